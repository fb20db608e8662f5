from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from blobstore.core.digest import Digest
from blobstore.errors import StoreError
from blobstore.operations.maintenance.gc import collect_garbage
from blobstore.operations.maintenance.names import copy_model, remove_models
from blobstore.store import signatures
from blobstore.store.local import LocalStore
from tests.support.frozen import put

MANIFEST = Digest.of(b"manifest")


def age(store: LocalStore) -> None:
    """Make all signatures old enough for gc."""
    old = time.time() - 7200
    for path in store.folder("signatures").rglob("*.sig"):
        os.utime(path, (old, old))


def test_keeps_signatures_by_the_digest_of_the_manifest(store: LocalStore) -> None:
    for data in (b"one", b"two", b"one"):
        store.keep_signature(MANIFEST, data, is_verified=True)
    store.keep_signature(Digest.of(b"other"), b"three", is_verified=True)

    assert sorted(store.signatures(MANIFEST)) == [b"one", b"two"]
    assert list(store.signatures(Digest.of(b"none"))) == []


def test_leaves_out_files_that_are_damaged_or_not_signatures(
    store: LocalStore, tmp_path: Path
) -> None:
    for data in (b"one", b"two", b"three", b"four"):
        store.keep_signature(MANIFEST, data, is_verified=True)
    folder = store.folder("signatures") / MANIFEST.hex
    one, two, three = (folder / f"{Digest.of(data).hex}.sig" for data in (b"one", b"two", b"three"))
    one.write_bytes(b"ONE")
    two.unlink()
    two.mkdir()
    three.unlink()
    three.symlink_to(tmp_path / "nothing")
    (folder / "notes.txt").write_bytes(b"x")
    assert list(store.signatures(MANIFEST)) == [b"four"]


def test_reads_a_limited_number_of_signatures(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signatures, "MAX_SIGNATURES", 3)
    for number in range(5):
        store.keep_signature(MANIFEST, bytes([number]), is_verified=True)
    assert len(list(store.signatures(MANIFEST))) == 3


def test_a_store_that_cannot_be_written_keeps_none(store: LocalStore) -> None:
    store.root.mkdir()
    store.folder("signatures").parent.write_bytes(b"no folder")
    with pytest.raises(StoreError):
        store.keep_signature(MANIFEST, b"one", is_verified=True)


def test_gc_removes_the_signatures_of_manifests_that_are_gone(store: LocalStore) -> None:
    put(store, "kept", {"x": 1})
    put(store, "removed", {"x": 2})
    kept, removed = (Digest.of(store.read_manifest(name)) for name in ("kept", "removed"))
    for digest in (kept, removed):
        store.keep_signature(digest, b"signature", is_verified=True)
    remove_models("removed", store=store)

    collect_garbage(store=store)
    assert list(store.signatures(removed))  # its model can be restored
    for path in store.folder("history").iterdir():
        path.unlink()
    collect_garbage(store=store)
    assert list(store.signatures(removed))  # it may belong to a model that is being imported

    age(store)
    dry = collect_garbage(store=store, dry_run=True)
    assert list(store.signatures(removed))
    collected = collect_garbage(store=store)
    assert dry.leftovers == collected.leftovers
    assert [item.path.parent.name for item in collected.leftovers] == [removed.hex]
    assert [list(store.signatures(one)) for one in (kept, removed)] == [[b"signature"], []]
    assert [path.name for path in store.folder("signatures").iterdir()] == [kept.hex]


def test_gc_keeps_the_signatures_of_manifests_that_can_be_restored(store: LocalStore) -> None:
    put(store, "first", {"x": 1})
    put(store, "second", {"x": 2})
    digest = Digest.of(store.read_manifest("first"))
    store.keep_signature(digest, b"signature", is_verified=True)
    copy_model("first", "model", store=store)
    copy_model("second", "model", store=store, force=True)
    remove_models("first", store=store)
    age(store)

    collect_garbage(store=store)

    assert list(store.signatures(digest)) == [b"signature"]
