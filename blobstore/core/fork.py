"""Locks inside objects that forked processes go on using."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol


class _HasLock(Protocol):
    _lock: threading.Lock


_OWNERS: weakref.WeakSet[_HasLock] = weakref.WeakSet()


def renew_lock_in_children(owner: _HasLock) -> None:
    """Give ``owner`` a new ``_lock`` in processes that are forked from this one.

    Another thread may hold the old one during the fork. The child has no such thread, and would wait for it
    forever.
    """
    _OWNERS.add(owner)


def _renew_locks() -> None:
    for owner in _OWNERS:
        owner._lock = threading.Lock()  # noqa: SLF001 - this is what owners ask for


os.register_at_fork(after_in_child=_renew_locks)
