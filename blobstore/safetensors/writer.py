"""Writes safetensors files atomically."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blobstore.core.files import replacing, write_all
from blobstore.safetensors.header import encode_header

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from typing_extensions import Buffer

    from blobstore.core.tensor import TensorSpec


def in_file_order(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """Return specs in the order of the reference library: descending alignment, then names.

    Element sizes never increase within the file, so every tensor of complete bytes is aligned.
    """
    return sorted(specs, key=lambda spec: (-spec.dtype.rank, spec.name))


def write_safetensors(
    path: Path,
    specs: Iterable[TensorSpec],
    read: Callable[[str], Iterable[Buffer]],
    metadata: Mapping[str, str] | None = None,
) -> int:
    """Write a file with the tensors ``specs``, and return its size in bytes.

    The file appears under its name complete and synced, or not at all.

    Args:
        path: the file to write.
        specs: the tensors.
        read: returns the bytes of a tensor by name.
        metadata: the metadata of the file.

    Raises:
        InvalidHeader: the specs are not valid for one file.
        OSError: the file cannot be written.
    """
    ordered = in_file_order(specs)
    header = encode_header(ordered, metadata)
    with replacing(path) as descriptor:
        write_all(descriptor, header)
        for spec in ordered:
            for buffer in read(spec.name):
                write_all(descriptor, buffer)
    return len(header) + sum(spec.nbytes for spec in ordered)
