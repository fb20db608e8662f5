"""Where the checks run: on a GPU, or on the processor in the same way."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from blobstore.models.frameworks import ArrayTarget


@dataclass(frozen=True, slots=True)
class Lane:
    """A device that checks run on."""

    device: str
    is_gpu: bool
    folder: Path
    """A new folder for the files of one check."""
    scale: float = 1.0
    """The size of the inputs, 1 for those of a GPU."""

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.is_gpu:
            torch.cuda.synchronize()

    def allocated(self) -> int:
        """Return the bytes of device memory that tensors use; always 0 on the processor."""
        self.synchronize()
        return torch.cuda.memory_allocated() if self.is_gpu else 0


def gpu_count() -> int:
    """Return the number of CUDA devices that torch can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


@contextlib.contextmanager
def processor_as_gpu() -> Iterator[str]:
    """Send tensors to the device ``cpu:0`` through staging buffers, as to a GPU; give its name."""
    usual: Any = vars(ArrayTarget)["has_stream"]
    changed: Any = property(lambda target: target.device != "cpu")
    ArrayTarget.has_stream = changed  # type: ignore[method-assign]
    try:
        yield "cpu:0"
    finally:
        ArrayTarget.has_stream = usual  # type: ignore[method-assign]
