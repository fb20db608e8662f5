"""What a program logs while a block runs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


@contextlib.contextmanager
def logged(level: int = logging.WARNING) -> Iterator[list[str]]:
    """Yield the list of the messages that loggers pass to the root logger from now on."""
    root, handler = logging.getLogger(), _Messages()
    before = root.level
    root.addHandler(handler)
    root.setLevel(level)
    try:
        yield handler.found
    finally:
        root.setLevel(before)
        root.removeHandler(handler)
