"""A safetensors file of the tests, mapped by the functions that read the headers of blobs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from blobstore.core.files import open_regular
from blobstore.core.mmap import mapped
from blobstore.core.tensor import TensorView
from blobstore.safetensors.file import read_header
from blobstore.safetensors.header import Header


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """The header of a file and its bytes."""

    header: Header
    memory: memoryview

    @classmethod
    def open(cls, path: Path) -> Self:
        """Map a file. Raises InvalidHeader."""
        descriptor, size = open_regular(path)
        try:
            return cls(read_header(descriptor, size), mapped(descriptor, size))
        finally:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the memory to the views."""

    def __iter__(self) -> Iterator[str]:
        return iter(self.header.tensors)

    def view(self, name: str) -> TensorView:
        """Return a tensor's bytes."""
        spec, begin, end = self.header.tensors[name]
        start = self.header.data_start
        return TensorView(spec, self.memory[start + begin : start + end])
