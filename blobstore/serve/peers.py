"""Fetches the blobs of a model from other servers of the same kind, so that nodes of a rack feed each other.

Peers are a list that the user gives; nothing is negotiated. All peers are asked at once which of them has the commit.
No answer of a peer is trusted: a blob must have its digest, and files that are assembled from blobs must have the
digests that the upstream lists. A peer that sends other bytes is named in the log and not asked for the model again;
one that is gone or slow is not asked for a while. Requests are marked, and a marked
request is answered from the store alone, so no chain of servers waits for itself.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from blobstore.core import capacity, limits, strict_json
from blobstore.core.digest import Digest
from blobstore.core.escape import quote, quote_place
from blobstore.core.files import status_of
from blobstore.core.workers import WorkerPool
from blobstore.errors import (
    BlobDamaged,
    BlobMissing,
    BlobstoreError,
    ModelNotFound,
    RemoteError,
    StoreError,
    UsageError,
)
from blobstore.http.protocol import Login
from blobstore.http.retry import Patience
from blobstore.manifests.media_types import SOURCE
from blobstore.manifests.reference import DEFAULT_NAMESPACE, DEFAULT_TAG
from blobstore.models.source_layers import read_source_record
from blobstore.operations.maintenance.gc import remove_blobs
from blobstore.registry.client import RegistryClient
from blobstore.registry.credentials import GivenLogin, LoginFiles
from blobstore.registry.reference import RemoteReference
from blobstore.registry.store import RemoteSource
from blobstore.remotes.choose_cold_layers import usable_layers
from blobstore.remotes.download import Download
from blobstore.remotes.fetch_attached import attached
from blobstore.remotes.model_reader import RemoteReader
from blobstore.serve.messages import PEER, BlobPart
from blobstore.serve.model_files import commit_of, model_files
from blobstore.sources.hub_listing import COMMIT

if TYPE_CHECKING:
    from collections.abc import (
        Callable,
        Collection,
        Generator,
        Iterable,
        Iterator,
        Mapping,
        Sequence,
    )

    from blobstore.manifests.descriptor import Descriptor
    from blobstore.manifests.reference import Reference
    from blobstore.remotes.cold_layers import ColdLayer
    from blobstore.serve.messages import Content
    from blobstore.store.ingest import Ingest
    from blobstore.store.local import LocalStore

PATIENCE: Final = Patience(stall=5, slowest=1 << 20, attempts=2, first=0.1, longest=1)
"""A silent peer costs two timeouts, because a first connection may just end. One that sends less than 1 MiB/s is dropped."""
SKIP_SECONDS: Final = 60.0
"""Seconds that a peer is not asked after it did not answer."""
_STREAMS: Final = capacity.PEER_BLOBS.most
_PIECE: Final = 1 << 20
_PROBES: Final = capacity.PROBES.most
"""Peers that are asked at once."""
_SPARE: Final = 64 << 20
"""Bytes of a model that are in no file."""
_FEW: Final = 256
_LITTLE: Final = 1 << 20
"""Blobs and bytes that wait for more before they are removed."""


@dataclass(slots=True, eq=False)
class Peer:
    """A server that may have blobs."""

    address: RemoteReference
    """With any repository."""
    login: Login | None = None
    """The login for requests to it; None for the login that the user has there."""
    skipped_until: float = 0.0

    @property
    def name(self) -> str:
        """The URL without a path."""
        return f"{self.address.scheme}://{self.address.host}"

    @classmethod
    def parse(cls, url: str, token: str = "") -> Peer:
        """Return the peer at a URL such as ``http://node:8080``. Raises UsageError."""
        try:
            address = RemoteReference.parse(f"{url.rstrip('/')}/x")
        except BlobstoreError:
            address = None
        if address is None or not address.scheme or address.repository != "x":
            raise UsageError(
                f"not the URL of a peer: {quote_place(url)}",
                advice="give http://HOST:PORT or https://HOST",
            )
        return cls(address, Login("token", token) if token else None)

    def token(self) -> str:
        """Return the token for requests to it as a Hub; empty for none."""
        login = self.login
        if login is None:
            with contextlib.suppress(BlobstoreError, OSError):
                login = LoginFiles().find(self.address.host)
        return "" if login is None else login.password

    def client(self) -> RegistryClient:
        """Return a client whose requests are marked as those of a peer. It is connected to nothing yet."""
        return RegistryClient(
            self.address.host,
            plain_http=self.address.uses_plain_http(),
            credentials=None if self.login is None else GivenLogin(self.login),
            patience=PATIENCE,
            headers={PEER: "1"},
        )


