"""Finds the end of a weight file that was never written: a downloader had reserved its space, and then stopped.

A file system reads such a hole as zeros. Tensors of zeros may be holes, too, as ``cp --sparse=always`` makes them
and some file systems do. These begin where a tensor does; a download stops within one.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Final

from blobstore.core.escape import quote
from blobstore.errors import DamagedSource

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from blobstore.core.tensor import FileLayout

_ADVICE: Final = "finish the download, or download it again"
_MANY: Final = 1 << 20
"""Bytes of zeros that are named although they were written."""


def check_written(path: Path, descriptor: int, layout: FileLayout) -> Iterator[str]:
    """Check that the end of an open file was written; yield a notice if that is not sure.

    Raises:
        OSError: the file cannot be read.
        DamagedSource: its tensors were not written, or the end of one and all after it.
    """
    status = os.fstat(descriptor)
    begin, size = layout.data_start, status.st_size
    start = _seek(descriptor, begin, os.SEEK_HOLE, size)
    end = _seek(descriptor, start, os.SEEK_DATA, size)
    is_hole = start < size
    if not is_hole:
        start = _zeros_from(descriptor, begin, size)
        if size - start < _MANY:
            return
    lost = [
        (name, at) for name, (_, at, stop) in layout.tensors.items() if at < end and stop > start
    ]
    if not lost:
        return
    name, at = lost[0]
    is_cut = len(lost) > 1 and start - at >= status.st_blksize
    is_unfinished = end == size and (is_cut or start - begin < status.st_blksize)
    if is_hole and is_unfinished:
        raise DamagedSource(
            f"{quote(path)}: this is an unfinished download: nothing was written after byte {start}, in "
            f"tensor {quote(name)}",
            advice=f"{_ADVICE}; if these are zeros, 'cp --sparse=never' makes a copy that has them",
        )
    if is_hole or is_unfinished:
        written = "were never written, and " if is_hole else ""
        yield (
            f"bytes {start} to {end}, from tensor {quote(name)} on, {written}are zeros; if they should not "
            f"be, {_ADVICE}"
        )


def _seek(descriptor: int, offset: int, whence: int, size: int) -> int:
    """Return where the next hole or the next data begins; ``size`` without one, or if the file system does not say."""
    try:
        return min(os.lseek(descriptor, offset, whence), size)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.EINVAL, errno.EOPNOTSUPP):
            return size
        raise


def _zeros_from(descriptor: int, begin: int, size: int) -> int:
    """Return where the zeros at the end of a file begin, but not before ``begin``."""
    step = 1 << 12  # almost no file ends in so many
    while size > begin:
        start = max(begin, size - step)
        data = os.pread(descriptor, size - start, start)
        if found := len(data.rstrip(b"\0")):
            return start + found
        size, step = start, 1 << 20
    return begin
