from __future__ import annotations

import os
from pathlib import Path

import pytest

from blobstore.operations.maintenance.gc import collect_garbage
from blobstore.operations.maintenance.names import remove_models
from blobstore.operations.maintenance.verify import verify_models
from blobstore.pages.health_view import health_view
from blobstore.store.local import LocalStore
from tests.support.disk import measured
from tests.support.frozen import put


def age(store: LocalStore, seconds: float) -> None:
    """Make all blobs older."""
    for path in store.folder("blobs").iterdir():
        stamp = path.stat().st_mtime - seconds
        os.utime(path, (stamp, stamp))


def test_a_blob_is_verified_until_its_file_changes(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Files that changed in the last seconds get no entry in the cache otherwise.
    monkeypatch.setattr("blobstore.store.verified_cache._MARGIN_NS", -(10**10))
    put(store, "one", {"a": 1})
    before = health_view(*measured(store))
    verify_models(["one"], store=store)
    after = health_view(*measured(store))
    Path(store.blob_path(store.resolve("one").layers[0].digest)).touch()
    touched = health_view(*measured(store))

    assert (before["verified"], before["last_verified"]) == (0, 0)
    assert after["verified"] == after["blobs"] == after["models"][0]["verified"] == 2
    assert after["last_verified"] > 0
    assert touched["verified"] == touched["models"][0]["verified"] == 1


def test_what_gc_would_remove_is_what_it_removes(store: LocalStore) -> None:
    put(store, "one", {"a": 1})
    put(store, "gone", {"b": 2})
    remove_models(["gone"], store=store)
    young = health_view(*measured(store))["gc"]
    age(store, 7200)
    old = health_view(*measured(store))["gc"]

    assert young["size"] == 0
    assert young["kept"]["young"] > 0
    assert old["size"] == sum(blob.size for blob in collect_garbage(store=store).blobs) > 0
    assert old["largest"][0][0].startswith("blobs/sha256-")


def test_damage_is_found_without_reading(store: LocalStore) -> None:
    put(store, "one", {"a": 1})
    put(store, "two", {"b": 2})
    layer = store.resolve("one").layers[0]
    Path(store.blob_path(layer.digest)).unlink()
    store.manifest_path("two").write_text("{")

    view = health_view(*measured(store))

    one, two = view["models"]
    assert "missing" in one["faults"][0]
    assert two["error"]
    assert view["gc"]["error"]  # a damaged manifest stops gc
