"""The memory of an open model: its blobs, mapped into one region or read into it.

Each blob is loaded once: when it is first needed, or when all blobs are. The bytes of a mapped blob
belong to the page cache. All processes share them, and the kernel reads them on first use, or
earlier on request. The bytes of a blob that is read belong to this process alone. That suits network
file systems, where maps are slow and die with the connection. Cold blobs belong to this process in
either case: threads decompress them straight into the region.
"""

from __future__ import annotations

import contextlib
import threading
from bisect import bisect_left
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from zlib_ng.zlib_ng import crc32  # releases the interpreter's lock

from blobstore.core.digest import PieceDigester
from blobstore.core.escape import quote
from blobstore.core.fork import cached_property, renew_lock_in_children
from blobstore.core.mmap import MappedRegion
from blobstore.core.progress import Meter
from blobstore.core.system import map_counts
from blobstore.core.workers import WorkerPool
from blobstore.errors import (
    BlobDamaged,
    BlobMissing,
    BlobstoreError,
    TooManyMaps,
)
from blobstore.manifests import media_types
from blobstore.models.decompress import ColdSlot, ParallelDecoder
from blobstore.models.small_files import faults_located
from blobstore.store.hot import ADVICE

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from blobstore.core.digest import Digest
    from blobstore.core.progress import Progress
    from blobstore.models.small_files import ModelFiles
    from blobstore.store.verified_cache import BlobState, VerifiedBlobs

_REQUEST = 4 << 20
"""Bytes per request for data that may not be in memory yet."""
_REQUESTS = 8
"""Concurrent requests: with one at a time, a disk is idle between two requests."""
_FIRST_WINDOW = 16 << 20
_MAX_WINDOW = 256 << 20
"""Bytes of blobs that are read ahead of a program that reads them in order, if they are not mapped."""
_POPULATING_THREADS = 2
"""More threads do not map pages of the page cache any faster."""
_FEW = 4096
"""The number of blobs that can always be mapped."""
_SMALL = 8 << 10
"""Reading a blob of fewer bytes takes less time than mapping it and touching its pages."""
_ALONE = 8 << 20
"""A tensor is read by itself if the rest of its blob has more bytes."""
_SPARE_MAPS = 8192
"""Maps that are left to other models and to other code of the process."""


class _Request(NamedTuple):
    slot: int
    begin: int
    end: int


def reserve(sizes: Sequence[int], *, writable: bool, filled: bool = False) -> MappedRegion:
    """Return a region for blobs of these sizes. If there are many, it reads the small ones.

    If the process may not map all of the others, only the largest ones are mapped.

    Raises:
        BlobstoreError: there are not that many addresses.
    """
    read_slots: Collection[int] = ()
    if len(sizes) > _FEW:
        by_size = sorted(range(len(sizes)), key=sizes.__getitem__)
        count = bisect_left(by_size, _SMALL, key=sizes.__getitem__)
        if len(sizes) - count > _FEW and not filled and (counts := map_counts()):
            available = max(counts.limit - counts.present - _SPARE_MAPS, 0)
            count = max(count, len(sizes) - available)
        read_slots = frozenset(by_size[:count])
    return MappedRegion(sizes, writable=writable, filled=filled, read_slots=read_slots)


