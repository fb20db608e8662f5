"""The memory of an opened model: its blobs mapped into one region, or read into it.

A blob comes in once, when it is first wanted or when all are. Mapped, its bytes are the page cache's,
shared by all processes, and read when they are first touched, or ahead of that if asked. Read, they
are this process's own: for network file systems, whose maps are slow and die with the connection.
Blobs that are cold are this process's own either way: threads decode them straight into the memory.
"""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal, get_args

from zlib_ng.zlib_ng import crc32  # which lets other threads run

from blobstore.core.escape import quote
from blobstore.core.mmap import MappedRegion
from blobstore.core.progress import Meter
from blobstore.errors import BlobDamaged, BlobMissing, BlobstoreError, UsageError
from blobstore.models.decompress import ParallelDecoder, Wanted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from blobstore.core.digest import Digest
    from blobstore.core.progress import Progress
    from blobstore.store.local import LocalStore

Read = Literal["mmap", "pread"]
Prefetch = Literal["willneed", "read"]

_REQUEST = 4 << 20
"""Bytes of one request for data that is not in memory yet."""
_REQUESTS = 8
"""Requests at a time: one alone leaves a disk idle between two."""
_POPULATING_THREADS = 2
"""More would not come by what is in the page cache any faster."""


class ModelMemory:
    """The blobs of the model ``name`` in memory.

    ``blobs`` are digests and sizes; ``region`` has them mapped already, if it is given. ``read`` is
    ``mmap`` or ``pread``; ``prefetch`` of mapped blobs is ``willneed``, which asks for them and goes
    on, ``read``, which waits until they are there, or None. ``progress`` is told of what is waited
    for.

    Raises:
        UsageError: ``read`` or ``prefetch`` is another, or both are given.
    """

    def __init__(
        self,
        name: str,
        store: LocalStore,
        blobs: Sequence[tuple[Digest, int]],
        *,
        region: MappedRegion | None = None,
        is_writable: bool = False,
        read: str = "mmap",
        prefetch: str | None = None,
        progress: Progress | None = None,
    ) -> None:
        check_reading(read, prefetch)
        self._name = name
        self._store = store
        self._blobs = blobs
        self._region = region
        self._is_writable = is_writable
        self._is_read = read == "pread"
        self._prefetch = prefetch
        self._progress = progress
        present = set() if region is None else region.present  # cold ones are not, if others are
        self._absent = set(range(len(blobs))) - present
        self._cold = set(range(len(blobs))) if prefetch else set()
        self._lock = threading.Lock()
        self._is_closed = False

    def bring(self, slots: Iterable[int]) -> MappedRegion:
        """Return the memory, in which at least the blobs at ``slots`` are.

        Raises:
            BlobMissing, BlobDamaged: one of them is not whole.
            BlobstoreError: it is closed.
        """
        # One at a time: a blob that came in twice would lose what was written to it.
        with self._lock:
            if self._is_closed:
                raise BlobstoreError(f"model {self._name} is closed")
            if self._region is None:
                self._region = self._reserved()
            if self._absent or self._cold:
                wanted = set(slots)
                (self._fill if self._is_read else self._map)(wanted & self._absent, self._region)
                self._warm(wanted & self._cold, self._region)
            return self._region

    def map_hot(self) -> bool:
        """Map all blobs that are files; tell whether that is all of them.

        Raises:
            BlobDamaged: one of them is not whole.
        """
        with self._lock:
            if self._region is None:
                self._region = self._reserved()
            self._map_hot(set(self._absent), self._region)
            return not self._absent

    def holds(self, slot: int) -> bool:
        """Tell whether a blob is in the memory."""
        return slot not in self._absent

    def read_into(self, slot: int, begin: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with bytes of a blob's file, or if that is gone, of what is in the memory.

        Raises:
            BlobMissing, BlobDamaged: the blob is not whole.
        """
        try:
            self._store.read_into(*self._blobs[slot], begin, buffer)
        except BlobMissing:  # no more, but it may be mapped
            region = self.bring((slot,))
            start = region.offsets[slot] + begin
            buffer[:] = memoryview(region.memory)[start : start + len(buffer)]

    def close(self) -> None:
        """Let go of the memory; views that were handed out keep it."""
        self._is_closed = True
        self._region = None

    def _reserved(self) -> MappedRegion:
        sizes = [size for _, size in self._blobs]
        try:
            return MappedRegion(sizes, writable=self._is_writable, filled=self._is_read)
        except BlobstoreError:  # most likely a claimed size is absurd, and the blob's file tells
            for digest, size in self._blobs:
                self._store.check_size(digest, size)
            raise

    def _map(self, wanted: set[int], region: MappedRegion) -> None:
        if frozen := self._map_hot(wanted, region):
            self._decode(frozen, region)

    def _map_hot(self, wanted: set[int], region: MappedRegion) -> set[int]:
        """Map what is a file; return what is not."""
        frozen = set()
        for slot in wanted:
            try:
                self._store.map_hot(*self._blobs[slot], slot, region)
            except BlobMissing:
                frozen.add(slot)
            else:
                self._absent.discard(slot)
        return frozen

    def _decode(self, frozen: set[int], region: MappedRegion) -> None:
        """Decode blobs that are cold; those that have been thawed since are mapped, or read."""
        meter = self._meter(frozen)
        decoding = ParallelDecoder(
            self._store,
            region,
            past_cache=self._is_read,
            tell=lambda count: meter.add(count, "decoding"),
        )
        for slot in decoding.run([Wanted(slot, *self._blobs[slot]) for slot in sorted(frozen)]):
            self._store.bring_blob(*self._blobs[slot], slot, region)
        self._absent -= frozen
        self._cold -= frozen

    def _fill(self, wanted: set[int], region: MappedRegion) -> None:
        # Beforehand: it needs the lock of the address space, for which those who fill it would wait.
        cached: dict[int, bool] = {}
        for slot in wanted:
            with contextlib.suppress(BlobMissing):
                cached[slot] = self._store.is_cached(*self._blobs[slot])
        self._read(cached, region)
        if frozen := wanted - cached.keys():
            self._decode(frozen, region)

    def _read(self, cached: Mapping[int, bool], region: MappedRegion) -> None:
        meter = self._meter(set(cached))

        def read(request: tuple[int, int, int]) -> None:
            slot, begin, end = request
            room = region.room(slot, begin, end)
            if cached[slot]:
                room = room[: end - begin]
            self._store.read_into(*self._blobs[slot], begin, room, past_cache=not cached[slot])
            meter.add(end - begin, "reading")

        _all(read, self._requests(set(cached)), _REQUESTS)
        self._absent -= cached.keys()

    def _warm(self, cold: set[int], region: MappedRegion) -> None:
        if self._prefetch == "willneed":
            for slot in cold:
                region.will_need(slot, self._blobs[slot][1])
        elif cold:
            self._populate(cold, region)
        self._cold -= cold

    def _populate(self, cold: set[int], region: MappedRegion) -> None:
        meter = self._meter(cold)
        sizes = {slot: size for slot in cold if (size := self._blobs[slot][1])}
        uncached = {slot for slot, size in sizes.items() if not region.is_cached(slot, size)}
        for slot in uncached:
            region.will_populate(slot, sizes[slot])

        def populate(request: tuple[int, int, int]) -> None:
            slot, begin, end = request
            try:
                region.populate(slot, begin, end)
                if slot in uncached:
                    # A virtual machine has the memory of what came from the disk only when it is
                    # touched, which takes as long again if one thread does it.
                    crc32(region.room(slot, begin, end))
            except OSError as error:
                digest, size = self._blobs[slot]
                self._store.check_size(digest, size)  # it may have become shorter
                raise BlobDamaged(
                    f"blob {digest} cannot be read at byte {begin} or later: {error.strerror}"
                ) from error
            meter.add(end - begin, "reading")

        _all(populate, self._requests(cold), _REQUESTS if uncached else _POPULATING_THREADS)

    def _requests(self, slots: set[int]) -> list[tuple[int, int, int]]:
        """Return the requests for all bytes of some blobs."""
        return [
            (slot, begin, min(begin + _REQUEST, self._blobs[slot][1]))
            for slot in sorted(slots)
            for begin in range(0, self._blobs[slot][1], _REQUEST)
        ]

    def _meter(self, slots: set[int]) -> Meter:
        return Meter(self._progress, sum(self._blobs[slot][1] for slot in slots))


def check_reading(read: str, prefetch: str | None) -> None:
    """Check how blobs are to be brought into memory.

    Raises:
        UsageError: an unknown way, or a prefetch of what is read at once anyway.
    """
    if read not in get_args(Read):
        raise UsageError(f"read must be mmap or pread, got {quote(read)}")
    if prefetch is not None and prefetch not in get_args(Prefetch):
        raise UsageError(f"prefetch must be willneed, read or None, got {quote(prefetch)}")
    if prefetch is not None and read == "pread":
        raise UsageError("prefetch is for mapped blobs; read='pread' reads them at once")


def _all(work: Callable[[Any], None], items: Sequence[Any], threads: int) -> None:
    """Do ``work`` for all items on some threads; the first error stops it."""
    if len(items) == 1:
        work(items[0])
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="blobstore") as pool:
        try:
            for _ in pool.map(work, items):
                pass
        except BaseException:  # also Ctrl-C
            pool.shutdown(wait=True, cancel_futures=True)
            raise
