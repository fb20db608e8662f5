"""Two commands give one name at once: one of them wins, and the other one fails and changes nothing.

The second command runs when the first one is about to take the store's lock. So the order is the same each time.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import blobstore
from blobstore.core.digest import Digest
from blobstore.errors import BlobDamaged, NameTaken
from blobstore.manifests.lock_file import LockedModel
from blobstore.manifests.reference import Reference
from blobstore.operations.follow.follow import follow
from blobstore.operations.ingest.task import import_model
from blobstore.operations.maintenance.copy_to_store import copy_to_store
from blobstore.operations.maintenance.history import restore_model
from blobstore.operations.maintenance.names import copy_model, remove_models, rename_model
from blobstore.operations.maintenance.repair_manifests import restore_manifests
from blobstore.operations.transfer.pull import pull_model
from blobstore.operations.transfer.push import push_model
from blobstore.operations.transfer.sync import sync_models
from blobstore.store.local import LocalStore
from blobstore.store.locks import Locks
from blobstore.store.names import ABSENT
from tests.support.models import write_folder

Command = Callable[["Stage"], None]
NAME = Reference.parse("m")


def array(number: int) -> dict[str, np.ndarray[Any, Any]]:
    return {"x": np.full((4, 4), number, np.float32)}


class Stage:
    """A store in which a name is given, and what the commands give it, one model each."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = LocalStore(root / "store")
        self.own = self._saved("own", 1)
        self._saved("second", 3)
        self.old = self._saved("m", 2)

    def _saved(self, name: str, number: int) -> Digest:
        return blobstore.save(array(number), name, store=self.store).digest

    def elsewhere(self, number: int) -> LocalStore:
        """Return another store, with a model under the name."""
        store = LocalStore(self.root / f"other-{number}")
        blobstore.save(array(number), NAME, store=store)
        return store

    def has(self) -> object:
        return self.store.names.version(NAME)


def create(stage: Stage) -> None:
    blobstore.create(write_folder(stage.root / "folder", array(10)), NAME, store=stage.store)


def save(stage: Stage) -> None:
    blobstore.save(array(11), NAME, store=stage.store)


def save_in_background(stage: Stage) -> None:
    blobstore.save(array(12), NAME, store=stage.store, background=True).result()


def ingest(stage: Stage) -> None:
    folder = write_folder(stage.root / "ingested", array(13))
    outcome = import_model(str(folder), str(NAME), stage.store, {})
    assert not outcome.is_present
    if outcome.error:
        assert outcome.kind == "NameTaken"
        raise NameTaken(outcome.error)


def pull(stage: Stage, *, force: bool = False) -> None:
    address = f"file://{stage.root}/bucket"
    push_model(NAME, address, store=stage.elsewhere(14))
    pull_model(f"{address}/{NAME}", NAME, store=stage.store, force=force)


def pull_with_force(stage: Stage) -> None:
    pull(stage, force=True)


def sync(stage: Stage) -> None:
    address = f"file://{stage.root}/locked"
    push_model(NAME, address, store=(other := stage.elsewhere(15)))
    manifest = Digest.of(other.read_manifest(NAME))
    model = LockedModel(reference=NAME, manifest=manifest, remote=f"{address}/{NAME}")
    (result,) = sync_models([model], store=stage.store, replace_others=False)
    if result.error is not None:
        raise result.error


def unpack(stage: Stage) -> None:
    archive = stage.root / "m.blob"
    blobstore.pack([NAME], archive, store=stage.elsewhere(16))
    blobstore.unpack(archive, store=stage.store)


def copy_from_another_store(stage: Stage) -> None:
    copy_to_store(NAME, stage.store, store=stage.elsewhere(17))


def follow_another_store(stage: Stage) -> None:
    other = stage.elsewhere(18)
    assert list(follow(NAME, str(other.root), store=stage.store, once=True))


def restore(stage: Stage) -> None:
    restore_model(NAME, store=stage.store)


def copy(stage: Stage) -> None:
    copy_model("own", NAME, store=stage.store)


def rename(stage: Stage) -> None:
    rename_model("second", NAME, store=stage.store)


TAKING = (create, save, save_in_background, follow_another_store)
"""What gives the name whatever it had when it began."""
REFUSING = (ingest, pull, sync, unpack, copy_from_another_store, copy, rename)
"""What gives it only if it is free."""


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


@contextlib.contextmanager
def before_the_lock(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]
) -> Iterator[None]:
    """Call something once, when a command is about to take the exclusive lock of the store."""
    exclusive, waiting = Locks.exclusive, [act]

    def late(self: Locks, *importer: Any) -> contextlib.AbstractContextManager[None]:
        if self._layout.root == stage.store.root and waiting:  # a worker has a store of its own
            waiting.pop()()
        return exclusive(self, *importer)

    with monkeypatch.context() as patch:
        patch.setattr(Locks, "exclusive", late)
        yield
    assert not waiting, "the command took no lock"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        *((one, save) for one in (*TAKING, *REFUSING, restore) if one is not save),
        *((create, one) for one in (*TAKING, *REFUSING, restore) if one is not create),
    ],
)
def test_of_two_commands_that_give_a_free_name_one_wins(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, first: Command, second: Command
) -> None:
    remove_models([NAME], store=stage.store)
    winner: list[object] = []

    def concurrently() -> None:
        second(stage)
        winner.append(stage.has())

    with (
        before_the_lock(stage, monkeypatch, concurrently),
        pytest.raises(NameTaken, match="'m:latest'"),
    ):
        first(stage)
    assert [stage.has()] == winner
    assert winner[0] not in (ABSENT, stage.old) or second is restore
    assert blobstore.verify(store=stage.store).faults == ()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (create, save),
        (save, create),
        (save_in_background, save),
        (follow_another_store, save),
        (restore, save),
    ],
)
def test_of_two_commands_that_replace_a_model_one_wins(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, first: Command, second: Command
) -> None:
    copy_model("own", NAME, store=stage.store, force=True)  # so that there is a former model
    winner: list[object] = []

    def concurrently() -> None:
        second(stage)
        winner.append(stage.has())

    with (
        before_the_lock(stage, monkeypatch, concurrently),
        pytest.raises(NameTaken, match=f"it was {stage.own.short} and is [0-9a-f]+ now"),
    ):
        first(stage)
    assert [stage.has()] == winner


