from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blobstore.core.digest import BlobId, Digest, Digester
from blobstore.errors import BlobMissing, UnsupportedSource, UsageError
from blobstore.manifests.descriptor import Descriptor
from blobstore.manifests.layers_digest import layers_digest
from blobstore.manifests.reference import Reference
from blobstore.operations.create.create import create
from blobstore.operations.export.export import export_model
from blobstore.operations.maintenance.repair_sources import BlobProvider, OtherBlobs, RebuiltBlobs
from blobstore.sources.open import open_source
from blobstore.store.local import LocalStore
from tests.support.models import (
    Arrays,
    dense_tensors,
    moe_tensors,
    quantizable_tensors,
    write_folder,
)
from tests.support.options import grouped

FILES = {"tokenizer.json": b"{}", "merges.txt": b"a b\n"}


def made(tensors: Arrays, store: LocalStore, tmp_path: Path, **options: Any) -> Path:
    folder = write_folder(tmp_path / "source", tensors, files=FILES)
    create(folder, "m", store=store, **grouped(options))
    return folder


def all_blobs(store: LocalStore) -> dict[BlobId, Descriptor]:
    blobs = store.resolve(Reference.parse("m")).blobs
    return {blob.id: blob for blob in blobs}


def layer_lists(store: LocalStore) -> list[Digest]:
    return [layers_digest(store.resolve(Reference.parse("m")).layers)]


def had(provider: BlobProvider, wanted: dict[BlobId, Descriptor]) -> Mapping[BlobId, int]:
    """Remove the blobs that a provider has from ``wanted``; return the candidates of each blob."""
    tries: dict[BlobId, int] = {}
    for candidates in provider.rounds(wanted):
        for blob, buffers in candidates:
            tries[blob.id] = tries.get(blob.id, 0) + 1
            digester = Digester()
            for piece in buffers():  # good until the next one
                digester.update(piece)
            if digester.digest() == blob.digest:
                wanted.pop(blob.id, None)
    return tries


@pytest.mark.parametrize("experts", ["packed", "stacked"])
def test_a_source_has_every_blob_of_its_model(
    experts: str, store: LocalStore, tmp_path: Path
) -> None:
    folder = made(dense_tensors() | moe_tensors(), store, tmp_path, experts=experts)
    wanted = all_blobs(store)
    tries = had(RebuiltBlobs(open_source(folder), lists=layer_lists(store)), wanted)
    assert not wanted
    assert set(tries.values()) == {1}


@pytest.mark.slow
@pytest.mark.parametrize("experts", ["packed", "stacked"])
@pytest.mark.parametrize(
    "options",
    [
        {"quantize": "int4"},
        {"quantize": "int4", "group_size": 128, "policy": "uniform"},
        {"quantize": "int8", "group_size": 32},
        {"quantize": "nvfp4"},
        {"quantize": "mxfp8", "policy": "uniform"},
        {"quantize": "mxfp4"},
    ],
    ids=str,
)
def test_finds_out_how_a_model_was_quantized(
    options: dict[str, Any], experts: str, store: LocalStore, tmp_path: Path
) -> None:
    folder = made(quantizable_tensors(), store, tmp_path, experts=experts, **options)
    wanted = all_blobs(store)
    tries = had(RebuiltBlobs(open_source(folder), lists=layer_lists(store)), wanted)
    assert not wanted
    assert max(tries.values()) <= 2


@pytest.mark.slow
def test_overrides_must_be_given(store: LocalStore, tmp_path: Path) -> None:
    overrides = ["*.experts.3.up_proj.weight=none"]
    folder = made(quantizable_tensors(), store, tmp_path, quantize="int4", overrides=overrides)
    left = all_blobs(store)
    had(RebuiltBlobs(open_source(folder), lists=layer_lists(store)), left)
    assert [blob.name for blob in left.values()] == ["model.layers.0.mlp.experts", ""]
    had(RebuiltBlobs(open_source(folder), overrides=overrides), left)
    assert not left


@pytest.mark.slow
def test_an_override_that_fits_nothing_is_an_error(store: LocalStore, tmp_path: Path) -> None:
    folder = made(quantizable_tensors(), store, tmp_path, quantize="int4")
    origin = RebuiltBlobs(open_source(folder), overrides=["nothing=int8"])
    with pytest.raises(UsageError, match="no tensor of the source matches"):
        had(origin, all_blobs(store))


def test_a_source_that_is_quantized_already_is_taken_as_it_is(
    store: LocalStore, tmp_path: Path
) -> None:
    tensors = {n: a for n, a in quantizable_tensors().items() if "experts" not in n}
    made(tensors, store, tmp_path, quantize="int4")
    export_model(Reference.parse("m"), tmp_path / "exported", store=store)
    left = all_blobs(store)
    had(RebuiltBlobs(open_source(tmp_path / "exported"), lists=layer_lists(store)), left)
    # What export adds to config.json is not taken away again, and the record is that of the export.
    assert [blob.name for blob in left.values()] == ["config.json", ""]


def test_a_source_that_makes_no_model_is_an_error(store: LocalStore, tmp_path: Path) -> None:
    made(dense_tensors(), store, tmp_path)
    experts = "model.layers.0.mlp.experts"
    tensor = dense_tensors()["position_ids"]
    names = (experts, f"{experts}.0.up_proj.weight")
    folder = write_folder(tmp_path / "odd", dict.fromkeys(names, tensor))
    with pytest.raises(UnsupportedSource, match="would both be stored as"):
        had(RebuiltBlobs(open_source(folder)), all_blobs(store))


def test_gives_only_candidates_of_the_right_name_and_size(
    store: LocalStore, tmp_path: Path
) -> None:
    made(dense_tensors(), store, tmp_path)
    other = dense_tensors()
    other["mask"] = other["mask"][:2]
    other["scalar"] = np.array(8, dtype=np.uint8)
    del other["empty"]
    folder = write_folder(tmp_path / "other", other)
    wanted = {key: blob for key, blob in all_blobs(store).items() if blob.name in {"mask", "empty"}}
    scalar = next(key for key, blob in all_blobs(store).items() if blob.name == "scalar")
    wanted[scalar] = all_blobs(store)[scalar]
    assert had(RebuiltBlobs(open_source(folder)), wanted) == {scalar: 1}
    assert len(wanted) == 3


def test_another_store_has_what_it_has(store: LocalStore, tmp_path: Path) -> None:
    made(dense_tensors(), store, tmp_path)
    wanted = all_blobs(store)
    (gone, short, *_) = wanted
    Path(store.blob_path(gone[0])).unlink()
    path = Path(store.blob_path(short[0]))
    path.chmod(0o644)
    path.write_bytes(b"")
    had(OtherBlobs(store), wanted)
    assert set(wanted) == {gone, short}


def test_a_blob_that_another_store_loses_cannot_be_read(store: LocalStore, tmp_path: Path) -> None:
    made(dense_tensors(), store, tmp_path)
    wanted = all_blobs(store)
    (candidates,) = OtherBlobs(store).rounds(wanted)
    Path(store.blob_path(candidates[0].blob.digest)).unlink()
    with pytest.raises(BlobMissing):
        list(candidates[0].buffers())
