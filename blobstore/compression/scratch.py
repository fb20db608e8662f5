"""Memory that a thread uses again and again, for the first touch of new pages costs more than a codec."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_STEP = 1 << 16
_PAGE = 1 << 12


class _Held(threading.local):
    def __init__(self) -> None:
        self.arrays: dict[str, Bytes] = {}


_held = _Held()


def scratch(name: str, size: int) -> Bytes:
    """Return ``size`` bytes of this thread, where a page begins; what they hold is undefined.

    They are the same bytes at every call with the same ``name``: whoever needs two at once gives
    them two names, and nobody returns them to a caller.
    """
    array = _held.arrays.get(name)
    if array is None or len(array) < size:
        array = _aligned(-(-size // _STEP) * _STEP)
        _held.arrays[name] = array
    return array[:size]


def _aligned(size: int) -> Bytes:
    memory = np.empty(size + _PAGE, np.uint8)
    skipped = -memory.ctypes.data % _PAGE
    return memory[skipped : skipped + size]
