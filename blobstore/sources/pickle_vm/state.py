"""What a pickle has made so far, and the ways in which opcodes read its bytes."""

from __future__ import annotations

from typing import Any

from blobstore.errors import CheckpointRefused
from blobstore.sources.pickle_vm.globals import Use, look_up
from blobstore.sources.pickle_vm.values import Global, Persistent, Record, Reduced
from blobstore.text import quoted

_MAX_LINE = 1 << 16
_MAX_NAME = 1 << 10


class CutShort(CheckpointRefused):
    """The bytes end before the pickle does."""


class State:
    """A pickle being read. The stack belongs to the loop, for each mark begins another."""

    def __init__(self, data: bytes, start: int) -> None:
        self.data = data
        self.at = self.position = start
        """Where the opcode at hand is, and how far it has been read."""
        self.protocol = 0
        self.memo: dict[int, Any] = {}
        self.objects = 0
        """Lists, dicts, tuples, calls and objects made."""
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
            message = f"a line is longer than {_MAX_LINE} bytes"
            raise CheckpointRefused(message)
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
            message = "a global is not named by two texts"
            raise CheckpointRefused(message)
        if len(module) > _MAX_NAME or len(name) > _MAX_NAME:
            message = f"the name of a global is longer than {_MAX_NAME} characters"
            raise CheckpointRefused(message)
        found = self.globals.get((module, name))
        if found is None:
            found = self.globals[module, name] = look_up(module, name, self.at)
        return found

    def call(self, function: Any, arguments: Any, at: int) -> Any:
        """Return the record of a call, or the plain value that it makes."""
        self.objects += 1
        if type(function) is not Global or type(arguments) is not tuple:
            message = "what is called is not a global, or its arguments are no tuple"
            raise CheckpointRefused(message)
        if function.make is not None:
            return self._made(function, arguments)
        if not function.is_function:
            message = f"{quoted(function)} is no function"
            raise CheckpointRefused(message)
        function.is_called = True
        return Reduced(function, arguments, at)

    def new(self, cls: Any, arguments: Any) -> Any:
        """Return the record of an object, or the plain value that its class makes."""
        self.objects += 1
        if type(cls) is not Global or type(arguments) is not tuple:
            message = "the class of an object is not a global, or its arguments are no tuple"
            raise CheckpointRefused(message)
        if cls.make is not None:
            return self._made(cls, arguments)
        if cls.use is None:
            cls.is_class = True
            cls.is_called |= bool(arguments)
        elif cls.use is not Use.RECORD:
            message = f"{quoted(cls)} is not made in this way"
            raise CheckpointRefused(message)
        return self._record(Record(cls, arguments, self.at))

    def _made(self, function: Global, arguments: tuple[Any, ...]) -> Any:
        assert function.make is not None  # noqa: S101 - for the type checker
        try:
            value = function.make(arguments)
        except (TypeError, ValueError):
            message = f"{quoted(function)} is called with other arguments than torch writes"
            raise CheckpointRefused(message) from None
        return self._record(value) if type(value) is Record else value

    def _record(self, record: Record) -> Record:
        if record.cls.use is None:
            self.records.append(record)
        return record
