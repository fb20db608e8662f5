"""Sends the parts of a response: ranges of files by sendfile, others as bytes.

Nothing that may wait for a disk or a processor runs on the thread of the event loop. Every window has a time in
which the client has to take it, so that a slow reader does not keep a connection for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING, Any, cast

from blobstore.core.system import is_in_page_cache
from blobstore.errors import BlobstoreError, StoreError
from blobstore.serve.blob_reader import read_ahead
from blobstore.serve.messages import BlobPart, FilePart, StoredPart
from blobstore.store.cold import LOOKS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Executor
    from typing import Protocol

    from blobstore.serve.blob_reader import BlobReader, OpenBlob
    from blobstore.serve.messages import Part

    class Writer(Protocol):
        """What sends bytes."""

        async def write(self, data: bytes) -> None:
            """Send bytes, and wait while too many are waiting."""
            ...


WINDOW = 4 << 20
"""Bytes that the client has :data:`STALL_SECONDS` for."""
STALL_SECONDS = 120.0
_SMALL = 64 << 10
"""Ranges of files below this are read: sendfile would cost more than the copy."""
_LOOK_SECONDS = 1.0
"""How often a response that waits for an upstream looks whether its client is still there."""
_DECODED = 32
"""Pieces of cold blobs that are in memory at once, in all responses together."""


class BodySender:
    """Sends bodies. One for each server."""

    def __init__(self, blobs: BlobReader, executor: Executor) -> None:
        self._blobs = blobs
        self._executor = executor
        self._decoding = asyncio.Semaphore(_DECODED)
        self._verifying: dict[object, asyncio.Future[object]] = {}

    async def first(self, parts: Sequence[Part]) -> None:
        """Check the first blob of a body, before anything is sent. Raises as :meth:`send`."""
        for part in parts[:2]:  # a header may come before it
            if isinstance(part, BlobPart | StoredPart):
                descriptor = await self._open(part)
                if descriptor is not None:
                    os.close(descriptor)
                return

    async def send(
        self,
        parts: Sequence[Part],
        writer: Writer,
        transport: asyncio.Transport,
        on_sent: Callable[[int], object],
    ) -> None:
        """Send the parts of a body; ``on_sent`` gets the bytes of each piece that is on its way.

        Raises:
            BlobMissing, BlobDamaged, StoreError: a blob is missing or damaged. No wrong byte was sent.
            ConnectionError: the client has left.
            TimeoutError: it takes too long.
        """
        for number, part in enumerate(parts):
            if isinstance(part, bytes):
                async with asyncio.timeout(STALL_SECONDS):
                    await writer.write(part)
                on_sent(len(part))
                continue
            if isinstance(part, FilePart):
                await self._send_arriving(part, writer, transport, on_sent)
                continue
            descriptor = await self._open(part)
            self._verify_ahead(parts, number + 1)
            if descriptor is None:
                await self._send_cold(cast("BlobPart", part), writer, on_sent)
                continue
            try:
                end = part.begin + part.length
                await self._send_file(descriptor, part.begin, end, writer, transport, on_sent)
            finally:
                os.close(descriptor)

    async def _open(self, part: BlobPart | StoredPart) -> int | None:
        """Open a file whose bytes are right, and return its descriptor; None if they have to be decoded."""
        if isinstance(part, StoredPart):
            return self._blobs.open_stored(part)
        for _ in range(LOOKS):
            blob = self._blobs.open(part)
            if blob.is_verified:
                return blob.descriptor
            try:
                state = await asyncio.shield(self._verification(part))
            except BaseException:
                _close(blob)
                raise
            if state == blob.state:
                return blob.descriptor
            _close(blob)  # it was frozen, thawed or replaced in the meantime
        raise StoreError(f"blob {part.digest} changes again and again")

    def _verification(self, part: BlobPart) -> asyncio.Future[object]:
        """Return the check of a blob, of which all responses share one."""
        key = (part.digest, part.size)
        running = self._verifying.get(key)
        if running is None:
            loop = asyncio.get_running_loop()
            running = loop.run_in_executor(self._executor, self._blobs.verify, *key)
            self._verifying[key] = running

            def forget(done: asyncio.Future[object]) -> None:
                del self._verifying[key]
                if not done.cancelled():
                    done.exception()  # read it: maybe nobody waits for this check

            running.add_done_callback(forget)
        return running

    def _verify_ahead(self, parts: Sequence[Part], number: int) -> None:
        """Begin to check the next blob, while this one is sent."""
        part = parts[number] if number < len(parts) else b""
        if not isinstance(part, BlobPart):
            return
        try:
            blob = self._blobs.open(part)
        except (BlobstoreError, OSError):  # reported when the blob is sent
            return
        _close(blob)
        if not blob.is_verified:
            self._verification(part)

    async def _send_arriving(
        self,
        part: FilePart,
        writer: Writer,
        transport: asyncio.Transport,
        on_sent: Callable[[int], object],
    ) -> None:
        """Send a range of a file as it arrives. Raises BlobstoreError if it will not arrive."""
        loop = asyncio.get_running_loop()
        begin, end = part.begin, part.begin + part.length
        changed = asyncio.Event()
        with part.file.calling(lambda: loop.call_soon_threadsafe(changed.set)):
            while begin < end:
                changed.clear()
                ready = min(begin + part.file.readable(begin), end)
                if ready > begin:
                    descriptor = part.file.descriptor
                    await self._send_file(descriptor, begin, ready, writer, transport, on_sent)
                    begin = ready
                    continue
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), _LOOK_SECONDS)
                if transport.is_closing():
                    raise ConnectionResetError("the client has left")

    async def _send_file(
        self,
        descriptor: int,
        first: int,
        end: int,
        writer: Writer,
        transport: asyncio.Transport,
        on_sent: Callable[[int], object],
    ) -> None:
        loop = asyncio.get_running_loop()
        with os.fdopen(descriptor, "rb", buffering=0, closefd=False) as file:
            for begin in range(first, end, WINDOW):
                count = min(WINDOW, end - begin)
                if not is_in_page_cache(descriptor, begin, count):
                    await loop.run_in_executor(self._executor, read_ahead, descriptor, begin, count)
                async with asyncio.timeout(STALL_SECONDS):
                    if count < _SMALL:
                        data = os.pread(descriptor, count, begin)
                        await writer.write(data)
                        sent = len(data)
                    else:
                        sent = await loop.sendfile(transport, file, begin, count)
                if sent != count:  # the file has become shorter
                    raise ConnectionAbortedError("a blob ended early")
                on_sent(sent)

    async def _send_cold(
        self, part: BlobPart, writer: Writer, on_sent: Callable[[int], object]
    ) -> None:
        loop = asyncio.get_running_loop()
        pieces = self._blobs.cold_pieces(part)
        waiting: asyncio.Future[Any] | None = None

        async def decode() -> asyncio.Future[Any]:
            await self._decoding.acquire()
            future = loop.run_in_executor(self._executor, next, pieces, None)
            future.add_done_callback(lambda done: done.cancelled() or done.exception())
            return future

        held = 0
        try:
            waiting, held = await decode(), 1
            while (piece := await waiting) is not None:
                waiting, held = await decode(), held + 1
                async with asyncio.timeout(STALL_SECONDS):
                    await writer.write(piece)
                on_sent(len(piece))
                self._decoding.release()
                held -= 1
        finally:
            if waiting is not None and not waiting.done():
                await asyncio.wait([waiting])  # a generator cannot be left while it runs
            for _ in range(held):
                self._decoding.release()


def _close(blob: OpenBlob) -> None:
    if blob.descriptor is not None:
        os.close(blob.descriptor)
