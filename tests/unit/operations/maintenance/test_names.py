from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from blobstore.core.digest import Digest
from blobstore.errors import (
    BlobDamaged,
    BlobMissing,
    InvalidManifest,
    InvalidReference,
    ModelNotFound,
    NameConflict,
    NameTaken,
    StoreBusy,
    StoreError,
    UsageError,
)
from blobstore.manifests.reference import Reference
from blobstore.operations.maintenance.gc import collect_garbage
from blobstore.operations.maintenance.names import Named, copy_model, remove_models, rename_model
from blobstore.operations.maintenance.verify import verify_models
from blobstore.store.local import LocalStore
from tests.support import sandbox
from tests.support.damage import forget_manifests, write_manifest
from tests.support.models import add_blobs, blob
from tests.support.ollama_store import add_gguf_model

A, B = map(Reference.parse, "ab")


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store", lock_timeout=0.05)


def make(store: LocalStore, name: str, *contents: bytes) -> None:
    """Add a model of a blob for each of ``contents``, of three bytes each."""
    add_blobs(store, name, {data.hex(): content(data) for data in contents})


def content(data: bytes) -> bytes:
    return blob((data.hex(), "U8", (3,), data))


def listed(store: LocalStore) -> list[str]:
    return list(map(str, store.references()))


def break_manifest(store: LocalStore, name: str) -> Path:
    return write_manifest(store, name, b"{torn")


# Copying


def test_a_copy_has_the_same_manifest_and_no_blob_moves(store: LocalStore) -> None:
    make(store, "a", b"one", b"two")
    before = {path.name: path.stat().st_ino for path in store.folder("blobs").iterdir()}
    named = copy_model("a", "team/b:v2", store=store)
    assert (str(named.source), str(named.target)) == ("a:latest", "team/b:v2")
    assert not named.replaced
    assert store.read_manifest(named.target) == store.read_manifest(A)
    assert named.digest == Digest.of(store.read_manifest(A))
    assert {path.name: path.stat().st_ino for path in store.folder("blobs").iterdir()} == before
    assert list(store.folder("temporary").iterdir()) == []


def test_a_manifest_is_copied_byte_for_byte(store: LocalStore) -> None:
    add_gguf_model(store, "a")
    path = store.manifest_path(A)
    strange = json.dumps(json.loads(path.read_bytes()) | {"unknown": [1.50]}, indent=7).encode()
    path.write_bytes(strange)
    copy_model(A, B, store=store)
    assert store.read_manifest(B) == strange
    rename_model(B, "c", store=store)
    assert store.read_manifest(Reference.parse("c")) == strange


Give = Callable[..., Named]


@pytest.fixture(params=[copy_model, rename_model])
def give(request: pytest.FixtureRequest) -> Give:
    """An operation that gives a model a name."""
    return request.param  # type: ignore[no-any-return]


def test_a_name_of_another_model_is_taken_by_force_only(store: LocalStore, give: Give) -> None:
    make(store, "a", b"one")
    make(store, "b", b"two")
    old = store.read_manifest(B)
    with pytest.raises(NameTaken, match="another model has the name 'b:latest'"):
        give(A, B, store=store)
    assert (store.read_manifest(B), listed(store)) == (old, ["a:latest", "b:latest"])
    new = store.read_manifest(A)
    assert give(A, B, store=store, force=True).replaced
    assert store.read_manifest(B) == new


def test_a_manifest_that_cannot_be_read_is_replaced_by_force_only(
    store: LocalStore, give: Give
) -> None:
    make(store, "a", b"one")
    break_manifest(store, "b").unlink()
    store.manifest_path(B).symlink_to("nowhere")
    with pytest.raises(NameTaken):
        give(A, B, store=store)
    store.manifest_path(B).unlink()
    break_manifest(store, "b")
    with pytest.raises(NameTaken):
        give(A, B, store=store)
    give(A, B, store=store, force=True)
    assert store.resolve(B)


