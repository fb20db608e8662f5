"""What a pickle has made so far, and the ways in which opcodes read its bytes."""

from __future__ import annotations

from typing import Any

from blobstore.core.escape import quote
from blobstore.errors import CheckpointRefused
from blobstore.sources.unpickler.globals import Use, look_up
from blobstore.sources.unpickler.values import Global, Number, Persistent, Record, Reduced


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


_MAX_LINE = 1 << 16
_MAX_NAME = 1 << 10
_MAX_GLOBALS = 1 << 12
_MAX_COPIED = 1 << 20
"""Items of lists and dicts, and runs of ``_RUN`` characters, that calls may make new values of."""
_RUN = 1 << 6


class CutShort(CheckpointRefused):
    """The bytes end before the pickle does."""


class State:
    """A pickle being read. The stack belongs to the loop, for each mark begins another."""

    def __init__(self, data: bytes, start: int) -> None:
        self.data = data
        self.at = self.position = start
        """Where the opcode at hand is, and how far it has been read."""
        self.protocol = 0
        self.memo = Memo()
        self.objects = 0
        """Lists, dicts and their entries, tuples, calls and objects made."""
        self.copied = 0
        """Items that calls were given to make new values of; one list can be given to many."""
        self.globals: dict[tuple[str, str], Global] = {}
        self.records: list[Record] = []
        """Objects of classes that are not on the list of globals."""
        self.persistents: list[Persistent] = []

    def take(self, begin: int, end: int) -> bytes:
        """Return bytes of the pickle.

        Raises:
            CutShort: they are not all there.
        """
        if end > len(self.data):
            raise self.cut_short()
        return self.data[begin:end]

    def text(self, begin: int, end: int) -> str:
        """Return a text, with the lone surrogates that Python lets through."""
        return str(self.take(begin, end), "utf-8", "surrogatepass")

    def line(self, begin: int) -> tuple[bytes, int]:
        """Return the bytes to the end of their line, and where the next line begins."""
        end = self.data.find(b"\n", begin, begin + _MAX_LINE)
        if end < 0:
            self.take(begin, begin + _MAX_LINE)
            raise CheckpointRefused(f"a line is longer than {_MAX_LINE} bytes")
        return self.data[begin:end], end + 1

    def cut_short(self) -> CutShort:
        """Return the error of bytes that end too early."""
        return CutShort(f"the pickle ends at byte {len(self.data)}, before its STOP")

    def refusal(self, reason: str, name: str) -> CheckpointRefused:
        """Return the error of the opcode at hand."""
        return CheckpointRefused(f"pickle byte {self.at}, {name}: {reason}")

    def find(self, module: Any, name: Any) -> Global:
        """Return the record of a global."""
        if type(module) is not str or type(name) is not str:
            raise CheckpointRefused("a global is not named by two texts")
        if len(module) > _MAX_NAME or len(name) > _MAX_NAME:
            raise CheckpointRefused(f"the name of a global is longer than {_MAX_NAME} characters")
        found = self.globals.get((module, name))
        if found is None:
            if len(self.globals) >= _MAX_GLOBALS:
                raise CheckpointRefused(f"the pickle asks for more than {_MAX_GLOBALS} globals")
            found = self.globals[module, name] = look_up(module, name, self.at)
        return found

    def call(self, function: Any, arguments: Any, at: int) -> Any:
        """Return the record of a call, or the plain value that it makes."""
        self.objects += 1
        if type(function) is not Global or type(arguments) is not tuple:
            raise CheckpointRefused("what is called is not a global, or its arguments are no tuple")
        if function.make is not None:
            return self._made(function, arguments)
        if not function.is_function:
            raise CheckpointRefused(f"{quote(function)} is no function")
        function.is_called = True
        return Reduced(function, arguments, at)

    def new(self, cls: Any, arguments: Any) -> Any:
        """Return the record of an object, or the plain value that its class makes."""
        self.objects += 1
        if type(cls) is Persistent and type(cls.identifier) is tuple:  # of torch before 1.6
            raise CheckpointRefused(
                "it holds a model saved whole, class and all; save its state_dict() instead"
            )
        if type(cls) is not Global or type(arguments) is not tuple:
            raise CheckpointRefused(
                "the class of an object is not a global, or its arguments are no tuple"
            )
        if cls.make is not None:
            return self._made(cls, arguments)
        if cls.use is None:
            cls.is_class = True
            cls.is_called |= bool(arguments)
        elif cls.use is not Use.RECORD:
            raise CheckpointRefused(f"{quote(cls)} is not made in this way")
        return self._record(Record(cls, arguments, self.at))

    def _made(self, function: Global, arguments: tuple[Any, ...]) -> Any:
        assert function.make is not None  # noqa: S101 - for the type checker
        try:
            value = function.make(arguments)
        except (TypeError, ValueError):
            raise CheckpointRefused(
                f"{quote(function)} is called with other arguments than torch writes"
            ) from None
        for argument in arguments:
            if argument is not value:
                self.copied += _items_of(argument)
        if self.copied > _MAX_COPIED:
            raise CheckpointRefused("the pickle has its lists and texts copied too often")
        return self._record(value) if type(value) is Record else value

    def _record(self, record: Record) -> Record:
        if record.cls.use is None:
            self.records.append(record)
        return record


def _items_of(value: Any) -> int:
    """Return how many items or runs of characters a copy of a value takes."""
    if type(value) in (list, tuple, dict):
        return len(value)
    return len(value) // _RUN if type(value) in (str, bytes) else 0
