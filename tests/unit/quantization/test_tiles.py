"""Scales of ComfyUI in tiles: every value is exact, and every file is exported byte for byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import blobstore
from blobstore.core.tensor import DTYPES, TensorSpec
from blobstore.errors import UsageError
from blobstore.operations.create.create import create
from blobstore.operations.export.export import export_model
from blobstore.quantization.detect import detect_quantization
from blobstore.quantization.tiles import tiled_shape
from blobstore.store.local import LocalStore
from tests.support.comfy_files import tiled_weight
from tests.support.published import Tensors, file_of

KINDS = ["nvfp4", "mxfp8"]


def imported(tmp_path: Path, store: LocalStore, tensors: Tensors) -> Path:
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_of(tensors))
    create(path, "m", store=store)
    return path


@pytest.mark.parametrize("framework", ["numpy", "torch", "mlx"])
@pytest.mark.parametrize("shape", [(144, 96), (128, 256), (16, 32)])
@pytest.mark.parametrize("kind", KINDS)
def test_every_value_is_exact(
    kind: str, shape: tuple[int, int], framework: Any, tmp_path: Path, store: LocalStore
) -> None:
    tensors, values = tiled_weight(kind, shape=shape)
    imported(tmp_path, store, tensors)
    with blobstore.open("m", store=store, framework=framework) as model:
        assert model.quantized == {"m.weight": (f"{kind}-tiled", 16 if kind == "nvfp4" else 32)}
        found = np.array(model.dequantized("m.weight", "float32").tolist(), np.float32)
    assert found.tobytes() == values.tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_files_are_exported_byte_for_byte_and_dequantized(
    kind: str, tmp_path: Path, store: LocalStore
) -> None:
    tensors, values = tiled_weight(kind, shape=(16, 32), exponents="U8")
    path = imported(tmp_path, store, tensors)
    export_model("m", tmp_path / "same", store=store)
    assert (tmp_path / "same" / path.name).read_bytes() == path.read_bytes()
    export_model("m", tmp_path / "plain", store=store, dequantize=True)
    create(tmp_path / "plain", "plain", store=store)
    with blobstore.open("plain", store=store) as model:
        assert set(model) == {"m.weight"}
        assert np.array_equal(model["m.weight"], values.astype(model["m.weight"].dtype))


INDEXES: list[Any] = [
    3,
    slice(1, 5),
    (slice(100, 140), slice(3, 40)),
    (slice(130, 131), 7),
    (..., 5),
    slice(0, 0),
]


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_a_weight_are_those_of_the_whole(
    kind: str, tmp_path: Path, store: LocalStore
) -> None:
    tensors, values = tiled_weight(kind, shape=(300, 64) if kind == "mxfp8" else (304, 64))
    imported(tmp_path, store, tensors)
    with blobstore.open("m", store=store, dequantize=True) as model:
        whole = model["m.weight"]
        assert np.array_equal(whole, values.astype(whole.dtype))
        for index in INDEXES:
            assert np.array_equal(model.get_slice("m.weight")[index], whole[index])
    with blobstore.open("m", store=store) as model:
        tiles = model.quantized_slice("m.weight", slice(128, 256))
        assert sorted(array.shape[:1] for array in tiles.values())[-2:] == [(128,), (128,)]
        for index in (slice(0, 8), (slice(0, 128), slice(0, 32))):
            with pytest.raises(UsageError, match="scales in tiles of 128 rows"):
                model.quantized_slice("m.weight", index)


def test_a_large_weight_is_dequantized_in_pieces(tmp_path: Path, store: LocalStore) -> None:
    """A piece of 2^20 elements ends within a tile."""
    shape = (300, 4096)
    rows, columns = shape
    codes = np.random.default_rng(1).integers(0, 120, shape, np.uint8)
    height, width = tiled_shape(rows, columns // 32)
    marker = b'{"format": "mxfp8"}'
    tensors: Tensors = {
        "m.weight": ("F8_E4M3", [*shape], codes.tobytes()),
        "m.weight_scale": ("F8_E8M0", [height, width], bytes(range(100, 164)) * (height * 2)),
        "m.comfy_quant": ("U8", [len(marker)], marker),
    }
    imported(tmp_path, store, tensors)
    export_model("m", tmp_path / "plain", store=store, dequantize=True)
    create(tmp_path / "plain", "plain", store=store)
    with (
        blobstore.open("m", store=store, dequantize=True) as model,
        blobstore.open("plain", store=store) as plain,
    ):
        assert np.array_equal(model["m.weight"], plain["m.weight"])


def changed(kind: str, **changes: Any) -> Tensors:
    """Return the tensors of a weight with others in place of some, or without them."""
    tensors = dict(tiled_weight(kind, shape=(16, 32)).tensors)
    for end, value in changes.items():
        tensors.pop(f"m.{end}", None)
        if value is not None:
            tensors[f"m.{end}"] = value
    return tensors


SCALES = ("F8_E4M3", [128, 4], bytes(512))


@pytest.mark.parametrize(
    "tensors",
    [
        changed("nvfp4", weight_scale_2=None),
        changed("nvfp4", weight_scale_2=("F32", [2], bytes(8))),
        changed("nvfp4", weight_scale=None),
        changed("nvfp4", weight_scale=("F8_E4M3", [16, 2], bytes(32))),
        changed("nvfp4", weight_scale=("U8", [128, 4], bytes(512))),
        changed("nvfp4", weight=("I8", [16, 16], bytes(256))),
        changed("nvfp4", weight=("U8", [2, 8, 16], bytes(256))),
        changed("nvfp4", pre_quant_scale=("BF16", [32], bytes(64))),
        changed("nvfp4", comfy_quant=("U8", [33], b'{"format": "nvfp4", "convrot": 1}')),
        changed("nvfp4", comfy_quant=("U8", [17], b'{"format":"other"')),
        changed("mxfp8", comfy_quant=("U8", [18], b'{"format":"nvfp4"}')),
        changed("mxfp8", comfy_quant=("U8", [18], b'{"format":"nvfp5"}')),
        changed("mxfp8", weight_scale_2=("F32", [], bytes(4))),
        changed("mxfp8", weight_scale=SCALES),
        changed("mxfp8", weight_scale=("F8_E8M0", [16, 1], bytes(16))),
    ],
)
def test_what_does_not_fit_its_marker_is_kept_as_published(
    tensors: Tensors, tmp_path: Path, store: LocalStore
) -> None:
    path = imported(tmp_path, store, tensors)
    with blobstore.open("m", store=store) as model:
        assert not model.quantized
    export_model("m", tmp_path / "same", store=store)
    assert (tmp_path / "same" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_a_header_can_have_the_markers(kind: str) -> None:
    tensors = changed(kind, comfy_quant=None)
    specs = {
        name: TensorSpec(name, DTYPES[code], tuple(shape))
        for name, (code, shape, _) in tensors.items()
    }
    layers = f'{{"layers": {{"m": {{"format": "{kind}"}}}}}}'
    found = detect_quantization(specs, {}, metadata=[("_quantization_metadata", layers)])
    assert found.quant_type == f"{kind}-tiled"
    other = layers.replace('"m"', '"other"')
    for text in (other, layers.replace("}}}", '}, "other": {"format": "nvfp4"}}}')):
        assert detect_quantization(specs, {}, metadata=[("_quantization_metadata", text)]).scheme
