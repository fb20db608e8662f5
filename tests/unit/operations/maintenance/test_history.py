from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest

from blobstore.core.digest import Digest
from blobstore.core.files import read_regular
from blobstore.errors import ModelNotFound, NotFound, StoreBusy, StoreError, UsageError
from blobstore.operations.create.create import create
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.operations.maintenance.gc import collect_garbage
from blobstore.operations.maintenance.history import model_history, restore_model
from blobstore.operations.maintenance.names import copy_model, remove_models
from blobstore.operations.maintenance.verify import verify_models
from blobstore.store import history
from blobstore.store.local import LocalStore
from blobstore.store.names import NewModel, replace_any
from blobstore.store.scan import list_names
from tests.support.frozen import put
from tests.support.models import write_folder


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """A store whose name ``model`` was ``first`` and then ``second``, and is ``third`` now."""
    store = LocalStore(tmp_path / "store")
    for number, name in enumerate(("first", "second", "third")):
        put(store, name, {"x": number})
        copy_model(name, "model", store=store, force=True)
    return store


def ids(store: LocalStore) -> list[Digest]:
    return [former.digest for former in model_history("model", store=store)]


def id_of(store: LocalStore, name: str) -> Digest:
    return Digest.of(store.read_manifest(name))


def files_of(store: LocalStore) -> list[Path]:
    return list(store.folder("history").iterdir())


def test_lists_what_a_name_was_latest_first(store: LocalStore) -> None:
    assert ids(store) == [id_of(store, "second"), id_of(store, "first")]
    (latest, _) = model_history("model", store=store)
    assert latest.is_restorable
    assert latest.size == sum(blob.size for blob in store.resolve("second").blobs)


def test_restores_the_former_model_and_undoes_that(store: LocalStore) -> None:
    restored = restore_model("model", store=store)

    assert (restored.digest, restored.replaced) == (id_of(store, "second"), True)
    assert store.read_manifest("model") == store.read_manifest("second")
    restore_model("model", store=store)
    assert store.read_manifest("model") == store.read_manifest("third")
    assert verify_models(store=store).faults == ()


def test_a_model_gets_its_own_state_back(store: LocalStore) -> None:
    for number in range(3):
        put(store, f"run:{number}", {"x": number})
        if number != 1:
            put(store, f"run:{number}.state", {"x": number, "moment": number})
        copy_model(f"run:{number}", "run:last", store=store)
    copy_model("run:0", "run:last", store=store)
    for expected in (2, 0, 1):
        restore_model("run:last", id_of(store, f"run:{expected}"), store=store)
        assert id_of(store, "run:last") == id_of(store, f"run:{expected}")
        assert store.has_model("run:last.state") == (expected != 1)
        if expected != 1:
            assert id_of(store, "run:last.state") == id_of(store, f"run:{expected}.state")
    remove_models(["run:2", "run:2.state"], store=store)
    restore_model("run:2", store=store)
    assert store.has_model("run:2.state")


def test_restoring_needs_the_exclusive_lock(store: LocalStore) -> None:
    store.lock_timeout = 0.05
    with store._locks.shared(), pytest.raises(StoreBusy):
        restore_model("model", store=store)
    assert store.read_manifest("model") == store.read_manifest("third")


def test_restores_by_the_start_of_an_id(store: LocalStore) -> None:
    restore_model("model", id_of(store, "first").hex[:6], store=store)
    assert store.read_manifest("model") == store.read_manifest("first")


def test_restores_by_the_digest_that_the_history_has(store: LocalStore) -> None:
    former = model_history("model", store=store)[-1]
    assert restore_model("model", former.digest, store=store).digest == former.digest


def test_each_former_model_is_listed_once_and_never_the_current_one(store: LocalStore) -> None:
    for _ in range(3):
        restore_model("model", store=store)
    assert ids(store) == [id_of(store, "third"), id_of(store, "first")]


def test_giving_a_name_the_same_manifest_again_is_no_history(store: LocalStore) -> None:
    before = files_of(store)
    copy_model("third", "model", store=store)
    assert files_of(store) == before


def test_history_keeps_no_blob_alive_and_goes_with_the_blobs(store: LocalStore) -> None:
    remove_models(["first"], store=store)
    collected = collect_garbage(store=store, older_than=0)

    # The history of the name that was removed, and of the one that had its model.
    assert (len(collected.blobs), len(collected.leftovers)) == (1, 2)
    assert ids(store) == [id_of(store, "second")]
    with pytest.raises(NotFound, match="has no former model with the ID"):
        restore_model("model", "0000", store=store)


