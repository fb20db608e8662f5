"""Pauses of the garbage collector, while many objects are created or requests are open."""

from __future__ import annotations

import contextlib
import gc
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_IDLE_SECONDS: Final = 600.0
"""Seconds from one full collection to the next, if no request is open then."""
_BUSY_SECONDS: Final = 3600.0
"""The same if requests are open all the time."""


class _Program:
    """The state of the program that uses this package."""

    has_frozen = False
    """Whether objects were frozen. To count them takes milliseconds, so they are not counted twice."""


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Pause garbage collection while many long-lived objects are created."""
    # Tens of thousands of new objects trigger full collections. In a process that has loaded torch,
    # these take several times as long as the work itself. None of the objects is in a cycle.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            # Move all objects to the oldest generation, as collections would have done, unless this
            # would unfreeze objects that the program has frozen.
            _Program.has_frozen = _Program.has_frozen or gc.get_freeze_count() > 0
            if not _Program.has_frozen:
                gc.freeze()
                gc.unfreeze()
            gc.enable()


class OldGarbage:
    """The cyclic garbage of a server that only full collections find.

    These stop it, because they look at every value of the models in memory: for up to seconds, no other thread runs.
    Most garbage is young, and is collected as usual. The rest waits until no request is open.
    """

    def __init__(self) -> None:
        self._collected = time.monotonic()

    @staticmethod
    @contextlib.contextmanager
    def kept() -> Iterator[None]:
        """Make no full collection within the block unless :meth:`collect` does."""
        usual = gc.get_threshold()
        gc.set_threshold(*usual[:2], 2**30)
        try:
            yield
        finally:
            gc.set_threshold(*usual)

    def collect(self, *, is_idle: bool) -> None:
        """Collect it if it is time. Call it from time to time."""
        age = time.monotonic() - self._collected
        if age >= (_IDLE_SECONDS if is_idle else _BUSY_SECONDS):
            gc.collect()
            self._collected = time.monotonic()
