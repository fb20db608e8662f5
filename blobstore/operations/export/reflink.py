"""A blob's data in another file under another header, without a copy where the file system can.

btrfs, XFS and others let files share blocks. Only whole blocks can be shared, so the new header is
padded with spaces until the data lies at the same place in its block as it does in the blob; of the
data only the bytes before the first boundary are written.
"""

from __future__ import annotations

import fcntl
import os
import struct

from blobstore.core.files import read_exactly, write_all

_FICLONERANGE = 0x4020940D
"""Linux's request: descriptor, offset, length and the offset in the file that is to share them."""
_MAX_BLOCK = 1 << 17
"""Network file systems name sizes of requests, to which no header should be padded."""
_LENGTH_SIZE = 8


def clone_data(source: int, size: int, data_start: int, target: int, header: bytes) -> bool:
    """Write ``header`` and a file's data to an empty file; tell whether they share the blocks.

    Where they cannot, the empty file stays as it is.

    Args:
        source: descriptor of a safetensors file.
        size: its size in bytes.
        data_start: where its data begins.
        target: descriptor of the empty file.
        header: safetensors header for the same bytes, the length included.

    Raises:
        OSError: the file cannot be written.
    """
    block = os.fstatvfs(target).f_bsize
    boundary = data_start + -data_start % block
    if block > _MAX_BLOCK or boundary >= size:
        return False
    padded = _padded(header, (data_start - len(header)) % block)
    before = boundary - data_start
    request = struct.pack("=qQQQ", source, boundary, size - boundary, len(padded) + before)
    try:
        fcntl.ioctl(target, _FICLONERANGE, request)
    except OSError:  # one file system cannot, another is full; who writes the bytes will see
        return False
    write_all(target, padded + read_exactly(source, before, data_start))
    return True


def _padded(header: bytes, count: int) -> bytes:
    length = len(header) - _LENGTH_SIZE + count
    return length.to_bytes(_LENGTH_SIZE, "little") + header[_LENGTH_SIZE:] + b" " * count
