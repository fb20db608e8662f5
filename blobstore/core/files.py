"""Safe file access: only regular files are read, and files are replaced atomically."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from blobstore.core.escape import quote
from blobstore.core.system import CANNOT_SYNC, copy_range, direct_flag, flush, will_read
from blobstore.errors import BlobstoreError, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import Self

    from typing_extensions import Buffer

    Opener = Callable[[Path], tuple[int, int]]
    """Opens a regular file as :func:`open_regular`."""

OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
"""Flags that open files of strangers: a pipe must not make a program wait."""
_OWN_FLAGS = os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
_FOLIO = 1 << 20
_MAY_BE_LINKS = ("cold",)
"""Folders of a store that users move to other disks."""
_ROOT_USER = 0
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


def is_absence(error: OSError) -> bool:
    """Return whether an error says that nothing has a name. One of a disk, or of permissions, does not."""
    return error.errno in _ABSENT


def status_of(path: Path | str, *, follow: bool = False) -> os.stat_result | None:
    """Return the status of what is at ``path``; None if nothing is.

    Raises:
        StoreError: that cannot be known now.
    """
    try:
        return os.stat(path, follow_symlinks=follow)  # noqa: PTH116 - a Path would cost as much again
    except OSError as error:
        if is_absence(error):
            return None
        raise StoreError(f"cannot look at {quote(path)}: {error.strerror}") from error


def is_there(path: Path | str) -> bool:
    """Return whether something is at ``path``, also a broken link. Raises as :func:`status_of`."""
    return status_of(path) is not None


class FileState(NamedTuple):
    """The state that distinguishes a file from other files, and from itself after its bytes have changed.

    Renaming and linking a file keep its state.
    """

    device: int
    inode: int
    size: int
    modified: int
    """In nanoseconds."""

    @classmethod
    def of_status(cls, status: os.stat_result) -> Self:
        """Return the state of the file with that status."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)

    @classmethod
    def of(cls, path: Path | str) -> Self | None:
        """Return the state of the regular file at ``path``, not following links; None if nothing is there.

        Raises as :func:`status_of`.
        """
        status = status_of(path)
        return cls.of_status(status) if status and stat.S_ISREG(status.st_mode) else None


class FileVersion(NamedTuple):
    """The version that distinguishes the content of a file from any other content that it ever has.

    Unlike a :class:`FileState`, it changes if the file is renamed, linked or touched: programs can set back
    the time of the last modification, but not that of the last change of the inode.
    """

    device: int
    inode: int
    size: int
    modified: int
    """In nanoseconds."""
    changed: int
    """Time of the last change of the inode, in nanoseconds."""

    @classmethod
    def of_status(cls, status: os.stat_result) -> Self:
        """Return the version of the file with that status."""
        times = status.st_mtime_ns, status.st_ctime_ns
        # In half the time of the usual constructor, because there may be very many.
        return tuple.__new__(cls, (status.st_dev, status.st_ino, status.st_size, *times))

    @property
    def state(self) -> FileState:
        """The state of the same file, which others may have renamed or linked since."""
        return FileState(*self[:-1])

    @classmethod
    def of(cls, path: Path | str) -> Self | None:
        """Return the version of what is at ``path``, following links; None if nothing is.

        Raises as :func:`status_of`.
        """
        status = status_of(path, follow=True)
        return cls.of_status(status) if status else None


def open_regular(path: Path | str, *, follow: bool = True) -> tuple[int, int]:
    """Open a regular file for reading; return its descriptor and size in bytes.

    Raises:
        OSError: it cannot be opened, or it is a symbolic link and ``follow`` is false.
        BlobstoreError: it is a folder, device, pipe or socket. Reading one might never end.
    """
    flags = OPEN_FLAGS if follow else OPEN_FLAGS | os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ENXIO:  # as of a socket
            raise BlobstoreError(f"{quote(path)} is not a regular file") from error
        raise
    return check_regular(descriptor, path)


def check_regular(descriptor: int, path: Path | str) -> tuple[int, int]:
    """Return an open file and its size; close it if that fails. Raises OSError, or BlobstoreError if it is not regular."""
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, descriptor)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise BlobstoreError(f"{quote(path)} is not a regular file")
        stack.pop_all()
    return descriptor, status.st_size


