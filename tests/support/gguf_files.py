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
    described, data = b"", b""
    for index, (name, number, dimensions, content) in enumerate(tensors):
        data += bytes(-len(data) % alignment)
        offset = len(data) if offsets is None else offsets[index]
        described += text(name) + struct.pack(
            f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, number, offset
        )
        data += content
    start = b"GGUF" + struct.pack("<IQQ", version, *(counts or (len(tensors), len(values))))
    start += b"".join(text(key) + struct.pack("<I", kind) + value for key, kind, value in values)
    start += described
    if tensors:
        start += bytes(-len(start) % alignment)
    return start + data + bytes(-len(data) % alignment)
