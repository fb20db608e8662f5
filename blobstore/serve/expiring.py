"""Bounded dictionaries, also of values that expire, for what strangers can cause any number of."""

from __future__ import annotations

import time
from copy import copy
from typing import Final, Generic, TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
MAX_KNOWN: Final = 100_000
"""Values that are kept if nothing else is said."""


def bounded(known: dict[_Key, _Value], most: int = MAX_KNOWN) -> dict[_Key, _Value]:
    """Return a dictionary that has space for one more: if there are ``most`` values, all are forgotten for it."""
    if len(known) >= most:
        known.clear()
    return known


def narrowed(known: dict[_Key, _Value], key: _Key, whole: _Value, **others: object) -> _Value:
    """Return a copy of an object with some other attributes; the same one for an equal key."""
    found = bounded(known).setdefault(key, copy(whole))
    vars(found).update(others)
    return found


class Expiring(Generic[_Key, _Value]):
    """A dictionary whose values expire. Threads may share it."""

    def __init__(self, most: int) -> None:
        """Start empty. If there are ``most`` values, all are forgotten before the next."""
        self._most = most
        self._values: dict[_Key, tuple[_Value, float]] = {}

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: _Key) -> _Value | None:
        """Return the value of a key; None if it is absent or expired."""
        value, until = self._values.get(key, (None, 0.0))
        return value if time.monotonic() < until else None

    def set(self, key: _Key, value: _Value, seconds: float) -> None:
        """Note a value, which expires after some seconds."""
        bounded(self._values, self._most)[key] = value, time.monotonic() + seconds

    def pop(self, key: _Key) -> _Value | None:
        """Remove a key and return its value, even an expired one; None if it is absent."""
        return self._values.pop(key, (None, 0.0))[0]
