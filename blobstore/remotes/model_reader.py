"""Models in registries and object storage, read as from a store: their manifests, headers and small files.

The models are resolved and checked first. The headers of their blobs are read by parallel requests of 64 KiB
each, and kept in the header index of the local store. Blobs that the local store has are read there.
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
from itertools import chain
from typing import TYPE_CHECKING, Final, Protocol

from blobstore.core import capacity, limits, strict_json
from blobstore.core.digest import Digest
from blobstore.core.escape import quote
from blobstore.core.workers import WorkerPool
from blobstore.errors import (
    BlobDamaged,
    BlobMissing,
    Damaged,
    InvalidHeader,
    ModelNotFound,
    StoreError,
)
from blobstore.manifests.model import Manifest
from blobstore.manifests.reference import Reference
from blobstore.safetensors.header import PREFIX_SIZE, Header, header_size, parse_header
from blobstore.store.gguf_blob import is_gguf, read_gguf_header
from blobstore.store.notes import NoteKind

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence

    from blobstore.manifests.descriptor import Descriptor
    from blobstore.store.local import LocalStore

HEADER_REQUEST: Final = 64 * 2**10
"""Bytes of a blob that are fetched to read its header; larger headers take a second request."""
_LENGTH = struct.Struct("<Q")
_HEADERS: Final = NoteKind("headers of remote blobs 1")
_STREAMS: Final = capacity.HEADERS.most


class RemoteClient(Protocol):
    """The client that sends the requests for a model."""

    def abort(self) -> None:
        """End the requests of all threads, soon and for good."""


class RemoteModelSource(Protocol):
    """A remote model whose manifest was checked."""

    @property
    def client(self) -> RemoteClient:
        """The client that sends the requests."""

    @property
    def address(self) -> object:
        """The address of the model; its text is printed."""

    @property
    def manifest(self) -> Manifest:
        """The manifest that the model has in a store."""

    @property
    def data(self) -> bytes:
        """Its bytes."""

    @property
    def blobs(self) -> Sequence[Descriptor]:
        """The blobs of the model, each once."""

    @property
    def notices(self) -> tuple[str, ...]:
        """What a user should know about how the model is served."""

    def headers(self) -> bytes | None:
        """Return the headers as :func:`pack_headers` packs them, unchecked; None if the remote has none."""

    def check_size(self, digest: Digest, size: int) -> None:
        """Check that a blob exists with ``size`` bytes. Raises BlobMissing, BlobDamaged, RemoteError."""

    def read(
        self, digest: Digest, size: int, begin: int, end: int
    ) -> Generator[bytes | memoryview, None, None]:
        """Yield the bytes of a blob from ``begin`` to before ``end``; nothing is hashed.

        Raises:
            BlobDamaged, BlobMissing: it does not exist, or has another size.
            RemoteError: the remote cannot be reached, refuses access or misbehaves.
        """


class RemoteReader:
    """Remote models by name, and those of a local store. Any number of threads may use it."""

    def __init__(
        self, sources: Mapping[Reference, RemoteModelSource], local: LocalStore | None = None
    ) -> None:
        """Read nothing yet.

        Args:
            sources: the remote models; their names may be any.
            local: the store that has other models, and blobs that need not be fetched.
        """
        self._sources = sources
        self._local = local
        self.starts: dict[Digest, bytes] = {}
        """The headers that were read, with their prefixes; they are unchecked until the blobs are hashed."""
        self._index_keys: set[Digest] = set()
        """Of the headers in the local cache."""
        # Blobs with one digest have the same bytes, so any model that lists it may be asked.
        self._owners = {
            blob.digest: (source, blob.size) for source in sources.values() for blob in source.blobs
        }

    @property
    def notices(self) -> tuple[str, ...]:
        """What a user should know about how the models are served."""
        return tuple(chain.from_iterable(source.notices for source in self._sources.values()))

    def references(self) -> tuple[Reference, ...]:
        """Return the names of the remote models."""
        return tuple(self._sources)

    def read_manifest(self, reference: str | Reference) -> bytes:
        """Return the bytes of a manifest. Raises ModelNotFound if no model has this name."""
        source = self._sources.get(Reference.of(reference))
        if source is not None:
            return source.data
        if self._local is not None:
            return self._local.read_manifest(reference)
        raise ModelNotFound(f"no model {quote(Reference.of(reference))}")

    def resolve(self, reference: str | Reference) -> Manifest:
        """Return the manifest of a model. Raises as :meth:`LocalStore.resolve`."""
        source = self._sources.get(Reference.of(reference))
        if source is not None:
            return source.manifest
        if self._local is not None:
            return self._local.resolve(reference)
        return Manifest.from_bytes(self.read_manifest(reference))

    def exists(self, digest: Digest, size: int) -> bool:
        """Return whether the blob exists, as the remote says.

        Raises:
            BlobDamaged: it has another size.
        """
        try:
            self.check_size(digest, size)
        except BlobMissing:
            return False
        return True

    def check_size(self, digest: Digest, size: int) -> None:
        """Check that a blob is in the remote or in the local store, and has ``size`` bytes.

        Raises:
            BlobMissing: it is not.
            BlobDamaged: it has another size.
        """
        if self._has_local(digest, size):
            return
        self._owner(digest, size).check_size(digest, size)

    def read_pieces(self, digest: Digest, size: int) -> Generator[memoryview, None, None]:
        """Yield the bytes of a blob in order; nothing is hashed. Raises as :meth:`RemoteModelSource.read`."""
        if self._local is not None and self._has_local(digest, size):
            yield from self._local.read_pieces(digest, size)
            return
        pieces = self._owner(digest, size).read(digest, size, 0, size)
        with contextlib.closing(pieces):
            for piece in pieces:
                yield memoryview(piece)

    def read_into(self, digest: Digest, size: int, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes of a blob from ``offset`` on. Raises as :meth:`read_pieces`."""
        if self._local is not None and self._has_local(digest, size):
            self._local.read_into(digest, size, offset, buffer)
            return
        source = self._owner(digest, size)
        end = offset + len(buffer)
        if end > size:
            raise BlobDamaged(f"blob {digest} of {size} bytes ends before byte {end}")
        with contextlib.closing(source.read(digest, size, offset, end)) as pieces:
            for piece in pieces:
                buffer[: len(piece)] = piece
                buffer = buffer[len(piece) :]

    def read_blob(self, digest: Digest, size: int, limit: int = limits.SMALL_FILES.one) -> bytes:
        """Return the bytes of a small blob after checking its digest. Raises as :meth:`read_pieces`."""
        if self._local is not None and self._has_local(digest, size):
            return self._local.read_blob(digest, size, limit)
        if size > limit:
            raise BlobDamaged(f"blob {digest} of {size} bytes is too large for a small file")
        return read_small(self._owner(digest, size), digest, size)

    def is_cold(self, digest: Digest) -> bool:
        """Return whether the blob has a cold file in the local store only."""
        return self._local is not None and self._local.is_cold(digest)

    def read_headers(
        self, blobs: Iterable[tuple[Digest, int]]
    ) -> Iterator[Header | Damaged | StoreError]:
        """Yield for each tensor blob its checked header, or the error that reading it raised.

        Raises:
            RemoteError: the remote cannot be reached, refuses access or misbehaves.
        """
        wanted = list(blobs)
        remote = [blob for blob in wanted if not self._has_local(*blob)]
        starts = dict(zip(remote, self._starts(remote), strict=True))
        for digest, size in wanted:
            start = starts.get((digest, size))
            try:
                if start is None and self._local is not None:
                    yield from self._local.read_headers([(digest, size)])
                elif isinstance(start, bytes):
                    yield _parsed(start, size)
                elif start is not None:
                    yield start
            except InvalidHeader as error:
                yield BlobDamaged(f"blob {digest}: {error}")

    def _starts(self, blobs: Sequence[tuple[Digest, int]]) -> list[bytes | Damaged]:
        """Return the bytes of headers, from the local cache if it has them."""
        # No digest shows that these are the headers of the blobs, so those of one address are used for no other.
        addresses = sorted(str(source.address) for source in self._sources.values())
        ids = [[digest.hex, size] for digest, size in blobs]
        key = Digest.of(
            # A path may be other bytes than UTF-8.
            strict_json.dumps([addresses, ids]).encode(errors="surrogateescape")
        )
        self._index_keys.add(key)
        digests = {digest for digest, _ in blobs}
        cached = self._local.read_note(_HEADERS, key) if self._local is not None else None
        known = unpack_headers(cached, digests)
        is_cached = digests <= known.keys()
        # The remote may have all headers in one object.
        if not is_cached:
            for source in {id(found): found for found, _ in self._owners.values()}.values():
                known |= unpack_headers(source.headers(), digests)
        budget = limits.Budget(
            limits.HEADERS, "headers of blobs", "'blobstore pull' reads one at a time"
        )

        def start_of(blob: tuple[Digest, int]) -> bytes | Damaged:
            return known.get(blob[0]) or self._start(*blob, budget)

        starts = WorkerPool(_STREAMS, None, 0).run(blobs, start_of, self._abort)
        found = {
            digest: start
            for (digest, _), start in zip(blobs, starts, strict=True)
            if isinstance(start, bytes)
        }
        self.starts |= found
        # Only a complete set is cached, so that errors are not.
        if self._local is not None and len(found) == len(starts) and not is_cached:
            self._local.write_note(_HEADERS, key, pack_headers(found))
        return starts

    def forget_headers(self) -> None:
        """Remove the headers of this model from the local cache, because one of them is wrong."""
        if self._local is not None:
            for key in self._index_keys:
                self._local.remove_note(_HEADERS, key)

    def _start(self, digest: Digest, size: int, budget: limits.Budget) -> bytes | Damaged:
        """Return the header of a remote blob with its prefix, or the error that reading it raised."""
        try:
            source = self._owner(digest, size)
            start = limits.gather(source.read(digest, size, 0, min(size, HEADER_REQUEST)))
            if is_gguf(start):
                return self._gguf_start(source, digest, size, start, budget)
            end = PREFIX_SIZE + header_size(start[:PREFIX_SIZE], size)
            # Counted before the rest is fetched, because the blob itself states the length.
            budget.spend(end)
            if end > len(start):
                start += limits.gather(source.read(digest, size, len(start), end))
            return start[:end]
        except InvalidHeader as error:
            return BlobDamaged(f"blob {digest}: {error}")
        except Damaged as error:
            return error

    @staticmethod
    def _gguf_start(
        source: RemoteModelSource, digest: Digest, size: int, start: bytes, budget: limits.Budget
    ) -> bytes:
        """Return the header of a GGUF file that begins with ``start``. Only its own bytes say where it ends."""

        def read(begin: int, end: int) -> bytes:
            nonlocal start
            if end > len(start):
                # Counted before it is fetched, because the blob itself says how long its header is.
                budget.spend(end - len(start))
                start += limits.gather(source.read(digest, size, len(start), end))
            return start[begin:end]

        budget.spend(len(start))
        header = read_gguf_header(read, size)
        return start[: header.data_start]

    def _abort(self) -> None:
        for source in self._sources.values():
            source.client.abort()

    def _has_local(self, digest: Digest, size: int) -> bool:
        """Return whether the local store has a blob; a damaged one is read from the registry."""
        if self._local is None:
            return False
        try:
            return self._local.exists(digest, size)
        except Damaged:
            return digest not in self._owners

    def check_listed(self, digest: Digest, size: int) -> None:
        """Check that the local store has a blob, or a remote model lists it, with this size; send no request.

        Raises:
            BlobMissing: neither has it.
            BlobDamaged: it has another size.
        """
        if not self._has_local(digest, size):
            self._owner(digest, size)

    def _owner(self, digest: Digest, size: int) -> RemoteModelSource:
        source, found = self._owners.get(digest, (None, size))
        if source is None:
            raise BlobMissing(f"no model here has the blob {digest}")
        if found != size:
            raise BlobDamaged(f"blob {digest} has {found} bytes, expected {size}")
        return source


