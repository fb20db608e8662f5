"""Fetches the blobs of a pull into the store, several at a time, and large ones in parts.

A blob comes as it is, or in its compressed form. Its digest is checked before it is added to the import.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from blobstore.core.digest import BlobId
from blobstore.core.escape import quote
from blobstore.core.files import write_all
from blobstore.core.mmap import map_file, mapped
from blobstore.core.workers import Cancelled
from blobstore.errors import BlobDamaged, BlobMissing, BlobstoreError, DamagedSource, RemoteError
from blobstore.http.protocol import DAMAGED_ADVICE
from blobstore.manifests.descriptor import Descriptor
from blobstore.remotes.cold_layers import COLD, decode_base

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from blobstore.compression.base import BaseBlob
    from blobstore.core.digest import Digest
    from blobstore.core.workers import WorkerPool
    from blobstore.remotes.choose_cold_layers import UsableLayers
    from blobstore.remotes.cold_layers import ColdLayer
    from blobstore.remotes.model_reader import RemoteClient
    from blobstore.store.ingest import Ingest
    from blobstore.store.local import LocalStore
    from blobstore.store.partial import PartialBlob

_DECODED = 8 << 20
"""Bytes of a base that are decoded at once."""
_BUSY_PAUSE = 0.1
"""Seconds until a blob that another process is fetching is looked at again."""


class Fetched(NamedTuple):
    """The result of a download, also of one that was only planned."""

    fetched: int
    """Blobs that the store did not have."""
    size: int
    """Bytes of these blobs."""
    bytes_fetched: int
    bytes_resumed: int
    bytes_saved: int
    repaired: Mapping[Digest, Path | None] = {}
    replaced: bool = False
    """Whether the name belonged to another model."""
    notices: tuple[str, ...] = ()


class _Fetch:
    """A blob that is being fetched, or its cold layer; or one that others are decoded from."""

    def __init__(
        self, blob: Descriptor, cold: ColdLayer | None = None, *, is_base: bool = False
    ) -> None:
        self.blob = blob
        self.cold = cold
        self.is_base = is_base
        """Whether only the cold layer is fetched: the store does not get the blob."""
        self.label = quote(blob.name or blob.media_type)
        self.file: PartialBlob | None = None
        self.parts = 0
        """Parts that are not complete yet."""
        self.reported = 0
        """Bytes that the progress counts; fetching damaged bytes again adds nothing."""
        self.resumed = 0
        """Bytes that an earlier pull had fetched."""
        self.wrong = 0
        """How often the bytes were wrong."""

    @property
    def stored(self) -> BlobId:
        """The blob that is fetched: the blob itself, or its compressed form."""
        return self.blob.id if self.cold is None else self.cold.stored


class BlobSource(Protocol):
    """Where blobs come from."""

    @property
    def client(self) -> RemoteClient:
        """The client that sends the requests."""

    @property
    def data(self) -> bytes:
        """The manifest that lists the blobs."""

    def read(
        self, digest: Digest, size: int, begin: int, end: int
    ) -> Generator[bytes | memoryview, None, None]:
        """See :class:`~blobstore.remotes.model_reader.RemoteModelSource`."""


class Download:
    """Fetches blobs on several threads, each with one stream.

    A task is a blob, or a part of a large blob. The thread that begins a blob adds a task for each of its
    parts, and the thread that ends its last part checks its digest. Blobs that another process is fetching
    are put back. If this pull also fetches the base of a delta, or the compressed form of the base, the delta
    begins when that is complete.
    """

    def __init__(
        self,
        source: BlobSource,
        store: LocalStore,
        ingest: Ingest,
        blobs: Iterable[Descriptor],
        workers: WorkerPool,
        cold: UsableLayers,
        attempts: int = 2,
    ) -> None:
        """Fetch nothing yet. ``attempts`` is how often a blob is fetched until it has its digest."""
        self._source = source
        self._attempts = attempts
        self._store = store
        self._ingest = ingest
        self._workers = workers
        self._blobs = [_Fetch(blob, cold.layers.get(blob.digest)) for blob in blobs]
        self._bases = [
            _Fetch(Descriptor(COLD, *layer.blob), layer, is_base=True)
            for layer in cold.bases.values()
        ]
        self._fetches = [*self._blobs, *self._bases]
        self._base_forms: dict[Digest, tuple[ColdLayer, Path] | None] = {}
        """The complete forms of bases and their files; None for one that the registry does not have."""
        self._bytes_fetched = self._bytes_resumed = self._bytes_saved = 0
        self._notices: list[str] = []
        self._tasks: deque[Callable[[], None]] = deque()
        self._deltas: dict[Digest, list[Callable[[], None]]] = {
            fetch.blob.digest: [] for fetch in self._fetches
        }
        """The tasks that wait for a blob."""
        # After each blob has a list, because a delta may come before its base.
        for fetch in self._fetches:
            base = None if fetch.cold is None else fetch.cold.base
            # If this pull does not fetch the base, the store has it.
            ready = self._tasks if base is None else self._deltas.get(base.digest, self._tasks)
            ready.append(partial(self._begin, fetch))
        self._unfinished = len(self._fetches)
        self._changed = threading.Condition()
        self.size = sum(fetch.blob.size for fetch in self._blobs)
        # The compressed forms stay until the blobs have their names.
        decoded = sum(fetch.blob.size for fetch in self._blobs if fetch.cold is not None)
        stored = [fetch.stored for fetch in self._fetches]
        to_fetch = sum(one.size - store.partial_bytes(one) for one in stored)
        store.check_space(to_fetch + decoded + len(source.data))
        self.paths: dict[Digest, Path] = {}
        """The complete files of blobs, which have no names yet."""
        self._used_forms: list[BlobId] = []
        """The compressed forms that blobs were decoded from, or bases of blobs can be."""

    def run(self, streams: int) -> None:
        """Fetch all blobs. What an error or an interrupt stops can be continued."""
        try:
            self._workers.run(range(streams), self._work, self._source.client.abort)
        finally:
            # Unlocks the blobs. Bytes that have arrived stay for the next pull.
            for fetch in self._fetches:
                if fetch.file is not None:
                    fetch.file.close()

    def remove_cold_files(self) -> None:
        """Remove compressed forms, when the blobs have their names."""
        for stored in self._used_forms:
            file = self._ingest.open_partial(stored)
            if file is not None:  # otherwise another pull decodes it, and will remove it
                file.discard()
                file.close()

    def remove_files(self) -> None:
        """Remove the complete files of blobs that are not published."""
        for digest in self.paths:
            self._store.remove_partial(digest)

    def result(self, notices: Sequence[str], **others: Any) -> Fetched:
        """Return the result, with these notices before those of the transfer."""
        return Fetched(
            len(self._blobs),
            self.size,
            self._bytes_fetched,
            self._bytes_resumed,
            # Forms of bases may have been fetched in vain.
            max(self._bytes_saved, 0),
            notices=(*notices, *self._notices),
            **others,
        )

    def _work(self, _: int) -> None:
        """Run tasks until none is left and none can come."""
        while True:
            with self._changed:
                while self._unfinished and not self._tasks:
                    if self._workers.stopping.is_set():
                        raise Cancelled("stopped")
                    # With a limit, because a request to stop does not notify.
                    self._changed.wait(_BUSY_PAUSE)
                if not self._tasks:
                    return
                task = self._tasks.popleft()
            task()
            # Only now: the threads must not end while a task may still add others.
            with self._changed:
                self._unfinished -= 1
                self._changed.notify_all()

    def _add(self, tasks: Sequence[Callable[[], None]], *, is_last: bool = False) -> None:
        with self._changed:
            self._unfinished += len(tasks)
            if is_last:
                self._tasks.extend(tasks)
            else:
                self._tasks.extendleft(reversed(tasks))
            self._changed.notify_all()

    def _begin(self, fetch: _Fetch) -> None:
        """Open the partial file of a blob, and fetch the parts that it lacks."""
        base = None if fetch.cold is None else fetch.cold.base
        if base is not None and self._base_forms.get(base.digest, True) is None:
            self._leave_form(fetch)
            return
        self._workers.report(0, fetch.label)
        # Reporting raises if the pull must end, also while an earlier file is copied.
        file = self._ingest.open_partial(fetch.stored, lambda: self._workers.report(0, fetch.label))
        if file is None:
            # Last, so that this thread first does what no other process does.
            self._workers.stopping.wait(_BUSY_PAUSE)
            self._add([partial(self._begin, fetch)], is_last=True)
            return
        fetch.file = file
        # Looked for again now that the file is locked: the process that held it may have published the blob.
        if self._ingest.find(*fetch.blob.id) is not None:
            file.discard()
            self._end(fetch, file, resumed=0 if fetch.is_base else fetch.blob.size)
            return
        fetch.resumed = file.done
        self._count(fetch, file.done)
        parts = file.missing
        # Set before the parts are tasks: another thread may end one at once.
        fetch.parts = len(parts)
        if not parts:
            self._check(fetch, file)
            return
        # First in the queue: a blob that is complete can be hashed and synced while others arrive.
        self._add([partial(self._fill, fetch, file, part) for part in parts[1:]])
        self._fill(fetch, file, parts[0])

    def _fill(self, fetch: _Fetch, file: PartialBlob, part: int) -> None:
        """Fetch what a part lacks."""
        try:
            missing = file.missing_bytes(part)
            with contextlib.closing(
                self._source.read(*fetch.stored, missing.start, missing.stop)
            ) as pieces:
                for piece in pieces:
                    file.write(part, piece)
                    with self._changed:
                        self._bytes_fetched += len(piece)
                    self._count(fetch, file.done)
        except (BlobDamaged, BlobMissing) as error:
            if fetch.cold is None:
                raise error.at(fetch.label) from None
            # The blob itself is fetched when no part is left.
        except RemoteError as error:
            # If the server does not answer, it would not answer a request for the blob either.
            if fetch.cold is None or not error.status:
                raise
        file.catch_up()  # the bytes are still in the page cache
        with self._changed:
            fetch.parts -= 1
            is_filled = not fetch.parts
        if is_filled:
            self._check(fetch, file)

    def _check(self, fetch: _Fetch, file: PartialBlob) -> None:
        """Take over a filled file whose digest is right; otherwise fetch it once more."""
        if fetch.cold is not None and self._is_usable(fetch, fetch.cold, file):
            # A pull that is killed before the blob has its name need not fetch it again.
            self._used_forms.append(file.blob)
            self._end(fetch, file)
            return
        if fetch.cold is None and file.has_right_digest():
            self._ingest.adopt_partial(file)
            # Before the blob ends: deltas that wait for it then read this file.
            self.paths[file.blob.digest] = file.path
            self._end(fetch, file)
            return
        # An earlier pull or another program may have left wrong bytes in the file, so it is not continued.
        file.discard()
        file.close()
        fetch.file = None
        if fetch.cold is not None:
            self._leave_form(fetch)
            return
        fetch.wrong += 1
        if fetch.wrong == self._attempts:
            raise BlobDamaged(
                f"{fetch.label}: the registry sent other bytes than those of blob "
                f"{fetch.blob.digest}, twice",
                advice=DAMAGED_ADVICE,
            )
        self._add([partial(self._begin, fetch)])

    def _leave_form(self, fetch: _Fetch) -> None:
        """Fetch a blob itself instead of its form. If it is a base, the deltas against it are replaced likewise."""
        with self._changed:
            if fetch.is_base:
                # Before they begin, because they look at this first.
                self._base_forms[fetch.blob.digest] = None
                self._release(fetch)
                return
            self._notices.append(
                f"{fetch.label}: its compressed form in the registry could not be used, so the blob "
                "itself was fetched"
            )
        fetch.cold = None
        self._add([partial(self._begin, fetch)])

    def _is_usable(self, fetch: _Fetch, cold: ColdLayer, file: PartialBlob) -> bool:
        """Add what a complete cold layer decodes to; return False if that is not the blob."""
        # A part is missing if the registry refused it, or has no such blob.
        if file.missing or not file.has_right_digest():
            return False
        # Cuts off the counters, so that the file has the bytes of the form and no others.
        file.complete()
        if fetch.is_base:  # it is decoded with those that need it
            self._base_forms[fetch.blob.digest] = cold, file.path
            return True
        try:
            added = self._ingest.add(
                fetch.blob.size, lambda: cold.pieces(str(file.path), self._base_files), once=True
            )
        except (BlobDamaged, BlobMissing, DamagedSource):
            return False
        if added.file:
            self.paths[fetch.blob.digest] = self._store.folder("temporary") / added.file
        return True

    def _base_files(self, digest: Digest, size: int) -> Iterator[BaseBlob]:
        """Yield the base of a delta: as it came with this pull, and from the files that the store has."""
        from blobstore.compression.base import BaseBlob  # imports numpy

        path = self.paths.get(digest)
        if path is not None:
            with contextlib.suppress(FileNotFoundError):  # another process has given it its name
                yield BaseBlob.hot(map_file(path, size), digest)
        if self._base_forms.get(digest) is not None:
            base = self._base_of_forms(digest)
            yield base if base.table is None else self._decode(base)
            return
        for base in self._store.base_files(digest, size, in_chain=True):
            yield base if base.table is None else self._decode(base)

    def _base_of_forms(self, digest: Digest) -> BaseBlob:
        """Return a base that is decoded from its form, which may be a delta against another form."""
        links: list[ColdLayer] = []
        paths: dict[BlobId, Path] = {}
        base: BlobId | None = BlobId(digest, 0)
        while base is not None and (form := self._base_forms.get(base.digest)) is not None:
            links.append(form[0])
            paths[form[0].stored] = form[1]
            base = form[0].base

        def read(stored: BlobId) -> memoryview:
            try:
                return map_file(paths[stored], stored.size)
            except FileNotFoundError:  # another pull of these blobs has ended
                raise BlobMissing(f"the file of cold blob {stored.digest} is gone") from None

        return decode_base(links, read, lambda blob: next(self._base_files(*blob)), self._decode)

    def _decode(self, base: BaseBlob) -> BaseBlob:
        """Decode a base that is a delta into a file without a name; return it as it is if there is no space.

        Its chunks may lie at other places than those of the delta against it, which was made elsewhere.
        """
        folder = self._store.folder("temporary")
        with contextlib.suppress(BlobstoreError, OSError):
            self._store.check_space(base.identity.size)
            with tempfile.TemporaryFile(dir=folder) as file:
                buffer = memoryview(bytearray(min(_DECODED, base.identity.size)))
                for begin in range(0, base.identity.size, _DECODED):
                    piece = buffer[: base.identity.size - begin]
                    base.read_into(piece, begin)
                    write_all(file.fileno(), piece)
                data = mapped(file.fileno(), base.identity.size)
            return type(base).hot(data, base.identity.digest)
        return base

    def _end(self, fetch: _Fetch, file: PartialBlob, resumed: int | None = None) -> None:
        """Close the file of a blob that is done."""
        file.close()
        fetch.file = None
        with self._changed:
            self._bytes_resumed += fetch.resumed if resumed is None else resumed
            self._bytes_saved += (0 if fetch.is_base else fetch.blob.size) - fetch.stored.size
            self._release(fetch)
        self._count(fetch, fetch.blob.size)

    def _release(self, fetch: _Fetch) -> None:
        """Begin what waits for a blob; the caller holds the lock."""
        self._tasks.extend(self._deltas.pop(fetch.blob.digest))
        self._changed.notify_all()

    def _count(self, fetch: _Fetch, done: int) -> None:
        """Report the bytes of a blob that are done, beyond those that were reported before."""
        if fetch.is_base:
            return
        if fetch.cold is not None:  # the progress counts bytes of the model
            done = min(done * fetch.blob.size // fetch.stored.size, fetch.blob.size)
        with self._changed:
            new = max(done - fetch.reported, 0)
            fetch.reported += new
        self._workers.report(new, fetch.label)
