"""Sends the parts of a response: ranges of files by sendfile, others, and all over TLS, as bytes.

Nothing that may wait for a disk or a processor runs on the thread of the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, cast

from blobstore.core import capacity
from blobstore.core.system import is_in_page_cache
from blobstore.errors import BlobstoreError, StoreError
from blobstore.serve.blob_reader import OpenBlob, read_ahead
from blobstore.serve.decoded_pieces import DecodedPieces
from blobstore.serve.messages import BlobPart, FilePart, StoredPart
from blobstore.serve.shared_work import Busy, SharedWork
from blobstore.store.cold import LOOKS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from typing import Protocol

    from blobstore.serve.blob_reader import BlobReader
    from blobstore.serve.messages import Part

    class Writer(Protocol):
        """A connection that bytes are written to."""

        async def write(self, data: bytes | memoryview) -> None:
            """Send bytes, and wait while too many are buffered."""
            ...


WRITTEN = 256 << 10
"""Bytes of a response that are buffered for a client that does not read."""
_PIECE = WRITTEN // 2
"""Bytes that are written at once: TLS has encrypted a piece, and buffers it, when the next one waits."""
WINDOW = 4 << 20
"""Bytes that are sent between two looks at whether the client takes them."""
_SMALL = 64 << 10
"""Ranges of files below this are read: sendfile would cost more than the copy."""


class BodySender:
    """Sends bodies. One for each server.

    It waits for clients without a limit: the server cancels it for a client that leaves or takes nothing.
    """

    def __init__(self, blobs: BlobReader) -> None:
        self._blobs = blobs
        self._reads = SharedWork(capacity.SEND)
        # More threads than processors would only take turns with each other's caches and locks.
        self._decodes = SharedWork(capacity.DECODE)
        self._verifications = SharedWork(capacity.VERIFY)
        self._pieces = DecodedPieces()

    def close(self) -> None:
        """Begin no more work on threads."""
        self._reads.close()
        self._decodes.close()
        self._verifications.close()

    async def first(self, parts: Sequence[Part]) -> None:
        """Check the first blob of a body, before anything is sent. Raises as :meth:`send`."""
        for part in parts[:2]:  # a header may come before it
            if isinstance(part, BlobPart | StoredPart):
                (await self._open(part)).close()
                return

    async def send(
        self,
        parts: Sequence[Part],
        writer: Writer,
        transport: asyncio.Transport,
        on_sent: Callable[[int], object],
    ) -> None:
        """Send the parts of a body; ``on_sent`` is called with the number of bytes of each piece.

        Raises:
            BlobMissing, BlobDamaged, StoreError: a blob is missing or damaged. No wrong byte was sent.
            OSError: the client has left, or a file cannot be read.
        """
        for number, part in enumerate(parts):
            if isinstance(part, bytes):
                await _write(writer, part, on_sent)
                continue
            if isinstance(part, FilePart):
                await self._send_arriving(part, writer, transport, on_sent)
                continue
            blob = await self._open(part)
            try:
                with self._verified_ahead(parts, number + 1):
                    if blob.descriptor is None:
                        await self._send_cold(cast("BlobPart", part), writer, transport, on_sent)
                    else:
                        stops = [part.begin, part.begin + part.length]
                        if number + 1 == len(parts) and part.length >= _SMALL:
                            # The last byte waits until all before it are known to be right.
                            stops.insert(1, stops[1] - 1)
                        for begin, end in pairwise(stops):
                            await self._send_file(blob, begin, end, writer, transport, on_sent)
            except (BlobstoreError, OSError) as error:
                is_of_client = isinstance(error, ConnectionError | TimeoutError)
                if not is_of_client and not transport.is_closing():
                    key = type(part), *part[:2]
                    await self._verifications.result(key, self._blobs.verify_again, part)
                raise
            finally:
                blob.close()

    async def _open(self, part: BlobPart | StoredPart) -> OpenBlob:
        """Open a blob whose bytes are right."""
        if isinstance(part, StoredPart):
            return self._blobs.open_stored(part)
        for _ in range(LOOKS):
            blob = self._blobs.open(part)
            if blob.is_verified:
                return blob
            try:
                with self._verification(part) as running:
                    state = await asyncio.shield(running)
            except BaseException:
                blob.close()
                raise
            if state == blob.state:
                return blob
            blob.close()  # it was frozen, thawed or replaced in the meantime
        raise StoreError(f"blob {part.digest} changes again and again")

    def _verification(self, part: BlobPart) -> AbstractContextManager[asyncio.Future[object]]:
        """Yield the check of a blob, which all responses share."""
        blob = part.digest, part.size
        return self._verifications.joined(blob, self._blobs.verify, *blob)

    @contextlib.contextmanager
    def _verified_ahead(self, parts: Sequence[Part], number: int) -> Iterator[None]:
        """Check the next blob while the block sends this one."""
        part = parts[number] if number < len(parts) else b""
        with contextlib.ExitStack() as stack:
            # Faults are reported when it is sent, and a change since it was found intact is noticed then.
            with contextlib.suppress(Busy):
                if isinstance(part, BlobPart) and not self._blobs.knows(part):
                    stack.enter_context(self._verification(part))
            yield

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
                # Before the look: bytes that arrive after it set the event again.
                changed.clear()
                ready = min(begin + part.file.readable(begin), end)
                if ready > begin:
                    arriving = OpenBlob(part.file.descriptor, None, is_verified=False)
                    await self._send_file(arriving, begin, ready, writer, transport, on_sent)
                    begin = ready
                    continue
                with contextlib.suppress(TimeoutError):  # bytes may be there that were not reported
                    async with asyncio.timeout(part.file.patience):
                        await changed.wait()

    async def _send_file(
        self,
        blob: OpenBlob,
        first: int,
        end: int,
        writer: Writer,
        transport: asyncio.Transport,
        on_sent: Callable[[int], object],
    ) -> None:
        """Send a range of a file. Raises BlobDamaged before its last bytes if somebody writes to it."""
        descriptor = cast("int", blob.descriptor)
        for begin in range(first, end, WINDOW):
            count = min(WINDOW, end - begin)
            if not is_in_page_cache(descriptor, begin, count):
                # If the client leaves, this descriptor is closed, and the thread may read another file, for nobody.
                await self._reads.call(read_ahead, descriptor, begin, count)
            if count >= _SMALL and await _sendfile(transport, descriptor, begin, count):
                blob.check_same()
                on_sent(count)
                continue
            for place in range(begin, begin + count, _PIECE):
                size = min(_PIECE, begin + count - place)
                data = os.pread(descriptor, size, place)
                if len(data) != size:  # the file has become shorter
                    raise ConnectionAbortedError("a blob ended early")
                blob.check_same()
                await _write(writer, data, on_sent)

    async def _send_cold(
        self,
        part: BlobPart,
        writer: Writer,
        transport: asyncio.Transport,
        on_sent: Callable[[int], object],
    ) -> None:
        for piece in await self._decodes.call(self._blobs.cold_pieces, part):
            decode = partial(self._decodes.call, piece.decode)
            async with self._pieces.one(transport, piece.key, decode) as data:
                if is_encrypted(transport):
                    await _write(writer, data, on_sent)
                else:
                    await _send_bytes(transport, data)
                    on_sent(piece.size)
                del data  # before it is another's turn


def is_encrypted(transport: asyncio.BaseTransport) -> bool:
    """Return whether a connection has TLS. Then nothing else may write to its socket."""
    return transport.get_extra_info("sslcontext") is not None


async def _write(writer: Writer, data: bytes | bytearray, on_sent: Callable[[int], object]) -> None:
    """Write bytes in pieces, because those that the client does not take are copied."""
    for begin in range(0, len(data), _PIECE):
        piece = memoryview(data)[begin : begin + _PIECE]
        await writer.write(piece)
        on_sent(len(piece))
        await asyncio.sleep(0)  # see _send: a body may have thousands of pieces


async def _sendfile(transport: asyncio.Transport, descriptor: int, begin: int, count: int) -> bool:
    """Send a range of a file without a copy; return False, and send nothing, if the system cannot, or over TLS.

    The loop's own sendfile takes twice the time, because it pauses and resumes reading for each range.
    """
    if is_encrypted(transport):
        return False
    sent = 0

    def send(client: int) -> int:
        nonlocal sent
        done = os.sendfile(client, descriptor, begin + sent, count - sent)
        if not done:
            raise ConnectionAbortedError("a blob ended early")
        sent += done
        return count - sent

    try:
        await _send(transport, send)
    except OSError as error:
        if sent or error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise
        return False
    return True


async def _send_bytes(transport: asyncio.Transport, data: bytearray) -> None:
    """Send bytes. The transport would copy what the client does not take at once."""
    left = memoryview(data)

    def send(client: int) -> int:
        nonlocal left
        left = left[os.write(client, left) :]
        return len(left)

    await _send(transport, send)


async def _send(transport: asyncio.Transport, send: Callable[[int], int]) -> None:
    """Let ``send`` write to the socket of a connection until it returns that nothing is left."""
    client = transport.get_extra_info("socket").fileno()
    while transport.get_write_buffer_size():  # the head of the response comes first
        await _writable(client)
    left = 1
    while left:
        try:
            left = send(client)
        except BlockingIOError:
            await _writable(client)
    await asyncio.sleep(0)  # others are next, however fast this client is


async def _writable(client: int) -> None:
    """Wait until a connection takes bytes."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    # A duplicate, because the loop refuses to watch the descriptor of a transport.
    own = os.dup(client)
    try:
        loop.add_writer(own, _set, ready)
        await ready
    finally:
        loop.remove_writer(own)
        os.close(own)


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
