"""Cold blobs decompressed into memory: some threads read files, others decode what was read.

Data outside the page cache is read in large, concurrent requests into a few buffers that are used
again and again: to allocate fresh memory takes as long as to read the bytes. So a model needs no
memory beyond its own bytes and these buffers. One thread decodes all small blobs: several would
spend more time on passing the interpreter's lock around than on decoding.
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
from blobstore.store.cold_file import buffer_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from blobstore.compression.file_view import FileBytes
    from blobstore.core.digest import Digest
    from blobstore.store.cold import ColdBlob
    from blobstore.store.cold_file import ColdFile
    from blobstore.store.protocols import BlobAccess

_REQUEST = 4 << 20
"""Maximum bytes per request."""
_REQUESTS = 8
"""Concurrent requests: with one at a time, a disk is idle between two requests."""
_BUFFERS = 2 * _REQUESTS
"""At most half of them wait to be decoded, so that others are always released."""
_DECODED = 16 << 20
"""Maximum bytes that a thread decodes at a time, approximately."""
_SMALL = 1 << 18
"""Blobs of at most so many bytes take longer to open than to decode."""
_BATCH = 64
"""Small blobs that are requested together, and then decoded."""


class ColdSlot(NamedTuple):
    """A cold blob, and the slot that it is decoded into."""

    slot: int
    digest: Digest
    size: int


class _Opened(NamedTuple):
    blob: ColdBlob
    is_cached: bool
    """Whether its file is in the page cache."""
    source: FileBytes | None
    """The whole file, if it was read."""
    buffer: memoryview | None
    """The buffer that holds the file."""


class ParallelDecoder:
    """Decodes cold blobs of a store into the slots of a region.

    Args:
        store: the store that holds the blobs.
        region: the memory to decode into.
        past_cache: whether to leave no copy of large files in the page cache.
        report: called with the number of bytes that were decoded, from any thread.
    """

    def __init__(
        self,
        store: BlobAccess,
        region: MappedRegion,
        *,
        past_cache: bool,
        report: Callable[[int], object],
    ) -> None:
        self._store = store
        self._region = region
        self._past_cache = past_cache
        self._report = report
        self._bases: set[Digest] = set()
        self._open_files = contextlib.ExitStack()
        """Closes all files. An error that is kept must not keep files open."""
        size = buffer_size(_REQUEST)
        self._memory = MappedRegion([size] * _BUFFERS, filled=True)
        self._free: SimpleQueue[memoryview] = SimpleQueue()
        for number in range(_BUFFERS):
            self._free.put(self._memory.slot_view(number, 0, size))

    def run(self, blobs: Sequence[ColdSlot]) -> list[int]:
        """Decode blobs. Returns the slots of those that are no longer cold.

        Raises:
            BlobDamaged: a blob or its base is damaged.
            StoreError: a blob cannot be read.
        """
        if len(blobs) == 1 and blobs[0].size <= (_SMALL if self._past_cache else _REQUEST):
            # It is read and decoded in one step, for which starting threads is not worth it.
            self._request(blobs)
            return self._decode_batch(blobs)
        small = [blob for blob in blobs if blob.size <= _SMALL]
        large = [blob for blob in blobs if blob.size > _SMALL]
        thawed: list[int] = []
        batches: list[Future[list[int]]] = []
        decoding: deque[Future[None]] = deque()
        # Threads end before the memory that they write to becomes read-only.
        with (
            contextlib.ExitStack() as writable,
            self._open_files,
            _completed(chain(batches, decoding)),
            _threads(_REQUESTS) as readers,
            _threads(os.cpu_count() or 1) as decoders,
            _threads(1) as batch_decoder,
        ):
            for begin in range(0, len(small), _BATCH):
                batch = small[begin : begin + _BATCH]
                requesting = readers.submit(self._request, batch)
                batches.append(batch_decoder.submit(self._decode_batch, batch, requesting))
            for slot, opening in self._open_ahead(large, readers):
                try:
                    opened = opening.result()
                except BlobMissing:
                    thawed.append(slot)
                    continue
                view = writable.enter_context(self._region.writable_slot(slot, opened.blob.size))
                decoding.extend(self._start_decoding(opened, view, readers, decoders))
                while decoding and decoding[0].done():
                    decoding.popleft().result()
            for work in decoding:
                work.result()
            thawed += chain.from_iterable(batch.result() for batch in batches)
        return thawed

    def _request(self, blobs: Sequence[ColdSlot]) -> None:
        """Ask the kernel to read the files of blobs, without waiting for that."""
        for blob in blobs:
            read_ahead(self._store.cold_path(blob.digest))

    def _request_base(self, blob: ColdBlob) -> None:
        if blob.base is not None and blob.base not in self._bases:
            self._bases.add(blob.base)
            read_ahead(self._store.blob_path(blob.base))

    def _decode_batch(
        self, blobs: Sequence[ColdSlot], requesting: Future[None] | None = None
    ) -> list[int]:
        """Decode blobs that were requested. Returns the slots of those that are no longer cold."""
        if requesting is not None:
            requesting.result()
        thawed = []
        with contextlib.ExitStack() as writable:
            opened = []
            for slot, digest, size in blobs:
                try:
                    blob = self._store.open_cold(digest, size)
                except BlobMissing:
                    thawed.append(slot)
                    continue
                self._request_base(blob)
                view = writable.enter_context(self._region.writable_slot(slot, size))
                opened.append((blob, view))
            for blob, view in opened:
                self._decode(blob, 0, view)
        return thawed

    def _open_ahead(
        self, blobs: Sequence[ColdSlot], readers: ThreadPoolExecutor
    ) -> Iterator[tuple[int, Future[_Opened]]]:
        """Yield the slot of each blob, which is being opened, while the next ones are too."""
        ahead: deque[tuple[int, Future[_Opened]]] = deque()
        for slot, digest, size in blobs:
            if len(ahead) == _REQUESTS:
                yield ahead.popleft()
            ahead.append((slot, readers.submit(self._open, digest, size, self._free.get())))
        yield from ahead

    def _open(self, digest: Digest, size: int, buffer: memoryview) -> _Opened:
        is_cached = is_complete = False
        source: FileBytes | None = None

        def read(file: ColdFile) -> FileBytes | None:
            nonlocal is_cached, is_complete, source
            self._open_files.callback(file.close)
            is_cached = file.is_cached()
            if not is_cached:
                if self._past_cache:
                    file.pass_cache()
                source = file.read_ends(buffer)
                is_complete = file.fits(buffer)
            if is_cached or is_complete:
                file.close()
            return source

        try:
            blob = self._store.open_cold(digest, size, read)
            self._request_base(blob)
        except BaseException:
            self._free.put(buffer)
            raise
        if is_complete:
            return _Opened(blob, is_cached, source, buffer)
        self._free.put(buffer)
        return _Opened(blob, is_cached, None, None)

    def _start_decoding(
        self,
        opened: _Opened,
        view: memoryview,
        readers: ThreadPoolExecutor,
        decoders: ThreadPoolExecutor,
    ) -> Iterator[Future[None]]:
        """Start to decode a blob, piece by piece, as soon as buffers are free."""
        blob = opened.blob
        if opened.source is not None:
            yield decoders.submit(self._decode, blob, 0, view, opened.source, opened.buffer)
            return
        for cut in blob.container.chunk_ranges(_DECODED, _REQUEST):
            part = view[cut.begin : cut.end]
            if opened.is_cached or cut.stored_end - cut.stored_begin > _REQUEST:
                yield decoders.submit(self._decode, blob, cut.begin, part)
                continue
            buffer = self._free.get()
            fetching = readers.submit(blob.fetch, cut, buffer)
            yield decoders.submit(self._decode, blob, cut.begin, part, fetching, buffer)

    def _decode(
        self,
        blob: ColdBlob,
        begin: int,
        view: memoryview,
        source: FileBytes | Future[FileBytes] | None = None,
        buffer: memoryview | None = None,
    ) -> None:
        """Decode bytes from ``begin`` on into ``view``, and release the buffer of the source."""
        try:
            blob.read_into(begin, view, source.result() if isinstance(source, Future) else source)
        except BlobDamaged:
            # It may have been thawed since, or frozen against another base and its base removed.
            self._store.read_into(blob.digest, blob.size, begin, view)
        finally:
            if buffer is not None:
                self._free.put(buffer)
        self._report(len(view))


@contextlib.contextmanager
def _completed(futures: Iterable[Future[Any]]) -> Iterator[None]:
    """Wait for all futures at the end, even if Ctrl-C interrupts the waiting again.

    Otherwise a thread could still write to memory after it was made read-only, or make memory
    read-only to which other threads write when the blobs are loaded again.
    """
    try:
        yield
    finally:
        for future in futures:
            while not future.done():
                with contextlib.suppress(KeyboardInterrupt, CancelledError):
                    future.exception()


@contextlib.contextmanager
def _threads(count: int) -> Iterator[ThreadPoolExecutor]:
    """Yield a pool, and wait for its threads. On an error, work that has not started is dropped."""
    pool = ThreadPoolExecutor(count, thread_name_prefix="blobstore")
    try:
        yield pool
    except BaseException:  # including Ctrl-C
        pool.shutdown(cancel_futures=True)
        raise
    pool.shutdown()