class Wanted(Protocol):
    """A version of a model that is wanted."""

    @property
    def reference(self) -> Reference:
        """Its name, also at the peers."""

    @property
    def commit(self) -> str:
        """The version."""


class PeerFiles(NamedTuple):
    """The files of a model, as some peers list them; nothing is trusted."""

    files: Mapping[str, Content]
    """Composed of blobs of this store."""
    peers: Sequence[Peer]
    """The peers that have the same manifest."""


class Peers:
    """The peers of a server. Threads may share them."""

    def __init__(
        self,
        store: LocalStore,
        peers: Sequence[Peer],
        note: Callable[..., object] = lambda **_: None,
    ) -> None:
        """Ask nothing yet. ``note`` is called with the fields of a line for the log."""
        self._store, self._peers, self._note = store, tuple(peers), note
        self._fetched = 0
        self._unneeded: set[str] = set()
        """Blobs that were fetched and that no model may need."""
        self._lock = threading.Lock()
        self._running: set[PeerFetch] = set()
        self._is_closed = False

    @property
    def fetched(self) -> int:
        """Bytes that peers have sent."""
        with self._lock:
            return self._fetched + sum(fetch.received for fetch in self._running)

    def alive(self) -> list[Peer]:
        """Return the peers that have answered lately, or were not asked."""
        now = time.monotonic()
        return [peer for peer in self._peers if peer.skipped_until <= now]

    def close(self) -> None:
        """End the fetches of other threads."""
        with self._lock:
            self._is_closed = True
            running = list(self._running)
        for fetch in running:
            fetch.abort()

    @contextlib.contextmanager
    def files(
        self,
        wanted: Wanted,
        size: int,
        *,
        first: Peer | None = None,
        others: bool = True,
        shared: Callable[[Collection[Digest]], Collection[Digest]] = lambda blobs: blobs,
    ) -> Iterator[Iterator[PeerFiles]]:
        """Yield an iterator over answers: the files of a model, as some peers list them.

        Peers that list different manifests give different files, so there may be several answers, or none. The
        blobs stay while the block runs, and then those that the store's models have.

        Args:
            wanted: the model.
            size: bytes of its files. No more are fetched, of all versions together, but some for other blobs.
            first: another server to ask, such as an upstream that is ``blobstore serve``.
            others: whether the peers may hear of the model.
            shared: which of some blobs that the store has are for all who may read the model. Peers have to send others.
        """
        fetched: set[str] = set()
        try:
            with contextlib.ExitStack() as stack:
                sources = self._sources(wanted, first, stack, self.alive() if others else [])
                yield self._all_files(wanted, size, sources, fetched, stack, shared)
        finally:
            with contextlib.suppress(BlobstoreError):
                _, manifest = self._store.parse(wanted.reference)
                fetched.difference_update(blob.digest.hex for blob in manifest.blobs)
            # The model was not imported, or has other blobs than a peer lists, or not all blobs of one peer arrived.
            with contextlib.suppress(BlobstoreError):
                self._remove(fetched)

    def _remove(self, blobs: Collection[str]) -> None:
        """Remove blobs, unless models need them. That looks at all manifests, so a few small ones wait. Raises BlobstoreError."""
        with self._lock:
            self._unneeded.update(blobs)
            paths = map(self._store.blob_path, map(Digest, self._unneeded))
            size = sum(status.st_size for status in map(status_of, paths) if status)
            if len(self._unneeded) < _FEW and size < _LITTLE:
                return
            unneeded, self._unneeded = self._unneeded, set()
        remove_blobs(self._store, unneeded)

    def _all_files(
        self,
        wanted: Wanted,
        size: int,
        sources: Mapping[Digest, list[_Source]],
        fetched: set[str],
        stack: contextlib.ExitStack,
        shared: Callable[[Collection[Digest]], Collection[Digest]],
    ) -> Iterator[PeerFiles]:
        left = size * 1.1 + _SPARE
        # The version that most peers have comes first.
        for several in sorted(sources.values(), key=len, reverse=True):
            source = several[0].source
            missing = {one.digest.hex: one.size for one in self._missing(source.blobs)}
            here = [one for one in source.blobs if one.digest.hex not in missing]
            unproven = _others(here, shared)
            arriving = sum(missing.values()) + sum(one.size for one in unproven)
            if arriving > left:
                name = several[0].peer.name
                self._note(peer=name, model=str(wanted.reference), error="too large")
                continue
            # Until the caller has imported the model, the lease of this import keeps the blobs.
            ingest = stack.enter_context(self._store.ingest())
            # Blobs are the same in all versions.
            others = [one for group in sources.values() if group is not several for one in group]
            fetch = PeerFetch(self._store, several, others, self)
            with self._lock:
                self._running.add(fetch)
            try:
                # After it is listed: either `close` aborts it, or this sees that the server is closed.
                if self._is_closed:
                    return
                left -= arriving
                fetched.update(missing)
                fetch.check_sent(unproven)
                sent = fetch.run(ingest, shared)
                # Others may have come into the store since, of models that the client may not read.
                late = [one for one in source.blobs if one.digest.hex in missing.keys() - sent]
                fetch.check_sent(_others(late, shared))
                files = model_files(self._store, source.manifest)
                yield PeerFiles(files, [one.peer for one in several])
            except BlobstoreError as error:
                self._note(model=str(wanted.reference), error=f"peers have not sent it: {error}")
                if isinstance(error, StoreError):
                    return
            finally:
                with self._lock:
                    self._running.discard(fetch)
                    self._fetched += fetch.received

    def _missing(self, blobs: Iterable[Descriptor]) -> Iterator[Descriptor]:
        for blob in blobs:
            with contextlib.suppress(BlobDamaged):
                if self._store.exists(blob.digest, blob.size):
                    continue
            yield blob

    def file_differs(self, wanted: Wanted, answer: PeerFiles, name: str) -> None:
        """Note that a file of a model has other bytes than the upstream lists."""
        for peer in answer.peers:
            self._note(
                peer=peer.name,
                model=str(wanted.reference),
                error=f"the peer lists other bytes of file {quote(name)}",
            )

    def _sources(
        self,
        wanted: Wanted,
        first: Peer | None,
        stack: contextlib.ExitStack,
        others: Sequence[Peer],
    ) -> dict[Digest, list[_Source]]:
        """Return the servers that have a model, by its manifest; the connections end with ``stack``."""
        asked = [] if first is None else [first]
        asked += [one for one in others if first is None or one.name != first.name]
        found: dict[Digest, list[_Source]] = defaultdict(list)
        if not asked:
            return found
        pool = WorkerPool(min(len(asked), _PROBES), None, 0)
        for one in pool.run(asked, lambda peer: self._ask(peer, wanted)):
            if one is not None:
                stack.callback(one.source.client.close)
                found[Digest.of(one.source.data)].append(one)
        return found

    def _ask(self, peer: Peer, wanted: Wanted) -> _Source | None:
        """Return a peer as the source of a model; None if it does not have this version."""
        client, held, reading = peer.client(), limits.Held(), limits.Held()
        try:
            name = RemoteReference.of(wanted.reference)  # registries do not allow all names
            repository = name.repository.removeprefix(f"{DEFAULT_NAMESPACE}/")
            # A commit is no tag, and the version decides.
            tag = DEFAULT_TAG if COMMIT.fullmatch(name.tag) else name.tag
            address = replace(peer.address, repository=repository, tag=tag)
            source = RemoteSource.resolve(client, address)
            held.add(strict_json.memory_of(source.data), "the manifest of a peer")
            reader = RemoteReader({wanted.reference: source}, self._store)
            layers = source.manifest.layers_of(SOURCE)
            reading.add(3 * sum(layer.size for layer in layers), "the source record of a peer")
            record = read_source_record(reader, source.manifest)
            commits = {commit_of(Digest.of(source.data)), record.commit if record else ""}
            if wanted.commit in commits:
                return _Source(peer, source, held)
        except ModelNotFound:
            pass
        except RemoteError as error:
            self.failed(peer, error)
        except BlobstoreError as error:
            self._note(peer=peer.name, error=str(error))
        finally:
            reading.release()
        client.close()
        return None

    def failed(self, peer: Peer, error: BlobstoreError) -> None:
        """Do not ask a peer for a while."""
        peer.skipped_until = time.monotonic() + SKIP_SECONDS
        self._note(peer=peer.name, error=str(error))

    def lied(self, peer: Peer, digest: Digest) -> None:
        """Note that a peer has sent other bytes than those of a blob."""
        message = f"the peer has sent other bytes than those of blob {digest.short}"
        self._note(peer=peer.name, error=message)