def test_the_same_model_under_the_name_is_no_obstacle(store: LocalStore, give: Give) -> None:
    for name in "ab":
        make(store, name, b"one")
    assert not give(A, B, store=store).replaced
    assert listed(store) == (["a:latest", "b:latest"] if give is copy_model else ["b:latest"])


@pytest.mark.parametrize("source", ["a", "registry.ollama.ai/library/a:latest"])
def test_a_name_cannot_become_itself(store: LocalStore, give: Give, source: str) -> None:
    make(store, "a", b"one")
    with pytest.raises(UsageError, match="has that name already"):
        give(source, A, store=store, force=True)
    assert listed(store) == ["a:latest"]


def test_a_name_that_differs_in_case_only_is_refused(store: LocalStore, give: Give) -> None:
    make(store, "Model", b"one")
    with pytest.raises(NameConflict):
        give("Model", "model", store=store, force=True)
    assert listed(store) == ["Model:latest"]
    with pytest.raises(NameConflict, match="a third name first"):
        rename_model("Model", "model", store=store)
    rename_model("Model", "third", store=store)
    rename_model("third", "model", store=store)
    assert listed(store) == ["model:latest"]


def test_only_an_intact_model_gets_a_name(store: LocalStore, give: Give) -> None:
    with pytest.raises(ModelNotFound):
        give(A, B, store=store)
    assert not store.root.exists()
    make(store, "a", b"one")
    path = Path(store.blob_path(store.resolve(A).layers[0].digest))
    whole = path.read_bytes()
    path.unlink()
    with pytest.raises(BlobMissing):
        give(A, B, store=store)
    path.write_bytes(whole[:-1])
    with pytest.raises(BlobDamaged):
        give(A, B, store=store)
    break_manifest(store, "a")
    with pytest.raises(InvalidManifest, match="library/a/latest"):
        give(A, B, store=store)
    assert listed(store) == ["a:latest"]


def test_rejects_invalid_names(store: LocalStore, give: Give) -> None:
    for names in (("../a", "b"), ("a", "-b"), ("a", "b:")):
        with pytest.raises(InvalidReference):
            give(*names, store=store)