def test_what_gc_has_half_removed_cannot_be_restored(store: LocalStore) -> None:
    blob = store.resolve("second").layers[0]
    Path(store.blob_path(blob.digest)).unlink()

    assert not model_history("model", store=store)[0].is_restorable
    with pytest.raises(NotFound, match="gc has removed some of its blobs"):
        restore_model("model", store=store)
    assert store.read_manifest("model") == store.read_manifest("third")


def test_a_frozen_former_model_can_be_restored(store: LocalStore) -> None:
    freeze_models(["first", "second", "third", "model"], store=store)
    remove_models(["second"], store=store)
    collect_garbage(store=store, older_than=3600)

    restore_model("model", store=store)

    assert verify_models(store=store).faults == ()


def test_a_removed_name_can_be_restored_and_keeps_its_history(store: LocalStore) -> None:
    removed = id_of(store, "model")
    remove_models(["model"], store=store)

    assert ids(store) == [removed, id_of(store, "second"), id_of(store, "first")]
    restored = restore_model("model", store=store)
    assert (restored.digest, restored.replaced) == (removed, False)
    assert id_of(store, "model") == removed
    assert ids(store) == [id_of(store, "second"), id_of(store, "first")]


def test_what_gc_has_removed_with_a_name_is_not_restored(store: LocalStore) -> None:
    put(store, "own", {"own": 9})
    remove_models(["own"], store=store)
    collect_garbage(store=store, older_than=0)
    with pytest.raises(ModelNotFound):
        restore_model("own", store=store)


def test_a_full_disk_keeps_no_name_from_being_removed(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(history, "write_file", full)
    (notice,) = remove_models(["model"], store=store).notices
    assert notice == "the disk is full, so 'restore' cannot bring back what is removed"
    assert not store.has_model("model")


def test_names_stay_if_a_disk_that_fails_cannot_keep_their_manifests(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(history, "write_file", failing)
    with pytest.raises(StoreError, match="broken"):
        remove_models(["model"], store=store)
    assert store.has_model("model")


def test_a_manifest_that_cannot_be_read_is_no_former_model(store: LocalStore) -> None:
    store.manifest_path("second").write_bytes(b"{")
    data = store.read_manifest("first")
    with store.writing(), store.exclusive_lock():
        assert store.names.place(NewModel(replace_any("second"), data, [])) == [None]
    assert model_history("second", store=store) == ()


def test_gc_reads_each_former_manifest_once_and_none_while_it_keeps_others_waiting(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove_models(["first"], store=store)
    paths, reads = set(files_of(store)), list[Path]()
    store.lock_timeout = 0

    def noted(path: Path, limit: int) -> bytes:
        with store._locks.shared():  # or the file is not read
            reads.append(path)
            return read_regular(path, limit)

    monkeypatch.setattr(history, "read_regular", noted)
    collected = collect_garbage(store=store, older_than=0)
    assert set(reads) == paths
    assert len(reads) == len(paths) == 3
    assert len(collected.leftovers) == 2


def test_giving_many_names_other_models_lists_the_history_once_each(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[object] = []

    def noted(folder: Path) -> list[str]:
        listed.append(folder)
        return list_names(folder)

    monkeypatch.setattr(history, "list_names", noted)
    for _ in range(3):
        copy_model("first", "model", store=store, force=True)
        copy_model("second", "model", store=store, force=True)
    assert listed == [store.folder("history")] * 6


def test_damaged_files_are_skipped_and_removed(store: LocalStore) -> None:
    for path in files_of(store):
        path.write_bytes(b"{")

    assert ids(store) == []
    collect_garbage(store=store, older_than=0)
    assert files_of(store) == []


def test_a_name_without_history_has_none(store: LocalStore) -> None:
    assert model_history("first", store=store) == ()
    with pytest.raises(NotFound, match="has no former model"):
        restore_model("first", store=store)
    with pytest.raises(ModelNotFound):
        model_history("absent", store=store)
    with pytest.raises(UsageError, match="not the start of an ID"):
        restore_model("model", "x", store=store)


@pytest.mark.parametrize("damage", [b"", b"{", bytes(100), b'"x" '])
def test_a_former_manifest_that_is_damaged_is_not_restored(
    store: LocalStore, damage: bytes
) -> None:
    (path,) = (
        former.path
        for former in store.names.former("model")
        if Digest.of(former.data) == ids(store)[0]
    )
    path.write_bytes(damage)
    assert ids(store) == [id_of(store, "first")]
    assert restore_model("model", store=store).digest == id_of(store, "first")


def test_a_former_manifest_that_was_changed_is_not_restored(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    for number in range(2):
        array = np.full(4, number, np.float32)
        create(write_folder(tmp_path / f"{number}", {"x": array}), "model", store=store)
    ((_, data, path),) = store.names.former("model")
    path.write_bytes(data.replace(b'"x"', b'"y"'))
    with pytest.raises(NotFound):
        restore_model("model", store=store)
