"""Blobs that are read from a remote straight into memory, with many concurrent requests.

A blob that is read completely is hashed while its bytes arrive, and may be kept in the local store. If the
remote has a compressed form of it whose base is in the store, or is read too, that is read and decoded instead.
"""

from __future__ import annotations

import threading
from functools import partial
from itertools import count, groupby
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from blobstore.compression.base import BaseBlob
from blobstore.compression.decoder import ColdBlobDecoder
from blobstore.compression.delta import MAX_CHAIN
from blobstore.core import capacity
from blobstore.core.digest import BlobId, Digest, Digester
from blobstore.core.mmap import new_buffer
from blobstore.core.workers import Cancelled, WorkerPool
from blobstore.errors import BlobDamaged, BlobMissing, ColdDamaged, Damaged
from blobstore.remotes.cold_layers import chain_of, decode_base, give_base
from blobstore.remotes.model_reader import check_sent, read_small
from blobstore.store.blob_ranges import LoadedRanges

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

    from blobstore.core.progress import Progress
    from blobstore.remotes.blob_cache import BlobBatch, BlobCache
    from blobstore.remotes.cold_layers import ColdLayer
    from blobstore.remotes.model_reader import RemoteModelSource
    from blobstore.store.blob_ranges import BlobRange
    from blobstore.store.local import LocalStore

PART: Final = 8 << 20
"""Bytes of a request."""
STREAMS: Final = capacity.RANGES.most
"""Concurrent requests."""
_GAP: Final = 256 << 10
"""Gaps of at most so many bytes are read too, which costs less than another request."""
_WHOLE: Final = 0.9
"""A blob of which so much is needed is read completely, so that it can be verified and kept."""


