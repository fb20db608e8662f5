"""A bounded dictionary of values that expire, for what strangers can cause any number of."""

from __future__ import annotations

import time
from typing import Generic, TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Expiring(Generic[_Key, _Value]):
    """A dictionary whose values expire. Threads may share it."""

    def __init__(self, most: int) -> None:
        """Start empty. If there are ``most`` values, all are forgotten before the next."""
        self._most = most
        self._values: dict[_Key, tuple[_Value, float]] = {}

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: _Key) -> _Value | None:
        """Return the value of a key, or None if there is none or it has expired."""
        value, until = self._values.get(key, (None, 0.0))
        return value if time.monotonic() < until else None

    def set(self, key: _Key, value: _Value, seconds: float) -> None:
        """Note a value, which expires after some seconds."""
        if len(self._values) >= self._most:
            self._values.clear()
        self._values[key] = value, time.monotonic() + seconds

    def pop(self, key: _Key) -> _Value | None:
        """Forget the value of a key and return it, expired or not; None if there is none."""
        return self._values.pop(key, (None, 0.0))[0]
