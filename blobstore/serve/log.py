"""The log of a server: a line of JSON for each request, and for what goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from blobstore.core.escape import escape

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_LINES: Final = 4096
"""Lines that wait, of at most about 6 kB each. The reader of the log may stop reading, and clients go on."""


def _line(fields: dict[str, object]) -> str:
    """Return a line of JSON: the time, and the fields that are not empty, escaped and shortened."""
    shown = {
        name: escape(value, 500) if isinstance(value, str) else value
        for name, value in fields.items()
        if value != ""
    }
    return json.dumps({"time": round(time.time(), 3), **shown})


class Log:
    """Lines that wait until they are written, at most :data:`MAX_LINES`. Threads may share it.

    Only :meth:`flush` writes, which may wait for ever: nothing else that a server does may wait for its log.
    """

    def __init__(self, write: Callable[[str], object] | None) -> None:
        """Write nothing yet; None if nothing is ever written."""
        self.write = write
        self.lines: deque[str] = deque(maxlen=MAX_LINES)
        self._dropped = 0

    def note(self, **fields: object) -> None:
        """Add a line with these fields; the oldest one goes if nobody has read so many."""
        self._dropped += len(self.lines) == MAX_LINES
        self.lines.append(_line(fields))

    def flush(self) -> None:
        """Write all lines, which may wait for a disk."""
        lines = []
        with contextlib.suppress(IndexError):  # the loop may add some at the same time
            while True:
                lines.append(self.lines.popleft())
        dropped, self._dropped = self._dropped, 0
        if dropped:
            lines.append(_line({"dropped": dropped}))
        if lines and self.write is not None:
            self.write("\n".join(lines))


class ErrorLog(logging.Logger):
    """Notes the failures of aiohttp, and of the loop that runs now. Their texts may have tokens of requests."""

    def __init__(self, log: Log) -> None:
        """Begin with the next failure."""
        super().__init__("blobstore.serve", logging.WARNING)
        self._lines = log
        asyncio.get_running_loop().set_exception_handler(self._note_context)

    def handle(self, record: logging.LogRecord) -> None:
        """See :class:`logging.Logger`."""
        error = record.exc_info[1] if record.exc_info else None
        self._note(record.getMessage(), error)

    def _note_context(self, _: object, context: dict[str, Any]) -> None:
        self._note(context["message"], context.get("exception"))

    def _note(self, message: str, error: BaseException | None) -> None:
        if not isinstance(error, ConnectionError):  # the request has a line of its own
            name = "" if error is None else type(error).__name__
            self._lines.note(error=": ".join(filter(None, (message, name))))
