from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from blobstore.core.digest import Digest
from blobstore.core.files import FileState, FileVersion
from blobstore.errors import BlobDamaged, StoreError
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.operations.freeze.thaw import thaw_models
from blobstore.operations.maintenance import gc as collect
from blobstore.operations.maintenance.gc import collect_garbage
from blobstore.operations.maintenance.names import remove_models
from blobstore.operations.maintenance.verify import verify_models
from blobstore.store.local import LocalStore
from tests.support.frozen import flip, layer, layers, put, tuned
from tests.support.models import add_blobs

BASE = {"x": 1, "y": 2}


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """A store with a frozen child, whose one blob is a delta against its base."""
    store = LocalStore(tmp_path / "store", lock_timeout=0.05)
    put(store, "base", BASE)
    add_blobs(store, "child", {"x": layer("x", tuned(10, 1))})
    freeze_models(["child"], store=store, base="base")
    return store


@pytest.fixture
def delta(store: LocalStore) -> Digest:
    (delta,) = store.cold_bases()
    return delta


def fresh(store: LocalStore) -> LocalStore:
    return LocalStore(store.root)


def flip_silently(store: LocalStore, digest: Digest) -> None:
    """Damage a cold file as a failing disk does, which leaves its times."""
    path = store.cold_path(digest)
    status = os.stat(path)
    flip(path, -1)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def without_opening(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> LocalStore:
    store = fresh(store)
    monkeypatch.setattr(store._cold, "open", None)
    return store


def test_bases_are_known_without_opening_cold_blobs(
    store: LocalStore, delta: Digest, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = fresh(store).open_cold(delta).base
    assert expected is not None
    assert without_opening(store, monkeypatch).cold_bases() == {delta: expected}


def test_gc_keeps_the_base_of_a_cold_blob_that_cannot_be_read(
    store: LocalStore, delta: Digest
) -> None:
    flip_silently(store, delta)
    remove_models(["base"], store=store)
    found = collect_garbage(store=fresh(store), older_than=0)
    assert found.bases == 1
    assert found.blobs


def test_a_store_of_an_earlier_version_gets_an_index_by_gc(
    store: LocalStore, delta: Digest, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = store.cold_bases()
    store.cold_index.path.unlink()
    assert fresh(store).cold_bases() == expected
    collect_garbage(store=fresh(store), dry_run=True)
    assert not store.cold_index.path.exists()
    collect_garbage(store=fresh(store))
    assert without_opening(store, monkeypatch).cold_bases() == expected


@pytest.mark.slow
@pytest.mark.parametrize("position", range(0, 150, 7))
def test_a_damaged_entry_never_hides_a_base(store: LocalStore, position: int) -> None:
    expected = store.cold_bases()
    path = store.cold_index.path
    data = bytearray(path.read_bytes())
    data[position % len(data)] ^= 4
    path.write_bytes(data)
    assert fresh(store).cold_bases() == expected


def test_an_entry_after_a_torn_line_is_read(
    store: LocalStore, delta: Digest, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = store.cold_index.path
    expected = store.cold_bases()
    path.write_bytes(b"0123 torn")
    status = os.lstat(store.cold_path(delta))
    store.cold_index.append([(delta, FileState.of_status(status), expected[delta])])
    assert without_opening(store, monkeypatch).cold_bases() == expected


def test_a_cold_file_that_was_replaced_has_no_entry(store: LocalStore, delta: Digest) -> None:
    status = os.stat(store.cold_path(delta))
    os.utime(store.cold_path(delta), ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    flip_silently(store, delta)
    assert fresh(store).cold_bases() == {}
    with pytest.raises(BlobDamaged):
        fresh(store).base_of(delta, store.cold_files()[delta])


def test_contradicting_entries_are_not_believed(store: LocalStore, delta: Digest) -> None:
    expected = store.cold_bases()
    status = os.lstat(store.cold_path(delta))
    store.cold_index.append([(delta, FileState.of_status(status), None)])
    assert fresh(store).cold_bases() == expected


def freeze_before_gc_removes(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let another process freeze a model against a base that gc is about to remove."""
    sweep = collect._Collection.sweep

    def late(self: Any, candidates: Any) -> Any:
        monkeypatch.setattr(collect._Collection, "sweep", sweep)
        put(store, "other-base", {"z": 3})
        freeze_models(["other"], store=store, base="other-base")
        remove_models(["other-base"], store=store)
        return sweep(self, candidates)

    monkeypatch.setattr(collect._Collection, "sweep", late)


@pytest.mark.parametrize("clock", ["fine", "coarse"])
def test_gc_keeps_the_base_of_a_blob_that_is_frozen_while_it_runs(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, clock: str
) -> None:
    put(store, "other-base", {"z": 3})
    add_blobs(store, "other", {"z": layer("z", tuned(11, 3))})
    remove_models(["other-base"], store=store)
    freeze_before_gc_removes(store, monkeypatch)
    if clock == "coarse":  # all changes of a folder happen within one tick
        of_status = FileVersion.of_status

        def without_times(status: os.stat_result) -> FileVersion:
            version = of_status(status)._replace(modified=0, changed=0)
            return version._replace(size=0) if stat.S_ISDIR(status.st_mode) else version

        monkeypatch.setattr(FileVersion, "of_status", without_times)
    collect_garbage(store=fresh(store), older_than=0, force=True)
    (base,) = set(store.cold_bases().values()) - {layers(store, "base")["x"].digest}
    assert store.has_hot(base)
    assert not verify_models(store=store).faults


def test_gc_lists_cold_blobs_once_however_many_batches_it_needs(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"garbage{number}" for number in range(5)]
    for number, name in enumerate(names):
        put(store, name, {name: 20 + number})
    freeze_models(names, store=store)
    remove_models(names, store=store)
    store = fresh(store)
    cold_files, calls = store.cold_files, list[object]()

    def counted() -> object:
        calls.append(None)
        return cold_files()

    monkeypatch.setattr(collect, "_hold", lambda _: 0.0)
    monkeypatch.setattr(store, "cold_files", counted)
    found = collect_garbage(store=store, older_than=0, force=True)
    assert len([item for item in found.blobs if item.path.parent.name == "cold"]) == 5
    assert len(calls) == 1


def test_gc_removes_the_entries_of_blobs_that_are_gone(store: LocalStore, delta: Digest) -> None:
    freeze_models(["base"], store=store)
    thaw_models(["child"], store=store)
    assert delta.hex in store.cold_index.path.read_text()
    collect_garbage(store=store)
    assert delta.hex not in store.cold_index.path.read_text()


def test_entries_are_durable_before_cold_blobs_get_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path / "other")
    put(store, "a", {"x": 1})
    index, sync = store.cold_index.path, os.fsync
    seen: list[bool] = []

    def noted(descriptor: int) -> None:
        sync(descriptor)
        if index.exists() and os.path.samestat(os.fstat(descriptor), index.stat()):
            seen.append(not store.cold_files())

    monkeypatch.setattr(os, "fsync", noted)
    freeze_models(["a"], store=store)
    assert seen == [True]
    assert store.cold_files()


def test_a_link_in_place_of_the_index_is_not_written_through(
    store: LocalStore, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"precious")
    add_blobs(store, "more", {"x": layer("x", tuned(11, 1))})
    store.cold_index.path.unlink()
    store.cold_index.path.symlink_to(other)
    with pytest.raises(StoreError, match="cold-index' is a link"):
        freeze_models(["more"], store=store, base="base")
    assert other.read_bytes() == b"precious"
