from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import blobstore
from blobstore.core.mmap import MappedRegion
from blobstore.manifests import media_types
from blobstore.manifests.reference import Reference
from blobstore.models import dequantize as unpacking
from blobstore.models.dequantize import plain_pieces
from blobstore.models.tensors import StoredTensor, read_tensors
from blobstore.planning.plan import QuantizeOptions
from blobstore.quantization import quantize_numpy as reference
from blobstore.quantization.formats import FORMATS
from blobstore.store.local import LocalStore
from tests.support.models import add_blobs, blob, quantizable_tensors, write_folder
from tests.support.pack_quantized import packed_config, packed_weight, write_packed

NAME = Reference.parse("m")
TENSORS = quantizable_tensors()
EXPERTS = "model.layers.0.mlp.experts"


def mapped(store: LocalStore, name: str) -> tuple[StoredTensor, Any]:
    stored = read_tensors(store, store.resolve(NAME)).tensors[name]
    region = MappedRegion([stored.layer.size])
    store.map_blob(stored.layer.digest, stored.layer.size, 0, region)
    return stored, region.memory


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "store")
    folder = write_folder(tmp_path / "model", TENSORS)
    blobstore.create(folder, NAME, store=store, quantize=QuantizeOptions("int4"), experts="stacked")
    return store


@pytest.mark.parametrize("piece", [1 << 20, 1000, 1])
def test_yields_a_few_rows_at_a_time_in_order(
    piece: int, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpacking, "_PIECE_ELEMENTS", piece)
    name = "model.layers.0.self_attn.q_proj.weight"
    pieces = list(plain_pieces(*mapped(store, name), "float32"))
    assert len(pieces) == {1 << 20: 1, 1000: 19, 1: 128}[piece]
    packed = reference.quantize(TENSORS[name], FORMATS["int4"], 32)
    expected = reference.dequantize(*packed, FORMATS["int4"], 32, "float32")
    np.testing.assert_array_equal(np.concatenate(pieces), expected, strict=True)


@pytest.mark.parametrize("part", [0, 11])
def test_dequantizes_one_expert_of_a_stack(part: int, store: LocalStore) -> None:
    stored, memory = mapped(store, f"{EXPERTS}.down_proj.weight")
    (found,) = plain_pieces(stored, memory, "bfloat16", part)
    array = TENSORS[f"{EXPERTS}.{part}.down_proj.weight"]
    packed = reference.quantize(array, FORMATS["int8"], 64)
    expected = reference.dequantize(*packed, FORMATS["int8"], 64, "bfloat16")
    np.testing.assert_array_equal(found, expected, strict=True)


def test_a_global_scale_is_applied(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    tensors: list[tuple[str, str, tuple[int, ...], bytes]] = [
        ("w.scale", "U8", (1, 1), bytes([56])),
        ("w", "U32", (1, 2), bytes([0x21] * 8)),
        ("w.global_scale", "F32", (1,), np.float32(3).tobytes()),
    ]
    add_blobs(store, "m", {"w": blob(*tensors, quant_type="nvfp4")})
    assert store.resolve(NAME).layers_of(media_types.TENSOR)
    (found,) = plain_pieces(*mapped(store, "w"), "float16")
    assert found.tolist() == [[1.5, 3.0] * 8]


@pytest.mark.parametrize("bits", [4, 8])
def test_yields_rows_of_symmetric_integers(
    bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpacking, "_PIECE_ELEMENTS", 100)
    store = LocalStore(tmp_path / "store")
    packed = packed_weight("w", bits=bits)
    config = packed_config({"num_bits": bits})
    blobstore.create(write_packed(tmp_path / "m", packed.tensors, config), NAME, store=store)
    pieces = list(plain_pieces(*mapped(store, "w.weight"), "bfloat16"))
    assert len(pieces) == 6
    np.testing.assert_array_equal(np.concatenate(pieces), packed.values, strict=True)