def test_nothing_is_collected_or_removed_during_the_change(
    store: LocalStore, give: Give, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the blobs are checked, and before the new name references them."""
    make(store, "a", b"one")
    other = LocalStore(store.root, lock_timeout=0)
    attempts = []

    def concurrently(reference: Reference) -> None:
        for attempt in (
            lambda: collect_garbage(store=other, older_than=0, force=True),
            lambda: remove_models([A], store=other),
            lambda: copy_model(A, reference, store=other),
        ):
            with pytest.raises(StoreBusy):
                attempt()
            attempts.append(attempt)

    make(store, "c", b"two")  # so that there is a lock
    monkeypatch.setattr(store.names, "check_name", concurrently)
    give(A, B, store=store)
    assert len(attempts) == 2 * 3  # when the name is claimed, and when it is given
    assert store.resolve(B)


def test_works_in_a_store_of_ollama(store: LocalStore) -> None:
    add_gguf_model(store, "a")
    assert not store._layout.lock.parent.exists()
    copy_model(A, B, store=store)
    rename_model(A, "c", store=store)
    remove_models([B], store=store)
    assert listed(store) == ["c:latest"]


# Renaming


def test_a_renamed_model_leaves_no_folder_behind(store: LocalStore) -> None:
    make(store, "host/space/a", b"one")
    rename_model("host/space/a", "b", store=store)
    assert listed(store) == ["b:latest"]
    assert [path.name for path in store.folder("manifests").iterdir()] == ["registry.ollama.ai"]


def test_the_new_name_is_durable_before_the_old_one_goes(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(store, "a", b"one")
    store.manifest_path(B).parent.mkdir()
    states: list[tuple[str, bool, bool]] = []
    folders = {store.manifest_path(name).parent.stat().st_ino: str(name) for name in (A, B)}
    fsync = os.fsync

    def noting(descriptor: int) -> None:
        what = folders.get(os.fstat(descriptor).st_ino, "")
        is_old, is_new = (store.manifest_path(name).exists() for name in (A, B))
        states.append((what, is_old, is_new))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    rename_model(A, B, store=store)
    assert states[-1] == ("a:latest", False, True)
    assert states[-2] == ("", True, True)  # the second link of the old name is gone first
    assert states[-3] == ("b:latest", True, True)
    assert ("", True, False) in states  # the manifest itself, before it has the name


def test_a_failed_sync_is_a_failed_rename(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(store, "a", b"one")
    fsync, failed = os.fsync, 0

    def failing(descriptor: int) -> None:
        nonlocal failed
        if left[0] == 0:
            failed += 1
            raise OSError(5, "Input/output error")
        left[0] -= 1
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    for count in range(50):
        left = [count]
        try:
            rename_model(A, B, store=store)
        except StoreError as error:
            assert "Input/output error" in str(error)
            names = listed(store)
            assert names
            left = [100]
            for name in set(names) - {"a:latest"}:  # as it was
                rename_model(name, A, store=store)
        else:
            break
    assert failed == count > 2


# The process is killed at every step. Audit hooks report all changes of names and files except fsync.
KILLED = """
import json, os, signal, sys
from blobstore.operations.maintenance.names import copy_model, remove_models, rename_model
from blobstore.store import references
from blobstore.store.local import LocalStore

references._MARGIN_NS = 10**18  # or a step that writes the cache would make later ones shorter
store = LocalStore(sys.argv[1])
WATCHED = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir"}

def names():
    return sorted(str(name) for name in store.references())

def attempt(action, step):
    child = os.fork()
    if child == 0:
        left = step
        def count(event):
            nonlocal left
            if event in WATCHED:
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(lambda event, _: count(event))
        fsync = os.fsync
        def counted(descriptor):
            count("open")
            fsync(descriptor)
        os.fsync = counted
        action()
        os._exit(0)
    return os.waitpid(child, 0)[1]

def undo():
    for name in names():
        if name != "a:latest":
            rename_model(name, "a", store=store)

ACTIONS = {
    "mv": lambda: rename_model("a", "other/b:new", store=store),
    "cp": lambda: copy_model("a", "other/b:new", store=store),
    "rm": lambda: remove_models(["a", "spare"], store=store),
}
for what, action in ACTIONS.items():
    status, step = 1, 0
    while status:
        copy_model("a", "spare", store=store)
        for former in store.folder("history").glob("*"):  # a full history would take more steps
            former.unlink()
        status = attempt(action, step)
        step += 1
        found = names()
        whole = all(store.resolve(name) for name in store.references())
        if what != "rm":
            remove_models(["spare"], store=store)
            undo()
        elif found == []:
            break
        elif "a:latest" not in found:
            copy_model("spare", "a", store=store)
        print(json.dumps([what, status, found, whole]))
"""


@pytest.mark.slow
def test_a_process_killed_at_any_step_leaves_every_name_whole(store: LocalStore) -> None:
    make(store, "a", b"one", b"two")
    with sandbox.start(KILLED, store.root) as process:
        output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    outcomes: dict[str, list[tuple[int, set[str]]]] = {"mv": [], "cp": [], "rm": []}
    for line in output.splitlines():
        what, status, names, whole = json.loads(line)
        assert whole
        assert status in (0, signal.SIGKILL)
        outcomes[what].append((status, set(names) - {"spare:latest"}))
    old, new = {"a:latest"}, {"other/b:new"}
    found = {what: {frozenset(names) for _, names in steps} for what, steps in outcomes.items()}
    assert found["mv"] == {frozenset(old), frozenset(old | new), frozenset(new)}
    assert found["cp"] == {frozenset(old), frozenset(old | new)}
    assert outcomes["mv"][-1] == (0, new)
    assert outcomes["cp"][-1] == (0, old | new)
    assert {frozenset(old), frozenset()} <= found["rm"]
    assert all(len(steps) > 8 for steps in outcomes.values())
    collect_garbage(store=store, older_than=0, force=True)
    assert list(store.folder("temporary").iterdir()) == []
    assert list(store.folder("leases").iterdir()) == []


# Removing


def test_a_removed_name_is_gone_and_its_blobs_stay(store: LocalStore) -> None:
    make(store, "space/a", b"one")
    make(store, "b", b"two")
    blobs = set(store.folder("blobs").iterdir())
    (entry,) = remove_models(["space/a"], store=store).names
    assert str(entry.reference) == "space/a:latest"
    assert listed(store) == ["b:latest"]
    assert set(store.folder("blobs").iterdir()) == blobs
    folder = store.folder("manifests") / "registry.ollama.ai"
    assert [path.name for path in folder.iterdir()] == ["library"]


@pytest.mark.parametrize(
    ("names", "freed"),
    [
        (["a"], []),
        (["b"], [b"tri"]),
        (["a", "c"], [b"one"]),
        (["a", "a"], []),
        (["a", "b", "c"], [b"one", b"two", b"tri", None]),
    ],
)
def test_reports_what_a_collection_frees(
    store: LocalStore, names: list[str], freed: list[bytes | None]
) -> None:
    make(store, "a", b"one", b"two")
    make(store, "b", b"two", b"tri")
    make(store, "c", b"two", b"one")
    config = store.resolve(A).config.size
    expected = [config if data is None else len(content(data)) for data in freed]
    for dry_run in (True, False):
        assert len(listed(store)) == 3
        removed = remove_models(names, store=store, dry_run=dry_run)
        assert (removed.blobs, removed.size) == (len(expected), sum(expected))
    collected = collect_garbage(store=store, older_than=0, force=True)
    assert len(collected.blobs) == removed.blobs
    assert sum(item.size for item in collected.blobs) == removed.size


def test_counts_only_blobs_that_are_there(store: LocalStore) -> None:
    make(store, "a", b"one")
    manifest = store.resolve(A)
    Path(store.blob_path(manifest.layers[0].digest)).unlink()
    removed = remove_models(["a"], store=store)
    assert (removed.blobs, removed.size) == (1, manifest.config.size)


def test_all_names_or_none(store: LocalStore) -> None:
    for name in "ab":
        make(store, name, b"one")
    with pytest.raises(ModelNotFound, match="no model 'c:latest'"):
        remove_models(["a", "c", "b"], store=store)
    assert listed(store) == ["a:latest", "b:latest"]
    assert remove_models([], store=store).names == ()


def test_a_name_that_vanishes_before_the_lock_leaves_the_others(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "ab":
        make(store, name, b"one")
    alone = store.exclusive_lock

    def late() -> object:
        forget_manifests(store, str(B))
        return alone()

    monkeypatch.setattr(store, "exclusive_lock", late)
    with pytest.raises(ModelNotFound, match="no model 'b:latest'"):
        remove_models(["a", "b"], store=store)
    assert listed(store) == ["a:latest"]


def test_removes_a_name_whose_manifest_cannot_be_read(store: LocalStore) -> None:
    make(store, "whole", b"one")
    break_manifest(store, "a")
    link = store.manifest_path(Reference.parse("link"))
    link.parent.mkdir()
    outside = store.root.parent / "outside"
    outside.write_bytes(b"{")
    link.symlink_to(outside)
    pipe = store.manifest_path(Reference.parse("pipe"))
    pipe.parent.mkdir()
    os.mkfifo(pipe)
    names = ["a", "link", "pipe"]
    removed = remove_models(names, store=store)
    assert [type(entry.error) for entry in removed.names] == [InvalidManifest] * 3
    assert (removed.blobs, removed.size, removed.unreadable) == (0, 0, ())
    assert listed(store) == ["whole:latest"]
    assert outside.read_bytes() == b"{"


def test_reports_manifests_that_prevent_a_collection(store: LocalStore) -> None:
    make(store, "a", b"one")
    path = break_manifest(store, "b")
    (entry,) = remove_models(["a"], store=store).unreadable
    assert entry.reference == B
    assert str(path) in str(entry.error)


def test_a_folder_in_the_place_of_a_manifest_is_not_removed(store: LocalStore) -> None:
    make(store, "a", b"one")
    store.manifest_path(B).mkdir(parents=True)
    with pytest.raises(InvalidManifest, match="is not a regular file"):
        remove_models(["a", "b"], store=store)
    assert listed(store) == ["a:latest"]


def test_a_store_without_the_name_is_not_touched(store: LocalStore) -> None:
    with pytest.raises(ModelNotFound):
        remove_models(["a"], store=store)
    assert not store.root.exists()
    store.root.write_bytes(b"")
    with pytest.raises(StoreError, match="is not a folder"):
        remove_models(["a"], store=store)


@pytest.mark.slow
def test_reports_a_store_without_write_permission() -> None:
    with sandbox.common_folder() as folder:
        store = LocalStore(folder / "store")
        make(store, "a", b"one")
        for action in (
            lambda: remove_models(["a"], store=store),
            lambda: copy_model("a", "b", store=store),
            lambda: rename_model("a", "b", store=store),
        ):
            outcome = sandbox.call(action, unprivileged=True)
            assert outcome.startswith("StoreError: no permission to write to the store")
        assert listed(store) == ["a:latest"]


# Many processes

PLAYERS = """
import sys
import time
from pathlib import Path
from blobstore.operations.maintenance.gc import collect_garbage
from blobstore.errors import ModelNotFound
from blobstore.operations.maintenance.names import copy_model, remove_models, rename_model
from blobstore.store.local import LocalStore
from tests.support.models import add_blobs, blob

def move(number):  # the only name of its model
    rename_model(f"m:{number}", f"m:{number + 1}", store=store)

def copy(number):
    copy_model(f"c:{number}", f"c:{number + 1}", store=store)
    remove_models([f"c:{number}"], store=store)

def make(number):  # a name that the catcher may copy
    add_blobs(store, "prey", {"x": blob(("x", "U8", (3,), b"x%02d" % number))})
    remove_models(["prey"], store=store)

def catch():
    try:
        caught = copy_model("prey", "caught", store=store, force=True)
    except ModelNotFound:
        return 0
    for item in store.resolve(caught.target).blobs:
        store.check_size(item.digest, item.size)
    return 1

def collect():
    return len(collect_garbage(store=store, older_than=0, force=True).blobs)

role, store, rounds = sys.argv[1], LocalStore(sys.argv[2]), int(sys.argv[3])
stop = Path(sys.argv[4])
print("ready", flush=True)
sys.stdin.readline()
done = 0
if role in ("move", "copy", "make"):
    for number in range(rounds):
        {"move": move, "copy": copy, "make": make}[role](number)
else:
    act = {"catch": catch, "collect": collect}[role]
    while not stop.exists():
        done += act()
        time.sleep(0.01)  # without a pause, the other processes would hardly get the lock
    done += act()
print(done)
"""


@pytest.mark.slow
def test_names_change_while_garbage_is_collected(store: LocalStore, tmp_path: Path) -> None:
    rounds, stop = 25, tmp_path / "stop"
    make(store, "m:0", b"one", b"two")
    make(store, "c:0", b"tri", b"for")
    with contextlib.ExitStack() as stack:
        players = {
            role: stack.enter_context(sandbox.start(PLAYERS, role, store.root, rounds, stop))
            for role in ("move", "copy", "make", "catch", "collect")
        }
        stack.callback(stop.touch)  # also after a failure, so that the others end
        for player in players.values():  # all are ready before any begins
            assert player.stdout is not None
            assert player.stdout.readline() == "ready\n"
        for player in players.values():
            assert player.stdin is not None
            player.stdin.write("go\n")
            player.stdin.flush()
        for role, player in players.items():
            if role == "catch":
                stop.touch()
            output, errors = player.communicate(timeout=120)
            assert player.returncode == 0, (role, errors)
    names = set(listed(store))
    assert names - {"caught:latest"} == {f"m:{rounds}", f"c:{rounds}"}
    assert verify_models(store=store).faults == ()
    # Each blob of the prey was garbage once, except the one that was caught.
    left = len(collect_garbage(store=store, older_than=0, force=True).blobs)
    assert int(output) + left == rounds - len(names & {"caught:latest"})