def open_shared(path: Path, flags: int, mode: int = 0o666) -> int:
    """Open a file of a folder that others may write to: neither through a link, nor a pipe, which would wait.

    Raises:
        OSError: it cannot be opened, or is a link.
        BlobstoreError: it is a folder, device or pipe.
    """
    return check_regular(os.open(path, flags | _OWN_FLAGS, mode), path)[0]


def open_to_append(path: Path) -> int:
    """Open a file of this user alone, after the bytes that it has. What else is there is replaced. Raises OSError."""
    flags = os.O_WRONLY | os.O_APPEND
    with contextlib.suppress(OSError, BlobstoreError):
        descriptor = open_shared(path, flags)
        status = os.fstat(descriptor)
        if status.st_uid == os.geteuid() and status.st_nlink == 1:
            return descriptor
        os.close(descriptor)
    path.unlink(missing_ok=True)
    return open_shared(path, flags | os.O_CREAT | os.O_EXCL)


@contextlib.contextmanager
def open_own(path: Path, access: int = os.O_RDONLY) -> Iterator[int | None]:
    """Open a cache for a block if this user alone can write it; otherwise give None."""
    try:
        descriptor = open_shared(path, access)
    except (OSError, BlobstoreError):
        yield None
        return
    try:
        found = os.fstat(descriptor)
        is_own = found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        yield descriptor if is_own else None
    finally:
        os.close(descriptor)


def allocated(status: os.stat_result) -> int:
    """Return the bytes that a file occupies: those of a sparse file without its holes."""
    return min(status.st_size, status.st_blocks * 512)


def read_ahead(path: str) -> None:
    """Ask the system to read a file in the background. The call may block while requests are queued.

    Errors are ignored here, and raised when the file is read.
    """
    with contextlib.suppress(OSError, BlobstoreError):
        descriptor, size = open_regular(path, follow=False)
        try:
            will_read(descriptor, size)
        finally:
            os.close(descriptor)


def read_regular(path: Path | str, limit: int, opener: Opener | None = None) -> bytes:
    """Return the content of a regular file of at most ``limit`` bytes.

    Raises:
        OSError: it cannot be opened or read.
        BlobstoreError: it is not a regular file, or larger than ``limit``.
    """
    descriptor, size = open_regular(path) if opener is None else opener(Path(path))
    try:
        if size > limit:
            raise BlobstoreError(f"{quote(path)} has {size} bytes, over the limit of {limit}")
        return read_exactly(descriptor, size, 0)
    finally:
        os.close(descriptor)


def read_exactly(descriptor: int, size: int, offset: int) -> bytes:
    """Return ``size`` bytes at ``offset`` of an open file, or fewer at its end."""
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
    """Read whole pages from the disk into ``buffer``, without a copy in the page cache.

    Returns:
        The number of bytes read; 0 if the system or the file system does not support this.
    """
    direct = direct_flag()
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
    """Write every byte of ``data``; a single write may be short."""
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(descriptor, view) :]


def write_pieces(descriptor: int, pieces: Iterable[Buffer]) -> None:
    """Write pieces to the beginning of a file, in multiples of a size that the page cache keeps together.

    It keeps bytes in one folio that are written at once and aligned, and a program that maps the file takes one fault
    per folio. If a header were written by itself, there would be four times as many.
    """
    waiting = bytearray()
    for piece in pieces:
        view = memoryview(piece).cast("B")
        count = len(waiting) + len(view)
        cut = count - count % _FOLIO - len(waiting)
        if cut > 0:
            buffers = [memoryview(waiting), view[:cut]]
            while buffers:
                buffers = without_start(buffers, os.writev(descriptor, buffers))
            waiting, view = bytearray(), view[cut:]
        waiting += view
    write_all(descriptor, waiting)


def pieces_of(descriptor: int) -> Iterator[memoryview]:
    """Yield the bytes of a file, each piece valid until the next one."""
    buffer, position = memoryview(bytearray(1 << 20)), 0
    while count := os.preadv(descriptor, [buffer], position):
        yield buffer[:count]
        position += count


