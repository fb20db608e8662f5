"""What a pickle becomes: numbers, texts, lists, tuples, dicts with plain keys, and these records.

None of them does anything. They compare and hash by identity, and have no representation that
follows references, so that neither a loop nor a value shared a billion times can hang a reader.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from blobstore.sources.unpickler.globals import Use


class Global:
    """A name that the pickle asks for; nothing is imported."""

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
        """Byte of the pickle at which it is first asked for."""
        self.use = use
        """What a checkpoint uses it for; None if it is not on the list."""
        self.make = make
        """Makes a plain value of a call's arguments; None for calls that stay inert."""
        self.is_function = use is None or use.is_function
        self.is_class = False
        """An object without arguments was made of it, as of the classes of modules."""
        self.is_called = False
        """It was called, or an object was made of it with arguments."""

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Reduced:
    """A call that was not made: the function and its arguments."""

    __slots__ = ("arguments", "function", "offset", "state")

    def __init__(self, function: Global, arguments: tuple[Any, ...], offset: int) -> None:
        self.function = function
        self.arguments = arguments
        self.offset = offset
        self.state: Any = None


class Record:
    """An object that was not made: its class, its attributes, and its entries if it has any."""

    __slots__ = ("arguments", "cls", "entries", "offset", "state")

    def __init__(self, cls: Global, arguments: tuple[Any, ...], offset: int) -> None:
        self.cls = cls
        self.arguments = arguments
        self.offset = offset
        self.state: Any = None
        self.entries: dict[Any, Any] = {}


class Persistent:
    """Data outside the pickle, by the identifier that the pickle gives."""

    __slots__ = ("identifier", "meaning", "offset")

    def __init__(self, identifier: Any, offset: int) -> None:
        self.identifier = identifier
        self.offset = offset
        self.meaning: Any = None
        """What the reader of the pickle has found the identifier to mean."""


class Items:
    """The items of a set, in the order of the file: a set would have to hash them."""

    __slots__ = ("items",)

    def __init__(self, items: list[Any]) -> None:
        self.items = items


class Number(int):
    """An integer as a key. Its hash depends on chance, as a text's does.

    Integers hash to themselves, modulo a prime, and a dict looks for room in places that follow from
    the hash: some megabytes of keys can be chosen in such a way that each takes milliseconds.
    """

    def __hash__(self) -> int:
        return hash(str(self))


class Key:
    """A key that is no text and no integer; two of them are never the same key."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value
