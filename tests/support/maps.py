"""A process that may map only a few more files."""

from __future__ import annotations

import ctypes
import mmap

from blobstore.core.system import map_counts

_mprotect = ctypes.CDLL(None, use_errno=True).mprotect
_mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def use_up_maps(spare: int) -> object:
    """Use all but ``spare`` of the maps that this process may have, as long as the result lives."""
    counts = map_counts()
    assert counts is not None
    pages = counts.limit - counts.present - spare
    memory = mmap.mmap(-1, pages * mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for page in range(0, pages, 2):  # two maps: this page, and the next one
        assert _mprotect(address + page * mmap.PAGESIZE, mmap.PAGESIZE, mmap.PROT_READ) == 0
    return memory
