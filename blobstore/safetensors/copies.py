"""Plain copies from host memory to a device: what loads are compared with."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch

from blobstore.core import interrupts
from blobstore.safetensors.cuda import failures, host_buffer
from blobstore.safetensors.torch import empty_tensor

if TYPE_CHECKING:
    from collections.abc import Iterable

    from blobstore.core.tensor import TensorSpec

_SOURCE = 256 << 20
"""Bytes of the memory that is copied, again and again: more than the caches of a processor hold."""


def has_cuda() -> bool:
    """Return whether torch can use a CUDA device."""
    with warnings.catch_warnings(action="ignore"):  # of an old driver
        return torch.cuda.is_available()


def free_memory(device: str) -> int | None:
    """Return the bytes that a CUDA device has left, or None for other devices.

    Raises:
        BlobstoreError: the device fails.
    """
    place = torch.device(device)
    if place.type != "cuda":
        return None
    with failures(place):
        return torch.cuda.mem_get_info(place)[0]


def release(device: str) -> None:
    """Free the device memory that torch keeps for reuse, so that the next load allocates its own."""
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()


def synchronize(device: str) -> None:
    """Wait until the device has done all that was requested.

    Raises:
        BlobstoreError: the device fails.
    """
    place = torch.device(device)
    if place.type == "cuda":
        with failures(place):
            torch.cuda.synchronize(place)


def source_of_copies(size: int, *, is_pinned: bool) -> torch.Tensor | None:
    """Return host memory to copy ``size`` bytes from, or None if the system refuses pinned memory.

    Raises:
        BlobstoreError: the host is out of memory.
    """
    with failures(torch.device("cpu")):
        source = host_buffer(min(size, _SOURCE), is_pinned=is_pinned)
    if is_pinned and not source.is_pinned():
        return None
    return source.fill_(1)  # memory that was never written to is one page of zeros


def copy_each(specs: Iterable[TensorSpec], source: torch.Tensor, device: str) -> list[torch.Tensor]:
    """Copy bytes into new tensors on a device, one tensor after the other; wait for all of them.

    Raises:
        BlobstoreError: the device is out of memory, or fails.
        UnsupportedDType: torch has no such type.
    """
    place, found, at = torch.device(device), [], 0
    with failures(place):
        for spec in specs:
            interrupts.check()
            tensor = empty_tensor(spec, place)
            found.append(tensor)
            done = 0
            while done < spec.nbytes:
                count = min(spec.nbytes - done, len(source) - at)
                target = tensor.view(-1).view(torch.uint8)[done : done + count]
                target.copy_(source[at : at + count], non_blocking=True)
                done, at = done + count, (at + count) % len(source)
        synchronize(device)
    return found


def copy_of_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor in memory of their own."""
    return tensor.reshape(-1).view(torch.uint8).clone()
