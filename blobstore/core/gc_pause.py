"""How Python manages memory while many objects are made."""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Put off garbage collection while many objects are made that live on."""
    # Tens of thousands of new objects start full collections, which in a process with torch
    # loaded take several times as long as the work itself. None of the objects is in a cycle.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            _age()
            gc.enable()


def _age() -> None:
    """Count all objects as old, as they would be after a look at each."""
    if not gc.get_freeze_count():  # what a program has frozen stays so
        gc.freeze()
        gc.unfreeze()
