from __future__ import annotations

import gc
import shutil
import weakref
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import blobstore
from blobstore.errors import (
    BlobDamaged,
    BlobMissing,
    BlobstoreError,
    TensorNotFound,
    UnsupportedDType,
    UsageError,
)
from blobstore.operations.open import Model
from blobstore.planning.plan import QuantizeOptions
from blobstore.store.local import LocalStore
from tests.support.damage import blob_path, truncate
from tests.support.models import add_blobs, blob, moe_tensors, quantizable_tensors, write_folder
from tests.support.pack_quantized import packed_weight, write_packed

TENSORS: dict[str, Any] = {
    "w": np.random.default_rng(1).standard_normal((8, 6, 4), dtype=np.float32),
    "b": np.arange(7, dtype=np.int64),
    "scalar": np.array(3, dtype=np.int32),
    **{name: array for name, array in moe_tensors(2).items() if array.dtype == np.float32},
}
HALF = np.random.default_rng(2).standard_normal((4, 6)).astype(ml_dtypes.bfloat16)
INDEXES: list[Any] = [
    slice(2, 5),
    slice(None),
    3,
    -1,
    ...,
    (slice(None), slice(1, 3)),
    (..., slice(-2, None)),
    (slice(4, 100), 2, slice(0, 2)),
    (1, ..., 2),
    slice(3, 3),
]
UP = "model.layers.0.self_attn.q_proj.weight"
PACKED = quantizable_tensors()
WAYS = [{}, {"read": "pread", "verify": "none"}, {"read": "pread"}, {"verify": "none"}]


@pytest.fixture
def store(store: LocalStore, tmp_path: Path) -> LocalStore:
    blobstore.create(write_folder(tmp_path / "model", TENSORS), "m", store=store)
    return store


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> LocalStore:
    place = tmp_path_factory.mktemp("quantized")
    store = LocalStore(place / "store")
    folder = write_folder(place / "model", PACKED)
    for name in ("int4", "int8", "nvfp4"):
        blobstore.create(
            folder, f"m:{name}", store=store, quantize=QuantizeOptions(name), experts="stacked"
        )
    return store


def as_numpy(array: Any) -> Any:
    if isinstance(array, np.ndarray):
        return array.astype(np.float64)
    if isinstance(array, torch.Tensor):
        return array.double().numpy()
    import mlx.core as mx

    return np.array(array.astype(mx.float32)).astype(np.float64)


# Slices


@pytest.mark.parametrize("options", WAYS)
def test_a_slice_equals_the_slice_of_the_whole_tensor(
    store: LocalStore, framework: Any, options: dict[str, Any]
) -> None:
    with blobstore.open("m", store=store, framework=framework, **options) as model:
        part = model.get_slice("w")
        for index in INDEXES:
            expected = TENSORS["w"][index]
            assert tuple(part[index].shape) == expected.shape
            np.testing.assert_array_equal(as_numpy(part[index]), expected)
        for name, tensor in TENSORS.items():
            found = model.get_slice(name)[...]
            assert type(found) is type(model[name])
            assert found.dtype == model[name].dtype
            np.testing.assert_array_equal(as_numpy(found), tensor)


@pytest.mark.parametrize("options", WAYS)
def test_slices_of_bfloat16_are_right_in_every_framework(
    tmp_path: Path, framework: Any, options: dict[str, Any]
) -> None:
    store = LocalStore(tmp_path)
    add_blobs(store, "m", {"h": blob(("h", "BF16", (4, 6), HALF.tobytes()))})
    with blobstore.open("m", store=store, framework=framework, **options) as model:
        part = model.get_slice("h")
        for index in (slice(1, 3), (slice(None), slice(2, 5)), (2, 3)):
            np.testing.assert_array_equal(as_numpy(part[index]), HALF[index].astype(np.float64))  # type: ignore[index]


def test_a_slice_describes_its_tensor(store: LocalStore) -> None:
    with blobstore.open("m", store=store) as model:
        part = model.get_slice("w")
        assert (part.get_shape(), part.get_dtype()) == ([8, 6, 4], "F32")
        assert part.spec == model.specs["w"]
        assert repr(part) == "<TensorSlice of 'w': F32 [8, 6, 4]>"
        with pytest.raises(TypeError, match="not iterable"):
            iter(part)  # type: ignore[call-overload]