class RangeLoader:
    """Reads blobs of one remote model that the local store lacks. Any number of threads may use it."""

    def __init__(
        self,
        source: RemoteModelSource,
        local: LocalStore,
        layers: Mapping[Digest, ColdLayer],
        base_layers: Mapping[Digest, ColdLayer],
        starts: Mapping[Digest, bytes],
        cache: BlobCache | None,
        forget_headers: Callable[[], object],
    ) -> None:
        """Read nothing yet.

        Args:
            source: the model.
            local: the store.
            layers: compressed forms of its blobs, none of them trusted.
            base_layers: compressed forms of their bases, for those that are not in the store.
            starts: the headers by which the blobs are used, with their prefixes; checked when a blob is read.
            cache: keeps blobs that were read completely.
            forget_headers: called if a header turns out to differ from the start of its blob.
        """
        self._source = source
        self._local = local
        self._layers = layers
        self._base_layers = base_layers
        self._starts = starts
        self._cache = cache
        self._forget_headers = forget_headers
        self._sizes = {blob.digest: blob.size for blob in source.blobs}

    def is_local(self, digest: Digest) -> bool:
        """Return whether the local store has a blob with its size, or no remote model lists it."""
        try:
            return self._local.exists(digest, self._sizes[digest])
        except Damaged:
            return False
        except KeyError:
            return True

    def stored_size(self, blob: BlobId) -> int:
        """Return how many bytes are read for a blob if all are read: those of a compressed form, if that is of use."""
        form = self._usable_form(blob, self._sizes.items())
        return blob.size if form is None else form.size

    def load(
        self, blobs: Iterable[tuple[Digest, int, memoryview]], progress: Progress | None = None
    ) -> None:
        """Fill memory with blobs, and check their digests.

        Args:
            blobs: digest, size and memory of each.
            progress: called with the bytes of blobs that are complete.

        Raises:
            BlobMissing, BlobDamaged: a blob is missing, or has other bytes.
            RemoteError: the remote cannot be reached, refuses access or misbehaves.
        """
        loads = [_Load(BlobId(digest, size), memory[:size]) for digest, size, memory in blobs]
        together = {load.blob: load for load in loads}
        for load in loads:
            form = self._usable_form(load.blob, together)
            if form is None:
                continue
            load.layer, load.links = form
            if load.layer.base is not None:
                load.base = together.get(load.layer.base)
        pool = WorkerPool(STREAMS, progress, sum(load.blob.size for load in loads))
        for wave in _in_waves(loads):
            self._load_wave(wave, pool)

    def _load_wave(self, loads: Sequence[_Load], pool: WorkerPool) -> None:
        """Fill memory with blobs, none of which is decoded against another one of them."""
        if self._cache is None:
            self._read_loads(loads, None, pool)
            return
        batch = self._cache.batch()
        try:
            self._read_loads(loads, batch, pool)
            if others := [load for load in loads if not load.is_mine()]:
                # Before waiting: the other process may wait for our blobs as we do for its.
                batch.publish()
                pool.run(others, lambda load: self._take(load, batch, pool))
                self._read_loads([load for load in others if load.is_mine()], batch, pool)
        finally:
            batch.publish()  # each was verified, even if another failed

    def _read_loads(
        self, loads: Sequence[_Load], batch: BlobBatch | None, pool: WorkerPool
    ) -> None:
        """Read blobs, but not those that another process has begun to read."""

        def claim(blob: BlobId) -> bool:
            # Claimed first, then looked for: another process names a blob before it releases its claim.
            return batch is None or (batch.claim(blob) and not self.is_local(blob.digest))

        def read(part: tuple[_Load, int]) -> None:
            load, begin = part
            if not load.is_mine(claim):
                return
            end = min(begin + PART, load.stored.size)
            memory = load.arriving()[begin:end]
            try:
                self._read(load.stored, begin, memory)
            except (BlobDamaged, BlobMissing):
                if load.layer is None:
                    raise
                # The part counts as arrived: the thread of the last part then reads the blob itself.
                load.is_lost = True
            if batch is not None:
                batch.beat()
            if load.has_arrived(begin, end):
                self._finish(load, batch)
                pool.report(load.blob.size, load.blob.digest.short)

        # An empty blob has one part, or nothing would finish it.
        parts = [(load, begin) for load in loads for begin in range(0, load.stored.size or 1, PART)]
        pool.run(parts, read)

    def _take(self, load: _Load, batch: BlobBatch, pool: WorkerPool) -> None:
        """Take a blob from the local store when the process that reads it is done. If that failed, read it here."""

        def pause(seconds: float) -> None:
            if pool.stopping.wait(seconds):
                raise Cancelled("stopped")

        digest, size = load.blob
        batch.wait(load.blob, pause)
        try:
            # Not hashed again: the process that wrote it has checked the digest.
            self._local.read_into(digest, size, 0, load.memory)
        except Damaged:  # the other process has failed, or could not keep it
            load.leave_to_us()
            return
        batch.give_up(load.blob)
        self._check_start(load)
        pool.report(size, digest.short)

    def load_small(self, blobs: Iterable[BlobId]) -> dict[Digest, bytes]:
        """Return the bytes of small blobs after checking their digests. Raises as :meth:`load`."""
        batch = self._cache.batch() if self._cache is not None else None

        def read(blob: BlobId) -> tuple[Digest, bytes]:
            data = read_small(self._source, *blob)
            if batch is not None:
                batch.keep(blob.digest, memoryview(data))
            return blob.digest, data

        try:
            return dict(WorkerPool(STREAMS, None, 0).run(list(blobs), read))
        finally:
            if batch is not None:
                batch.publish()  # each was verified, even if another failed

    def read_ranges(self, wanted: Iterable[BlobRange]) -> LoadedRanges:
        """Read parts of blobs into new memory, which may be read-only; neighbours are read together.

        A blob of which most is wanted is read completely, hashed and kept. Nothing else is verified.

        Raises as :meth:`load`.
        """
        loaded: dict[Digest, list[tuple[int, memoryview]]] = {}
        small: list[BlobRange] = []
        parts: list[tuple[BlobId, int, memoryview]] = []
        whole: list[tuple[Digest, int, memoryview]] = []
        by_blob = sorted(wanted, key=attrgetter("digest", "begin"))
        for digest, ranges in groupby(by_blob, key=attrgetter("digest")):
            merged = list(_merged(ranges))
            blob = BlobId(digest, merged[0].size)
            found = loaded.setdefault(digest, [])
            if self.is_local(digest):  # it may be cold
                found += self._local.read_ranges(merged).parts(digest)
                continue
            # Compared with the bytes that reading all of it takes, which are fewer if there is a
            # compressed form. A part of such a form could not be verified, so it is read completely.
            form = self._usable_form(blob)
            size = blob.size if form is None else form.size
            if sum(one.end - one.begin for one in merged) >= _WHOLE * size:
                memory = new_buffer(blob.size)
                whole.append((*blob, memory))
                found.append((0, memory))
                continue
            for one in merged:
                if one.end - one.begin <= PART:
                    small.append(one)
                    continue
                memory = new_buffer(one.end - one.begin)
                found.append((one.begin, memory))
                parts += (
                    (blob, begin, memory[begin - one.begin :][:PART])
                    for begin in range(one.begin, one.end, PART)
                )
        self._read_all(small, loaded, parts)
        if whole:
            self.load(whole)
        return LoadedRanges(
            {digest: sorted(found, key=itemgetter(0)) for digest, found in loaded.items()}
        )

    def _read_all(
        self,
        small: Iterable[BlobRange],
        loaded: Mapping[Digest, list[tuple[int, memoryview]]],
        parts: Iterable[tuple[BlobId, int, memoryview]],
    ) -> None:
        """Read small ranges, which are added to ``loaded``, and parts of others into their memory."""

        def take(one: BlobRange) -> None:
            pieces = list(self._source.read(one.digest, one.size, one.begin, one.end))
            # The memory of a response is that of nobody else, so that it need not be copied.
            data = memoryview(pieces[0] if len(pieces) == 1 else b"".join(pieces))
            loaded[one.digest].append((one.begin, data))

        jobs = [partial(take, one) for one in small]
        jobs += [partial(self._read, *part) for part in parts]
        if jobs:
            WorkerPool(min(STREAMS, len(jobs)), None, 0).run(jobs, lambda job: job())

    def _usable_form(
        self, blob: BlobId, together: Container[tuple[Digest, int]] = ()
    ) -> _Form | None:
        """Return the compressed form of a blob if its base is available: in the store, in this load, or decodable."""
        layer = self._layers.get(blob.digest)
        # The list of compressed forms is not trusted: it may state another size.
        if layer is None or layer.blob != blob:
            return None
        # If a base is gone later, decoding fails, and the blob itself is read.
        if layer.base is None or layer.base in together or self._has_base(layer.base):
            return _Form(layer, ())
        links = chain_of(layer, self._base_layers, self._has_base)
        return None if links is None else _Form(layer, links)

    def _has_base(self, base: BlobId) -> bool:
        try:
            return self._local.exists(*base)
        except (BlobDamaged, BlobMissing):
            return False

    def _read(self, blob: BlobId, begin: int, memory: memoryview) -> None:
        for piece in self._source.read(*blob, begin, begin + len(memory)):
            # The source fails if fewer bytes arrive, so the memory is full at the end.
            memory[: len(piece)] = piece
            memory = memory[len(piece) :]

    def _finish(self, load: _Load, batch: BlobBatch | None) -> None:
        """Check a blob that has arrived, after decoding it, and keep it."""
        if load.layer is not None and not self._is_decoded(load, load.layer):
            # The list of compressed forms is not trusted; the blob itself has the digest.
            # From here on the bytes of the blob itself arrive, and are hashed.
            load.layer = None
            for begin in range(0, load.blob.size, PART):
                end = min(begin + PART, load.blob.size)
                self._read(load.blob, begin, load.memory[begin:end])
                load.has_arrived(begin, end)
        load.check()
        self._check_start(load)
        # After both checks, because the cache does not hash what it is given.
        if batch is not None:
            batch.keep(load.blob.digest, load.memory)

    def _check_start(self, load: _Load) -> None:
        # The model was opened by this header, which nothing could confirm before all bytes were
        # hashed.
        start = self._starts.get(load.blob.digest, b"")
        if load.memory[: len(start)] != start:
            self._forget_headers()
            raise BlobDamaged(
                f"the remote sent another header for blob {load.blob.digest} before",
                advice="open the model again; if that fails too, push it there again",
            )

    def _is_decoded(self, load: _Load, layer: ColdLayer) -> bool:
        """Decode a blob; return whether that succeeds."""
        if load.is_lost:
            return False
        try:
            decoder = ColdBlobDecoder(load.arriving())
            # The decoder has the bytes now, and they are freed with it.
            load.release()
            if decoder.size != load.blob.size:
                return False
            if load.base is not None:
                decoder.give_base(BaseBlob.hot(load.base.memory, load.base.blob.digest))
            elif load.links:
                base = decode_base(load.links, self._read_form, self._local_base, _in_memory)
                give_base(decoder, base, _in_memory)
            elif layer.base is not None:
                give_base(decoder, self._local_base(layer.base), _in_memory)
            for begin in range(0, decoder.size, PART):
                decoder.read_into(load.memory[begin : begin + PART], begin)
        except (ColdDamaged, BlobDamaged, BlobMissing):
            return False
        return Digest.of(load.memory) == load.blob.digest

    def _local_base(self, blob: BlobId) -> BaseBlob:
        """Open a base of the local store. Raises BlobDamaged and BlobMissing."""
        return self._local.base(*blob, in_chain=True)

    def _read_form(self, stored: BlobId) -> memoryview:
        """Read the form of a base. Raises BlobDamaged, BlobMissing and RemoteError."""
        memory = new_buffer(stored.size)
        self._read(stored, 0, memory)
        return memory


