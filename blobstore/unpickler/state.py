"""The state of the machine that reads a pickle: its bytes, its memo and the records it has made."""

from __future__ import annotations

from typing import Any

from blobstore.core.escape import quote
from blobstore.errors import CheckpointDamaged, CheckpointRefused, CheckpointUnsupported
from blobstore.unpickler.globals import look_up
from blobstore.unpickler.values import Global, Number, Persistent, Record, Reduced, Use

_MAX_LINE = 1 << 16
_MAX_NAME = 1 << 10
_MAX_GLOBALS = 1 << 12
_MAX_COPIED = 1 << 20
"""Items of lists and dicts, and runs of ``_RUN`` characters, that calls may copy to new values."""
_RUN = 1 << 6


class CutShort(CheckpointDamaged):
    """The bytes end before the pickle does."""


class LimitReached(CheckpointUnsupported):
    """The pickle needs more of a resource than it may use."""


class Memo:
    """Values by number. Picklers count up from 0, but any number is allowed.

    A list needs a third of the time and memory of a dict. The dict has the other numbers.
    """

    __slots__ = ("items", "others")

    def __init__(self) -> None:
        self.items: list[Any] = []
        """The values with the numbers 0, 1, 2 and so on."""
        self.others: dict[Number, Any] = {}
        """Values with numbers after a gap, which an attacker could choose to collide."""

    def __len__(self) -> int:
        return len(self.items) + len(self.others)

    def __getitem__(self, slot: int) -> Any:
        """Return a value, or raise ``KeyError``."""
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


class State:
    """A pickle being read. The loop has the stack, because each mark starts a new one."""

    def __init__(self, data: bytes, start: int) -> None:
        self.data = data
        self.at = self.position = start
        """Offset of the current opcode, and of the next byte to read."""
        self.protocol = 0
        self.memo = Memo()
        self.objects = 0
        """Number of lists, dicts and their entries, tuples, calls and objects."""
        self.copied = 0
        """Items that calls have copied to new values. Many calls can copy the same list."""
        self.globals: dict[tuple[str, str], Global] = {}
        self.records: list[Record] = []
        """Objects of classes that are not on the list of globals."""
        self.persistents: list[Persistent] = []

    def take(self, begin: int, end: int) -> bytes:
        """Return some bytes of the pickle.

        Raises:
            CutShort: the pickle ends before.
        """
        if end > len(self.data):
            raise self.cut_short()
        return self.data[begin:end]

    def line(self, begin: int) -> tuple[bytes, int]:
        """Return the bytes up to the end of the line, and the start of the next line."""
        end = self.data.find(b"\n", begin, begin + _MAX_LINE)
        if end < 0:
            self.take(begin, begin + _MAX_LINE)
            raise CheckpointDamaged(f"a line is longer than {_MAX_LINE} bytes")
        return self.data[begin:end], end + 1

    def cut_short(self) -> CutShort:
        """Return the error for bytes that end too early."""
        return CutShort(f"the pickle ends at byte {len(self.data)}, before its STOP")

    def refusal(self, reason: str, name: str, kind: type[CheckpointRefused]) -> CheckpointRefused:
        """Return the error for the current opcode."""
        return kind(f"pickle byte {self.at}, {name}: {reason}")

    def find(self, module: Any, name: Any) -> Global:
        """Return the record of a global."""
        if type(module) is not str or type(name) is not str:
            raise CheckpointDamaged("the name of a global is not two strings")
        if len(module) > _MAX_NAME or len(name) > _MAX_NAME:
            raise CheckpointUnsupported(
                f"the name of a global is longer than {_MAX_NAME} characters"
            )
        found = self.globals.get((module, name))
        if found is None:
            if len(self.globals) >= _MAX_GLOBALS:
                raise CheckpointUnsupported(
                    f"the pickle refers to more than {_MAX_GLOBALS} globals"
                )
            found = self.globals[module, name] = look_up(module, name, self.at)
        return found

    def call(self, function: Any, arguments: Any, at: int) -> Any:
        """Return the record of a call, or its plain value."""
        self.objects += 1
        if type(function) in (Record, Reduced):
            raise CheckpointUnsupported("a call is of an object that is not a global")
        if type(function) is not Global or type(arguments) is not tuple:
            raise CheckpointDamaged("a call is not of a global with a tuple of arguments")
        if function.make is not None:
            return self._made(function, arguments)
        if not function.is_function:
            raise CheckpointDamaged(f"{quote(function)} is not a function")
        function.is_called = True
        return Reduced(function, arguments, at)

    def new(self, cls: Any, arguments: Any) -> Any:
        """Return the record of an object, or its plain value."""
        self.objects += 1
        if type(cls) is Persistent and type(cls.identifier) is tuple:  # of torch before 1.6
            raise CheckpointUnsupported(
                "it holds a complete model object, with its class; save its state_dict() instead"
            )
        if type(cls) is not Global or type(arguments) is not tuple:
            raise CheckpointDamaged("an object is not made of a global with a tuple of arguments")
        if cls.make is not None:
            return self._made(cls, arguments)
        if cls.use is None:
            cls.is_class = True
            cls.is_called |= bool(arguments)
        elif cls.use is not Use.RECORD:
            raise CheckpointUnsupported(f"{quote(cls)} cannot be made by this opcode")
        return self._record(Record(cls, arguments, self.at))

    def _made(self, function: Global, arguments: tuple[Any, ...]) -> Any:
        assert function.make is not None  # noqa: S101 - for the type checker
        try:
            value = function.make(arguments)
        except (TypeError, ValueError):
            raise CheckpointUnsupported(
                f"the arguments of {quote(function)} are not those that torch writes"
            ) from None
        for argument in arguments:
            if argument is value:
                continue
            if type(argument) in (list, tuple, dict):
                self.copied += len(argument)
            elif type(argument) in (str, bytes):
                self.copied += len(argument) // _RUN
        if self.copied > _MAX_COPIED:
            raise CheckpointUnsupported("the pickle copies its lists and strings too often")
        return self._record(value) if type(value) is Record else value

    def _record(self, record: Record) -> Record:
        if record.cls.use is None:
            self.records.append(record)
        return record
