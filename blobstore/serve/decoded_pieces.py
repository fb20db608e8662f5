"""The decoded pieces of frozen models in memory: who shares one, and which client is let go if all memory is taken."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blobstore.core import capacity

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Hashable

_DECODED = capacity.DECODED.most
_GRACE_SECONDS = 2.0
"""How long a client may take for a decoded piece, if another one needs the memory."""


@dataclass(slots=True, eq=False)
class _Piece:
    decoding: asyncio.Task[bytearray]
    users: int = 0


class DecodedPieces:
    """The memory of decoded pieces. A response has one at most, and has sent it before it gets another.

    Responses that need the same piece at the same time share it: a model that many clients load is decoded once.
    """

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(_DECODED)
        self._pieces: dict[Hashable, _Piece] = {}
        self._sending: dict[asyncio.Transport, tuple[Hashable, float]] = {}
        """The piece of each client that has not taken it yet, and since when, the earliest first."""

    @contextlib.asynccontextmanager
    async def one(
        self,
        transport: asyncio.Transport,
        key: Hashable,
        decode: Callable[[], Awaitable[bytearray]],
    ) -> AsyncIterator[bytearray]:
        """Give a block the piece with this key, which nobody may change. It is decoded unless others have it.

        Raises as ``decode``.
        """
        piece = self._pieces.get(key)
        if piece is None:
            piece = self._pieces[key] = _Piece(asyncio.create_task(self._decoded(decode)))
        piece.users += 1
        try:
            data = await asyncio.shield(piece.decoding)
            self._sending[transport] = key, asyncio.get_running_loop().time()
            yield data
        finally:
            self._sending.pop(transport, None)
            piece.users -= 1
            if not piece.users:
                del self._pieces[key]
                # What has failed, or is cancelled now, gives its memory back itself.
                if not piece.decoding.cancel() and piece.decoding.exception() is None:
                    self._free.release()

    async def _decoded(self, decode: Callable[[], Awaitable[bytearray]]) -> bytearray:
        await self._memory()
        try:
            return await decode()
        except BaseException:
            self._free.release()
            raise

    async def _memory(self) -> None:
        """Wait for the memory of a piece. If none is free, end those that have not taken a piece for the longest time."""
        while True:
            try:
                async with asyncio.timeout(_GRACE_SECONDS):
                    await self._free.acquire()
            except TimeoutError:
                latest = asyncio.get_running_loop().time() - _GRACE_SECONDS
                slowest = next(iter(self._sending.values()), (None,))[0]
                for client, (key, since) in list(self._sending.items()):
                    if key == slowest and since <= latest:
                        client.abort()
                        # Its block, which now fails, no longer uses the piece.
                        del self._sending[client]
            else:
                return
