"""Shares the data of a blob with a file that has another header, if the file system supports it.

btrfs, XFS and others let files share blocks. Only complete blocks can be shared, so the new header is
padded with spaces until the data has the same offset within a block as in the blob. Only the data
before the first block boundary is written.
"""

from __future__ import annotations

import os

from blobstore.core.files import read_exactly, write_all
from blobstore.core.system import share_range

_MAX_BLOCK = 1 << 17
"""Network file systems report their request size, which is too much padding."""
_LENGTH_SIZE = 8


def clone_data(source: int, size: int, data_start: int, target: int, header: bytes) -> bool:
    """Write ``header`` and the data of another file to an empty file; return whether they share it.

    If they cannot, the file stays empty.

    Args:
        source: descriptor of a safetensors file.
        size: its size in bytes.
        data_start: offset of its data.
        target: descriptor of the empty file.
        header: new safetensors header of the data, including its length.

    Raises:
        OSError: the file cannot be written.
    """
    block = os.fstatvfs(target).f_bsize
    boundary = data_start + -data_start % block
    if block > _MAX_BLOCK or boundary >= size:
        return False
    padding = (data_start - len(header)) % block
    length = len(header) - _LENGTH_SIZE + padding
    padded = length.to_bytes(_LENGTH_SIZE, "little") + header[_LENGTH_SIZE:] + b" " * padding
    before = boundary - data_start
    start = read_exactly(source, before, data_start)
    if len(start) != before:  # the caller finds out why
        return False
    if not share_range(source, boundary, size - boundary, target, len(padded) + before):
        return False  # the caller then writes the bytes
    write_all(target, padded + start)
    return True
