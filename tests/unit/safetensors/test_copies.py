from __future__ import annotations

import pytest
import torch

from blobstore.core.tensor import DType, TensorSpec
from blobstore.safetensors import copies
from blobstore.safetensors.copies import (
    copy_each,
    copy_of_bytes,
    free_memory,
    has_cuda,
    source_of_copies,
)

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]
SPECS = [
    TensorSpec("a", DType.F32, (2, 3)),
    TensorSpec("b", DType.F4, (2, 4)),
    TensorSpec("empty", DType.BF16, (0, 3)),
    TensorSpec("c", DType.U8, (100,)),
]


@pytest.mark.parametrize("device", DEVICES)
def test_each_tensor_gets_all_of_its_bytes_from_a_smaller_source(device: str) -> None:
    source = torch.arange(1, 31, dtype=torch.uint8)
    found = copy_each(SPECS, source, device)

    assert [tensor.nbytes for tensor in found] == [spec.nbytes for spec in SPECS]
    assert {tensor.device.type for tensor in found} == {device}
    copied = [tensor.cpu().reshape(-1).view(torch.uint8) for tensor in found]
    assert torch.cat(copied).tolist() == [number % 30 + 1 for number in range(24 + 4 + 100)]


def test_the_source_was_written_to_and_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "_SOURCE", 100)
    for size, expected in ((5, 5), (10**15, 100)):
        source = source_of_copies(size, is_pinned=False)
        assert source is not None
        assert source.tolist() == [1] * expected


def test_refused_pinned_memory_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        copies, "host_buffer", lambda size, *, is_pinned: torch.empty(size, dtype=torch.uint8)
    )
    assert source_of_copies(5, is_pinned=True) is None


@needs_cuda
def test_a_pinned_source_is_pinned() -> None:
    source = source_of_copies(5, is_pinned=True)
    assert source is not None
    assert source.is_pinned()


@needs_cuda
def test_the_free_memory_of_a_device_is_known() -> None:
    assert has_cuda()
    total = torch.cuda.get_device_properties(0).total_memory
    assert 0 < (free_memory("cuda:0") or 0) <= total


def test_the_free_memory_of_the_processor_is_asked_for_elsewhere() -> None:
    assert free_memory("cpu") is None


def test_bytes_are_copied() -> None:
    tensor = torch.tensor([[1.0, 2.0]], dtype=torch.float16)
    copied = copy_of_bytes(tensor)
    assert copied.tolist() == tensor.view(torch.uint8).flatten().tolist()
    assert copied.data_ptr() != tensor.data_ptr()
    assert copy_of_bytes(torch.empty((0, 3))).numel() == 0
