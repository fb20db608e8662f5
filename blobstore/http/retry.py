"""Repeats requests that failed: how often, and after which pause."""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from blobstore.core.workers import Cancelled
from blobstore.errors import RemoteError
from blobstore.http.protocol import TransientError

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Generator, Iterator

HINT_ATTEMPTS: Final = 3
"""The most attempts for a request whose answer only saves work."""
_ADVANCE: Final = 2**20
"""Bytes after which earlier failures no longer count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long to wait for a server, and how often to ask it again."""

    stall: float = 30
    """Seconds without a byte after which a connection counts as lost."""
    slowest: float = 100
    """Bytes per second, over the time of a stall, below which a connection counts as lost too."""
    attempts: int = 6
    """Failures in a row, without progress between them, that end a transfer."""
    first: float = 0.5
    """Seconds before the second attempt; each later one waits twice as long."""
    longest: float = 60
    """Seconds that are waited at most, whatever a server asks."""

    def delay(self, failures: int, retry_after: float, jitter: float) -> float | None:
        """Return the seconds to wait before the next attempt, or None to give up.

        Args:
            failures: failures in a row, at least 1.
            retry_after: seconds that the server asks for, or 0.
            jitter: a random number from 0 to 1, so that clients that failed together do not return
                together.
        """
        if failures >= self.attempts or retry_after > self.longest:
            return None
        backoff = min(self.first * 2.0 ** min(failures - 1, 32), self.longest) * (0.5 + jitter / 2)
        return max(retry_after, backoff)


class Retry:
    """Repeats a block until it succeeds: ``for attempt in retry: with attempt: …; return``.

    A TransientError in the block is followed by a pause and the next attempt. After too many in a row, it
    ends as a RemoteError.
    """

    def __init__(self, patience: Patience, closed: threading.Event) -> None:
        self._patience = patience
        self._closed = closed
        self.failures = 0
        """In a row, without progress between them."""

    def __iter__(self) -> Iterator[Self]:
        while True:
            yield self

    def progress(self) -> None:
        """Forget the failures: the transfer has advanced."""
        self.failures = 0

    def resumed(
        self, begin: int, end: int, read: Callable[[int], Generator[bytes, None, None]]
    ) -> Generator[bytes, None, None]:
        """Yield the bytes from ``begin`` to before ``end``; if the connection is lost, go on with the next byte.

        ``read`` yields the bytes from an offset on, of one response.
        """
        counted = begin
        for attempt in self:
            with attempt, contextlib.closing(read(begin)) as pieces:
                for piece in pieces:
                    begin += len(piece)
                    # A byte per attempt is no progress: a broken transfer must end.
                    if begin - counted > _ADVANCE:
                        counted = begin
                        self.progress()
                    yield piece
            if begin == end:
                return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if not isinstance(error, TransientError):
            return False
        self.failures += 1
        jitter = random.random()  # noqa: S311 - not a secret
        delay = self._patience.delay(self.failures, error.retry_after, jitter)
        # Also without a delay: a client that was closed has not run out of patience.
        if self._closed.wait(delay or 0):
            raise Cancelled("stopped") from error
        if delay is None:
            wait = error.retry_after
            advice = f"try again in {wait:.0f} seconds" if wait else error.advice
            raise RemoteError(
                error.message, advice=advice, status=error.status, code=error.code
            ) from error
        return True
