"""A file that is being fetched, and read at the same time by responses that send it."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
import weakref
from typing import TYPE_CHECKING, Protocol

from blobstore.core import capacity
from blobstore.core.escape import quote
from blobstore.core.files import write_all
from blobstore.errors import BlobstoreError, DamagedSource
from blobstore.sources.hub_listing import digester_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from blobstore.sources.hub_listing import ListedFile

_PIECE = 1 << 20
_CALL_SECONDS = 0.001
"""Readers are called again no sooner than this time, times the number of readers. Pieces may be single bytes."""
_PATIENCE_SECONDS = 0.1


def max_files(limit: int) -> int:
    """Return how many arriving files there may be in a process that may open ``limit`` files; -1 for any number."""
    most = capacity.ARRIVING_FILES.most
    # An import opens them once more, and half is left for connections.
    return most if limit < 0 else min(most, limit // 4)


class Space(Protocol):
    """The disk space that arriving models claim. Threads may share it."""

    def extend(self, claim: Claim, size: int, found: int, files: int) -> object:
        """See :class:`Claim`."""

    def spend(self, claim: Claim, size: int) -> object:
        """See :class:`Claim`."""

    def release(self, claim: Claim) -> object:
        """See :class:`Claim`."""


class Claim:
    """The folder that the files of an arriving model may be written to, and how many bytes. Threads may share it."""

    def __init__(self, space: Space, folder: Path) -> None:
        """Claim nothing yet."""
        self.folder = folder
        self.size = 0
        """Bytes that may be written."""
        self.spent = 0
        """Bytes that were written, or are about to be."""
        self.taken = 0
        """Bytes for which space is reserved."""
        self.files = 0
        """Files that may be open."""
        self._space = space

    def extend(self, size: int, found: int = 0, files: int = 1) -> None:
        """Claim ``size`` bytes more in so many files, of which ``found`` lie there from an earlier attempt.

        Raises:
            Refusal: there is not enough space, or the models that are there are in use, or too many files are open.
            BlobstoreError: the disk is too full, or the store is damaged.
        """
        self._space.extend(self, size, found, files)

    def spend(self, size: int) -> None:
        """Make space for bytes that are about to be written, and for as many more.

        If models that could have been removed are in use by now, the limit is exceeded until the next model arrives.

        Raises:
            BlobstoreError: they were not claimed, or the store cannot be written.
        """
        self._space.spend(self, size)

    def release(self) -> None:
        """Release the claim, because the model is in the store or the fetch has failed."""
        self._space.release(self)


class ArrivingFile:
    """A file that one thread writes and any number of threads read.

    Readers get its last byte only when its digest is known to be right, so none of them gets a complete file with
    wrong bytes. The file stays open, and readable, until nothing refers to this object.
    """

    def __init__(
        self,
        listed: ListedFile,
        claim: Claim,
        on_wanted: Callable[[str], object] = lambda _: None,
    ) -> None:
        """Open nothing yet.

        Args:
            listed: the name, size and digest of the file.
            claim: the folder that it is written to. Its bytes are spent before they are written.
            on_wanted: called with the name of the file when a reader waits for it.
        """
        self.name, self.size = listed.name, listed.size
        self.path = claim.folder / listed.name
        self._claim = claim
        self._spent = 0
        """Bytes of the claim that are this file's."""
        self.written = 0
        """Bytes of the file."""
        self.received = 0
        """Bytes of the file that this process has received."""
        self.is_wrong = False
        """Whether readers may have got wrong bytes."""
        self._listed = listed
        self._on_wanted = on_wanted
        self._digester = digester_of(listed)
        self._lock = threading.Lock()
        self._callbacks: set[Callable[[], object]] = set()
        self._called = 0.0
        """When readers were last called."""
        self._error: BlobstoreError | None = None
        self._is_verified = False
        self.descriptor = -1
        """Of the file, once it is open."""

    # Called by the thread that fetches it

    def find(self) -> int:
        """Return the size of the file that an earlier attempt has left. Call it once, before the file is claimed."""
        with contextlib.suppress(OSError):
            found = self.path.lstat().st_size
            self._spent = found if found <= self.size else 0
        return self._spent

    def open(self) -> None:
        """Open the file, and read the bytes that an earlier attempt has left. Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self.descriptor = os.open(self.path, flags, 0o600)
        weakref.finalize(self, os.close, self.descriptor)
        if os.fstat(self.descriptor).st_size > self.size:
            os.ftruncate(self.descriptor, 0)
        while piece := os.pread(self.descriptor, _PIECE, self.written):
            self._digester.update(piece)
            self._advance(len(piece))

    def take(self, pieces: Iterable[bytes]) -> bool:
        """Take all bytes from ``pieces`` if they have the right digest; return whether they have.

        No reader gets any of them before. Raises as :meth:`append`, and what ``pieces`` raises.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        digester = self._digester.copy()
        descriptor, name = tempfile.mkstemp(dir=self.path.parent, prefix=".taken-")
        try:
            written = 0
            for piece in pieces:
                written += len(piece)
                self._spend(written)
                digester.update(piece)
                write_all(descriptor, piece)
            is_right = digester.hexdigest() == self._listed.digest
            if is_right:
                os.replace(name, self.path)  # noqa: PTH105 - a string
            return is_right
        finally:
            os.close(descriptor)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)  # noqa: PTH108 - a string

    def append(self, piece: bytes) -> None:
        """Write the next bytes.

        Raises:
            DamagedSource: the file has more bytes than were listed.
            BlobstoreError: there is no space.
            OSError: they cannot be written.
        """
        if self.written + len(piece) > self.size:
            raise DamagedSource(
                f"file {quote(self.name)}: the upstream sends more than the {self.size} bytes that it lists"
            )
        # Before the bytes are written: they count against the limit at once.
        self._spend(self.written + len(piece))
        done = 0
        # At its place: sending a file moves the position of its descriptor.
        while done < len(piece):
            done += os.pwrite(self.descriptor, piece[done:], self.written + done)
        self._digester.update(piece)
        self.received += len(piece)
        self._advance(len(piece))

    def finish(self) -> None:
        """Check the digest of the complete file.

        Raises:
            DamagedSource: it differs. The file is removed, so that the next attempt begins from its start.
        """
        found, expected = self._digester.hexdigest(), self._listed.digest
        if found != expected:
            self.is_wrong = True
            self.path.unlink(missing_ok=True)
            raise DamagedSource(
                f"file {quote(self.name)}: its {self._listed.algorithm} is {found}, the upstream lists {expected}"
            )
        # From here on readers get the last byte.
        self._is_verified = True
        self._wake()

    def fail(self, error: BlobstoreError) -> None:
        """End the wait of all readers, unless the file is complete."""
        if not self._is_verified:
            self._error = error
            self._wake()

    @property
    def etag(self) -> str:
        """The validator (ETag) of the file's bytes."""
        return self._listed.digest

    @property
    def is_complete(self) -> bool:
        """Whether all bytes are there and right."""
        return self._is_verified

    def _spend(self, written: int) -> None:
        if written > self._spent:
            self._claim.spend(written - self._spent)
            self._spent = written

    def _advance(self, count: int) -> None:
        # After the bytes are in the file: readers read up to this.
        self.written += count
        # A slow upstream sends small pieces. If each woke every reader, a thousand of them would stop all others.
        if time.monotonic() - self._called >= self._pause:
            self._wake()

    def _wake(self) -> None:
        self._called = time.monotonic()
        with self._lock:
            callbacks = list(self._callbacks)
            # Without the lock, because a callback may add or remove others.
        for call in callbacks:
            call()

    @property
    def _pause(self) -> float:
        return _CALL_SECONDS * len(self._callbacks)

    # Called by readers

    @property
    def patience(self) -> float:
        """See :meth:`calling`, in seconds."""
        return max(self._pause, _PATIENCE_SECONDS)

    def readable(self, begin: int) -> int:
        """Return how many bytes from ``begin`` on can be read.

        Raises:
            BlobstoreError: the file will not be complete.
        """
        if self._is_verified:
            return self.size - begin
        if self._error is not None:
            raise self._error.copy()  # a traceback of its own, which does not hold this file
        return max(min(self.written, self.size - 1) - begin, 0)

    @contextlib.contextmanager
    def calling(self, on_change: Callable[[], object]) -> Iterator[None]:
        """While the block runs, call a function on the fetching thread as bytes arrive, and when the fetch ends or fails.

        Of bytes that arrive one after the other, it is called for some only. A reader that has waited for
        :attr:`patience` has to look itself.
        """
        with self._lock:
            self._callbacks.add(on_change)
        # After the callback is known, so that no bytes arrive unnoticed.
        self._on_wanted(self.name)
        try:
            yield
        finally:
            with self._lock:
                self._callbacks.discard(on_change)