def _parsed(start: bytes, size: int) -> Header:
    """Return the header of a blob of ``size`` bytes that begins with ``start``. Raises InvalidHeader."""
    if is_gguf(start):
        return read_gguf_header(lambda begin, end: start[begin:end], size)
    return parse_header(start[PREFIX_SIZE:], size)


def read_small(source: RemoteModelSource, digest: Digest, size: int) -> bytes:
    """Return the bytes of a small blob after checking its digest. Memory grows as they arrive.

    Raises as :meth:`RemoteModelSource.read`; BlobDamaged also if the digest differs.
    """
    data = limits.gather(source.read(digest, size, 0, size))
    check_sent(digest, Digest.of(data))
    return data


def check_sent(digest: Digest, found: Digest) -> None:
    """Check that bytes have the digest of the blob as which they were sent. Raises BlobDamaged."""
    if found != digest:
        raise BlobDamaged(f"the remote sent bytes with digest {found} for blob {digest}")


def pack_headers(starts: Mapping[Digest, bytes]) -> bytes:
    """Return headers, each with its prefix, as bytes that begin with a checksum."""
    data = b"".join(
        part
        for digest, start in starts.items()
        for part in (bytes.fromhex(digest.hex), _LENGTH.pack(len(start)), start)
    )
    return hashlib.sha256(data).digest() + data


def unpack_headers(data: bytes | None, wanted: Iterable[Digest]) -> dict[Digest, bytes]:
    """Return the wanted ones of the headers that :func:`pack_headers` packed; none if the bytes were altered."""
    size = hashlib.sha256().digest_size
    if data is None or hashlib.sha256(memoryview(data)[size:]).digest() != data[:size]:
        return {}
    starts: dict[Digest, bytes] = {}
    digests = {bytes.fromhex(digest.hex): digest for digest in wanted}
    at = size
    # The checksum shows accidents only, so a length may be anything. A slice past the end is short,
    # and does not parse.
    while at + size + _LENGTH.size <= len(data):
        digest = digests.get(data[at : at + size])
        (length,) = _LENGTH.unpack_from(data, at + size)
        at += size + _LENGTH.size
        if digest is not None:
            starts[digest] = data[at : at + length]
        at += length
    return starts
