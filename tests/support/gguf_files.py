"""Writes GGUF files from their parts, also those that no program writes."""

from __future__ import annotations

import struct
from collections.abc import Sequence

U32, F32, BOOL, TEXT, ARRAY = 4, 6, 7, 8, 9
Tensor = tuple[str, int, Sequence[int], bytes]
"""Name, number of the type, dimensions with the fastest first, bytes."""


def text(value: bytes | str) -> bytes:
    """Return a text with its length."""
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def texts(values: Sequence[bytes | str]) -> bytes:
    """Return the value of an array of texts."""
    return struct.pack("<IQ", TEXT, len(values)) + b"".join(map(text, values))


def gguf_header(
    values: Sequence[tuple[str, int, bytes]] = (),
    tensors: Sequence[tuple[str, int, Sequence[int], int]] = (),
    *,
    version: int = 3,
    alignment: int = 32,
    offsets: Sequence[int] | None = None,
    counts: tuple[int, int] | None = None,
) -> bytes:
    """Return a file up to its data. A tensor has its size instead of its bytes; see :func:`gguf_file`."""
    described, end = b"", 0
    for index, (name, number, dimensions, size) in enumerate(tensors):
        offset = end if offsets is None else offsets[index]
        described += text(name) + struct.pack(
            f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, number, offset
        )
        end += size + -size % alignment
    start = b"GGUF" + struct.pack("<IQQ", version, *(counts or (len(tensors), len(values))))
    start += b"".join(text(key) + struct.pack("<I", kind) + value for key, kind, value in values)
    start += described
    return start + bytes(-len(start) % alignment) if tensors else start


def gguf_file(
    values: Sequence[tuple[str, int, bytes]] = (),
    tensors: Sequence[Tensor] = (),
    *,
    version: int = 3,
    alignment: int = 32,
    offsets: Sequence[int] | None = None,
    counts: tuple[int, int] | None = None,
) -> bytes:
    """Return a file. ``offsets`` and ``counts`` (of tensors and of values) replace those that are right."""
    sized = [(name, number, shape, len(data)) for name, number, shape, data in tensors]
    start = gguf_header(
        values, sized, version=version, alignment=alignment, offsets=offsets, counts=counts
    )
    return start + b"".join(data + bytes(-len(data) % alignment) for *_, data in tensors)
