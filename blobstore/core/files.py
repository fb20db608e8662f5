"""Files opened, read and written with care: regular files only, nothing half-written."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from typing import TYPE_CHECKING

from blobstore.core.escape import quote
from blobstore.errors import BlobstoreError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from typing_extensions import Buffer

_OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK


def open_regular(path: Path | str, *, follow: bool = True) -> tuple[int, int]:
    """Open a regular file for reading; return its descriptor and size in bytes.

    With ``follow`` false a symbolic link is refused.

    Raises:
        OSError: it cannot be opened.
        BlobstoreError: it is a folder, device, pipe or socket. (Reading one might never end.)
    """
    flags = _OPEN_FLAGS if follow else _OPEN_FLAGS | os.O_NOFOLLOW
    descriptor = os.open(path, flags)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise BlobstoreError(f"{quote(path)} is not a regular file")
    return descriptor, status.st_size


def read_ahead(path: str) -> None:
    """Have the system read a file that will be needed soon; this may take as long as asking the disk.

    What is wrong with the file is told when it is read.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    with contextlib.suppress(OSError, BlobstoreError):
        descriptor, size = open_regular(path, follow=False)
        try:
            os.posix_fadvise(descriptor, 0, size, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)


def read_regular(path: Path | str, limit: int) -> bytes:
    """Return the content of a regular file of at most ``limit`` bytes.

    Raises:
        OSError: it cannot be opened or read.
        BlobstoreError: it is not a regular file, or larger than ``limit``.
    """
    descriptor, size = open_regular(path)
    try:
        if size > limit:
            raise BlobstoreError(f"{quote(path)} has {size} bytes, over the limit of {limit}")
        return read_exactly(descriptor, size, 0)
    finally:
        os.close(descriptor)


def read_exactly(descriptor: int, size: int, offset: int) -> bytes:
    """Return ``size`` bytes at ``offset`` of an open file, fewer where the file ends before."""
    parts = []
    while size:
        part = os.pread(descriptor, size, offset)
        if not part:
            break
        parts.append(part)
        size -= len(part)
        offset += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def read_past_cache(descriptor: int, buffer: memoryview, offset: int) -> int:
    """Read into whole pages from the disk, leaving no copy in the page cache.

    Returns:
        The bytes read; none if the system or the file system cannot do it.
    """
    direct = getattr(os, "O_DIRECT", 0)
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | direct)
        return os.preadv(descriptor, [buffer], offset) if direct else 0
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return 0
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)


def write_all(descriptor: int, data: Buffer) -> None:
    """Write every byte of ``data``; one write may take only a part."""
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(descriptor, view) :]


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folders(folder: Path, top: Path) -> None:
    """Create ``folder`` and its missing parents below ``top``, durably."""
    folder.mkdir(parents=True, exist_ok=True)
    for parent in (folder, *folder.parents):
        if parent == top.parent:
            break
        sync_folder(parent)


@contextlib.contextmanager
def replacing(
    target: Path, *, mode: int = 0o666, temporary: Path | None = None, durable: bool = True
) -> Iterator[int]:
    """Give a descriptor to write and read; on success its content becomes ``target`` in one step.

    The content is durable before it gets the name, and the name is durable afterwards. On an
    error nothing remains. The temporary file lies in ``temporary`` (by default beside the
    target), which must be on the target's file system; ``mode`` is reduced by the umask.
    ``durable`` false leaves out the syncing, for caches.

    Raises:
        OSError: it cannot be written.
    """
    path = (temporary or target.parent) / f".{os.getpid()}-{secrets.token_hex(8)}.tmp"
    # A file may be created read-only and yet be written through this descriptor; and read, by who
    # checks what was written.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        try:
            yield descriptor
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        path.replace(target)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(target.parent)


def write_file(
    target: Path,
    buffers: Iterable[Buffer],
    *,
    mode: int = 0o666,
    temporary: Path | None = None,
    durable: bool = True,
) -> None:
    """Write ``buffers`` to ``target`` as :func:`replacing` does."""
    with replacing(target, mode=mode, temporary=temporary, durable=durable) as descriptor:
        for buffer in buffers:
            write_all(descriptor, buffer)
