"""Cold blobs on their way from the disk into memory: some threads read, others decode what is there.

What is not in the page cache is read in large requests, several at a time, into a few buffers that are used
again and again: memory that was never touched takes as long to come by as the bytes to read. So a
model takes no more memory than it has bytes, but for the buffers. Small blobs are left to one thread:
several would spend more time on passing the interpreter's lock about than on decoding.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from itertools import chain
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

from blobstore.core.files import read_ahead
from blobstore.core.mmap import MappedRegion
from blobstore.errors import BlobDamaged, BlobMissing
from blobstore.store.cold_file import room_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from blobstore.compression.file_view import FileBytes
    from blobstore.core.digest import Digest
    from blobstore.store.cold import ColdBlob
    from blobstore.store.cold_file import ColdFile
    from blobstore.store.local import LocalStore

_REQUEST = 4 << 20
"""Bytes of one request at most."""
_REQUESTS = 8
"""Requests at a time: one alone leaves a disk idle between two."""
_BUFFERS = 2 * _REQUESTS
"""At most half of them wait to be decoded from, so that others are always given back."""
_DECODED = 16 << 20
"""Bytes that a thread decodes at a time at most, about."""
_SMALL = 1 << 18
"""Bytes of the largest of the small blobs, which take longer to open than to decode."""
_TOGETHER = 64
"""Small blobs that are asked for, and then decoded, at a time."""


class Wanted(NamedTuple):
    """A cold blob and where it goes."""

    slot: int
    digest: Digest
    size: int


class _Opened(NamedTuple):
    blob: ColdBlob
    is_cached: bool
    """Whether its file is in the page cache."""
    source: FileBytes | None
    """All bytes of that, if they were read."""
    memory: memoryview | None
    """The buffer that they are in."""


class ParallelDecoder:
    """Decodes cold blobs of a store into the slots of a region."""

    def __init__(
        self,
        store: LocalStore,
        region: MappedRegion,
        *,
        past_cache: bool,
        tell: Callable[[int], object],
    ) -> None:
        """Begin nothing yet.

        Args:
            store: where the blobs are.
            region: where they go.
            past_cache: leave no copy of what is read in the page cache, but for small blobs.
            tell: gets the numbers of bytes that were decoded, from any thread.
        """
        self._store = store
        self._region = region
        self._past_cache = past_cache
        self._tell = tell
        self._bases: set[Digest] = set()
        self._closings: list[Callable[[], object]] = []
        """Of all files: who keeps an error shall not keep them open."""
        size = room_for(_REQUEST)
        self._memory = MappedRegion([size] * _BUFFERS, filled=True)
        self._free: SimpleQueue[memoryview] = SimpleQueue()
        for number in range(_BUFFERS):
            self._free.put(self._memory.room(number, 0, size))

    def run(self, wanted: Sequence[Wanted]) -> list[int]:
        """Decode blobs; return the slots of those that are not cold any more.

        Raises:
            BlobDamaged: one of them is not whole, or its base is not.
            StoreError: one cannot be read.
        """
        if len(wanted) == 1 and wanted[0].size <= (_SMALL if self._past_cache else _REQUEST):
            # One that is read and decoded at once either way: threads would only have to start.
            self._ask_for(wanted)
            return self._decode_here(wanted)
        small = [blob for blob in wanted if blob.size <= _SMALL]
        large = [blob for blob in wanted if blob.size > _SMALL]
        missing: list[int] = []
        asides: list[Future[list[int]]] = []
        decoding: deque[Future[None]] = deque()
        # Threads end before the memory that they write to is closed to writing.
        with (
            contextlib.ExitStack() as making,
            self._files_closed(),
            _waited_for(chain(asides, decoding)),
            _threads(_REQUESTS) as readers,
            _threads(os.cpu_count() or 1) as decoders,
            _threads(1) as alone,
        ):
            for some in _batches(small):
                asking = readers.submit(self._ask_for, some)
                asides.append(alone.submit(self._decode_small, some, asking))
            for slot, opening in self._openings(large, readers):
                try:
                    opened = opening.result()
                except BlobMissing:
                    missing.append(slot)
                    continue
                room = making.enter_context(self._region.making(slot, opened.blob.size))
                decoding.extend(self._decodings(opened, room, readers, decoders))
                while decoding and decoding[0].done():
                    decoding.popleft().result()
            for work in decoding:
                work.result()
            missing += chain.from_iterable(aside.result() for aside in asides)
        return missing

    @contextlib.contextmanager
    def _files_closed(self) -> Iterator[None]:
        try:
            yield
        finally:
            for close in self._closings:
                close()

    def _ask_for(self, wanted: Sequence[Wanted]) -> None:
        for blob in wanted:
            read_ahead(self._store.cold_path(blob.digest))

    def _decode_small(self, wanted: Sequence[Wanted], asking: Future[None]) -> list[int]:
        asking.result()
        return self._decode_here(wanted)

    def _decode_here(self, wanted: Sequence[Wanted]) -> list[int]:
        """Decode blobs that were asked for; return the slots of those that are not cold any more."""
        missing = []
        with contextlib.ExitStack() as making:
            rooms = []
            for slot, digest, size in wanted:
                try:
                    blob = self._store.open_cold(digest, size)
                except BlobMissing:
                    missing.append(slot)
                    continue
                self._ask_for_base(blob)
                rooms.append((blob, making.enter_context(self._region.making(slot, size))))
            for blob, room in rooms:
                self._decode(blob, 0, room)
        return missing

    def _openings(
        self, wanted: Sequence[Wanted], readers: ThreadPoolExecutor
    ) -> Iterator[tuple[int, Future[_Opened]]]:
        """Yield the slot of each blob, which is being opened, while the next ones are too."""
        ahead: deque[tuple[int, Future[_Opened]]] = deque()
        for slot, digest, size in wanted:
            if len(ahead) == _REQUESTS:
                yield ahead.popleft()
            ahead.append((slot, readers.submit(self._open, digest, size, self._free.get())))
        yield from ahead

    def _open(self, digest: Digest, size: int, memory: memoryview) -> _Opened:
        is_cached = is_whole = False
        source: FileBytes | None = None

        def read(file: ColdFile) -> FileBytes | None:
            nonlocal is_cached, is_whole, source
            self._closings.append(file.close)
            is_cached = file.is_cached()
            if not is_cached:
                if self._past_cache:
                    file.pass_cache()
                source = file.read_ends(memory)
                is_whole = file.fits(memory)
            if is_cached or is_whole:
                file.close()
            return source

        try:
            blob = self._store.open_cold(digest, size, read)
            self._ask_for_base(blob)
        except BaseException:
            self._free.put(memory)
            raise
        if is_whole:
            return _Opened(blob, is_cached, source, memory)
        self._free.put(memory)
        return _Opened(blob, is_cached, None, None)

    def _ask_for_base(self, blob: ColdBlob) -> None:
        if blob.base is not None and blob.base not in self._bases:
            self._bases.add(blob.base)
            read_ahead(self._store.blob_path(blob.base))

    def _decodings(
        self,
        opened: _Opened,
        room: memoryview,
        readers: ThreadPoolExecutor,
        decoders: ThreadPoolExecutor,
    ) -> Iterator[Future[None]]:
        """Begin to decode a blob, as soon as there are buffers for it."""
        blob = opened.blob
        if opened.source is not None:
            yield decoders.submit(self._decode, blob, 0, room, opened.source, opened.memory)
            return
        for cut in blob.container.cuts(_DECODED, _REQUEST):
            part = room[cut.begin : cut.end]
            if opened.is_cached or cut.stored_end - cut.stored_begin > _REQUEST:
                yield decoders.submit(self._decode, blob, cut.begin, part)
                continue
            memory = self._free.get()
            fetching = readers.submit(blob.fetch, cut, memory)
            yield decoders.submit(self._decode, blob, cut.begin, part, fetching, memory)

    def _decode(
        self,
        blob: ColdBlob,
        begin: int,
        room: memoryview,
        source: FileBytes | Future[FileBytes] | None = None,
        memory: memoryview | None = None,
    ) -> None:
        """Decode bytes from ``begin`` on into ``room``, and give back the buffer of the source."""
        try:
            blob.read_into(begin, room, source.result() if isinstance(source, Future) else source)
        except BlobDamaged:
            # Since it was opened it may have been thawed, or frozen another way, and its base removed.
            self._store.read_into(blob.digest, blob.size, begin, room)
        finally:
            if memory is not None:
                self._free.put(memory)
        self._tell(len(room))


def _batches(wanted: Sequence[Wanted]) -> list[Sequence[Wanted]]:
    return [wanted[begin : begin + _TOGETHER] for begin in range(0, len(wanted), _TOGETHER)]


@contextlib.contextmanager
def _waited_for(works: Iterable[Future[Any]]) -> Iterator[None]:
    """Let what was begun end, though Ctrl-C comes again when threads are waited for.

    Otherwise they would write to memory that is closed to that when the blobs are wanted again, and
    close it when others write to it.
    """
    try:
        yield
    finally:
        for work in works:
            while not work.done():
                with contextlib.suppress(KeyboardInterrupt, CancelledError):
                    work.exception()


@contextlib.contextmanager
def _threads(count: int) -> Iterator[ThreadPoolExecutor]:
    """Give threads that are waited for; on an error they end early."""
    pool = ThreadPoolExecutor(count, thread_name_prefix="blobstore")
    try:
        yield pool
    except BaseException:  # also Ctrl-C
        pool.shutdown(cancel_futures=True)
        raise
    pool.shutdown()