@pytest.mark.parametrize("command", [create, save, pull, unpack])
def test_two_commands_that_give_the_same_model_both_succeed(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    remove_models([NAME], store=stage.store)
    same = Stage(stage.root / "same")
    same.store = stage.store
    with before_the_lock(stage, monkeypatch, lambda: command(same)):
        command(stage)
    assert isinstance(stage.has(), Digest)


def test_a_name_that_becomes_free_is_given(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    with before_the_lock(stage, monkeypatch, lambda: remove_models([NAME], store=stage.store)):
        create(stage)
    assert stage.has() not in (ABSENT, stage.old)


def test_a_name_that_ingest_found_free_and_is_given_before_it_reads_the_source_stays(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove_models([NAME], store=stage.store)

    def late(*arguments: Any, **options: Any) -> Any:
        save(stage)
        created: blobstore.Created = blobstore.create(*arguments, **options)
        return created

    monkeypatch.setattr("blobstore.operations.ingest.task.create", late)
    with pytest.raises(NameTaken):
        ingest(stage)
    given = stage.has()
    save(stage)
    assert stage.has() == given


def test_force_takes_the_name_from_whatever_has_it(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with before_the_lock(stage, monkeypatch, lambda: save(stage)):
        pull_with_force(stage)
    pulled = stage.has()
    restore(stage)
    assert stage.has() not in (pulled, stage.old)  # nothing is lost: it is what was saved


def test_an_archive_gives_all_names_or_none(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    remove_models([NAME], store=stage.store)
    other = stage.elsewhere(30)
    blobstore.save(array(31), "a", store=other)
    blobstore.save(array(32), "z", store=other)
    archive = stage.root / "three.blob"
    blobstore.pack(["a", NAME, "z"], archive, store=other)
    with before_the_lock(stage, monkeypatch, lambda: save(stage)), pytest.raises(NameTaken):
        blobstore.unpack(archive, store=stage.store)
    assert sorted(map(str, stage.store.references())) == ["m:latest", "own:latest", "second:latest"]


def test_follow_takes_its_name_again_in_the_next_step(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = stage.elsewhere(33)
    errors: list[Exception] = []
    versions = follow(
        NAME,
        str(other.root),
        store=stage.store,
        interval=0.001,
        on_error=lambda error, _: errors.append(error),
    )
    monkeypatch.setattr("blobstore.operations.follow.follow._sleep", lambda *_: None)
    with before_the_lock(stage, monkeypatch, lambda: save(stage)):
        followed = next(versions)
    assert [type(error) for error in errors] == [NameTaken]
    assert stage.has() == followed.digest == Digest.of(other.read_manifest(NAME))
    assert followed.previous not in (None, stage.old)


def test_a_manifest_that_was_replaced_while_it_is_repaired_stays(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = stage.store.manifest_path(NAME)
    intact = LocalStore(stage.root / "intact")
    copy_to_store(NAME, intact, store=stage.store)
    data = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(data.replace(b'"x"', b'"y"'))
    with before_the_lock(stage, monkeypatch, lambda: save(stage)):
        assert list(restore_manifests(stage.store, intact, [NAME], is_dry=False)) == []
    assert stage.has() not in (ABSENT, stage.old)


def test_a_model_that_is_not_the_one_of_the_lock_file_gets_no_name(stage: Stage) -> None:
    address = f"file://{stage.root}/moved"
    other = stage.elsewhere(34)
    push_model(NAME, address, store=other)
    model = LockedModel(reference=NAME, manifest=stage.own, remote=f"{address}/{NAME}")
    (result,) = sync_models([model], store=stage.store)
    assert isinstance(result.error, BlobDamaged)
    assert f"{stage.own.short} was expected" in str(result.error)
    assert stage.has() == stage.old


def test_threads_that_save_one_name_leave_one_whole_model(stage: Stage) -> None:
    remove_models([NAME], store=stage.store)
    start = threading.Barrier(8)

    def run(number: int) -> Digest | None:
        start.wait()
        with contextlib.suppress(NameTaken):
            return blobstore.save(array(40 + number), NAME, store=stage.store).digest
        return None

    with ThreadPoolExecutor(8) as pool:
        given = [digest for digest in pool.map(run, range(8)) if digest is not None]
    assert stage.has() in given
    former = {Digest.of(one.data) for one in stage.store.names.former(NAME)}
    assert set(given) <= former | {stage.has()}  # each that succeeded had the name once
    assert blobstore.verify(store=stage.store).faults == ()
