"""What a pickle remembers under numbers."""

from __future__ import annotations

from typing import Any

from blobstore.sources.pickle_vm.values import Number


class Memo:
    """Values by their numbers, which picklers count up from 0 but may be any.

    A list takes a third of the time and memory of a dict; the dict is there for the other numbers.
    """

    __slots__ = ("items", "others")

    def __init__(self) -> None:
        self.items: list[Any] = []
        """The values under 0, 1, 2 and so on."""
        self.others: dict[Number, Any] = {}
        """Those under numbers with a gap before them, which could be chosen to collide."""

    def __len__(self) -> int:
        return len(self.items) + len(self.others)

    def __getitem__(self, slot: int) -> Any:
        """Return a value; a ``KeyError`` if there is none."""
        return self.items[slot] if slot < len(self.items) else self.others[Number(slot)]

    def __setitem__(self, slot: int, value: Any) -> None:
        if slot < len(self.items):
            self.items[slot] = value
        elif slot == len(self.items):
            if self.others:
                self.others.pop(Number(slot), None)
            self.items.append(value)
        else:
            self.others[Number(slot)] = value
