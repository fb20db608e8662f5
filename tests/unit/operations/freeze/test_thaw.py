from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import blobstore
from blobstore.cold_blobs import batches
from blobstore.core.digest import Digest
from blobstore.core.files import sync_folder
from blobstore.errors import BlobDamaged, BlobMissing, ModelNotFound, StoreError
from blobstore.manifests.reference import Reference
from blobstore.operations.freeze import thaw
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.operations.freeze.thaw import thaw_models
from blobstore.operations.maintenance.gc import collect_garbage
from blobstore.store.cold_file import ColdFile
from blobstore.store.local import LocalStore
from tests.support import sandbox
from tests.support.frozen import flip, forms_of, layer, layers, put, weights


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "store", lock_timeout=0.05)
    put(store, "a", {"x": 1, "y": 2})
    freeze_models(["a"], store=store)
    return store


def content(store: LocalStore, name: str) -> dict[str, bytes]:
    """Return the content of the files of a model's blobs."""
    return {
        key: Path(store.blob_path(item.digest)).read_bytes()
        for key, item in layers(store, name).items()
    }


def test_restores_the_original_files(store: LocalStore) -> None:
    thawed = thaw_models(["a"], store=store)
    assert content(store, "a") == {"x": layer("x", weights(1)), "y": layer("y", weights(2))}
    assert forms_of(store, "a") == {"x": "hot", "y": "hot"}
    assert (thawed.blobs, thawed.size) == (2, sum(map(len, content(store, "a").values())))
    assert 0 < thawed.stored < thawed.size
    assert list(store.folder("temporary").iterdir()) == []
    mode = Path(store.blob_path(layers(store, "a")["x"].digest)).stat().st_mode
    assert mode & 0o777 == 0o444


def test_thawing_hot_models_has_nothing_to_do(store: LocalStore) -> None:
    thaw_models(["a"], store=store)
    assert thaw_models(["a", "a"], store=store).blobs == 0


def test_keep_cold_keeps_both_forms(store: LocalStore) -> None:
    assert thaw_models(["a"], store=store, keep_cold=True).blobs == 2
    assert forms_of(store, "a") == {"x": "both", "y": "both"}
    assert thaw_models(["a"], store=store).blobs == 2
    assert forms_of(store, "a") == {"x": "hot", "y": "hot"}


def test_reports_a_damaged_blob_and_leaves_it_cold(store: LocalStore) -> None:
    flip(store.cold_path(layers(store, "a")["x"].digest), 500)
    thawed = thaw_models(["a"], store=store)
    assert forms_of(store, "a") == {"x": "cold", "y": "hot"}
    (fault,) = thawed.faults
    assert isinstance(fault, BlobDamaged)
    assert "layer 'x'" in str(fault)
    assert list(store.folder("temporary").iterdir()) == []


def test_reports_a_missing_blob(store: LocalStore) -> None:
    Path(store.cold_path(layers(store, "a")["x"].digest)).unlink()
    (fault,) = thaw_models(["a"], store=store).faults
    assert isinstance(fault, BlobMissing)
    assert forms_of(store, "a") == {"x": "neither", "y": "hot"}


def test_quarantines_a_damaged_hot_file(store: LocalStore) -> None:
    thaw_models(["a"], store=store, keep_cold=True)
    flip(store.blob_path(layers(store, "a")["x"].digest))
    thaw_models(["a"], store=store)
    assert content(store, "a")["x"] == layer("x", weights(1))
    assert forms_of(store, "a") == {"x": "hot", "y": "hot"}
    (aside,) = store.folder("quarantine").iterdir()
    assert aside.name.startswith(layers(store, "a")["x"].digest.file_name)


