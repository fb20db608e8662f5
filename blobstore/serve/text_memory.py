"""The memory of texts: forms that clients send, and answers that they read. All of them share it.

Nobody waits for it, because who waits would hold a text, too. If it is full, a connection is ended that is in the way
of another one: the one that has moved no byte for the longest time, or else the one with the largest text, if that is
larger. So neither silent clients nor those that read nothing stop the small requests of others.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, NamedTuple

from blobstore.core.limits import Crowded

if TYPE_CHECKING:
    from typing import Protocol

    class Content(Protocol):
        """The body of a request."""

        async def readany(self) -> bytes:
            """Return what has arrived, at least a byte; nothing at the end."""
            ...


GRACE_SECONDS: Final = 2.0
"""How long a client may move no byte if another one needs the memory."""


class _Text(NamedTuple):
    size: int
    moved: float
    """When its client has last sent or taken a byte of it."""


class TextMemory:
    """The texts of the connections of one event loop. Each connection has one at a time."""

    def __init__(self, most: int) -> None:
        """Allow so many bytes in all."""
        self._most, self._taken = most, 0
        self._texts: dict[asyncio.Transport, _Text] = {}
        """By connections. The one that has moved a byte last is the last one."""

    def take(self, client: asyncio.Transport, size: int) -> None:
        """Hold more bytes for a connection. Raises Crowded, and holds none for it then."""
        size += self.give(client)
        while self._taken + size > self._most:
            other = self._in_the_way(size)
            if other is None:
                raise Crowded("the texts of other clients")
            self.give(other)
            other.abort()  # its request ends, and lets go of the text
        self._hold(client, size)

    async def read(self, content: Content, client: asyncio.Transport, most: int) -> bytes | None:
        """Return a text that a client sends, which is held; None if it has more than ``most`` bytes. Raises Crowded."""
        text = bytearray()
        while piece := await content.readany():
            if len(text) + len(piece) > most:
                return None
            self.take(client, len(piece))
            text += piece
        return bytes(text)

    def moved(self, client: asyncio.Transport) -> None:
        """Note that a client has sent or taken bytes."""
        if client in self._texts:
            self._hold(client, self.give(client))

    def give(self, client: asyncio.Transport) -> int:
        """Hold nothing for a connection any more, and return how many bytes that were."""
        size = self._texts.pop(client)[0] if client in self._texts else 0
        self._taken -= size
        return size

    def _hold(self, client: asyncio.Transport, size: int) -> None:
        self._texts[client] = _Text(size, asyncio.get_running_loop().time())
        self._taken += size

    def _in_the_way(self, size: int) -> asyncio.Transport | None:
        if not self._texts:
            return None
        idle, text = next(iter(self._texts.items()))
        if asyncio.get_running_loop().time() - text.moved >= GRACE_SECONDS:
            return idle
        largest, text = max(self._texts.items(), key=lambda item: item[1].size)
        return largest if text.size > size else None