def copy_bytes(source: int, begin: int, count: int, target: int, offset: int) -> int:
    """Copy at most ``count`` bytes between files, and return how many: 0 at the end of ``source``.

    The system copies them if it can, and some file systems then share the blocks.

    Raises:
        OSError: they cannot be read or written.
    """
    copied = copy_range(source, begin, count, target, offset)
    if copied is not None:
        return copied
    data = os.pread(source, min(count, 1 << 20), begin)
    return os.pwrite(target, data, offset) if data else 0


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` durable, if the file system can sync folders."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        flush(descriptor)
    except OSError as error:
        if error.errno not in CANNOT_SYNC:
            raise
    finally:
        os.close(descriptor)


def make_folders(folder: Path, top: Path, *, durable: bool = True) -> None:
    """Create ``folder`` and its missing parents durably, or without syncing them.

    ``top`` and the folders below it are synced even if they exist: another process may have just
    created them. Those in a hidden folder of ``top`` are this program's own, so links in place of them are refused.
    """
    parents = [folder, *folder.parents]
    for parent in parents[: parents.index(top)]:
        is_own = parent.relative_to(top).parts[0][0] == "."
        if is_own and parent.name not in _MAY_BE_LINKS and parent.is_symlink():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(parent))
    existing = next(index for index, parent in enumerate(parents) if parent.is_dir())
    below = parents.index(top)
    for index in reversed(range(existing)):
        try:
            parents[index].mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:  # it is a file
            raise NotADirectoryError(
                errno.ENOTDIR, os.strerror(errno.ENOTDIR), error.filename
            ) from None
        if index < below:
            give_to_owner(parents[index])
    for parent in parents[: max(existing, below) + 1] if durable else ():
        sync_folder(parent)


def give_to_owner(new: Path) -> None:
    """Give a new, empty file or folder of root to the owner of its folder, or that user would be locked out.

    Containers often run as root in the folders of other users. That owner may replace any part of the
    path at any time, so nothing is followed, and only what is still empty and has no other name is given.
    """
    if os.geteuid() != _ROOT_USER or new.parent.stat().st_uid == _ROOT_USER:
        return
    with contextlib.ExitStack() as stack:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            folder = os.open(new.parent, flags | os.O_DIRECTORY)
            stack.callback(os.close, folder)
            descriptor = os.open(new.name, flags, dir_fd=folder)
            stack.callback(os.close, descriptor)
            owner, status = os.fstat(folder), os.fstat(descriptor)
            if stat.S_ISDIR(status.st_mode):
                is_empty = not os.listdir(descriptor)  # noqa: PTH208 - of a descriptor
            else:
                is_empty = status.st_size == 0 and status.st_nlink == 1
            if is_empty and status.st_uid == _ROOT_USER:
                os.fchown(descriptor, owner.st_uid, owner.st_gid)
        except OSError:  # a file system without owners, one that keeps root out, or a changed path
            return


def without_start(buffers: Sequence[memoryview], count: int) -> list[memoryview]:
    """Return buffers without their first ``count`` bytes in all, which ``preadv`` or ``writev`` has done."""
    done = 0
    while done < len(buffers) and count >= len(buffers[done]):
        count -= len(buffers[done])
        done += 1
    rest = list(buffers[done:])
    if count:
        rest[0] = rest[0][count:]
    return rest


@contextlib.contextmanager
def replacing(
    target: Path, *, mode: int = 0o666, temporary: Path | None = None, durable: bool = True
) -> Iterator[int]:
    """Yield the descriptor of a temporary file, which replaces ``target`` at the end of the block.

    The content is durable before it gets the name, and the name is durable afterwards. On an error,
    nothing remains.

    Args:
        target: the path of the file.
        mode: its permissions, reduced by the umask.
        temporary: the folder of the temporary file, on the same file system as the target; by
            default the target's folder.
        durable: whether to sync file and folder; false for caches.

    Raises:
        OSError: the file cannot be written.
    """
    path = (temporary or target.parent) / f".{os.getpid()}-{secrets.token_hex(8)}.tmp"
    # This descriptor can be written and read back, even if the mode is read-only.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        try:
            yield descriptor
            if durable:
                flush(descriptor)
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