def test_safetensors_returns_the_same_slices(store: LocalStore, tmp_path: Path) -> None:
    from safetensors import safe_open

    with (
        safe_open(tmp_path / "model" / "model.safetensors", "numpy") as file,
        blobstore.open("m", store=store) as model,
    ):
        theirs, ours = file.get_slice("w"), model.get_slice("w")
        assert (theirs.get_shape(), theirs.get_dtype()) == (ours.get_shape(), ours.get_dtype())
        for index in (slice(2, 5), 3, (slice(None), slice(1, 3)), (slice(1, 2), 2, slice(0, 2))):
            np.testing.assert_array_equal(theirs[index], ours[index], strict=True)


@pytest.mark.parametrize("index", [slice(2, 5), (slice(None), slice(1, 3)), 3])
def test_slices_of_mapped_blobs_are_views(store: LocalStore, index: Any) -> None:
    with blobstore.open("m", store=store) as model:
        assert np.shares_memory(model.get_slice("w")[index], model["w"])
    with blobstore.open("m", store=store, framework="torch") as model:
        model.get_slice("w")[index][:] = 9
        assert (model["w"][index] == 9).all()
        assert (model["w"] != 9).any()
    assert (blobstore.open("m", store=store)["w"] != 9).all()


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_slices_that_are_read_share_no_memory(store: LocalStore, framework: Any) -> None:
    with blobstore.open(
        "m", store=store, framework=framework, read="pread", verify="none"
    ) as model:
        first, again = model.get_slice("w")[1:3], model.get_slice("w")[1:3]
        if framework == "numpy":
            assert not first.flags.writeable
            assert not np.shares_memory(first, again)
        else:
            first.zero_()
            np.testing.assert_array_equal(again, TENSORS["w"][1:3])


def test_reading_a_slice_does_not_load_the_blob(store: LocalStore) -> None:
    with blobstore.open("m", store=store, read="pread", verify="none") as model:
        np.testing.assert_array_equal(model.get_slice("w")[2:4], TENSORS["w"][2:4])
        whole = model["b"]
        blob_path(store, "w").unlink()
        with pytest.raises(BlobMissing, match="^m:latest: layer 'w': blob '.*' is missing"):
            model.get_slice("w")[2:4]
        with pytest.raises(BlobMissing, match="^m:latest: layer 'w'"):
            model["w"]
        blob_path(store, "b").unlink()
        np.testing.assert_array_equal(model.get_slice("b")[1:3], whole[1:3])


def test_a_truncated_blob_is_reported_with_its_layer(store: LocalStore) -> None:
    with blobstore.open("m", store=store, read="pread", verify="none") as model:
        truncate(blob_path(store, "w"))
        with pytest.raises(BlobDamaged, match="^m:latest: layer 'w': .*expected"):
            model.get_slice("w")[0]


@pytest.mark.parametrize("options", WAYS)
def test_a_closed_model_returns_no_slices(store: LocalStore, options: dict[str, Any]) -> None:
    model = blobstore.open("m", store=store, **options)
    part = model.get_slice("w")
    kept = part[1:3]
    model.close()
    np.testing.assert_array_equal(kept, TENSORS["w"][1:3])
    with pytest.raises(BlobstoreError, match="model m:latest is closed"):
        part[1:3]


def test_a_model_is_freed_without_the_garbage_collector(store: LocalStore) -> None:
    model = blobstore.open("m", store=store)
    list(model.iter_tensors(parts={"w": slice(1, 2)}))
    part = model.get_slice("w")[1]
    alive = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert alive() is None
    finally:
        gc.enable()
    np.testing.assert_array_equal(part, TENSORS["w"][1])


def test_reports_missing_tensors_and_elements(store: LocalStore) -> None:
    with blobstore.open("m", store=store) as model:
        with pytest.raises(TensorNotFound, match="m:latest has no tensor 'none'"):
            model.get_slice("none")
        with pytest.raises(UsageError, match="tensor 'b' has 7 elements in a dimension"):
            model.get_slice("b")[7]
        with pytest.raises(UsageError, match="slices of step 1"):
            model.get_slice("b")[::2]


