from __future__ import annotations

import fcntl
import gc
import os
import time
from array import array
from pathlib import Path
from typing import Any

import pytest

import blobstore
from blobstore.core.digest import BlobId, Digest
from blobstore.core.files import read_regular
from blobstore.errors import ImplausibleGarbage, InvalidManifest, StoreBusy, StoreError, UsageError
from blobstore.manifests.reference import Reference
from blobstore.operations.describe.disk_usage import Space, measure_usage
from blobstore.operations.maintenance import gc as collect
from blobstore.operations.maintenance.collected import Collected, Removed
from blobstore.operations.maintenance.gc import collect_garbage
from blobstore.operations.maintenance.names import remove_models
from blobstore.registry.reference import RemoteReference
from blobstore.registry.upload import UploadSession
from blobstore.remotes.transfer_cache import PushCache
from blobstore.serve.made_digests import MadeDigests, read_made, write_made
from blobstore.store import reachability as marks
from blobstore.store.local import LocalStore
from blobstore.store.names import Names
from tests.support import sandbox
from tests.support.damage import write_manifest
from tests.support.descriptors import ANYWHERE, open_files
from tests.support.models import add_blob, add_blobs, blob, dense_tensors, moe_tensors, write_folder
from tests.support.ollama_store import add_gguf_model

A = Reference.parse("a")


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store", lock_timeout=0.05)


def put(store: LocalStore, data: bytes, age: float = 0) -> Digest:
    """Add an unreferenced blob, written ``age`` seconds ago."""
    digest, _ = add_blob(store, data)
    written = time.time() - age
    os.utime(store.blob_path(digest), (written, written))
    return digest


def names(found: tuple[Removed, ...]) -> set[str]:
    return {item.path.name for item in found}


def everything(store: LocalStore) -> set[str]:
    return {str(path.relative_to(store.root)) for path in store.root.rglob("*")}


def test_removes_unreferenced_blobs(store: LocalStore) -> None:
    add_blobs(store, "a", {"x": blob(("x", "U8", (3,), b"abc"))})
    kept = {path.name for path in store.folder("blobs").iterdir()}
    garbage = {put(store, data).file_name for data in (b"", b"one", b"two" * 1000)}
    found = collect_garbage(store=store, older_than=0, force=True)
    assert names(found.blobs) == garbage
    assert sorted(item.size for item in found.blobs) == [0, 3, 3000]
    assert (found.size, found.kept, found.kept_size) == (3003, 0, 0)
    assert {path.name for path in store.folder("blobs").iterdir()} == kept
    assert collect_garbage(store=store, older_than=0, force=True).size == 0


def test_removes_chosen_blobs_and_no_others(store: LocalStore) -> None:
    add_blobs(store, "a", {"x": blob(("x", "U8", (3,), b"abc"))})
    used = {layer.digest.hex for layer in store.resolve("a").blobs}
    chosen, leased, other = (put(store, data) for data in (b"one", b"four", b"seven"))
    names = [f"{digest.hex}-part" for digest in (chosen, leased, other)]
    store.folder("partial").mkdir(parents=True)
    for name in names:
        (store.folder("partial") / name).touch()
    with store.lease() as lease:
        lease.hold([leased])
        freed = collect.remove_blobs(store, used | {chosen.hex, leased.hex})
    assert freed == {chosen.hex: 3}
    assert not store.has(chosen)
    assert {path.name for path in store.folder("partial").iterdir()} == {*names[1:]}
    assert all(map(store.has, (leased, other, *map(Digest, used))))