class ModelMemory:
    """The blobs of a model in memory.

    Args:
        files: the model.
        blobs: digest and size of each of its tensor blobs.
        region: a region into which the blobs were mapped already.
        is_writable: whether the memory may be written to. The files never change.
        read: ``mmap``; ``populate`` to wait for the pages, too; or ``pread``.
        is_shared: whether ``pread`` leaves the bytes in the page cache, for other processes that read them.
        progress: called with the bytes that were waited for.
    """

    def __init__(
        self,
        files: ModelFiles,
        blobs: Sequence[tuple[Digest, int]],
        *,
        region: MappedRegion | None = None,
        is_writable: bool = False,
        read: str = "mmap",
        is_shared: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self.files = files
        """The model."""
        self._store = files.store
        self._blobs = blobs
        self._region = region
        self._is_writable = is_writable
        self._is_read = read == "pread"
        self._is_shared = is_shared and self._is_read
        self._progress = progress
        mapped = set() if region is None else region.present  # cold blobs are not mapped
        self._absent = set(range(len(blobs))) - mapped
        self._unpopulated = set(range(len(blobs))) if read == "populate" else set()
        self._unverified: set[int] = set()
        """The slots of blobs whose digests are compared before anything of them is handed out."""
        self._is_used = False
        """Whether memory was handed out, which must not be replaced."""
        self._next_slot = -1
        """The blob after those that were copied last."""
        self._window = 0
        """Bytes of blobs that are copied before they are asked for."""
        self._lock = threading.Lock()
        renew_lock_in_children(self)
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """Whether nothing can be loaded any more."""
        return self._is_closed

    @property
    def is_complete(self) -> bool:
        """Whether all blobs are in memory, so that their files are no longer needed."""
        return not self._absent

    def reads_parts(self, slot: int) -> bool:
        """Return whether a part of a blob should be read by itself, without loading the blob."""
        return self._is_copied(slot) and slot not in self._unverified

    def needs_remote(self, slot: int) -> bool:
        """Return whether a blob is neither in memory nor local."""
        return slot in self._absent and self._is_remote(slot)

    def reads_tensors(self, slot: int) -> bool:
        """Return whether each tensor of a blob is read by itself: it is a remote GGUF file, which has them all."""
        return self.needs_remote(slot) and self._blobs[slot][0] in self._gguf_files

    def reads_alone(self, slot: int, nbytes: int) -> bool:
        """Return whether a tensor of ``nbytes`` is read by itself, without the rest of its blob."""
        is_part = self._is_shared and self.reads_parts(slot)
        return (is_part and self._blobs[slot][1] - nbytes > _ALONE) or self.reads_tensors(slot)

    @cached_property
    def _gguf_files(self) -> frozenset[Digest]:
        return frozenset(layer.digest for layer in self.files.manifest.layers_of(*media_types.GGUF))

    def load(self, slots: Iterable[int] = (), *, is_in_order: bool = False) -> MappedRegion:
        """Return the memory, after loading the blobs at ``slots`` into it.

        ``is_in_order`` says that the program may need the blobs after them next.

        Raises:
            BlobMissing, BlobDamaged: a blob is missing or damaged.
            BlobstoreError: the model is closed.
        """
        is_done = not (self._absent or self._unpopulated or self._unverified)
        if is_done and (region := self._region) is not None:
            return region
        # One thread at a time: a blob that is loaded twice would lose what was written to it.
        with self._lock:
            if self._is_closed:
                raise BlobstoreError(f"model {self.files.reference} is closed")
            wanted = set(slots)
            with faults_located(self.files):
                try:
                    return self._load(wanted, is_in_order=is_in_order)
                except TooManyMaps:
                    if self._is_used:
                        raise
                # Here, because the error keeps the region and its maps alive.
                self._read_instead()
                return self._load(wanted, is_in_order=is_in_order)

    def bring(self, slots: Collection[int], slot: int, begin: int, end: int) -> None:
        """Load the blobs at ``slots``, and bring bytes of one of them into memory. Raises as :meth:`load`."""
        region = self.load(slots)
        with faults_located(self.files):
            try:
                region.populate(slot, begin, end)
            except OSError as error:
                digest, _ = self._blobs[slot]
                raise BlobDamaged(f"blob {digest} cannot be read: {error.strerror}") from None

    @property
    def unverified(self) -> int:
        """How many blobs are hashed when they are loaded."""
        return len(self._unverified)

    def verify_loads(self, *, again: bool, is_populated: bool) -> set[Digest]:
        """Compare the digests of blobs that are copied or populated, before anything of them is handed out.

        Args:
            again: hash also those that were found intact, and are unchanged since then.
            is_populated: whether blobs that are mapped will be populated.

        Returns:
            The blobs that are taken care of: none if memory was handed out already.
        """
        if self._is_used or not (self._is_read or is_populated):
            return set()
        slots = {slot for slot in range(len(self._blobs)) if not self._is_remote(slot)}
        blobs = {self._blobs[slot] for slot in slots}
        unknown = blobs if again else self._verified.unknown(blobs)
        self._unverified = {slot for slot in slots if self._blobs[slot] in unknown}
        return {digest for digest, _ in blobs}

    @cached_property
    def _verified(self) -> VerifiedBlobs:
        return self._store.verified_blobs()

    def map_hot(self) -> bool:
        """Map all blobs that are not cold. Returns whether all blobs are in memory then.

        Raises:
            BlobDamaged: a blob is damaged.
        """
        with self._lock, faults_located(self.files):
            with contextlib.suppress(TooManyMaps):  # load() reads the blobs
                self._map_hot(self._absent.copy(), self._reserve())
            return not self._absent

    def check_sizes(self) -> None:
        """Check that all blobs exist and have the right size, without loading them.

        Raises:
            BlobMissing, BlobDamaged: a blob is missing or damaged.
        """
        with faults_located(self.files):
            # On a network, each question takes a while.
            pool = WorkerPool(_REQUESTS if self._is_shared else 1, None, 0)
            pool.run(self._blobs, lambda blob: self._store.check_size(*blob))

    def read_into(self, slot: int, begin: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with bytes of a blob's file, or of the memory if the file is gone.

        Raises:
            BlobMissing, BlobDamaged: the blob is missing or damaged.
        """
        if not self._is_remote(slot):  # it is checked when it is read completely
            # A file that is gone may still be mapped.
            with faults_located(self.files), contextlib.suppress(BlobMissing):
                self._store.read_into(*self._blobs[slot], begin, buffer)
                return
        region = self.load((slot,), is_in_order=True)
        start = region.offsets[slot] + begin
        buffer[:] = memoryview(region.memory)[start : start + len(buffer)]

    def populate_ahead(self, slots: Iterable[int]) -> None:
        """Begin to bring mapped blobs into memory in the background, in their order.

        It ends when all is there, or nothing uses the memory any more. What cannot be read is an error when it is
        used.
        """
        region = self.load()
        populate = region.background_populate()
        mapped = sorted(set(slots) - self._absent - set(region.read_slots))
        requests = deque(self._requests(mapped))
        for slot in mapped:
            region.will_populate(slot)

        def run() -> None:
            with contextlib.suppress(IndexError):  # all are done
                while populate(*requests.popleft()):
                    pass

        for _ in range(min(_REQUESTS, len(requests))):
            threading.Thread(target=run, name="blobstore-populate", daemon=True).start()

    def close(self) -> None:
        """Release the memory. Arrays that were handed out keep it alive."""
        self._is_closed = True
        self._region = None

    def _load(self, wanted: set[int], *, is_in_order: bool) -> MappedRegion:
        region = self._reserve()
        absent = wanted & self._absent
        is_local, blobs = self._store.is_local, self._blobs
        if remote := {slot for slot in absent if not is_local(blobs[slot][0])}:
            absent -= remote
            if is_in_order:
                remote |= self._following(remote)
            self._copy(remote, region, self._progress)
        if self._is_read and is_in_order and self._is_shared and absent:
            absent |= self._following(absent)
        unverified = (wanted | absent) & self._unverified
        before = {slot: self._verified.state(*self._blobs[slot]) for slot in unverified}
        digesters = {slot: PieceDigester() for slot in unverified}
        if self._is_read:
            self._read(absent, region, digesters)
        else:
            cold = self._map_hot(absent, region)
            if cold:
                self._decompress(cold, region)
            if unpopulated := (wanted & self._unpopulated) | (unverified - cold):
                self._populate(unpopulated, region, digesters)
        if unverified:
            self._compare(wanted, before, digesters, region)
        self._is_used |= bool(wanted)
        return region

    def _is_copied(self, slot: int) -> bool:
        return slot in self._absent and (self._is_read or self._is_remote(slot))

    def _is_remote(self, slot: int) -> bool:
        return not self._store.is_local(self._blobs[slot][0])

    def _copy(
        self, slots: Iterable[int], region: MappedRegion, progress: Progress | None = None
    ) -> None:
        """Read blobs into memory of this process, from wherever they are."""
        slots = sorted(slots)
        with contextlib.ExitStack() as writable:
            blobs = [
                (digest, size, writable.enter_context(region.writable_slot(slot, size)))
                for slot in slots
                for digest, size in [self._blobs[slot]]
            ]
            self._store.load(blobs, progress)
        self._absent.difference_update(slots)
        self._unpopulated.difference_update(slots)

    def _following(self, slots: set[int]) -> set[int]:
        """Return the blobs to copy that come next, if those are read one after the other: ever more of them."""
        first, last = min(slots), max(slots)
        between = range(self._next_slot, first)
        is_next = 0 <= self._next_slot <= first and not any(map(self._is_copied, between))
        self._window = min(max(2 * self._window, _FIRST_WINDOW), _MAX_WINDOW) if is_next else 0
        self._next_slot, size = last + 1, 0
        for slot in range(last + 1, len(self._blobs)):
            size += self._blobs[slot][1]
            if size > self._window:
                break
            self._next_slot = slot + 1
        return set(filter(self._is_copied, range(last + 1, self._next_slot)))

    def _read_instead(self) -> None:
        """Release all maps, and read blobs from now on, as the process may not map all of them."""
        self._region = None
        self._absent = set(range(len(self._blobs)))
        self._unpopulated = set()
        self._is_read = True

    def _reserve(self) -> MappedRegion:
        if self._region is None:
            sizes = [size for _, size in self._blobs]
            try:
                self._region = reserve(sizes, writable=self._is_writable, filled=self._is_read)
            except BlobstoreError:  # most likely a stated size is absurd, and differs from the file
                for digest, size in self._blobs:
                    self._store.check_size(digest, size)
                raise
        return self._region

    def _map_hot(self, slots: set[int], region: MappedRegion) -> set[int]:
        """Map the blobs that are not cold; return the slots of the cold ones."""
        cold = set()
        for slot in slots:
            try:
                self._store.map_hot(*self._blobs[slot], slot, region)
            except BlobMissing:
                cold.add(slot)
            else:
                self._absent.discard(slot)
        return cold

    def _decompress(self, cold: set[int], region: MappedRegion) -> None:
        meter = Meter(self._progress, sum(self._blobs[slot][1] for slot in cold))
        decoder = ParallelDecoder(
            self._store,
            region,
            past_cache=self._is_read,
            report=lambda count: meter.add(count, "decoding"),
        )
        wanted = [ColdSlot(slot, *self._blobs[slot]) for slot in sorted(cold)]
        if thawed := decoder.run(wanted):  # since they were looked for
            self._copy(thawed, region)
        self._absent -= cold
        self._unpopulated -= cold

    def _compare(
        self,
        wanted: set[int],
        before: Mapping[int, BlobState],
        digesters: Mapping[int, PieceDigester],
        region: MappedRegion,
    ) -> None:
        """Compare the digests of blobs in memory, and record which are intact."""
        error: BlobDamaged | None = None
        for slot, digester in sorted(digesters.items()):
            digest, size = self._blobs[slot]
            if digester.size < size:  # it was not read in pieces
                digester.add(0, region.slot_view(slot, 0, size)[:size])
            if (found := digester.digest()) == digest:
                self._verified.note(before[slot])
                self._unverified.discard(slot)
                continue
            self._verified.forget(before[slot])
            if slot in wanted and error is None:
                path = quote(self._store.blob_path(digest))
                error = BlobDamaged(
                    f"blob {path} is damaged: its bytes have digest {found}", advice=ADVICE
                )
        self._verified.save()
        if error is not None:
            raise error

    def _read(
        self, slots: set[int], region: MappedRegion, digesters: Mapping[int, PieceDigester]
    ) -> None:
        # Done first: it takes the lock of the address space, for which reading threads would wait.
        cached: dict[int, bool] = {}
        for slot in slots:
            digest, size = self._blobs[slot]
            with contextlib.suppress(BlobMissing):
                if slot in region.read_slots:
                    self._store.map_hot(digest, size, slot, region)
                    self._absent.discard(slot)
                else:
                    cached[slot] = self._is_shared or self._store.is_cached(digest, size)

        def read(request: _Request) -> None:
            slot, begin, end = request
            view = region.slot_view(slot, begin, end)
            if cached[slot]:
                view = view[: end - begin]
            self._store.read_into(*self._blobs[slot], begin, view, past_cache=not cached[slot])
            if slot in digesters:
                digesters[slot].add(begin, view[: end - begin])

        self._run(read, set(cached), _REQUESTS)
        self._absent -= cached.keys()
        if cold := slots & self._absent:
            self._decompress(cold, region)

    def _populate(
        self, slots: set[int], region: MappedRegion, digesters: Mapping[int, PieceDigester]
    ) -> None:
        """Bring mapped blobs into the page cache and into this process."""
        sizes = {
            slot: size for slot in slots - set(region.read_slots) if (size := self._blobs[slot][1])
        }
        uncached = {slot for slot, size in sizes.items() if not region.is_cached(slot, size)}
        for slot in uncached:
            region.will_populate(slot)

        def populate(request: _Request) -> None:
            slot, begin, end = request
            try:
                region.populate(slot, begin, end)
                if slot in digesters:
                    view = region.slot_view(slot, begin, end)
                    digesters[slot].add(begin, view[: end - begin])
                elif slot in uncached:
                    # A virtual machine gets memory for pages from the disk only when they are
                    # touched. With a single thread that takes as long again.
                    crc32(region.slot_view(slot, begin, end))
            except OSError as error:
                digest, size = self._blobs[slot]
                self._store.check_size(digest, size)  # the file may have become shorter
                raise BlobDamaged(
                    f"blob {digest} cannot be read at byte {begin} or later: {error.strerror}"
                ) from error

        is_waiting = uncached or digesters
        self._run(populate, set(sizes), _REQUESTS if is_waiting else _POPULATING_THREADS)
        self._unpopulated -= slots

    def _requests(self, slots: Iterable[int]) -> list[_Request]:
        """Return all bytes of some blobs, in their order."""
        return [
            _Request(slot, begin, min(begin + _REQUEST, self._blobs[slot][1]))
            for slot in sorted(slots)
            for begin in range(0, self._blobs[slot][1], _REQUEST)
        ]

    def _run(self, work: Callable[[_Request], None], slots: set[int], jobs: int) -> None:
        """Do ``work`` for all bytes of some blobs."""
        requests = self._requests(slots)
        if not requests:
            return
        total = sum(request.end - request.begin for request in requests)
        pool = WorkerPool(jobs, self._progress, total)

        def run(request: _Request) -> None:
            work(request)
            pool.report(request.end - request.begin, "reading")

        if len(requests) == 1:  # to start a thread takes longer than to read a small blob
            run(requests[0])
        else:
            pool.run(requests, run)
