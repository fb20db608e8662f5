"""The header of an open safetensors file, read without the data."""

from __future__ import annotations

import os

from blobstore.core.files import read_exactly
from blobstore.errors import InvalidHeader
from blobstore.safetensors.header import PREFIX_SIZE, Header, header_size, parse_header, parse_start

_FIRST_READ = 1 << 12
"""Bytes of the first read, which contain the header of nearly all blobs."""


def read_header(descriptor: int, size: int) -> Header:
    """Read and check the header of an open file of ``size`` bytes.

    Raises:
        InvalidHeader: the file violates the format.
        OSError: the file cannot be read.
    """
    start = os.pread(descriptor, _FIRST_READ, 0)
    if len(start) < PREFIX_SIZE:  # a read may be short
        start += read_exactly(descriptor, PREFIX_SIZE - len(start), len(start))
    plain = parse_start(start, size)
    if plain is not None:
        return plain
    length = header_size(start, size)
    text = start[PREFIX_SIZE : PREFIX_SIZE + length]
    if len(text) < length:
        text += read_exactly(descriptor, length - len(text), len(start))
    if len(text) != length:
        raise InvalidHeader(f"header of {length} bytes ends after {len(text)}: the file has shrunk")
    return parse_header(text, size)
