"""Which client of a frozen model gets memory for a decoded piece, and which is let go if all of it is taken."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from blobstore.core import capacity

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

_DECODED = capacity.DECODED.most
_GRACE_SECONDS = 2.0
"""How long a client may take for a decoded piece, if another one needs the memory."""


class DecodedPieces:
    """The memory of decoded pieces. A response has one at most, and has sent it before it gets another."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(_DECODED)
        self._sending: dict[asyncio.Transport, float] = {}
        """When each client got the piece that it has not taken yet, the earliest first."""

    @contextlib.asynccontextmanager
    async def one(self, transport: asyncio.Transport) -> AsyncIterator[Callable[[], object]]:
        """Give a block the memory of a piece, and a function to call when it begins to send it.

        If none is free, the connection is aborted that has not taken its piece for the longest time.
        """
        clock = asyncio.get_running_loop().time
        while True:
            try:
                async with asyncio.timeout(_GRACE_SECONDS):
                    await self._free.acquire()
                break
            except TimeoutError:
                for slowest, since in [*self._sending.items()][:1]:
                    if clock() - since >= _GRACE_SECONDS:
                        slowest.abort()
                        # Its block, which now fails, frees the memory.
                        del self._sending[slowest]
        try:
            yield lambda: self._sending.__setitem__(transport, clock())
        finally:
            self._sending.pop(transport, None)
            self._free.release()
