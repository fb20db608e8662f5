from __future__ import annotations

from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from blobstore.core.tensor import DType, TensorSpec
from blobstore.errors import UnsupportedDType
from tests.support.dtypes import NAMES
from tests.support.models import write_safetensors
from tests.support.safetensors_file import SafetensorsFile

mx = pytest.importorskip("mlx.core", reason="MLX does not run on this machine")
as_mlx = import_module("blobstore.safetensors.mlx").as_mlx

BYTE_FLOATS = [dtype for dtype, name in NAMES.items() if name.startswith("float8")]
KINDS = {
    dtype: mx.uint8 if dtype in BYTE_FLOATS else getattr(mx, name)
    for dtype, name in ({**NAMES, DType.BOOL: "bool_"}).items()
    if dtype in BYTE_FLOATS or hasattr(mx, name)
}
LACKED = [dtype for dtype in DType if dtype not in KINDS]


def bits_of(array: object) -> bytes:
    with mx.stream(mx.cpu):
        return bytes(memoryview(np.array(mx.array(array).view(mx.uint8))))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", KINDS, ids=lambda dtype: dtype.value)
def test_gives_the_bits_at_any_offset(dtype: DType) -> None:
    bits = bytes(index % 2 for index in range(4 * dtype.bits // 8))
    for offset in (0, 1, 3):
        array = as_mlx(memoryview(bytes(offset) + bits), offset, TensorSpec("a", dtype, (2, 2)))
        assert array.dtype == KINDS[dtype]
        assert array.shape == (2, 2)
        assert bits_of(array) == bits


@pytest.mark.parametrize("dtype", KINDS, ids=lambda dtype: dtype.value)
def test_gives_empty_arrays(dtype: DType) -> None:
    array = as_mlx(memoryview(b""), 0, TensorSpec("a", dtype, (0, 3)))
    assert array.shape == (0, 3)
    assert array.dtype == KINDS[dtype]


def test_keeps_the_precision_of_doubles() -> None:
    value = np.float64(1) + np.finfo(np.float64).eps
    array = as_mlx(memoryview(value.tobytes()), 0, TensorSpec("a", DType.F64, ()))
    assert bits_of(array[None]) == value.tobytes()


def test_copies() -> None:
    memory = bytearray(4)
    array = as_mlx(memoryview(memory), 0, TensorSpec("a", DType.U8, (4,)))
    memory[0] = 1
    assert array.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("dtype", LACKED, ids=lambda dtype: dtype.value)
def test_refuses_types_that_mlx_lacks(dtype: DType) -> None:
    packed = "packed " if dtype.bits < 8 else ""
    message = f"'a': MLX has no {packed}{dtype.value}; read its bytes"
    with pytest.raises(UnsupportedDType, match=message):
        as_mlx(memoryview(bytes(32)), 0, TensorSpec("a", dtype, (4,)))


@pytest.mark.parametrize("shape", [(0, 2**31), (0, 2**63, 2**63), (1,) * 65])
def test_refuses_shapes_that_mlx_cannot_hold(shape: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedDType, match="MLX cannot hold its shape"):
        as_mlx(memoryview(bytes(4)), 0, TensorSpec("a", DType.F32, shape))


def test_gives_what_mlx_itself_loads(tmp_path: Path) -> None:
    known_to_mlx = {DType.F8_E4M3, DType.F8_E8M0} | KINDS.keys() - {*BYTE_FLOATS, DType.F64}
    specs = [
        TensorSpec(f"{dtype.value} {shape}", dtype, shape)
        for dtype in known_to_mlx
        for shape in ((), (3,), (2, 3), (0, 3))
    ]
    sizes = {spec.name: spec.nbytes for spec in specs}
    path = tmp_path / "a.safetensors"
    write_safetensors(path, specs, lambda name: [bytes(i % 2 for i in range(sizes[name]))])
    theirs = mx.load(str(path))
    with SafetensorsFile.open(path) as file:
        assert set(theirs) == set(file)
        for name in file:
            view = file.view(name)
            ours = as_mlx(view.data, 0, view.spec)
            assert (ours.dtype, ours.shape) == (theirs[name].dtype, theirs[name].shape)
            assert bits_of(ours.flatten()) == bits_of(theirs[name].flatten())


def test_reads_the_files_that_mlx_writes(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    arrays = {
        "odd": mx.array([1, 2, 3], mx.uint8),
        "x": mx.array([1.5, -2], mx.bfloat16),
        "transposed": mx.arange(6, dtype=mx.float32).reshape(2, 3).T,
        "none": mx.zeros((0, 3)),
    }
    mx.save_safetensors(str(path), arrays)
    with SafetensorsFile.open(path) as file:
        assert file.header.metadata == {}
        assert set(file) == set(arrays)
        for name, array in arrays.items():
            view = file.view(name)
            ours = as_mlx(view.data, 0, view.spec)
            assert ours.dtype == array.dtype
            assert ours.tolist() == array.tolist()