def test_neither_replaces_nor_trusts_a_file_that_another_process_has_written(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(store.blob_path(layers(store, "a")["x"].digest))
    real = thaw._commit

    def later(store: LocalStore, batch: Sequence[Any], *, keep_cold: bool) -> Any:
        path.write_bytes(b"the bytes of another process")
        return real(store, batch, keep_cold=keep_cold)

    monkeypatch.setattr(thaw, "_commit", later)
    assert thaw_models(["a"], store=store).blobs == 1
    assert forms_of(store, "a") == {"x": "both", "y": "hot"}
    assert path.read_bytes() == b"the bytes of another process"


def test_blobs_are_leased_while_they_are_thawed(store: LocalStore) -> None:
    leased: list[set[Digest]] = []
    thaw_models(["a"], store=store, progress=lambda *_: leased.append(store.read_leases().digests))
    assert leased
    assert all(
        digests == {item.digest for item in layers(store, "a").values()} for digests in leased
    )


def test_a_hot_file_that_is_there_is_durable_before_the_cold_one_is_removed(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    thaw_models(["a"], store=store, keep_cold=True)
    item = layers(store, "a")["x"]
    hot = os.stat(store.blob_path(item.digest)).st_ino
    cold = store.cold_path(item.digest)
    really_sync = os.fsync
    is_cold: list[bool] = []

    def sync(descriptor: int) -> None:
        if os.fstat(descriptor).st_ino == hot:
            is_cold.append(Path(cold).exists())
        really_sync(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    thaw_models(["a"], store=store)
    assert is_cold == [True]
    assert forms_of(store, "a")["x"] == "hot"


def test_keeps_the_cold_file_if_the_hot_one_vanishes_again(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs that know no locks remove blobs too."""
    hot = Path(store.blob_path(layers(store, "a")["x"].digest))

    def sync_and_lose(folder: Path) -> None:
        sync_folder(folder)
        if folder == store.folder("blobs"):
            hot.unlink()

    monkeypatch.setattr(thaw, "sync_folder", sync_and_lose)
    thaw_models(["a"], store=store)
    assert forms_of(store, "a") == {"x": "cold", "y": "hot"}


def test_a_blob_that_another_process_has_just_thawed_is_not_a_fault(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_cold = LocalStore.open_cold

    def late(self: LocalStore, *arguments: Any) -> Any:
        monkeypatch.undo()
        thaw_models(["a"], store=LocalStore(store.root))
        return open_cold(self, *arguments)

    monkeypatch.setattr(LocalStore, "open_cold", late)
    thawed = thaw_models(["a"], store=store, jobs=1)
    assert (thawed.blobs, thawed.faults) == (0, ())
    assert set(forms_of(store, "a").values()) == {"hot"}


def test_thaws_shared_blobs_for_all_models(store: LocalStore) -> None:
    put(store, "b", {"x": 1, "z": 3})
    freeze_models(["b"], store=store)
    thaw_models(["a"], store=store)
    assert forms_of(store, "b") == {"x": "hot", "z": "cold"}
    freeze_models(["b"], store=store)  # a is hot
    assert forms_of(store, "b") == {"x": "hot", "z": "cold"}


def test_open_can_thaw(store: LocalStore) -> None:
    with blobstore.open("a", store=store, thaw=True) as model:
        assert model["x"].tobytes() == weights(1)
    assert forms_of(store, "a") == {"x": "hot", "y": "hot"}


def test_open_reports_blobs_that_cannot_be_thawed(store: LocalStore) -> None:
    flip(store.cold_path(layers(store, "a")["x"].digest), 500)
    with pytest.raises(BlobDamaged, match="a:latest: layer 'x'"):
        blobstore.open("a", store=store, thaw=True)


def test_an_interrupt_leaves_every_blob_intact(store: LocalStore) -> None:
    def stop(what: str, done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        thaw_models(["a"], store=store, jobs=1, progress=stop)
    assert "neither" not in forms_of(store, "a").values()
    assert list(store.folder("temporary").iterdir()) == []


@pytest.mark.slow
def test_a_full_disk_leaves_all_blobs_cold(tmp_path: Path) -> None:
    with sandbox.small_disk(tmp_path / "disk", 2 * 2**20) as disk:
        store = LocalStore(disk / "store")
        put(store, "a", {f"x{number}": number for number in range(18)})
        freeze_models(["a"], store=store)
        (disk / "ballast").write_bytes(os.urandom(700_000))
        with pytest.raises(StoreError, match="no space left"):
            thaw_models(["a"], store=store, keep_cold=True)
        gc.collect()  # the traceback has the maps of blobs
        assert "neither" not in forms_of(store, "a").values()
        assert list(store.folder("temporary").iterdir()) == []
        assert collect_garbage(store=store, older_than=0, force=True).blobs == ()


def test_rejects_invalid_arguments(store: LocalStore) -> None:
    with pytest.raises(ModelNotFound):
        thaw_models([Reference.parse("b")], store=store)


def test_no_cold_blob_is_opened_under_the_exclusive_lock(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other processes wait for that lock, so each file is opened before it is taken, and only once."""
    put(store, "b", {f"y{number}": number for number in range(10, 16)})
    caller = threading.get_ident()
    is_locked = False
    opened: list[tuple[str, bool]] = []
    exclusive_lock, open_file = LocalStore.exclusive_lock, ColdFile.__init__

    @contextlib.contextmanager
    def locked(self: LocalStore) -> Iterator[None]:
        nonlocal is_locked
        with exclusive_lock(self):
            is_locked = True
            yield
            is_locked = False

    def count(self: ColdFile, path: str) -> None:
        if threading.get_ident() == caller:  # the other threads encode and decode
            opened.append((path, is_locked))
        open_file(self, path)

    monkeypatch.setattr(batches, "_BATCH", 2)
    monkeypatch.setattr(LocalStore, "exclusive_lock", locked)
    monkeypatch.setattr(ColdFile, "__init__", count)
    (store.root / ".blobstore" / "cold-index").unlink()  # as in a store of an earlier version
    freeze_models(["b"], store=LocalStore(store.root), find_base=False)
    assert {path for path, _ in opened} >= {
        store.cold_path(item.digest) for item in layers(store, "a").values()
    }
    thaw_models(["a", "b"], store=LocalStore(store.root))
    assert not any(is_under_lock for _, is_under_lock in opened)
    assert len(opened) <= 6 + 8  # freezing reads a and all batches but the last; thawing reads all
    assert set(forms_of(store, "b").values()) == {"hot"}