def test_removes_what_no_server_fetches_any_more(store: LocalStore) -> None:
    add_blobs(store, "a", {"x": blob(("x", "U8", (3,), b"abc"))})
    folder = store.folder("arrivals") / "model"
    folder.mkdir(parents=True)
    (folder / "young").write_bytes(b"1")
    (folder / "old").write_bytes(b"22")
    long_ago = time.time() - collect.PARTIAL_GRACE - 100
    os.utime(folder / "old", (long_ago, long_ago))
    descriptor = os.open(store.folder("arrivals"), os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # as a server that fetches
    assert collect_garbage(store=store).leftovers == ()
    os.close(descriptor)
    assert names(collect_garbage(store=store).leftovers) == {"old"}
    collect_garbage(store=store, older_than=0)
    assert not any(store.folder("arrivals").iterdir())


def test_an_absent_store_has_no_garbage(store: LocalStore) -> None:
    assert collect_garbage(store=store).blobs == ()
    assert not store.root.exists()


def test_blobs_are_kept_for_an_hour(store: LocalStore) -> None:
    old = put(store, b"old", age=3700)
    put(store, b"young!", age=3500)
    put(store, b"of the future", age=-100_000)
    found = collect_garbage(store=store, force=True)
    assert names(found.blobs) == {old.file_name}
    assert (found.kept, found.kept_size) == (2, 6 + 13)


@pytest.mark.parametrize("force", [False, True])
def test_a_blob_is_removed_from_the_moment_on_that_was_stated(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, *, force: bool
) -> None:
    add_blobs(store, "a", {"x": blob(("x", "U8", (3,), b"abc"))})
    put(store, b"garbage")
    (kept,) = collect_garbage(store=store).kept_blobs
    now = time.time
    monkeypatch.setattr(time, "time", lambda: kept.removable - 0.001)
    assert collect_garbage(store=store, force=force).blobs == ()
    monkeypatch.setattr(time, "time", lambda: kept.removable)
    dry = collect_garbage(store=store, dry_run=True)
    monkeypatch.setattr(time, "time", now)
    assert [item.path for item in dry.blobs] == [kept.path]


@pytest.mark.parametrize("age", [-1, float("nan")])
def test_rejects_an_invalid_age(store: LocalStore, age: float) -> None:
    with pytest.raises(UsageError, match="0 seconds or more"):
        collect_garbage(store=store, older_than=age)


def test_a_dry_run_reports_the_same_and_removes_nothing(store: LocalStore) -> None:
    put(store, b"garbage")
    (store.folder("temporary") / "1-a-0").write_bytes(b"left")
    (store.folder("leases") / "1-a").write_bytes(b"")
    (store.folder("manifests") / "host" / "empty").mkdir(parents=True)
    before = everything(store)
    dry = collect_garbage(store=store, older_than=0, dry_run=True, force=True)
    assert everything(store) == before
    assert dry == collect_garbage(store=store, older_than=0, force=True)
    assert dry.size == 11
    assert everything(store) == before - {
        *(f"blobs/{Digest.of(b'garbage').file_name}", ".blobstore/tmp/1-a-0"),
        *(".blobstore/leases/1-a", "manifests/host", "manifests/host/empty"),
    }


@pytest.mark.slow
def test_a_dry_run_needs_no_permission_to_write() -> None:
    with sandbox.common_folder() as folder:
        store = LocalStore(folder / "store")
        put(store, b"garbage")
        (folder / "store").chmod(0o755)

        def dry() -> object:
            return names(collect_garbage(store=store, older_than=0, dry_run=True, force=True).blobs)

        garbage = Digest.of(b"garbage").file_name
        assert sandbox.call(dry, unprivileged=True) == str({garbage})
        outcome = sandbox.call(
            lambda: collect_garbage(store=store, older_than=0, force=True), unprivileged=True
        )
        assert outcome.startswith("StoreError: no permission to write to the store")


def test_a_dry_run_without_permission_to_read_says_so() -> None:
    with sandbox.common_folder() as folder:
        store = LocalStore(folder / "store")
        put(store, b"garbage")
        (folder / "store").chmod(0o755)
        store.folder("temporary").parent.chmod(0o700)
        outcome = sandbox.call(
            lambda: collect_garbage(store=store, dry_run=True), unprivileged=True
        )
        assert outcome.startswith("StoreError: no permission to read the store")


def test_keeps_leased_blobs_of_any_age(store: LocalStore) -> None:
    digest = put(store, b"leased", age=10_000)
    with store.lease() as lease:
        lease.hold([digest])
        found = collect_garbage(store=store, older_than=0, force=True)
        assert (found.blobs, found.kept, found.kept_size) == ((), 1, 6)
    assert names(collect_garbage(store=store, older_than=0, force=True).blobs) == {digest.file_name}


def test_a_running_import_keeps_the_blobs_it_found_and_wrote(store: LocalStore) -> None:
    found = put(store, b"found", age=10_000)
    with store.ingest() as ingest:
        assert not ingest.add(5, lambda: [b"found"]).written
        ingest.add(5, lambda: [b"wrote"])
        collect_garbage(store=store, older_than=0, force=True)
        ingest.publish()
        collect_garbage(store=store, older_than=0, force=True)
        present = {path.name for path in store.folder("blobs").iterdir()}
        assert present == {found.file_name, Digest.of(b"wrote").file_name}


def test_a_collection_during_an_import_harms_no_model(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    write_folder(folder, dense_tensors())
    blobstore.create(folder, "old", store=store)
    store.manifest_path(Reference.parse("old")).unlink()
    publish = Names.publish

    def collected(self: Names, *arguments: object) -> None:
        collect_garbage(store=store, older_than=0, force=True)
        publish(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Names, "publish", collected)
    blobstore.create(folder, "new", store=store)
    collect_garbage(store=store, older_than=0, force=True)
    with blobstore.open("new", store=store, verify="digest") as model:
        assert len(model) == len(dense_tensors())


def test_removes_leftovers_of_dead_processes(store: LocalStore) -> None:
    put(store, b"x")
    with store.lease() as lease:
        living = [
            store.folder("temporary") / f"{lease.name}-7",
            store.folder("leases") / lease.name,
        ]
        dead = [
            *(store.folder("temporary") / name for name in ("1-a-0", ".1-ab.tmp", "strange")),
            store.folder("leases") / "1-a",
        ]
        for path in (living[0], *dead):
            path.write_bytes(b"12")
        found = collect_garbage(store=store)
        assert {item.path for item in found.leftovers} == {
            path.relative_to(store.root) for path in dead
        }
        assert found.size == 8
        assert all(path.exists() for path in living)
        assert not any(path.exists() for path in dead)


def test_leftovers_from_the_future_are_removed(store: LocalStore) -> None:
    put(store, b"x")
    left = store.folder("temporary") / "1-a-0"
    left.write_bytes(b"left")
    os.utime(left, (time.time() + 10_000,) * 2)
    collect_garbage(store=store)
    assert not left.exists()


def test_header_indexes_of_removed_models_are_removed(store: LocalStore, tmp_path: Path) -> None:
    for name, tensors in (("a", dense_tensors()), ("b", moe_tensors())):
        write_folder(tmp_path / name, tensors)
        blobstore.create(tmp_path / name, name, store=store)
    removed = Digest.of(store.read_manifest(A))
    store.manifest_path(A).unlink()
    assert len(list(store.folder("headers").iterdir())) == 2
    found = collect_garbage(store=store, older_than=0, force=True)
    assert names(found.leftovers) == {removed.hex}
    assert len(list(store.folder("headers").iterdir())) == 1


def test_notes_of_a_repository_are_removed_with_its_last_model(store: LocalStore) -> None:
    blobstore.save(dense_tensors(), "org/model:one", store=store)
    for name in ("org/model", "org/gone"):
        write_made(store, Reference.parse(name), {Digest.of(b""): MadeDigests(0, array("Q", [1]))})
    collect_garbage(store=store, older_than=0)
    assert read_made(store, Reference.parse("org/model"))
    assert not read_made(store, Reference.parse("org/gone"))
    remove_models(["org/model:one"], store=store)
    collect_garbage(store=store, older_than=0, force=True)
    assert not read_made(store, Reference.parse("org/model"))


def test_keeps_blobs_of_models_of_ollama(store: LocalStore) -> None:
    put(store, b"")
    add_gguf_model(store, "gguf")
    before = everything(store)
    assert names(collect_garbage(store=store, older_than=0, force=True).blobs) == {
        Digest.of(b"").file_name
    }
    assert before - everything(store) == {f"blobs/{Digest.of(b'').file_name}"}


def test_foreign_files_among_the_blobs_stay(store: LocalStore) -> None:
    put(store, b"x")
    foreign = [
        *("sha256-12", f"sha256-{'A' * 64}", f"sha256-{'a' * 64}-partial", "README"),
        f"sha512-{'a' * 64}",
    ]
    for name in foreign:
        (store.folder("blobs") / name).write_bytes(b"x")
    (store.folder("blobs") / f"sha256-{'b' * 64}").mkdir()
    collect_garbage(store=store, older_than=0, force=True)
    present = {path.name for path in store.folder("blobs").iterdir()}
    assert present == {*foreign, f"sha256-{'b' * 64}"}


def test_removes_a_link_and_not_its_target(store: LocalStore, tmp_path: Path) -> None:
    put(store, b"x")
    outside = tmp_path / "outside"
    outside.write_bytes(b"precious")
    (store.folder("temporary") / "1-a-9").symlink_to(outside)
    (store.folder("manifests") / "linked").symlink_to(tmp_path)
    with pytest.raises(InvalidManifest, match="linked"):
        collect_garbage(store=store, older_than=0, force=True)
    (store.folder("manifests") / "linked").unlink()
    collect_garbage(store=store, older_than=0, force=True)
    assert outside.read_bytes() == b"precious"
    assert not (store.folder("temporary") / "1-a-9").is_symlink()


def test_empty_folders_are_removed_and_full_ones_stay(store: LocalStore) -> None:
    add_blobs(store, "a", {"x": blob(("x", "U8", (3,), b"abc"))})
    for name in ("host/space/model", "host/other", "registry.ollama.ai/library/b"):
        (store.folder("manifests") / name).mkdir(parents=True)
    found = collect_garbage(store=store)
    assert {str(folder) for folder in found.folders} == {
        *("manifests/host", "manifests/host/other", "manifests/host/space"),
        *("manifests/host/space/model", "manifests/registry.ollama.ai/library/b"),
    }
    assert store.resolve(A)
    assert not (store.folder("manifests") / "host").exists()


TORN = {
    "empty": b"",
    "torn": b'{"schemaVersion":2,"med',
    "another document": b'{"schemaVersion":2,"manifests":[]}',
    "junk": os.urandom(100),
}


@pytest.mark.parametrize("content", TORN.values(), ids=TORN)
@pytest.mark.parametrize("place", ["registry.ollama.ai/library/a/latest", "junk", "x/y/z/t/deep"])
def test_removes_nothing_if_a_manifest_cannot_be_read(
    store: LocalStore, content: bytes, place: str
) -> None:
    put(store, b"perhaps needed")
    path = store.folder("manifests") / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    before = everything(store)
    for dry_run in (False, True):
        with pytest.raises(InvalidManifest, match=f"cannot tell which blobs '.*{path.name}' needs"):
            collect_garbage(store=store, older_than=0, dry_run=dry_run)
    assert everything(store) == before


def test_a_changed_digest_of_a_config_does_not_cost_the_config(
    store: LocalStore, tmp_path: Path
) -> None:
    blobstore.create(write_folder(tmp_path / "source", dense_tensors()), "m", store=store)
    path = store.manifest_path(Reference.parse("m"))
    whole = path.read_bytes()
    config = store.resolve(Reference.parse("m")).config
    named = bytes(str(config.digest), "ascii")
    garbage = put(store, b"garbage", age=1)
    path.write_bytes(whole.replace(named, named[:-1] + (b"1" if named.endswith(b"0") else b"0")))
    removed = collect_garbage(store=store, older_than=0, force=True).blobs
    assert [item.path.name for item in removed] == [garbage.file_name]
    path.write_bytes(whole)
    assert store.read_blob(config.digest, config.size)


def test_a_changed_digest_in_a_manifest_costs_no_blob(store: LocalStore, tmp_path: Path) -> None:
    blobstore.create(write_folder(tmp_path / "source", dense_tensors()), "m", store=store)
    path = store.manifest_path(Reference.parse("m"))
    whole = path.read_bytes()
    digest = bytes(str(store.resolve(Reference.parse("m")).layers[0].digest), "ascii")
    other = digest[:-1] + (b"1" if digest.endswith(b"0") else b"0")
    path.write_bytes(whole.replace(digest, other))
    before = everything(store)
    with pytest.raises(InvalidManifest, match="the manifest was changed since it was written"):
        collect_garbage(store=store, older_than=0, force=True)
    assert everything(store) == before
    path.write_bytes(whole)
    assert not collect_garbage(store=store, older_than=0, force=True).blobs


@pytest.mark.parametrize(
    "place", [".", "registry.ollama.ai", "registry.ollama.ai/library/a/latest"]
)
def test_a_link_to_nothing_in_the_place_of_manifests_costs_no_blob(
    place: str, store: LocalStore, tmp_path: Path
) -> None:
    add_blobs(store, "a", {"x": blob(("x", "U8", (3,), b"abc"))})
    path = store.folder("manifests") / place
    path.rename(tmp_path / "on a disk that is not mounted")
    path.symlink_to(tmp_path / "absent")
    before = everything(store)
    with pytest.raises((InvalidManifest, StoreError), match=f"'{path}'"):
        collect_garbage(store=store, older_than=0, force=True)
    assert everything(store) == before


def test_advises_what_to_do_with_an_unreadable_manifest(store: LocalStore) -> None:
    path = write_manifest(store, "a", b"{}")
    with pytest.raises(InvalidManifest, match=r"STORE' or 'blobstore rm a:latest' first$"):
        collect_garbage(store=store)
    path.rename(store.folder("manifests") / "file")
    with pytest.raises(InvalidManifest, match="repair or remove that file first$"):
        collect_garbage(store=store)


@pytest.mark.parametrize("is_folder", [False, True])
def test_stops_at_a_manifest_without_read_permission(is_folder: bool) -> None:
    with sandbox.common_folder() as folder:

        def collected() -> object:
            store = LocalStore(folder / "store")
            put(store, b"perhaps needed")
            path = write_manifest(store, "a", b"{}")
            closed = path.parent if is_folder else path
            closed.chmod(0)
            try:
                with pytest.raises(StoreError, match=f"'{closed}'.*: Permission denied"):
                    collect_garbage(store=store, older_than=0, force=True)
                return len(list(store.folder("blobs").iterdir()))
            finally:
                closed.chmod(0o700)

        assert sandbox.call(collected, unprivileged=True) == "1"


def test_a_manifest_published_during_the_run_is_respected(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = blob(("x", "U8", (3,), b"abc"))
    elsewhere = LocalStore(tmp_path / "elsewhere")
    add_blobs(elsewhere, "a", {"x": data})
    put(store, data, age=10_000)
    put(store, b"garbage")

    read_leases = LocalStore.read_leases

    def late(store: LocalStore) -> object:
        # Manifests were read once before.
        write_manifest(store, "a", elsewhere.read_manifest(A))
        return read_leases(store)

    monkeypatch.setattr(LocalStore, "read_leases", late)
    found = collect_garbage(store=store, older_than=0, force=True)
    assert names(found.blobs) == {Digest.of(b"garbage").file_name}
    assert Path(store.blob_path(Digest.of(data))).read_bytes() == data


@pytest.mark.parametrize("moment", [2, 3, 4])  # once gc has looked at the folder
def test_manifests_that_vanish_during_the_run_cost_no_blob(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    data = {name: blob((name, "U8", (3,), name.encode() * 3)) for name in "ab"}
    for name, content in data.items():
        add_blobs(store, name, {name: content})
    put(store, b"garbage")
    before = set(os.listdir(store.folder("blobs")))
    count = 0

    def unmounted(path: Any, **options: Any) -> os.stat_result:
        """Remove the manifests once one of them was read."""
        nonlocal count
        count += str(store.folder("manifests")) in str(path)
        if count == moment:
            monkeypatch.undo()
            store.folder("manifests").rename(tmp_path / "elsewhere")
            store.folder("manifests").mkdir()
        return stat(path, **options)

    stat = os.stat
    monkeypatch.setattr("blobstore.store.reachability.os.stat", unmounted)
    with pytest.raises(StoreError, match=r"manifests' was unmounted or replaced .*mount it again"):
        collect_garbage(store=store, older_than=0, force=True)
    assert set(os.listdir(store.folder("blobs"))) == before


def test_releases_the_lock_between_batches(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(7):
        put(store, b"%d" % number)
    times: list[object] = []
    alone = store.exclusive_lock

    def counted() -> object:
        times.append(None)
        return alone()

    monkeypatch.setattr(collect, "_hold", lambda _: 0.0)
    monkeypatch.setattr(store, "exclusive_lock", counted)
    assert len(collect_garbage(store=store, older_than=0, force=True).blobs) == 7
    assert len(times) == 7 + 1


def test_removes_blobs_for_as_long_as_it_took_to_read_what_changed() -> None:
    assert collect._hold(0.01) == collect._HOLD
    assert collect._hold(3) == 3


def test_two_collections_at_once_remove_each_blob_once(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    garbage = put(store, b"garbage")
    sweep, found = collect._Collection.sweep, list[Collected]()

    def late(self: Any, candidates: Any) -> Any:
        monkeypatch.undo()
        found.append(collect_garbage(store=store, older_than=0, force=True))
        return sweep(self, candidates)

    monkeypatch.setattr(collect._Collection, "sweep", late)
    found.append(collect_garbage(store=store, older_than=0, force=True))
    assert [names(it.blobs) for it in found] == [{garbage.file_name}, set()]


def test_reports_a_busy_store(store: LocalStore) -> None:
    put(store, b"x")
    with store._locks.shared(), pytest.raises(StoreBusy):
        collect_garbage(store=store, older_than=0, force=True)
    assert Path(store.blob_path(Digest.of(b"x"))).exists()


def test_is_linear_in_manifests_and_layers(store: LocalStore) -> None:
    """It reads each manifest once, and again only if it changes."""
    add_blobs(store, "m", {"x": blob(("x", "U8", (3,), b"abc"))})
    content = store.read_manifest(Reference.parse("m"))
    for number in range(30):
        write_manifest(store, f"m{number}", content)
    for number in range(20):
        put(store, b"%d" % number)
    reads: list[str] = []
    with pytest.MonkeyPatch.context() as patch:

        def noted(path: str, limit: int) -> bytes:
            reads.append(path)
            return read_regular(path, limit)

        patch.setattr(collect, "_hold", lambda _: 0.0)
        patch.setattr(marks, "read_regular", noted)
        assert len(collect_garbage(store=store, older_than=0, force=True).blobs) == 20
    assert len(reads) == len(set(reads)) == 31


def model_and_garbage(store: LocalStore, tmp_path: Path, garbage: int) -> None:
    """Add a model of a few blobs, and old blobs that nothing references."""
    write_folder(tmp_path / "model", dense_tensors())
    blobstore.create(tmp_path / "model", "a", store=store)
    for number in range(garbage):
        put(store, b"garbage %d" % number, age=10_000)


@pytest.mark.parametrize("is_there", [False, True], ids=["absent", "empty"])
def test_refuses_to_empty_a_store_whose_manifests_are_gone(
    store: LocalStore, tmp_path: Path, is_there: bool
) -> None:
    model_and_garbage(store, tmp_path, 1)
    for path in store.folder("blobs").iterdir():
        os.utime(path, (1, 1))
    store.folder("manifests").rename(tmp_path / "on a disk that is not mounted")
    if is_there:
        store.folder("manifests").mkdir()
    before = everything(store)
    with pytest.raises(
        ImplausibleGarbage,
        match=r"no manifests in '.*', but \d+ blobs; 'blobstore repair' restores .*force=True",
    ):
        collect_garbage(store=store)
    assert "no manifests" in collect_garbage(store=store, dry_run=True).refusal
    assert everything(store) == before
    assert collect_garbage(store=store, force=True).blobs
    assert not list(store.folder("blobs").iterdir())


def test_blobs_from_the_future_count_as_new(store: LocalStore) -> None:
    put(store, b"x", age=-100_000)
    assert collect_garbage(store=store, older_than=1).blobs == ()
    with pytest.raises(ImplausibleGarbage):
        collect_garbage(store=store, older_than=0)
    assert len(collect_garbage(store=store, older_than=0, force=True).blobs) == 1


@pytest.mark.slow
def test_refuses_to_remove_over_nine_tenths_of_the_blobs(store: LocalStore, tmp_path: Path) -> None:
    model_and_garbage(store, tmp_path, 0)
    model = len(list(store.folder("blobs").iterdir()))
    for number in range(9 * model):
        put(store, b"%d" % number, age=10_000)
    extra = put(store, b"one too many", age=10_000)
    before = everything(store)
    with pytest.raises(
        ImplausibleGarbage, match=f"do not reference {9 * model + 1} of {10 * model + 1}"
    ):
        collect_garbage(store=store)
    assert everything(store) == before
    Path(store.blob_path(extra)).unlink()
    assert len(collect_garbage(store=store).blobs) == 9 * model


@pytest.mark.parametrize("is_leased", [False, True])
def test_needs_no_force_where_no_blob_would_be_removed(store: LocalStore, is_leased: bool) -> None:
    digest = put(store, b"of a running import", age=10_000 * is_leased)
    with store.lease() as lease:
        lease.hold([digest] if is_leased else [])
        (kept,) = collect_garbage(store=store).kept_blobs
    assert kept.reason == ("in use" if is_leased else "young")


def test_says_why_each_blob_is_kept(store: LocalStore, tmp_path: Path) -> None:
    model_and_garbage(store, tmp_path, 0)
    young, leased = put(store, b"young", age=600), put(store, b"leased", age=600)
    with store.lease() as lease:
        lease.hold([leased])
        kept = {item.path.name: item for item in collect_garbage(store=store).kept_blobs}
    assert set(kept) == {young.file_name, leased.file_name}
    assert kept[young.file_name].reason == "young"
    assert kept[young.file_name].removable == pytest.approx(time.time() + 3000, abs=300)
    assert kept[leased.file_name][2:4] == ("in use", (os.getpid(),))


def test_files_that_a_file_manager_leaves_among_manifests_are_no_manifests(
    store: LocalStore, tmp_path: Path
) -> None:
    model_and_garbage(store, tmp_path, 1)
    (store.folder("manifests") / ".DS_Store").write_bytes(b"\0\0\0\1Bud1")
    assert len(collect_garbage(store=store).blobs) == 1


READING: list[dict[str, Any]] = [
    {},
    {"read": "pread"},
    {"verify": "none"},
    {"verify": "header"},
    {"verify": "digest"},
    {"read": "populate"},
    {"read": "pread", "verify": "none"},
]


@pytest.mark.parametrize("options", READING, ids=str)
def test_an_open_model_stays_whole_when_its_name_and_garbage_are_removed(
    store: LocalStore, tmp_path: Path, options: dict[str, Any]
) -> None:
    expected = dense_tensors()
    write_folder(tmp_path / "model", expected)
    blobstore.create(tmp_path / "model", "a", store=store)
    with blobstore.open("a", store=store, **options) as model:
        store.manifest_path(A).unlink()
        collect_garbage(store=store, older_than=0, force=True)
        for name, array in model.state_dict().items():
            assert array.tobytes() == expected[name].tobytes()
        del array
    collect_garbage(store=store, older_than=0, force=True)
    assert list(store.folder("blobs").iterdir()) == []
    assert list(store.folder("leases").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("options", READING, ids=str)
def test_a_released_model_keeps_no_lease_and_no_descriptor(
    store: LocalStore, tmp_path: Path, options: dict[str, Any]
) -> None:
    write_folder(tmp_path / "model", dense_tensors())
    blobstore.create(tmp_path / "model", "a", store=store)
    gc.collect()  # what other tests have left
    descriptors = open_files(ANYWHERE)
    model = blobstore.open("a", store=store, **options)
    del model
    gc.collect()
    assert list(store.folder("leases").iterdir()) == []
    assert open_files(ANYWHERE) == descriptors


@pytest.mark.slow
@pytest.mark.parametrize("options", READING, ids=str)
def test_a_model_opens_in_a_store_that_this_process_may_not_write_to(
    options: dict[str, Any],
) -> None:
    with sandbox.common_folder() as folder:
        store = LocalStore(folder / "store")
        add_blobs(store, "a", {"x": blob(("x", "U8", (3,), b"abc"))})
        (folder / "store").chmod(0o755)

        def read() -> bytes:
            return bytes(blobstore.open("a", store=store, **options)["x"])

        assert sandbox.call(read, unprivileged=True) == str(b"abc")


# Unfinished downloads

UNFINISHED = BlobId(Digest.of(b"unfinished"), 1 << 30)


def unfinished(store: LocalStore, age: float) -> Path:
    """Add a partial file of a killed pull, written ``age`` seconds ago, and return its path."""
    with store.ingest() as ingest:
        file = ingest.open_partial(UNFINISHED)
        assert file is not None
        with file:
            file.write(0, bytes(5000))
            file.write(1, bytes(5000))
    written = time.time() - age
    os.utime(file.path, (written, written))
    return file.path


def test_keeps_unfinished_downloads_for_a_week(store: LocalStore) -> None:
    add_blobs(store, "a", {"x": blob(("x", "U8", (3,), b"abc"))})
    path = unfinished(store, 6.5 * 86400)
    (kept,) = collect_garbage(store=store).kept_blobs
    assert kept.reason == "partial"
    assert kept.removable == pytest.approx(path.stat().st_mtime + 7 * 86400)
    assert 10_000 < kept.size < 10**6  # without the holes
    assert path.exists()


@pytest.mark.parametrize(("age", "older_than"), [(7.1 * 86400, None), (2 * 3600, 3600), (0, 0)])
def test_removes_unfinished_downloads_that_are_older(
    store: LocalStore, age: float, older_than: float | None
) -> None:
    add_blobs(store, "a", {"x": blob(("x", "U8", (3,), b"abc"))})
    path = unfinished(store, age)
    assert collect_garbage(store=store, older_than=older_than, dry_run=True).size > 0
    assert path.exists()
    assert path.name in names(collect_garbage(store=store, older_than=older_than).leftovers)
    assert not path.exists()


def test_keeps_a_download_that_a_process_continues(store: LocalStore) -> None:
    add_blobs(store, "a", {"x": blob(("x", "U8", (3,), b"abc"))})
    path = unfinished(store, 30 * 86400)
    with store.ingest() as ingest:
        assert ingest.find(*UNFINISHED) is None
        (kept,) = collect_garbage(store=store, older_than=0).kept_blobs
    assert kept.reason == "in use"
    assert kept.processes == (os.getpid(),)
    assert path.exists()


def test_removes_foreign_files_among_unfinished_downloads(store: LocalStore) -> None:
    add_blobs(store, "a", {"x": blob(("x", "U8", (3,), b"abc"))})
    foreign = unfinished(store, 0).with_name("notes.txt")
    foreign.write_text("no digest")
    assert "notes.txt" in names(collect_garbage(store=store, older_than=0).leftovers)


def test_removes_the_folder_of_an_import_that_was_killed(store: LocalStore) -> None:
    add_blobs(store, "a", {"x": blob(("x", "U8", (3,), b"abc"))})
    with store.lease() as lease:
        living = store.folder("temporary") / f"{lease.name}-files"
        dead = store.folder("temporary") / "1-abc-files"
        for folder in (living, dead):
            (folder / "inner").mkdir(parents=True)
            (folder / "inner" / "config.json").write_bytes(b"12345")
        assert measure_usage(store=store).temporary == Space(2, 10)
        assert [item.size for item in collect_garbage(store=store, dry_run=True).leftovers] == [5]
        collect_garbage(store=store)
        assert living.exists()
        assert not dead.exists()


def test_removes_what_a_remote_had_in_a_list_of_long_ago(store: LocalStore) -> None:
    add_blobs(store, "a", {"x": blob(("x", "U8", (3,), b"abc"))})
    folder = store.folder("headers").parent
    names = ("references-0", f"references-0-{'a' * 64}", f"references-0-{'b' * 64}")
    for name in names:
        (folder / name).touch()
    for name in names[:2]:
        os.utime(folder / name, (0, 0))
    collect_garbage(store=store)
    assert [(folder / name).exists() for name in names] == [True, False, True]


def test_removes_old_notes_of_uploads_that_no_process_continues(store: LocalStore) -> None:
    add_blobs(store, "a", {"x": blob(("x", "U8", (3,), b"abc"))})
    remote = RemoteReference.parse("127.0.0.1:5000/team/model")
    digest = Digest.of(b"abc")

    def age() -> set[str]:
        old = time.time() - 8 * 86400
        for path in store.folder("remotes").iterdir():
            os.utime(path, (old, old))
        return {path.name.partition("-")[0] for path in store.folder("remotes").iterdir()}

    with PushCache(store, remote) as notes:
        notes.add([digest])
        notes.keep_session(digest, UploadSession("http://127.0.0.1:5000/upload", 5))
        collect_garbage(store=store)
        assert age() == {"lock", "registry", "upload"}
        collect_garbage(store=store)
        assert age() == {"lock", "registry"}
    collect_garbage(store=store, dry_run=True)
    assert age() == {"lock", "registry"}
    collect_garbage(store=store)
    assert age() == {"registry"}


@pytest.mark.parametrize("name", ["temporary", "partial", "bases", "headers", "remotes"])
@pytest.mark.parametrize("is_swapped", [False, True])
def test_nothing_is_removed_through_a_link_in_place_of_a_folder(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: Any, is_swapped: bool
) -> None:
    add_blobs(store, "a", {"x": b"x"})
    outside, place = tmp_path / "outside", store.folder(name)
    for folder in (outside, place):
        (folder / "deep").mkdir(parents=True, exist_ok=True)
        for file in ("upload-1", ".a", "b", "deep/c"):
            (folder / file).write_bytes(b"")
            os.utime(folder / file, (1, 1))
    there = everything(LocalStore(outside))
    remove = collect._Collection._remove

    def swap(*_: object) -> None:
        place.rename(tmp_path / "away")
        place.symlink_to(outside)

    def swapped(self: Any, path: Path, size: int) -> Removed:
        if path.parent == place and not place.is_symlink():
            swap()
        return remove(self, path, size)

    if is_swapped:
        monkeypatch.setattr(collect._Collection, "_remove", swapped)
    else:
        swap()
    with pytest.raises(StoreError, match="Not a directory|is a link"):
        collect_garbage(store=store, older_than=0)
    assert everything(LocalStore(outside)) == there
