from __future__ import annotations

import gc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from blobstore.core.tensor import DType, TensorSpec
from blobstore.errors import UnsupportedDType
from blobstore.safetensors.numpy import as_array
from tests.support.dtypes import NAMES
from tests.support.safetensors_file import SafetensorsFile

KINDS = {
    dtype: np.dtype(getattr(ml_dtypes, name, name))
    for dtype, name in NAMES.items()
    if hasattr(ml_dtypes, name) or hasattr(np, name)
}
LACKED = [dtype for dtype in DType if dtype not in KINDS]


@pytest.mark.parametrize("dtype", KINDS, ids=lambda dtype: dtype.value)
def test_gives_the_values_at_any_offset(dtype: DType) -> None:
    expected = np.array([[1, 2], [4, 1]]).astype(KINDS[dtype])
    for offset in (0, 1, 3, 8):
        memory = memoryview(bytes(offset) + expected.tobytes() + b"rest")
        array = as_array(memory, offset, TensorSpec("a", dtype, (2, 2)))
        assert array.dtype == expected.dtype
        np.testing.assert_array_equal(array, expected)


def test_views_the_memory() -> None:
    memory = bytearray(8)
    array = as_array(memoryview(memory), 4, TensorSpec("a", DType.U8, (4,)))
    memory[5] = 7
    assert array.tolist() == [0, 7, 0, 0]


@pytest.mark.parametrize("dtype", KINDS, ids=lambda dtype: dtype.value)
def test_gives_the_types_that_numpy_itself_makes(dtype: DType) -> None:
    array = as_array(memoryview(bytes(16)), 0, TensorSpec("a", dtype, (2,)))
    assert repr(array.dtype) == repr(KINDS[dtype])  # equal types may have other byte orders


def test_buffers_of_arrays_have_elements() -> None:
    array = as_array(memoryview(bytes(8)), 0, TensorSpec("a", DType.F32, (2,)))
    assert array.data.tolist() == [0, 0]


@pytest.mark.parametrize("shape", [(), (4,), (2, 2)])
def test_is_writable_only_if_the_memory_is(shape: tuple[int, ...]) -> None:
    spec = TensorSpec("a", DType.U8, shape)
    assert not as_array(memoryview(bytes(4)), 0, spec).flags.writeable
    assert as_array(memoryview(bytearray(4)), 0, spec).flags.writeable


@pytest.mark.parametrize("dtype", KINDS, ids=lambda dtype: dtype.value)
def test_gives_empty_arrays_even_behind_the_last_byte(dtype: DType) -> None:
    for shape in ((0,), (0, 3), (3, 0, 2)):
        array = as_array(memoryview(b"1234"), 4, TensorSpec("a", dtype, shape))
        assert array.shape == shape
        assert array.dtype == np.dtype(KINDS[dtype])


def test_a_scalar_has_no_dimensions() -> None:
    array = as_array(memoryview(b"\7"), 0, TensorSpec("a", DType.U8, ()))
    assert array.shape == ()
    assert array == 7


@pytest.mark.parametrize("dtype", LACKED, ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("shape", [(4,), (0,)])
def test_refuses_types_that_numpy_lacks(dtype: DType, shape: tuple[int, ...]) -> None:
    packed = "packed " if dtype.bits < 8 else ""
    message = f"'a': numpy has no {packed}{dtype.value}; read its"
    with pytest.raises(UnsupportedDType, match=message):
        as_array(memoryview(bytes(32)), 0, TensorSpec("a", dtype, shape))


@pytest.mark.parametrize("shape", [(1,) * 65, (0, 2**63, 2**63), (0, 2**40, 2**40)])
def test_refuses_shapes_that_numpy_cannot_hold(shape: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedDType, match="tensor 'a': numpy cannot hold its shape"):
        as_array(memoryview(bytes(4)), 0, TensorSpec("a", DType.F32, shape))


def test_shares_the_read_only_map_of_a_file_and_keeps_it(tmp_path: Path) -> None:
    text = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'  # data at an odd byte
    value = np.array([1.5], np.float32)
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + value.tobytes())
    with SafetensorsFile.open(path) as file:
        view = file.view("a")
        array = as_array(view.data, 0, view.spec)
        assert np.shares_memory(array, np.frombuffer(view.data, np.uint8))
        assert not array.flags.aligned
        assert not array.flags.writeable
    del file, view
    gc.collect()
    path.unlink()
    np.testing.assert_array_equal(array, value)
