from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from blobstore.core.mmap import MappedRegion
from blobstore.core.tensor import DType, TensorSpec
from blobstore.errors import UnsupportedDType
from blobstore.safetensors.torch import as_tensor
from tests.support.dtypes import NAMES

KINDS = {dtype: getattr(torch, name) for dtype, name in NAMES.items() if hasattr(torch, name)}
LACKED = [dtype for dtype in DType if dtype not in KINDS and dtype is not DType.F4]


@pytest.mark.parametrize("dtype", KINDS, ids=lambda dtype: dtype.value)
def test_gives_the_bits_at_any_offset(dtype: DType) -> None:
    bits = torch.arange(4 * dtype.bits // 8, dtype=torch.uint8) % 2
    for offset in (0, 1, 3, 8):
        memory = memoryview(bytearray(offset) + bytes(bits.tolist()) + b"rest")
        tensor = as_tensor(memory, offset, TensorSpec("a", dtype, (2, 2)))
        assert tensor.dtype is KINDS[dtype]
        assert tensor.shape == (2, 2)
        assert torch.equal(tensor.clone().view(torch.uint8).flatten(), bits)


def test_views_the_memory_both_ways() -> None:
    memory = bytearray(8)
    tensor = as_tensor(memoryview(memory), 4, TensorSpec("a", DType.U8, (2, 2)))
    memory[5] = 7
    assert tensor.tolist() == [[0, 7], [0, 0]]
    tensor[1, 1] = 9
    assert memory[7] == 9


def test_unaligned_floats_can_be_computed_with() -> None:
    values = np.arange(1000, dtype=np.float32)
    tensor = as_tensor(
        memoryview(bytearray(b"x" + values.tobytes())), 1, TensorSpec("a", DType.F32, (1000,))
    )
    assert (tensor * 2).sum().item() == 999_000


@pytest.mark.parametrize("dtype", KINDS, ids=lambda dtype: dtype.value)
def test_gives_empty_tensors_even_behind_the_last_byte(dtype: DType) -> None:
    for shape in ((0,), (0, 3), (3, 0, 2)):
        tensor = as_tensor(memoryview(bytearray(4)), 4, TensorSpec("a", dtype, shape))
        assert tensor.shape == shape
        assert tensor.dtype is KINDS[dtype]


def test_a_scalar_has_no_dimensions() -> None:
    tensor = as_tensor(memoryview(bytearray(b"\7")), 0, TensorSpec("a", DType.U8, ()))
    assert tensor.shape == ()
    assert tensor.item() == 7


def test_gives_four_bit_floats_in_pairs() -> None:
    memory = memoryview(bytearray(b"x\x12\x34\x56\x78"))
    tensor = as_tensor(memory, 1, TensorSpec("a", DType.F4, (2, 4)))
    assert tensor.dtype is torch.float4_e2m1fn_x2
    assert tensor.shape == (2, 2)
    assert tensor.view(torch.uint8).tolist() == [[0x12, 0x34], [0x56, 0x78]]


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [(DType.F4, (2, 3)), (DType.F4, ()), *((dtype, (4,)) for dtype in LACKED)],
)
def test_refuses_what_torch_has_no_type_for(dtype: DType, shape: tuple[int, ...]) -> None:
    with pytest.raises(
        UnsupportedDType, match=f"'a': torch has no type for {dtype.value} of shape"
    ):
        as_tensor(memoryview(bytearray(32)), 0, TensorSpec("a", dtype, shape))


@pytest.mark.parametrize("shape", [(0, 2**63, 2**63), (0, 2**40, 2**40)])
def test_refuses_shapes_that_torch_cannot_hold(shape: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedDType, match="tensor 'a': torch cannot hold its shape"):
        as_tensor(memoryview(bytearray(8)), 0, TensorSpec("a", DType.F32, shape))


def test_takes_more_dimensions_than_numpy() -> None:
    assert as_tensor(memoryview(bytearray(1)), 0, TensorSpec("a", DType.U8, (1,) * 70)).ndim == 70


def test_what_is_written_to_a_mapped_tensor_never_reaches_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\1\2\3\4")
    region = MappedRegion([4], writable=True)
    descriptor = os.open(path, os.O_RDONLY)
    region.map(0, descriptor, 4)
    os.close(descriptor)
    tensor = as_tensor(region.memory, 1, TensorSpec("a", DType.U8, (3,)))
    tensor += 5
    assert region.memory[:4] == b"\1\7\x08\x09"
    assert path.read_bytes() == b"\1\2\3\4"
