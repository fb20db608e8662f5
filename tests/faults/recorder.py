"""Records the calls by which this process changes files, with the names and locks that they concern.

The functions of :mod:`os` and :mod:`fcntl` are wrapped, so a recording needs no root and no tracer, and the
same command makes the same calls each time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest import mock

from blobstore.store import ingest

Kind = Literal[
    "create", "lease", "mkdir", "symlink", "sync", "rename", "link", "unlink", "rmdir", "lock"
]
Inode = tuple[int, int]
"""A device and a number; two files that exist at different times may share it."""


class Call(NamedTuple):
    """A call that succeeded. Paths are absolute."""

    kind: Kind
    path: str
    """The file or folder; for ``rename`` and ``link`` the new name."""
    inode: Inode | None = None
    source: str = ""
    """The old name of ``rename`` and ``link``; the target of ``symlink``."""
    content: bytes | None = None
    """The bytes of a file that was synced, or was renamed or linked without having been synced."""
    leased: str = ""
    """The text of all leases when a file was renamed or linked."""
    lock: int = fcntl.LOCK_UN
    """The operation of ``lock``; otherwise the lock of the store that is held, ``LOCK_UN`` if none."""


@dataclass(slots=True)
class Recorder:
    """The calls below a folder, in the order in which they ended."""

    root: Path
    calls: list[Call] = field(default_factory=list)
    _held: dict[int, int] = field(default_factory=dict)
    _dirty: set[Inode] = field(default_factory=set)
    _mutex: Any = field(default_factory=threading.RLock)

    def add(self, kind: Kind, path: str, **more: Any) -> None:
        """Record a call, if its file is below the folder."""
        if Path(path).is_relative_to(self.root):
            more.setdefault("lock", max(self._held.values(), default=fcntl.LOCK_UN, key=_strength))
            self.calls.append(Call(kind, path, **more))

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record all calls of the block, on one thread of each kind, so that their order is the same."""
        wrappers = {
            name: self._wrapper(getattr(os, name), getattr(self, f"_{name}"))
            for name in ("open", "fsync", "rename", "link", "unlink", "mkdir", "symlink")
        }
        wrappers |= {
            "close": self._closer(os.close),
            "replace": self._wrapper(os.replace, self._rename),
        }
        wrappers |= {"remove": wrappers["unlink"], "rmdir": self._wrapper(os.rmdir, self._rmdir)}
        for name in ("write", "pwrite", "writev", "pwritev", "ftruncate", "posix_fallocate"):
            if hasattr(os, name):
                wrappers[name] = self._wrapper(getattr(os, name), self._written)
        with contextlib.ExitStack() as stack:
            for name, wrapper in wrappers.items():
                stack.enter_context(mock.patch.object(os, name, wrapper))
            locking = self._wrapper(fcntl.flock, self._flock)
            stack.enter_context(mock.patch.object(fcntl, "flock", locking))
            stack.enter_context(mock.patch.object(os, "cpu_count", return_value=1))
            stack.enter_context(mock.patch.object(ingest, "_SYNC_THREADS", 1))
            yield

    def _wrapper(self, call: Callable[..., Any], note: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*arguments: Any, **options: Any) -> Any:
            with self._mutex:  # so that calls are recorded in the order in which they happen
                result = call(*arguments, **options)
                note(result, *arguments, **options)
                return result

        return recorded

    def _closer(self, close: Callable[[int], None]) -> Callable[[int], None]:
        def recorded(descriptor: int) -> None:
            with self._mutex:
                close(descriptor)
                self._held.pop(descriptor, None)

        return recorded

    def _open(
        self, descriptor: int, path: Any, flags: int, mode: int = 0o777, *, dir_fd: Any = None
    ) -> None:
        del mode
        if flags & os.O_CREAT and flags & os.O_EXCL:
            self.add("create", _absolute(path, dir_fd), inode=_inode(descriptor))
            self._dirty.add(_inode(descriptor))

    def _fsync(self, _: None, descriptor: int) -> None:
        path, inode = _path_of(descriptor), _inode(descriptor)
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        self._dirty.discard(inode)
        content = None if is_folder else Path(f"/proc/self/fd/{descriptor}").read_bytes()
        self.add("sync", path, inode=inode, content=content)

    def _written(self, _: Any, descriptor: int, *__: Any) -> None:
        self._dirty.add(_inode(descriptor))
        path = Path(_path_of(descriptor))
        if path.parent.name == "leases":
            self.add("lease", str(path))

    def _rename(
        self, _: None, source: Any, target: Any, *, src_dir_fd: Any = None, dst_dir_fd: Any = None
    ) -> None:
        self._named("rename", _absolute(source, src_dir_fd), _absolute(target, dst_dir_fd))

    def _link(self, _: None, source: Any, target: Any, **__: Any) -> None:
        self._named("link", _absolute(source), _absolute(target))

    def _named(self, kind: Kind, source: str, target: str) -> None:
        status = os.lstat(target)
        inode = (status.st_dev, status.st_ino)
        unsynced = inode in self._dirty and stat.S_ISREG(status.st_mode)
        content = Path(target).read_bytes() if unsynced else None
        leases = self.root.glob("**/.blobstore/leases/*")
        leased = "".join(lease.read_text("ascii") for lease in leases)
        self.add(kind, target, inode=inode, source=source, content=content, leased=leased)

    def _unlink(self, _: None, path: Any, *, dir_fd: Any = None) -> None:
        self.add("unlink", _absolute(path, dir_fd))

    def _rmdir(self, _: None, path: Any, *, dir_fd: Any = None) -> None:
        self.add("rmdir", _absolute(path, dir_fd))

    def _mkdir(self, _: None, path: Any, mode: int = 0o777, *, dir_fd: Any = None) -> None:
        del mode
        self.add("mkdir", _absolute(path, dir_fd))

    def _symlink(self, _: None, target: Any, path: Any, **__: Any) -> None:
        self.add("symlink", _absolute(path), source=os.fsdecode(target))

    def _flock(self, _: None, descriptor: int, operation: int) -> None:
        path = _path_of(descriptor)
        kind = operation & ~fcntl.LOCK_NB
        self.add("lock", path, inode=_inode(descriptor), lock=kind)
        if Path(path).name == "lock":
            self._held[descriptor] = kind


def _strength(kind: int) -> int:
    return [fcntl.LOCK_UN, fcntl.LOCK_SH, fcntl.LOCK_EX].index(kind)


def _inode(descriptor: int) -> Inode:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _path_of(descriptor: int) -> str:
    return str(Path(f"/proc/self/fd/{descriptor}").readlink()).removesuffix(" (deleted)")


def _absolute(path: Any, folder: int | None = None) -> str:
    name = os.fsdecode(path)
    return str((Path(_path_of(folder)) if folder is not None else Path.cwd()) / name)
