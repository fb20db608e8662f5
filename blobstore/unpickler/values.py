"""The inert values of a pickle, besides numbers, strings, lists, tuples and dicts.

None of these records has any behaviour. They compare and hash by identity, and their representation
follows no references, so that neither a cycle nor a value shared a billion times can hang a reader.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class Use(enum.Enum):
    """The use of a global in a checkpoint."""

    TENSOR = "rebuilds a tensor"
    STORAGE = "type of a storage"
    DTYPE = "element type"
    VALUE = "plain value"
    RECORD = "record of a training program"
    UNREADABLE = "kind of tensor that is not read"

    @property
    def is_function(self) -> bool:
        """Whether a pickle may call such a global. The call becomes a record."""
        return self not in (Use.STORAGE, Use.DTYPE)


class Global:
    """A name that the pickle refers to. It is not imported."""

    __slots__ = ("is_called", "is_class", "is_function", "make", "module", "name", "offset", "use")

    def __init__(
        self,
        module: str,
        name: str,
        offset: int,
        use: Use | None = None,
        make: Callable[[Any], Any] | None = None,
    ) -> None:
        self.module = module
        self.name = name
        self.offset = offset
        """Byte of the pickle of its first use."""
        self.use = use
        """Its use in a checkpoint; None if it is not on the list of known globals."""
        self.make = make
        """Makes a plain value from the arguments of a call; None if calls become records."""
        self.is_function = use is None or use.is_function
        self.is_class = False
        """Whether the pickle makes an object of it without arguments, as of the classes of modules."""
        self.is_called = False
        """Whether the pickle calls it, or makes an object of it with arguments."""

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Reduced:
    """A call that was not executed: the function and its arguments."""

    __slots__ = ("arguments", "function", "offset", "state")

    def __init__(self, function: Global, arguments: tuple[Any, ...], offset: int) -> None:
        self.function = function
        self.arguments = arguments
        self.offset = offset
        self.state: Any = None


_TENSORS = (Use.TENSOR, Use.UNREADABLE)


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor of any kind, supported or not."""
    return type(value) is Reduced and value.function.use in _TENSORS


class Record:
    """An object that was not made: its class, its attributes, and its entries if it is a dict."""

    __slots__ = ("arguments", "cls", "entries", "offset", "state")

    def __init__(self, cls: Global, arguments: tuple[Any, ...], offset: int) -> None:
        self.cls = cls
        self.arguments = arguments
        self.offset = offset
        self.state: Any = None
        self.entries: dict[Any, Any] = {}


class Persistent:
    """A reference to data outside the pickle."""

    __slots__ = ("identifier", "meaning", "offset")

    def __init__(self, identifier: Any, offset: int) -> None:
        self.identifier = identifier
        self.offset = offset
        self.meaning: Any = None
        """The meaning of the identifier, set by the reader of the pickle."""


class Items:
    """The items of a set in the order of the file. A Python set would have to hash them."""

    __slots__ = ("items",)

    def __init__(self, items: list[Any]) -> None:
        self.items = items


class Number(int):
    """An integer as a key, with a random hash like that of a string.

    Integers hash to themselves, modulo a prime, and the hash decides which slots a dict probes. So an
    attacker can choose some megabytes of integer keys such that each insertion takes milliseconds.
    """

    def __hash__(self) -> int:
        return hash(str(self))


class Key:
    """A key that is neither a string nor an integer. No two of them are equal."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value
