"""Pauses of the garbage collector, while many objects are created."""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


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
