"""Digests of files that no record has: blobs are hashed on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blobstore.core.digest import Digest
from blobstore.errors import BlobDamaged
from blobstore.folders import digests as module
from blobstore.folders.digests import folder_digests
from blobstore.operations.create.create import create
from blobstore.operations.export.export import export_model
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.store import verified_cache
from blobstore.store.cold import ColdBlob
from blobstore.store.local import LocalStore
from blobstore.store.verified_cache import VerifiedBlobs
from tests.support import frozen
from tests.support.cold import cold
from tests.support.folders import contents
from tests.support.models import Arrays, blob, moe_tensors, write_folder


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Counter[Digest]:
    """How many bytes of each cold blob were decoded."""
    monkeypatch.setattr(verified_cache, "_MARGIN_NS", 0)
    found: Counter[Digest] = Counter()
    read_into = ColdBlob.read_into

    def counted_read(self: ColdBlob, begin: int, buffer: memoryview, *others: Any) -> None:
        found[self.digest] += len(buffer)
        read_into(self, begin, buffer, *others)

    monkeypatch.setattr(ColdBlob, "read_into", counted_read)
    return found


def dense() -> Arrays:
    random = np.random.default_rng(3)
    return {
        f"layers.{number}.weight": (random.standard_normal(20_000) * 0.02).astype(np.float32)
        for number in range(12)
    }


def check(store: LocalStore, folder: Path) -> None:
    """Check the digests with those of the files that export writes."""
    export_model("model", folder, store=store)
    found = folder_digests(store, store.resolve("model"), "export")
    assert found.hashed
    assert found.files == {name: Digest.of(content) for name, content in contents(folder).items()}


@pytest.mark.parametrize("limit", [1, 8])
@pytest.mark.parametrize("tensors", [dense, moe_tensors])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_files_have_the_digests_of_an_export(
    store: LocalStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tensors: Callable[[], Arrays],
    limit: int,
    is_frozen: bool,
) -> None:
    monkeypatch.setattr(module, "_OPEN_BLOBS", limit)  # experts take turns
    create(write_folder(tmp_path / "source", tensors(), shards=2), "model", store=store)
    if is_frozen:
        freeze_models(["model"], store=store)
    check(store, tmp_path / "exported")


def test_a_cold_blob_is_decoded_once_and_is_verified_then(
    store: LocalStore, tmp_path: Path, decoded: Counter[Digest]
) -> None:
    create(write_folder(tmp_path / "source", dense()), "model", store=store)
    freeze_models(["model"], store=store)
    decoded.clear()
    folder_digests(store, store.resolve("model"), "export")
    layers = [layer for layer in store.resolve("model").layers if store.has_cold(layer.digest)]
    assert layers
    assert all(layer.size <= decoded[layer.digest] < 1.1 * layer.size for layer in layers), (
        "plus headers"
    )
    assert all(VerifiedBlobs(store).has_cold(*layer.id) for layer in layers)


def test_a_cold_blob_that_decodes_to_other_bytes_is_damaged(
    store: LocalStore, decoded: Counter[Digest]
) -> None:
    frozen.put(store, "model", {"a": 1, "b": 2})
    freeze_models(["model"], store=store)
    layer = frozen.layers(store, "model")["b"]
    path = Path(store.cold_path(layer.digest))
    other = blob(("b", "BF16", (frozen.COUNT,), frozen.weights(3)))
    path.chmod(0o644)
    path.write_bytes(cold(other, digest=layer.digest))
    with pytest.raises(BlobDamaged, match=r"b.*" + layer.digest.hex):
        folder_digests(store, store.resolve("model"), "export")
    assert not VerifiedBlobs(store).has_cold(*layer.id)
    assert decoded[layer.digest]
