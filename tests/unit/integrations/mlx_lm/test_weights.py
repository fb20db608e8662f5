"""Tensors of a model as the arrays that mlx-lm takes."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import blobstore
from blobstore.errors import BlobMissing, UnsupportedDType
from blobstore.manifests.reference import Reference
from blobstore.planning.grouping import ExpertForm
from blobstore.planning.plan import QuantizeOptions
from blobstore.store.local import LocalStore
from tests.support.models import add_blobs, blob, quantizable_tensors, write_folder
from tests.support.pack_quantized import packed_weight, write_packed

mx = pytest.importorskip("mlx.core", reason="MLX does not run on this machine")
mlx_weights = import_module("blobstore.integrations.mlx_lm.weights")

EXPERTS = "model.layers.0.mlp.experts"
SWITCH = "model.layers.0.mlp.switch_mlp"
ENDS = {"weight": "", "scales": "_scale", "biases": "_qbias"}


def weights_of(store: LocalStore, **opening: Any) -> dict[str, Any]:
    with blobstore.open("m", store=store, **opening) as model:
        specs = model.specs
        naming = mlx_weights.naming_of(model, specs)
        weights = mlx_weights.Weights(model, specs, naming, ())
        stand_ins, arrays = weights.stand_ins(), dict(weights.arrays())
    assert {name: (array.shape, array.dtype) for name, array in stand_ins.items()} == {
        name: (array.shape, array.dtype) for name, array in arrays.items()
    }
    return arrays


def create(store: LocalStore, tmp_path: Path, experts: ExpertForm, dtype: Any, item: str) -> None:
    tensors = {name: array.astype(dtype) for name, array in quantizable_tensors().items()}
    source = write_folder(tmp_path / "source", tensors)
    blobstore.create(
        source, "m", store=store, quantize=QuantizeOptions(item, policy="uniform"), experts=experts
    )


@pytest.mark.slow
@pytest.mark.parametrize("experts", ["packed", "stacked"])
@pytest.mark.parametrize(
    ("dtype", "item"), [("bfloat16", "int4"), (np.float16, "int8"), (np.float32, "mxfp8")]
)
def test_experts_are_one_array_in_the_order_of_their_numbers(
    experts: ExpertForm, dtype: Any, item: str, store: LocalStore, tmp_path: Path
) -> None:
    create(store, tmp_path, "packed", dtype, item)
    kinds = ["weight", "scales", "biases"][: 2 if item == "mxfp8" else 3]
    with blobstore.open("m", store=store, framework="mlx") as model:
        expected = {
            f"{SWITCH}.{projection}.{kind}": mx.stack(
                [
                    model[f"{EXPERTS}.{number}.{projection}.weight{ENDS[kind]}"]
                    for number in range(12)
                ]
            )
            for projection in ("up_proj", "down_proj")
            for kind in kinds
        }
    create(store, tmp_path / "again", experts, dtype, item)

    found = weights_of(store)

    joined = {name: array for name, array in found.items() if SWITCH in name}
    assert joined.keys() == expected.keys()
    for name, array in joined.items():
        assert array.dtype == expected[name].dtype
        assert mx.array_equal(array, expected[name])
        assert len({str(part.tolist()) for part in array}) == 12
    assert not any(EXPERTS in name for name in found)


def expert(number: int, shape: tuple[int, ...] = (2, 4)) -> list[tuple[str, str, Any, bytes]]:
    name = f"{EXPERTS}.{number}.up_proj.weight"
    words = np.full(shape, number, "<u4")
    scales = np.full((*shape[:-1], 1), number, "<f4")
    return [
        (name, "U32", shape, words.tobytes()),
        (f"{name}.scale", "F32", scales.shape, scales.tobytes()),
        (f"{name}.bias", "F32", scales.shape, scales.tobytes()),
    ]


def test_unaligned_experts_of_separate_blobs_are_joined(store: LocalStore) -> None:
    blobs = {
        f"b{number}": blob(
            (f"odd{number}", "U8", (1,), b"x"), *expert(number), quant_type="int4", group_size="32"
        )
        for number in range(3)
    }
    add_blobs(store, "m", blobs)
    found = weights_of(store)
    for kind, columns in (("weight", 4), ("scales", 1), ("biases", 1)):
        array = found[f"{SWITCH}.up_proj.{kind}"]
        assert array.tolist() == [[[number] * columns] * 2 for number in range(3)]


def test_arrays_outlive_the_store(store: LocalStore) -> None:
    items = [part for number in range(2) for part in expert(number)]
    add_blobs(store, "m", {"b": blob(*items, quant_type="int4", group_size="32")})
    found = weights_of(store, read="pread")
    assert found[f"{SWITCH}.up_proj.weight"].tolist() == [[[0] * 4] * 2, [[1] * 4] * 2]


def test_rejects_what_mlx_cannot_hold(store: LocalStore) -> None:
    items = [part for number in range(2) for part in expert(number, (0, 2**34, 4))]
    add_blobs(store, "m", {"b": blob(*items)})
    with pytest.raises(UnsupportedDType, match="up_proj.weight': MLX cannot hold its shape"):
        weights_of(store)


def test_reports_a_missing_blob_that_was_not_mapped_yet(store: LocalStore, tmp_path: Path) -> None:
    create(store, tmp_path, "packed", "bfloat16", "int4")
    layer = next(
        layer for layer in store.resolve(Reference.parse("m")).layers if layer.name == EXPERTS
    )
    with blobstore.open("m", store=store, verify="none") as model:
        naming = mlx_weights.naming_of(model, model.specs)
        weights = mlx_weights.Weights(model, model.specs, naming, ())
        Path(store.blob_path(layer.digest)).unlink()
        with pytest.raises(BlobMissing, match="experts"):
            dict(weights.arrays())


def test_8_bit_floats_are_given_decoded(store: LocalStore, tmp_path: Path) -> None:
    name, random = f"{EXPERTS}.0.up_proj.weight", np.random.default_rng(0)
    tensors: Any = {
        name: random.normal(size=(16, 8)).astype(ml_dtypes.float8_e4m3fn),
        f"{name}_scale_inv": np.full((1, 1), 0.3, np.float32),
        "norm.weight": np.ones(8, ml_dtypes.bfloat16),
    }
    source = write_folder(tmp_path / "source", tensors)
    blobstore.create(source, "m", store=store)
    blobstore.create(source, "decoded", store=store, decode=True)
    found = weights_of(store, dequantize=mlx_weights.DECODED)
    with blobstore.open("decoded", store=store, framework="mlx") as model:
        assert found.keys() == set(model)
        assert all(mx.array_equal(array, model[key]) for key, array in found.items())


def test_symmetric_integers_are_given_decoded(store: LocalStore, tmp_path: Path) -> None:
    packed = packed_weight(f"{EXPERTS}.0.up_proj")
    blobstore.create(write_packed(tmp_path / "source", packed.tensors), "m", store=store)
    found = weights_of(store, dequantize=mlx_weights.DECODED)
    array = np.array(found[f"{EXPERTS}.0.up_proj.weight"].astype(mx.float32))
    np.testing.assert_array_equal(array, packed.values.astype(np.float32))
