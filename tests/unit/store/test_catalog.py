from __future__ import annotations

from pathlib import Path

import pytest

from blobstore.core.digest import Digest
from blobstore.errors import (
    InvalidManifest,
    ModelNotFound,
    StoreError,
)
from blobstore.manifests.reference import Reference
from blobstore.store import references
from blobstore.store.catalog import Catalog, read_catalog, read_entries
from blobstore.store.local import LocalStore
from tests.support.models import add_blobs, blob

A, B = map(Reference.parse, "ab")


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "store")
    for name in "ba":
        add_blobs(store, name, {"x": blob(("x", "U8", (3,), name.encode() * 3))})
    return store


def test_reads_every_name_in_order(store: LocalStore) -> None:
    a, b = read_catalog(store)
    assert (a.reference, b.reference) == (A, B)
    assert a.manifest == store.resolve(A)
    assert a.digest == Digest.of(store.read_manifest(A))
    assert a.modified == store.manifest_path(A).stat().st_mtime
    assert a.error is None
    assert a.blobs == {item.digest: item.size for item in store.resolve(A).blobs}


def test_reports_why_a_manifest_cannot_be_read(store: LocalStore) -> None:
    store.manifest_path(A).write_bytes(b"{")
    store.manifest_path(B).unlink()
    store.manifest_path(B).symlink_to("nowhere")
    for entry in read_catalog(store):
        assert isinstance(entry.error, InvalidManifest)
        assert str(store.manifest_path(entry.reference)) in str(entry.error)
        assert (entry.digest, entry.manifest, entry.blobs) == (None, None, {})


def test_skips_a_name_that_vanishes(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    found = list(store.repositories())
    monkeypatch.setattr(store, "repositories", lambda **_: iter(found))
    store.manifest_path(A).unlink()
    assert [entry.reference for entry in read_catalog(store)] == [B]


def test_reads_each_requested_name_once(store: LocalStore) -> None:
    assert [entry.reference for entry in read_entries(store, [B, A, B])] == [B, A]
    with pytest.raises(ModelNotFound, match="no model 'c:latest'"):
        read_entries(store, [A, Reference.parse("c")])


def test_a_file_is_not_a_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="is not a folder"):
        read_entries(LocalStore(tmp_path / "file"), [A])


def test_entries_are_read_one_by_one_and_kept_for_the_next_command(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(references, "_MARGIN_NS", -(10**12))
    read: list[Reference] = []
    read_manifest = store.read_manifest

    def noted(name: Reference) -> bytes:
        read.append(name)
        return read_manifest(name)

    monkeypatch.setattr(store, "read_manifest", noted)
    for expected in ([A, B], []):
        catalog = Catalog(store, store.known_references())
        entries = catalog.each(catalog.paths(None))
        assert next(entries).reference == A
        assert read == expected[:1]
        assert [one.reference for one in entries] == [B]
        assert read == expected
        assert len(catalog) == 0
        read.clear()
