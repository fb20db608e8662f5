"""Clients that wait for a change: a thread looks for it once, for all that wait for the same one."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Final

from blobstore.core.capacity import WATCH
from blobstore.errors import BlobstoreError
from blobstore.serve.shared_work import SharedWork

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_SECONDS: Final = 0.25
"""Between two looks."""


class Watches:
    """The changes that clients wait for. It belongs to one event loop."""

    def __init__(self) -> None:
        self._work = SharedWork(WATCH)
        self._waiting: dict[Callable[[], bool], set[asyncio.Future[bool]]] = {}
        self._looks: asyncio.Task[None] | None = None
        self._is_closed = False

    async def wait(self, is_over: Callable[[], bool], seconds: float) -> bool:
        """Return True when ``is_over`` does or fails, and False after so many seconds, or when the server ends.

        Equal functions are called once for all clients that wait.
        """
        if self._is_closed:
            return False
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[bool] = loop.create_future()
        waiting = self._waiting.setdefault(is_over, set())
        waiting.add(ended)
        self._looks = self._looks or loop.create_task(self._look())
        timer = loop.call_later(seconds, partial(_end, [ended], is_over=False))
        try:
            return await ended
        finally:
            timer.cancel()
            waiting.discard(ended)

    def close(self) -> None:
        """End all waits, and those that are still to come."""
        self._is_closed = True
        for waiting in self._waiting.values():
            _end(waiting, is_over=False)
        if self._looks is not None:
            self._looks.cancel()
        self._work.close()

    async def _look(self) -> None:
        try:
            while self._waiting:
                await asyncio.sleep(_SECONDS)
                for over in await self._work.call(_changed, list(self._waiting)):
                    # Only this task removes entries, so each that was asked about is still there.
                    _end(self._waiting.pop(over), is_over=True)
                for unwanted in [one for one, waiting in self._waiting.items() if not waiting]:
                    del self._waiting[unwanted]
        finally:
            # No `await` lies between the last look at the table and this, so no new wait is missed.
            self._looks = None


def _changed(asked: Iterable[Callable[[], bool]]) -> list[Callable[[], bool]]:
    return [one for one in asked if _is_over(one)]


def _is_over(asked: Callable[[], bool]) -> bool:
    try:
        return asked()
    except (BlobstoreError, OSError):  # the next answer says what is wrong
        return True


def _end(waiting: Iterable[asyncio.Future[bool]], *, is_over: bool) -> None:
    for one in waiting:
        if not one.done():
            one.set_result(is_over)
