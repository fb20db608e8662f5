from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from blobstore.errors import (
    BlobDamaged,
    BlobMissing,
    ModelNotFound,
    NameTaken,
    StoreBusy,
    UsageError,
)
from blobstore.manifests.model import Manifest
from blobstore.manifests.reference import Reference
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.operations.maintenance.copy_to_store import copy_to_store
from blobstore.operations.maintenance.gc import collect_garbage
from blobstore.operations.maintenance.names import remove_models
from blobstore.operations.maintenance.verify import verify_models
from blobstore.store import locks
from blobstore.store.ingest import Ingest
from blobstore.store.local import LocalStore
from tests.support import sandbox
from tests.support.frozen import put


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "store")
    put(store, "model", {"x": 1, "y": 2})
    return store


def files_of(store: LocalStore) -> list[Path]:
    return [path for path in store.folder("blobs").rglob("*") if path.is_file()]


def test_copies_a_model_with_its_id(store: LocalStore, other: LocalStore) -> None:
    size = sum(blob.size for blob in store.resolve("model").blobs)

    copied = copy_to_store("model", other, "team/copy", store=store)

    assert other.read_manifest("team/copy") == store.read_manifest("model")
    assert (copied.bytes_written, copied.bytes_present, copied.replaced) == (size, 0, False)
    assert verify_models(store=other).faults == ()
    again = copy_to_store("model", other.root, "third", store=store.root)
    assert (again.bytes_written, again.bytes_present) == (0, size)


def test_copies_a_frozen_model(store: LocalStore, other: LocalStore) -> None:
    freeze_models(["model"], store=store)

    copy_to_store("model", other, store=store)

    assert verify_models(["model"], store=other).faults == ()
    assert not list(other.cold_files())


def test_another_model_is_replaced_by_force_only(store: LocalStore, other: LocalStore) -> None:
    put(other, "model", {"z": 3})
    before = other.read_manifest("model")

    with pytest.raises(NameTaken, match="another model has the name 'model:latest'"):
        copy_to_store("model", other, store=store)
    assert other.read_manifest("model") == before
    assert copy_to_store("model", other, store=store, force=True).replaced


@pytest.mark.parametrize("is_missing", [True, False])
def test_a_damaged_model_is_not_copied(
    store: LocalStore, other: LocalStore, is_missing: bool
) -> None:
    path = Path(store.blob_path(store.resolve("model").layers[0].digest))
    data = path.read_bytes()
    path.unlink()
    if not is_missing:
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))

    with pytest.raises(BlobMissing if is_missing else BlobDamaged, match="^layer '"):
        copy_to_store("model", other, store=store)

    assert files_of(other) == []
    assert list(other.references()) == []


def test_a_store_is_not_copied_to_itself(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(store.root)
    with pytest.raises(UsageError, match="cp without --to gives a name"):
        copy_to_store("model", tmp_path / "link", "other", store=store)


def test_a_model_that_does_not_exist_makes_no_store(store: LocalStore, other: LocalStore) -> None:
    with pytest.raises(ModelNotFound):
        copy_to_store("absent", other, store=store)
    assert not other.root.exists()


def test_reads_from_a_store_without_write_permission() -> None:
    with sandbox.common_folder() as folder:
        store, other = LocalStore(folder / "store"), LocalStore(folder / "other")
        put(store, "model", {"x": 1, "y": 2})
        store.root.chmod(0o755)

        def copy() -> int:
            return copy_to_store("model", other, store=store).bytes_present

        assert sandbox.call(copy, unprivileged=True) == "0"
        assert verify_models(["model"], store=other).faults == ()


def test_a_model_that_is_replaced_in_the_meantime_is_copied_with_its_own_blobs(
    store: LocalStore, other: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve = LocalStore.resolve

    def late(self: LocalStore, reference: str | Reference) -> Manifest:
        manifest = resolve(self, reference)
        monkeypatch.undo()
        put(store, "model", {"z": 3})
        return manifest

    monkeypatch.setattr(LocalStore, "resolve", late)
    copy_to_store("model", other, store=store)
    assert other.read_manifest("model") == store.read_manifest("model")
    assert verify_models(["model"], store=other).faults == ()


def test_a_model_that_is_removed_while_it_is_copied_is_copied_completely(
    store: LocalStore, other: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ingest = LocalStore.ingest

    def late(self: LocalStore) -> AbstractContextManager[Ingest]:
        remove_models(["model"], store=store)
        collect_garbage(store=store, older_than=0)
        return ingest(self)

    monkeypatch.setattr(LocalStore, "ingest", late)
    copy_to_store("model", other, store=store)
    assert verify_models(["model"], store=other).faults == ()
    assert not store.read_leases().digests


def test_a_name_that_another_model_takes_in_the_meantime_is_not_replaced(
    store: LocalStore, other: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = Ingest.publish

    def late(self: Ingest) -> None:
        monkeypatch.undo()
        put(other, "model", {"z": 3})
        publish(self)

    monkeypatch.setattr(Ingest, "publish", late)
    with pytest.raises(NameTaken):
        copy_to_store("model", other, store=store)
    assert [layer.name for layer in other.resolve("model").layers] == ["z"]


def test_needs_the_exclusive_lock_of_the_other_store(
    store: LocalStore, other: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "_IMPORT_TIMEOUT", 0)
    other.lock_timeout = 0.05
    with other._locks.shared(), pytest.raises(StoreBusy):
        copy_to_store("model", other, store=store)
    assert list(other.references()) == []
