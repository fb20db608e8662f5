"""Reusable memory per thread: touching new pages for the first time costs more than a codec."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_STEP = 1 << 16
_PAGE = 1 << 12


class _ThreadBuffers(threading.local):
    def __init__(self) -> None:
        self.arrays: dict[str, Bytes] = {}


_buffers = _ThreadBuffers()


def scratch(name: str, size: int) -> Bytes:
    """Return ``size`` page-aligned bytes of this thread with undefined content.

    Every call with the same ``name`` returns the same memory. A caller that needs two buffers at once
    must use two names.
    """
    array = _buffers.arrays.get(name)
    if array is None or len(array) < size:
        capacity = -(-size // _STEP) * _STEP
        memory = np.empty(capacity + _PAGE, np.uint8)
        skipped = -memory.ctypes.data % _PAGE
        array = memory[skipped : skipped + capacity]
        _buffers.arrays[name] = array
    return array[:size]