@dataclass(slots=True, eq=False)
class _Source:
    """A peer that has a model."""

    peer: Peer
    source: RemoteSource
    held: limits.Held
    """The memory of its manifest."""
    sent: dict[Digest, int] = field(default_factory=dict)
    """Bytes of each blob that it has sent."""


class PeerFetch:
    """The blobs of one model, from several peers that list the same: a source of :class:`Download`."""

    def __init__(
        self,
        store: LocalStore,
        sources: Sequence[_Source],
        others: Sequence[_Source],
        host: Peers,
    ) -> None:
        """Fetch nothing yet.

        Args:
            store: gets the blobs.
            sources: peers that have the same manifest.
            others: peers that have other manifests, with some of its blobs.
            host: gets a report about peers that fail or lie.
        """
        self._store, self._sources, self._host = store, [*sources, *others], host
        self._listed: dict[Digest, _Source] = {}
        """The peers that have a compressed form, by blob: each peer freezes on its own."""
        self._lock = threading.Lock()
        self._blobs = sources[0].source.blobs
        self.data = sources[0].source.data
        """The manifest, which all of them have."""
        self.received = 0
        """Bytes that have arrived."""
        self._begun: set[Digest] = set()
        """The blobs of which there are such bytes: others may lie in files that another command has left."""

    @property
    def client(self) -> PeerFetch:
        """The object that can end the requests."""
        return self

    def abort(self) -> None:
        """End the requests of all threads."""
        for one in list(self._sources):
            one.source.client.abort()

    def run(
        self, ingest: Ingest, shared: Callable[[Collection[Digest]], Collection[Digest]]
    ) -> set[str]:
        """Fetch the blobs that the store lacks, and give them their names; return the hex digests of those that were sent.

        See :meth:`Peers.files` for ``shared``: what others than those who may read the model have is no base of it, or
        peers would learn that it is here.

        Raises:
            BlobMissing, BlobDamaged: no peer has sent a blob with its digest.
            StoreError: the store cannot be written, or is short of space.
        """
        missing = [blob for blob in self._blobs if ingest.find(*blob.id) is None]
        layers = self._cold_layers()
        bases = {one.base.digest for one in layers.values() if one.base}
        known = {*shared(bases), *(blob.digest for blob in self._blobs)}
        usable = usable_layers(
            self._store,
            layers,
            missing,
            lambda base: base.digest in known and ingest.find(*base) is not None,
        )
        workers = WorkerPool(_STREAMS, None, sum(blob.size for blob in missing))
        attempts = len(self._sources) + 1  # each peer once, and what an earlier process has left
        download = Download(self, self._store, ingest, missing, workers, usable, attempts)
        download.run(_STREAMS)
        ingest.publish()
        # Only now: after a kill before this, the next attempt decodes them again.
        download.remove_cold_files()
        return {one.hex for one in download.paths if one in self._begun or one in usable.layers}

    def check_sent(self, blobs: Iterable[Descriptor]) -> None:
        """Let peers send blobs that the store has: who only knows the digest of one does not get it for the model.

        Raises:
            BlobMissing, BlobDamaged: no peer has sent a blob with its digest.
        """
        for blob in blobs:
            pieces = self.read(blob.digest, blob.size, 0, blob.size)
            if Digest.of_pieces(memoryview(piece) for piece in pieces) != blob.digest:
                raise BlobDamaged(f"the peer has sent other bytes than those of {blob.digest}")

    def _cold_layers(self) -> Mapping[Digest, ColdLayer]:
        """Return the compressed forms that one of the peers has."""
        for one in list(self._sources):
            source = one.source
            try:
                layers = attached(source, Digest.of(source.data), lambda _: None).fetch_layers()
            except BlobstoreError:
                continue
            if layers:
                self._listed |= {layer.stored.digest: one for layer in layers.values()}
                return layers
        return {}

    def read(self, digest: Digest, size: int, begin: int, end: int) -> Generator[bytes, None, None]:
        """Yield bytes of a blob, from the next peer where one fails; nothing is hashed.

        Raises:
            BlobMissing: no peer has it.
        """
        self._judge(digest, size)
        for one in self._order(digest):
            try:
                with contextlib.closing(one.source.read(digest, size, begin, end)) as pieces:
                    for piece in pieces:
                        # Before it is passed on: if this peer fails, the next one continues after it.
                        begin += len(piece)
                        with self._lock:
                            one.sent[digest] = one.sent.get(digest, 0) + len(piece)
                            self.received += len(piece)
                            self._begun.add(digest)
                        yield piece
            except BlobMissing:
                continue
            except BlobDamaged:  # another size
                self._leave(one)
                self._host.lied(one.peer, digest)
                continue
            except RemoteError as error:
                self._leave(one)
                self._host.failed(one.peer, error)
                continue
            if begin == end:
                return
        raise BlobMissing(f"no peer has sent blob {digest}")

    def _judge(self, digest: Digest, size: int) -> None:
        """Drop a peer whose complete blob is requested again: its bytes were wrong."""
        with self._lock:
            liars = [one for one in self._sources if size and one.sent.get(digest, 0) >= size]
        for one in liars:
            self._leave(one)
            self._host.lied(one.peer, digest)

    def _leave(self, one: _Source) -> None:
        with self._lock:
            if one in self._sources:
                self._sources.remove(one)

    def _order(self, digest: Digest) -> list[_Source]:
        """Return the peers to ask for a blob, in an order that differs from blob to blob."""
        with self._lock:
            sources = list(self._sources)
        if digest in self._listed:
            return [one for one in sources if one is self._listed[digest]]
        start = int(digest.hex[:8], 16) % max(len(sources), 1)
        return sources[start:] + sources[:start]


def _others(
    blobs: Sequence[Descriptor], shared: Callable[[Collection[Digest]], Collection[Digest]]
) -> list[Descriptor]:
    """Return the blobs that are not shared."""
    known = shared([one.digest for one in blobs])
    return [one for one in blobs if one.digest not in known]


def read_content(store: LocalStore, content: Content) -> Iterator[bytes]:
    """Yield the bytes of a file whose blobs are in a store. Raises BlobMissing, BlobDamaged or StoreError."""
    for part in content.parts:
        if isinstance(part, bytes):
            yield part
        elif isinstance(part, BlobPart):
            end = part.begin + part.length
            for begin in range(part.begin, end, _PIECE):
                piece = bytearray(min(_PIECE, end - begin))
                store.read_into(part.digest, part.size, begin, memoryview(piece))
                yield bytes(piece)