def test_four_bit_elements_are_sliced_at_bytes(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    add_blobs(store, "m", {"p": blob(("p", "F4", (2, 4), b"\x12\x34\x56\x78"))})
    with blobstore.open("m", store=store, framework="torch") as model:
        part = model.get_slice("p")
        assert part[1].view(torch.uint8).tolist() == [0x56, 0x78]
        assert part[:, 2:].view(torch.uint8).tolist() == [[0x34], [0x78]]
        with pytest.raises(UsageError, match="'p' cannot be sliced there"):
            part[:, 1:]
    with blobstore.open("m", store=store) as model, pytest.raises(UnsupportedDType):
        model.get_slice("p")[1]


def test_slices_are_put_on_the_device(store: LocalStore) -> None:
    with blobstore.open("m", store=store, framework="torch", device="meta") as model:
        for index in (slice(1, 3), (slice(None), slice(1, 3))):
            found = model.get_slice("w")[index]
            assert (found.device.type, found.shape) == ("meta", TENSORS["w"][index].shape)


# Quantized weights


def rebuilt(model: Model, parts: dict[str, Any], tag: str) -> Any:
    """Return a part of a packed weight, dequantized by the reference arithmetic."""
    from blobstore.quantization import quantize_numpy as reference
    from blobstore.quantization.formats import FORMATS

    item, (_, group_size) = FORMATS[tag], model.quantized[UP]
    ends = (UP, f"{UP}_scale", f"{UP}_qbias")
    weight, scale, bias = (parts.get(end) for end in ends)
    assert weight is not None
    assert scale is not None
    return reference.dequantize(weight, scale, bias, item, group_size, "bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("tag", ["int4", "int8", "nvfp4"])
@pytest.mark.parametrize("options", WAYS)
def test_a_weight_and_its_qparams_are_sliced_alike(
    quantized: LocalStore, tag: str, options: dict[str, Any]
) -> None:
    with blobstore.open(f"m:{tag}", store=quantized, **options) as model:
        whole = model.dequantized(UP)
        for index in (
            slice(8, 24),
            (slice(None), slice(64, 128)),
            (slice(3, 4), slice(0, 64)),
            ...,
        ):
            parts = model.quantized_slice(UP, index)  # type: ignore[arg-type]
            assert UP in parts
            assert parts[f"{UP}_scale"].shape[0] == parts[UP].shape[0]
            assert (f"{UP}_qbias" in parts) is (tag != "nvfp4")
            np.testing.assert_array_equal(rebuilt(model, parts, tag), whole[index], strict=True)


def test_a_group_is_not_split(quantized: LocalStore) -> None:
    with blobstore.open("m:int8", store=quantized) as model:
        columns = model.quantized[UP][1]
        for index in (
            (..., slice(0, columns // 2)),
            (..., slice(columns // 2, None)),
            (..., slice(columns, columns + 1)),
            (0, 0),
        ):
            with pytest.raises(
                UsageError, match=f"'{UP}' of m:int8 is quantized in groups of 64; col"
            ):
                model.quantized_slice(UP, index)  # type: ignore[arg-type]
        with pytest.raises(TensorNotFound, match="m:int8 has no quantized weight 'none'"):
            model.quantized_slice("none", 0)
        with pytest.raises(TensorNotFound, match="has no quantized weight"):
            model.quantized_slice("model.embed_tokens.weight", 0)


@pytest.mark.slow
@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize("tag", ["int4", "nvfp4"])
def test_any_slice_can_be_dequantized(
    quantized: LocalStore, tag: str, framework: Any, options: dict[str, Any]
) -> None:
    with blobstore.open(
        f"m:{tag}", store=quantized, framework=framework, dequantize=True, **options
    ) as model:
        part = model.get_slice(UP)
        whole = as_numpy(model.dequantized(UP))
        assert (part.get_shape(), part.get_dtype()) == ([*whole.shape], "BF16")
        for index in (
            slice(8, 24),
            (slice(1, 7), slice(5, 77)),
            (..., slice(63, 65)),
            (3, slice(16, 32)),
            (2, 99),
            (..., -1),
        ):
            found = as_numpy(part[index])  # type: ignore[index]
            np.testing.assert_array_equal(found, whole[index], strict=True)  # type: ignore[index]


def test_slices_of_stacked_experts_can_be_dequantized(quantized: LocalStore) -> None:
    with blobstore.open("m:int4", store=quantized, dequantize=True) as model:
        (name,) = (name for name in model if name.endswith("experts.up_proj.weight"))
        whole = model[name]
        part = model.get_slice(name)
        np.testing.assert_array_equal(part[1, :, 3:40], whole[1, :, 3:40], strict=True)
        np.testing.assert_array_equal(part[:, 2:4], whole[:, 2:4], strict=True)


def test_every_slice_has_the_global_scale(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    tensors = [
        ("w", "U32", (2, 4), bytes([0x21] * 32)),
        ("w.scale", "U8", (2, 2), bytes([56] * 4)),
        ("w.global_scale", "F32", (), np.float32(3).tobytes()),
    ]
    add_blobs(store, "m", {"w": blob(*tensors, quant_type="nvfp4")})  # type: ignore[arg-type]
    for options in WAYS:
        with blobstore.open("m", store=store, dequantize=True, **options) as model:  # type: ignore[call-overload]
            assert model.get_slice("w")[1, 15:18].tolist() == [3.0, 1.5, 3.0]
        with blobstore.open("m", store=store, **options) as model:  # type: ignore[call-overload]
            parts = model.quantized_slice("w", (0, slice(16, 32)))
            assert parts["w"].shape == (2,)
            assert parts["w_scale"].shape == (1,)
            assert parts["w.global_scale"].tolist() == 3


def test_a_weight_of_unknown_type_is_sliced_as_stored(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    tensors = [("w", "U32", (2, 4), bytes(32)), ("w.scale", "BF16", (2, 1), bytes(4))]
    add_blobs(store, "m", {"w": blob(*tensors)})  # type: ignore[arg-type]
    with blobstore.open("m", store=store) as model:
        assert model.quantized == {"w": ("", 0)}
        assert model.get_slice("w")[1, 2:].shape == (2,)
        with pytest.raises(UnsupportedDType, match="does not say how"):
            model.quantized_slice("w", 0)


def test_types_and_group_sizes_need_no_header(quantized: LocalStore, tmp_path: Path) -> None:
    root = shutil.copytree(quantized.root, tmp_path / "store")
    for path in (root / "blobs").iterdir():
        path.unlink()
    for tag, group_size in (("int4", 32), ("int8", 64), ("nvfp4", 16)):
        with blobstore.open(f"m:{tag}", store=root, verify="none") as model:
            assert model.quantized[UP] == (tag, group_size)
            packed = {name for name in model if f"{name}_scale" in model}
            assert set(model.quantized) == packed


# Plans


@pytest.mark.parametrize("options", WAYS)
def test_a_plan_selects_slices(store: LocalStore, framework: Any, options: dict[str, Any]) -> None:
    with blobstore.open("m", store=store, framework=framework, **options) as model:
        found = dict(model.iter_tensors(parts={"w": (..., slice(0, 2)), "b": slice(3, 7)}))
        assert set(found) == set(TENSORS)
        for name, tensor in found.items():
            expected = {"w": TENSORS["w"][..., :2], "b": TENSORS["b"][3:]}.get(name, TENSORS[name])
            np.testing.assert_array_equal(as_numpy(tensor), expected)


def test_a_plan_can_be_a_function(store: LocalStore) -> None:
    with blobstore.open("m", store=store) as model:
        asked: list[str] = []

        def plan(name: str) -> Any:
            asked.append(name)
            return slice(0, 1) if name.endswith("down_proj.weight") else None

        found = dict(model.iter_tensors("model.", order="name", parts=plan))
        assert asked == list(found) == sorted(name for name in TENSORS if name.startswith("model."))
        for name, tensor in found.items():
            rows = 1 if name.endswith("down_proj.weight") else None
            np.testing.assert_array_equal(tensor, TENSORS[name][:rows], strict=True)


@pytest.mark.parametrize("options", WAYS)
def test_qparams_are_sliced_with_their_weight(
    quantized: LocalStore, options: dict[str, Any]
) -> None:
    with blobstore.open("m:int4", store=quantized, **options) as model:
        index = (slice(4, 12), slice(32, 96))
        expected = model.quantized_slice(UP, index)
        asked: list[str] = []

        def plan(name: str) -> Any:
            asked.append(name)
            return index if name == UP else None

        for parts in ({UP: index}, plan):
            found = dict(model.iter_tensors(parts=parts))
            assert set(found) == set(model)
            for name, tensor in found.items():
                np.testing.assert_array_equal(tensor, expected.get(name, model[name]), strict=True)
        assert UP in asked
        assert not [name for name in asked if name.endswith(("_scale", "_qbias"))]


def test_a_plan_slices_dequantized_weights_anywhere(quantized: LocalStore) -> None:
    with blobstore.open("m:int4", store=quantized, dequantize=True) as model:
        found = dict(model.iter_tensors(parts={UP: (..., slice(5, 9))}))
        assert set(found) == set(model)
        np.testing.assert_array_equal(found[UP], model[UP][..., 5:9], strict=True)


def test_every_element_belongs_to_one_rank(store: LocalStore) -> None:
    whole = blobstore.open("m", store=store)["w"]
    shares = []
    for rank in range(4):
        with blobstore.open("m", store=store, read="pread", verify="none") as model:
            parts = {"w": slice(rank * 2, rank * 2 + 2)}
            shares.append(dict(model.iter_tensors("w", parts=parts))["w"])
    np.testing.assert_array_equal(np.concatenate(shares), whole)


def test_rejects_impossible_plans(quantized: LocalStore) -> None:
    with blobstore.open("m:int4", store=quantized) as model:
        with pytest.raises(TensorNotFound, match="m:int4 has no tensor 'none' to slice"):
            next(model.iter_tensors(parts={"none": 0}))
        with pytest.raises(
            UsageError, match=f"'{UP}_scale' of m:int4 is sliced with '{UP}': slice"
        ):
            next(model.iter_tensors(parts={f"{UP}_scale": 0}))
        with pytest.raises(UsageError, match="would split one"):
            list(model.iter_tensors(parts={UP: (..., slice(0, 5))}))
    with (
        blobstore.open("m:int4", store=quantized, dequantize=True) as model,
        pytest.raises(TensorNotFound, match=f"m:int4 has no tensor '{UP}_scale'"),
    ):
        next(model.iter_tensors(parts={f"{UP}_scale": 0}))


@pytest.mark.parametrize("options", WAYS)
def test_symmetric_integers_are_sliced_by_rows_columns_and_elements(
    framework: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    store, name = LocalStore(tmp_path / "store"), "model.layers.0.mlp.experts.1.up_proj.weight"
    experts = [packed_weight(f"model.layers.0.mlp.experts.{n}.up_proj") for n in range(2)]
    tensors = {name: own for expert in experts for name, own in expert.tensors.items()}
    blobstore.create(write_packed(tmp_path / "m", tensors), "m", store=store)
    expected = experts[1].values.astype(np.float64)
    with blobstore.open("m", store=store, framework=framework, dequantize=True, **options) as model:
        np.testing.assert_array_equal(as_numpy(model[name]), expected)
        for index in (slice(2, 5), (..., slice(32, 64)), (3, slice(5, 40)), (slice(1, 3), 63)):
            found = model.get_slice(name)[index]  # type: ignore[index]
            np.testing.assert_array_equal(as_numpy(found), expected[index])
    with blobstore.open("m", store=store, **options) as model:
        assert model.quantized[name] == ("int4-sym", 32)
        parts = model.quantized_slice(name, (slice(2, 4), slice(32, 64)))
        assert {part: array.shape for part, array in parts.items()} == {
            name: (2, 4),
            f"{name}_scale": (2, 1),
        }
        with pytest.raises(UsageError, match="in groups of 32; columns 0 to 8 would split one"):
            model.quantized_slice(name, (..., slice(0, 8)))
