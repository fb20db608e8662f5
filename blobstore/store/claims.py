"""Claims of blobs that processes of this machine are reading from a remote, so that each blob is read once.

A process claims a blob while it reads it and until the store has it: it locks one byte of a file, whose
position is taken from the digest. A process that finds a blob claimed waits, and takes it from the store.
Nothing depends on that: if locks have no effect, or a process dies or hangs, the blob is read twice.

These are locks of POSIX, because one descriptor holds any number of them, and a forked process none. A process
loses all of its locks of a file when it closes any descriptor of the file, so it opens the file once.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from typing import TYPE_CHECKING, ClassVar, Final
from weakref import WeakValueDictionary

from blobstore.core.files import give_to_owner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from blobstore.core.digest import Digest

_POSITION_DIGITS: Final = 15
"""Digits of the hex digest that give the offset of its byte, which stays below 2**63."""
_MAX_CLAIMS: Final = 4096
"""For a process; the system looks through all locks of a file for each new one."""
_STALL: Final = 60.0
"""Seconds to wait while no process that reads makes progress."""
_TIMEOUT: Final = 600.0
"""Seconds to wait in any case: the process that holds the claim may be suspended while others make progress."""
_PAUSE: Final = 0.02
_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class BlobClaims:
    """The claims of a process. Any number of threads may use them."""

    _open: ClassVar[WeakValueDictionary[tuple[int, Path], BlobClaims]] = WeakValueDictionary()
    """The instances in use, by process: a forked process has copies of others, and no claims."""
    _opening = threading.Lock()

    def __init__(self, path: Path) -> None:
        """Claim nothing yet. Raises OSError if the file cannot be opened. Callers use :meth:`of`."""
        self._descriptor = os.open(path, _FLAGS, 0o666)
        self._held: set[Digest] = set()
        self._lock = threading.Lock()
        give_to_owner(path)

    @classmethod
    def of(cls, path: Path) -> BlobClaims:
        """Return the claims of this process in a file, which is closed when nobody uses them any more.

        Raises:
            OSError: the file cannot be opened.
        """
        with cls._opening:
            key = os.getpid(), path
            found = cls._open.get(key)
            if found is None:
                found = cls._open[key] = cls(path)
            return found

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # the file could not be opened
            os.close(self._descriptor)

    def take(self, digest: Digest) -> bool:
        """Claim a blob; return False if another process or thread has claimed it."""
        with self._lock:
            # Locks of POSIX exclude other processes only, so threads of this one look here.
            if digest in self._held:
                return False
            if len(self._held) >= _MAX_CLAIMS:
                # Without a claim the blob may be read twice, which costs only time.
                return True
            with contextlib.suppress(OSError):  # no locks
                try:
                    fcntl.lockf(
                        self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _position(digest)
                    )
                except (BlockingIOError, PermissionError):
                    # POSIX allows either error for a byte that another process has locked.
                    return False
                self._held.add(digest)
            return True

    def release(self, digests: Iterable[Digest]) -> None:
        """Give up claims."""
        with self._lock, contextlib.suppress(OSError):
            for digest in self._held.intersection(digests):
                self._held.discard(digest)
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, _position(digest))

    def beat(self) -> None:
        """Let those that wait see that this process reads."""
        if self._held:
            with contextlib.suppress(OSError):
                # All processes touch this one file, so those that wait see that some process makes
                # progress, but not which one.
                os.utime(self._descriptor)

    def wait(self, digest: Digest, pause: Callable[[float], object]) -> bool:
        """Claim a blob when the process that has claimed it is done; return False if that seems to hang.

        Args:
            digest: the blob.
            pause: waits for some seconds, or raises.
        """
        now = time.monotonic()
        beat, stalled, end = self._last_beat(), now + _STALL, now + _TIMEOUT
        while not self.take(digest):
            if time.monotonic() >= min(stalled, end):
                return False
            pause(_PAUSE)
            if (last := self._last_beat()) != beat:
                beat, stalled = last, time.monotonic() + _STALL
        return True

    def _last_beat(self) -> int:
        return os.fstat(self._descriptor).st_mtime_ns


def _forget_lock() -> None:
    """Let a forked process open the file, although a thread of its parent was about to."""
    BlobClaims._opening = threading.Lock()


os.register_at_fork(after_in_child=_forget_lock)


def _position(digest: Digest) -> int:
    return int(digest.hex[:_POSITION_DIGITS], 16)
