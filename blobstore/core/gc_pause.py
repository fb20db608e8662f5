"""Pauses of the garbage collector, while many objects are created."""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


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
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()
