"""Files of numpy arrays: the reference's bytes, and values where it writes others."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy as reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as nst

from blobstore.safetensors import SafetensorError, safe_open
from blobstore.safetensors.numpy import load, load_file, save, save_file
from blobstore.safetensors.torch import load as load_torch
from tests.support.dtypes import without_newer_types
from tests.support.samples import samples

BACKENDS = ["mmap", "pread"]
PLAIN = ["?", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8", "c8"]
EXTENSIONS = [
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e4m3fnuz,
    ml_dtypes.float8_e5m2,
    ml_dtypes.float8_e5m2fnuz,
    ml_dtypes.float8_e8m0fnu,
]
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(
    lambda name: name != "__metadata__"
)
SQUARE = np.arange(12, dtype=np.int32).reshape(3, 4)


def random_array(dtype: str, shape: list[int]) -> np.ndarray[Any, Any]:
    size = math.prod(shape) * np.dtype(dtype).itemsize
    return np.frombuffer(os.urandom(size), dtype).reshape(shape)


@pytest.mark.slow
@settings(max_examples=samples(500), deadline=None)
@given(
    st.dictionaries(
        NAMES,
        st.tuples(st.sampled_from(PLAIN), st.lists(st.integers(0, 9), max_size=4)),
        max_size=6,
    ),
    st.one_of(st.none(), st.dictionaries(NAMES, NAMES, min_size=1, max_size=1)),
)
def test_the_bytes_are_those_of_the_reference(
    kinds: dict[str, tuple[str, list[int]]], metadata: dict[str, str] | None
) -> None:
    arrays = {name: random_array(*kind) for name, kind in kinds.items()}
    data = save(arrays, metadata)

    assert data == reference.save(arrays, metadata)
    found = load(data)
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        assert found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes()


@pytest.mark.slow
@settings(max_examples=samples(500), deadline=None)
@given(st.data())
def test_any_layout_is_saved_by_value(data: st.DataObject) -> None:
    array = data.draw(nst.arrays(st.sampled_from(PLAIN), nst.array_shapes(max_dims=4)))
    axes = data.draw(st.permutations(range(array.ndim)))
    index = data.draw(nst.basic_indices(array.shape, allow_newaxis=True, allow_ellipsis=True))
    view = np.asarray(array.transpose(axes).transpose(np.argsort(axes))[index])

    assert save({"a": view}) == reference.save(
        {"a": np.ascontiguousarray(view).reshape(view.shape)}
    )


@pytest.mark.parametrize(
    "array",
    [
        SQUARE.T,
        SQUARE[::-1],
        SQUARE[:, ::-1],
        SQUARE[:, ::2],
        np.asfortranarray(SQUARE),
        np.broadcast_to(SQUARE[0], (5, 4)),
        np.broadcast_to(np.float32(3), (2, 3)),
        SQUARE.astype(ml_dtypes.bfloat16).T,
    ],
    ids=["transposed", "reversed", "mirrored", "strided", "fortran", "broadcast", "scalar", "bf16"],
)
def test_strides_are_no_part_of_the_value(tmp_path: Path, array: np.ndarray[Any, Any]) -> None:
    save_file({"a": array}, tmp_path / "a")

    found = load_file(tmp_path / "a")["a"]
    assert np.array_equal(found, array)
    assert (tmp_path / "a").read_bytes() == save({"a": array.copy(order="C")})


@pytest.mark.parametrize("dtype", [">f4", ">i8", ">c8"])
def test_big_endian_arrays_are_swapped(dtype: str) -> None:
    array = np.arange(4).astype(dtype)

    assert save({"a": array}) == reference.save({"a": array})
    assert np.array_equal(load(save({"a": array}))["a"], array)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", EXTENSIONS, ids=lambda dtype: dtype.__name__)
def test_types_that_numpy_lacks_are_those_of_ml_dtypes(
    tmp_path: Path, dtype: Any, backend: str
) -> None:
    array = np.arange(1, 9, dtype=np.uint8).astype(dtype).reshape(2, 4)
    save_file({"a": array}, tmp_path / "a")

    for loaded in load_file(tmp_path / "a", backend=backend), load(save({"a": array})):
        assert loaded["a"].dtype == array.dtype
        assert loaded["a"].tobytes() == array.tobytes()
    part = safe_open(tmp_path / "a", "np", backend=backend).get_slice("a")[:, ::-2]
    assert part.tobytes() == array[:, ::-2].tobytes()


@pytest.mark.parametrize("backend", BACKENDS)
def test_four_bit_floats_are_packed_as_torch_packs_them(tmp_path: Path, backend: str) -> None:
    array = np.array([[0.5, 1, 6, -2], [0, -0.0, 1.5, 3]], ml_dtypes.float4_e2m1fn)
    save_file({"a": array}, tmp_path / "a")

    with safe_open(tmp_path / "a", "np", backend=backend) as file:
        assert file.get_tensor_meta("a").dtype == "F4"
        assert file.get_slice("a").get_shape() == [2, 4]
        assert file.get_tensor("a").tobytes() == array.tobytes()
        assert file.get_slice("a")[1, 1:].tobytes() == array[1, 1:].tobytes()
    packed = load_torch((tmp_path / "a").read_bytes())["a"]
    assert packed.dtype is torch.float4_e2m1fn_x2
    assert packed.view(torch.uint8).tolist() == [[0x21, 0xC7], [0x80, 0x53]]


def test_an_odd_number_of_four_bit_floats_is_refused() -> None:
    with pytest.raises(SafetensorError, match="not whole bytes"):
        save({"a": np.zeros(3, ml_dtypes.float4_e2m1fn)})


@pytest.mark.parametrize("backend", BACKENDS)
def test_six_bit_floats_are_no_arrays(tmp_path: Path, backend: str) -> None:
    text = b'{"a":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]}}'
    (tmp_path / "a").write_bytes(len(text).to_bytes(8, "little") + text + b"abc")

    with safe_open(tmp_path / "a", "np", backend=backend) as file:
        with pytest.raises(SafetensorError, match="numpy has no packed F6_E2M3"):
            file.get_tensor("a")
        with pytest.raises(SafetensorError, match="numpy has no packed F6_E2M3"):
            _ = file.get_slice("a")[1:]


@pytest.mark.parametrize("backend", BACKENDS)
def test_unaligned_tensors_are_read(tmp_path: Path, backend: str) -> None:
    text = (
        b'{"b":{"shape":[1],"dtype":"U8","data_offsets":[0,1]},'
        b'"a":{"dtype":"F32","shape":[2],"data_offsets":[1,9]}}'
    )
    data = np.array([1.5, -2], np.float32)
    (tmp_path / "a").write_bytes(len(text).to_bytes(8, "little") + text + b"x" + data.tobytes())

    for framework in "np", "pt", "mlx":
        with safe_open(tmp_path / "a", framework, backend=backend) as file:
            assert file.get_tensor("a").tolist() == [1.5, -2]
            assert file.get_slice("a")[::-1].tolist() == [-2, 1.5]


def test_a_loaded_array_is_a_view_of_the_file(tmp_path: Path) -> None:
    save_file({"a": SQUARE, "b": SQUARE}, tmp_path / "a")
    found = load_file(tmp_path / "a")

    assert not found["a"].flags.owndata
    found["a"][:] = 0
    assert np.array_equal(found["b"], SQUARE)
    assert np.array_equal(load_file(tmp_path / "a")["a"], SQUARE)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_arrays_of_a_buffer_are_views_of_it(kind: Any) -> None:
    data = kind(save({"a": SQUARE}))
    array = load(data)["a"]

    assert np.shares_memory(array, np.frombuffer(data, np.uint8))
    assert array.flags.writeable == (kind is bytearray)


@pytest.mark.parametrize(
    "array",
    [
        np.array(["x"]),
        np.zeros(2, "c16"),
        np.zeros(2, np.longdouble),
        np.array([object()]),
        np.zeros(2, "M8[s]"),
        np.zeros(2, "i4,f4"),
    ],
    ids=lambda array: str(array.dtype),
)
def test_types_that_the_format_lacks_are_errors_of_the_reference(array: Any) -> None:
    with pytest.raises(Exception, match="Unknown dtype") as theirs:
        reference.save({"a": array})

    with pytest.raises(SafetensorError) as ours:
        save({"a": array})

    assert without_newer_types(str(ours.value)) == without_newer_types(str(theirs.value))


@pytest.mark.parametrize(
    "tensors", [[SQUARE], {"a": [1]}, {1: SQUARE}], ids=["list", "value", "key"]
)
def test_other_values_are_errors_of_the_reference(tensors: Any) -> None:
    with pytest.raises(Exception) as theirs:  # noqa: PT011 - whatever it is
        reference.save(tensors)

    with pytest.raises(type(theirs.value)) as ours:
        save(tensors)

    assert str(ours.value) == str(theirs.value)


def test_metadata_is_a_map_of_texts() -> None:
    with pytest.raises(TypeError, match="argument 'metadata'"):
        save({"a": SQUARE}, {"a": 1})  # type: ignore[dict-item]


def test_the_table_that_scripts_import_is_that_of_the_reference() -> None:
    import safetensors.numpy as reference

    from blobstore.safetensors import numpy as own

    assert own._TYPES == reference._TYPES