def _in_memory(base: BaseBlob) -> BaseBlob:
    """Decode a base completely."""
    memory = new_buffer(base.identity.size)
    base.read_into(memory, 0)
    return BaseBlob.hot(memory, base.identity.digest)


class _Form(NamedTuple):
    """The compressed form that is read instead of a blob."""

    layer: ColdLayer
    links: Sequence[ColdLayer]
    """The forms that its base is decoded from, if that is neither in the store nor read too."""

    @property
    def size(self) -> int:
        """Bytes of all of them."""
        return sum(layer.stored.size for layer in (self.layer, *self.links))


class _Load:
    """A blob that is being read."""

    def __init__(self, blob: BlobId, memory: memoryview) -> None:
        self.blob = blob
        self.memory = memory
        self.layer: ColdLayer | None = None
        self.links: Sequence[ColdLayer] = ()
        """The forms that the base of the layer is decoded from, if it is nowhere else."""
        self.is_lost = False
        """Whether the remote does not have the compressed form that it lists."""
        self.base: _Load | None = None
        """The base of the layer, if that is read too."""
        self._compressed: memoryview | None = None
        self._digester = Digester()
        self._arrived = 0
        """Compressed bytes."""
        self._ends: dict[int, int] = {}
        """The parts that have arrived and were not hashed yet, by where they begin."""
        self._is_hashing = False
        self._is_mine: bool | None = None
        self._lock = threading.Lock()

    def is_mine(self, claim: Callable[[BlobId], bool] = lambda _: True) -> bool:
        """Return whether this process reads the blob. ``claim`` is asked once, and decides."""
        with self._lock:
            if self._is_mine is None:
                self._is_mine = claim(self.blob)
            return self._is_mine

    def leave_to_us(self) -> None:
        """Let this process read the blob."""
        self._is_mine = True

    @property
    def stored(self) -> BlobId:
        """The blob that is read: the blob itself, or its compressed form."""
        return self.blob if self.layer is None else self.layer.stored

    def arriving(self) -> memoryview:
        """Return the memory that the bytes are read into."""
        if self.layer is None:
            return self.memory
        with self._lock:
            if self._compressed is None:
                self._compressed = new_buffer(self.layer.stored.size)
            return self._compressed

    def release(self) -> None:
        """Forget the compressed bytes."""
        self._compressed = None

    def has_arrived(self, begin: int, end: int) -> bool:
        """Note that bytes have arrived, and hash those without a gap; return whether these are all."""
        with self._lock:
            if self.layer is not None:  # the decoded bytes are hashed
                self._arrived += end - begin
                return self._arrived == self.layer.stored.size
            self._ends[begin] = end
            if self._is_hashing:  # that thread takes this part too, since it looks under the lock
                return False
            self._is_hashing = True
        while True:
            with self._lock:
                # Without the next part, hashing ends here, and the thread that reads it goes on.
                at = self._digester.size
                following = self._ends.pop(at, None)
                if following is None or following == at:
                    self._is_hashing = False
                    return at == self.blob.size
            self._digester.update(self.memory[at:following])

    def check(self) -> None:
        """Compare the digest of all bytes. Raises BlobDamaged."""
        if self.layer is None:
            check_sent(self.blob.digest, self._digester.digest())


def _merged(ranges: Iterable[BlobRange]) -> Iterator[BlobRange]:
    """Yield sorted ranges of one blob, each together with those that follow after a small gap."""
    current: BlobRange | None = None
    for one in ranges:
        if current is not None and one.begin - current.end <= _GAP:
            current = current._replace(end=max(current.end, one.end))
            continue
        if current is not None:
            yield current
        current = one
    if current is not None:
        yield current


def _in_waves(loads: list[_Load]) -> Iterator[list[_Load]]:
    """Yield blobs, each delta after its base. Blobs in a cycle of bases come without compressed forms."""
    done: set[BlobId] = set()
    for depth in count():
        wave = [load for load in loads if load.base is None or load.base.blob in done]
        if depth == MAX_CHAIN or not wave:
            wave = loads
            for load in wave:
                load.layer = load.base = None
        if not wave:
            return
        yield wave
        done.update(load.blob for load in wave)
        loads = [load for load in loads if load.blob not in done]
