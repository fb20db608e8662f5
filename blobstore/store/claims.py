"""Which blobs the processes of this machine are reading from elsewhere, so that each is read once.

A process claims a blob while it reads it and until the store has it: it locks one byte of a file, whose
position is taken from the digest. A process that finds a blob claimed waits, and takes it from the store.
Nothing depends on that: if locks have no effect, or a process dies or hangs, the blob is read twice.

These are locks of POSIX, because one descriptor holds any number of them, and a forked process none.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from typing import TYPE_CHECKING, Final

from blobstore.core.files import give_to_owner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from blobstore.core.digest import Digest

_POSITION_DIGITS: Final = 15
"""Of the hex digest, which give the position of a byte: below 2**63."""
_MAX_CLAIMS: Final = 4096
"""For a process; the system looks through all locks of a file for each new one."""
_PATIENCE: Final = 60.0
"""Seconds to wait while no process that reads makes progress."""
_PAUSE: Final = 0.02


class BlobClaims:
    """The claims of a process. Any number of threads may use them."""

    def __init__(self, path: Path) -> None:
        """Claim nothing yet. Raises OSError if the file cannot be opened."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        give_to_owner(path)
        self._held: set[Digest] = set()
        self._lock = threading.Lock()

    def take(self, digest: Digest) -> bool:
        """Claim a blob; return False if another process has claimed it."""
        with self._lock:
            if len(self._held) >= _MAX_CLAIMS:
                return True
            with contextlib.suppress(OSError):  # no locks
                try:
                    fcntl.lockf(
                        self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _position(digest)
                    )
                except (BlockingIOError, PermissionError):
                    return False
                self._held.add(digest)
            return True

    def release(self, digests: Iterable[Digest]) -> None:
        """Give up claims."""
        with self._lock, contextlib.suppress(OSError):
            for digest in self._held.intersection(digests):
                self._held.discard(digest)
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, _position(digest))

    def show_progress(self) -> None:
        """Let those that wait see that this process reads."""
        with contextlib.suppress(OSError):
            os.utime(self._descriptor)

    def wait(self, digest: Digest, pause: Callable[[float], object]) -> None:
        """Wait until no other process claims a blob, or all that claim blobs seem to hang.

        Args:
            digest: the blob.
            pause: waits for some seconds, or raises.
        """
        shown, until = self._shown(), time.monotonic() + _PATIENCE
        while not self.take(digest) and time.monotonic() < until:
            pause(_PAUSE)
            if (now := self._shown()) != shown:
                shown, until = now, time.monotonic() + _PATIENCE
        self.release([digest])

    def close(self) -> None:
        """Give up all claims."""
        os.close(self._descriptor)

    def _shown(self) -> int:
        return os.fstat(self._descriptor).st_mtime_ns


def _position(digest: Digest) -> int:
    return int(digest.hex[:_POSITION_DIGITS], 16)
