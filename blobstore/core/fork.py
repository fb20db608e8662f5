"""What forked processes need, and what they must not keep: locks, files, and attributes without a lock."""

from __future__ import annotations

import functools
import os
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING or sys.version_info >= (3, 12):
    from functools import cached_property
else:

    class _CachedProperty(functools.cached_property):
        """An attribute that is computed when it is first asked for. Two threads may compute it at once.

        Before Python 3.12, that of the standard library has one lock for all instances. A child that is forked while
        any thread computes the attribute of any of them would wait for it forever.
        """

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            """Return the value, which hides this attribute from then on."""
            if instance is None:
                return self
            found = instance.__dict__[self.attrname] = self.func(instance)
            return found

    cached_property = _CachedProperty

__all__ = ["NOT_INHERITED", "cached_property", "renew_lock_in_children"]


class _HasLock(Protocol):
    _lock: threading.Lock


NOT_INHERITED: set[int] = set()
"""Descriptors of files that forked processes do not keep: locked ones, and those that may become blobs."""

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


def _drop_files() -> None:
    if NOT_INHERITED:
        # The descriptors are redirected and not closed: their owners still know the numbers and
        # close them later, when these could belong to other files.
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        for descriptor in NOT_INHERITED:
            os.dup2(nowhere, descriptor, inheritable=False)
        os.close(nowhere)
    NOT_INHERITED.clear()


os.register_at_fork(after_in_child=_renew_locks)
# A worker of an import that outlives it would keep its lease locked.
os.register_at_fork(after_in_child=_drop_files)
