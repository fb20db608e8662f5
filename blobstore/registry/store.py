"""Models in registries, read as from a store: their manifests, headers and small files.

The model is resolved and checked first. The headers of its blobs are read by parallel requests of 64 KiB
each, and kept in the header index of the local store. Blobs that the local store has are read there.
"""

from __future__ import annotations

import contextlib
import struct
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, NamedTuple

from blobstore.core.digest import Digest
from blobstore.core.escape import quote
from blobstore.errors import (
    BlobDamaged,
    BlobMissing,
    BlobstoreError,
    Damaged,
    InvalidHeader,
    InvalidManifest,
    ModelNotFound,
    StoreError,
    UnsupportedSource,
)
from blobstore.manifests.descriptor import Descriptor
from blobstore.manifests.media_types import FILE
from blobstore.manifests.model import Manifest
from blobstore.manifests.reference import Reference
from blobstore.registry.client import RegistryClient
from blobstore.registry.reference import RemoteReference
from blobstore.registry.shapes.files import RemoteFile, folder_of
from blobstore.registry.shapes.read import Place, RemoteModel, read_model
from blobstore.safetensors.header import PREFIX_SIZE, Header, header_size, parse_header

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence

    from blobstore.registry.manifest import RemoteManifest
    from blobstore.store.local import LocalStore

HEADER_REQUEST: Final = 64 * 2**10
"""Bytes of a blob that are fetched to read its header; larger headers take a second request."""
_MAX_SMALL_BLOB = 256 * 2**20
_LENGTH = struct.Struct("<Q")
_STREAMS: Final = 8


class RemoteSource(NamedTuple):
    """A model in a registry whose manifest was checked."""

    client: RegistryClient
    address: RemoteReference
    root: RemoteManifest
    """The manifest of the address."""
    model: RemoteModel
    manifest: Manifest
    """The local manifest."""
    files: tuple[RemoteFile, ...] = ()
    """The files of a model that another tool has pushed; its blobs are these, and it has no manifest yet."""

    @classmethod
    def resolve(
        cls, client: RegistryClient, address: RemoteReference, *, with_files: bool = False
    ) -> RemoteSource:
        """Find the model at an address; ``with_files``, also one that another tool has pushed.

        Raises:
            BlobDamaged, BlobMissing: the registry does not have what its manifest lists.
            InvalidManifest: a manifest breaks its format or contradicts the model.
            ModelNotFound: the registry has no such model.
            RemoteError: the registry cannot be reached, refuses access or misbehaves.
            UnsupportedSource: the address is that of something other than a model.
        """

        def read_blob(digest: Digest, size: int) -> bytes:
            pieces = client.read_blob(address.repository, digest, 0, size, size=size)
            with contextlib.closing(pieces):
                return b"".join(pieces)

        root = client.get_manifest(address.repository, address.reference)
        try:
            model = read_model(
                root, lambda digest: client.get_manifest(address.repository, str(digest)), read_blob
            )
            if isinstance(model, RemoteModel):
                files: tuple[RemoteFile, ...] = ()
                manifest = Manifest.from_bytes(model.manifest)
            elif with_files:
                files = folder_of(model.layers)
                layers = (Descriptor(FILE, one.digest, one.size, one.path) for one in files)
                config = Descriptor(FILE, model.config.digest, model.config.size)
                manifest = Manifest(config=config, layers=tuple(layers))
                blobs = tuple({layer.digest: layer for layer in manifest.layers}.values())
                model = RemoteModel(shape="files", manifest=b"", blobs=blobs)
            else:
                raise UnsupportedSource(
                    "this model was pushed as files by another tool",
                    advice="import it with 'blobstore pull'",
                )
            _check_sizes(manifest)
        except BlobstoreError as error:
            raise error.at(quote(address)) from None
        return cls(client, address, root, model, manifest, files)

    def place(self, digest: Digest, size: int) -> Place:
        """Return where the registry has the bytes of a blob."""
        return self.model.places.get(digest) or Place(digest, size, 0)

    def read(self, digest: Digest, size: int, begin: int, end: int) -> Generator[bytes, None, None]:
        """Yield the bytes of a blob of the model from ``begin`` to before ``end``; nothing is hashed.

        Raises:
            BlobDamaged, BlobMissing: the registry does not have it with its size.
            RemoteError: the registry cannot be reached, refuses access or misbehaves.
        """
        place = self.place(digest, size)
        return self.client.read_blob(
            self.address.repository,
            place.digest,
            place.offset + begin,
            place.offset + end,
            size=place.size,
        )


def _check_sizes(manifest: Manifest) -> None:
    """Check that a manifest gives each blob one size."""
    sizes = {manifest.config.digest: manifest.config.size}
    for index, layer in enumerate(manifest.layers):
        size = sizes.setdefault(layer.digest, layer.size)
        if size != layer.size:
            raise InvalidManifest(
                f"$.layers[{index}].size: blob {layer.digest} has {layer.size} bytes here and "
                f"{size} before"
            )


class RegistryReader:
    """Models in registries by name, and those of a local store. Any number of threads may use it."""

    def __init__(
        self, sources: Mapping[Reference, RemoteSource], local: LocalStore | None = None
    ) -> None:
        """Read nothing yet.

        Args:
            sources: the models in registries; their names may be any.
            local: the store that has other models, and blobs that need not be fetched.
        """
        self._sources = sources
        self._local = local
        self._owners = {
            blob.digest: (source, blob.size)
            for source in sources.values()
            for blob in source.model.blobs
        }

    def references(self) -> tuple[Reference, ...]:
        """Return the names of the models in registries."""
        return tuple(self._sources)

    def read_manifest(self, reference: str | Reference) -> bytes:
        """Return the bytes of a manifest. Raises ModelNotFound if no model has this name."""
        source = self._sources.get(Reference.of(reference))
        if source is not None:
            return source.model.manifest
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
        """Return whether the blob is in its registry, as that says.

        Raises:
            BlobDamaged: it has another size there.
        """
        try:
            self.check_size(digest, size)
        except BlobMissing:
            return False
        return True

    def check_size(self, digest: Digest, size: int) -> None:
        """Check that a blob is in its registry or the local store, and has ``size`` bytes.

        Raises:
            BlobMissing: it is not.
            BlobDamaged: it has another size.
        """
        if self._has_local(digest, size):
            return
        source = self._owner(digest, size)
        place = source.place(digest, size)
        found = source.client.blob_size(source.address.repository, place.digest)
        if found is None:
            raise BlobMissing(f"{quote(source.address)}: the registry does not have blob {digest}")
        if found != place.size:
            raise BlobDamaged(
                f"{quote(source.address)}: blob {place.digest} has {found} bytes, "
                f"expected {place.size}"
            )

    def read_pieces(self, digest: Digest, size: int) -> Generator[memoryview, None, None]:
        """Yield the bytes of a blob in order; nothing is hashed. Raises as :meth:`RemoteSource.read`."""
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

    def read_blob(self, digest: Digest, size: int, limit: int = _MAX_SMALL_BLOB) -> bytes:
        """Return the bytes of a small blob after checking its digest. Raises as :meth:`read_pieces`."""
        if size > limit:
            raise BlobDamaged(f"blob {digest} of {size} bytes is too large for a small file")
        data = b"".join(map(bytes, self.read_pieces(digest, size)))
        if (found := Digest.of(data)) != digest:
            raise BlobDamaged(f"the registry sent bytes with digest {found} for blob {digest}")
        return data

    def is_cold(self, digest: Digest) -> bool:
        """Return whether the blob is here in its cold form only."""
        return self._local is not None and self._local.is_cold(digest)

    def read_headers(
        self, blobs: Iterable[tuple[Digest, int]]
    ) -> Iterator[Header | Damaged | StoreError]:
        """Yield for each tensor blob its checked header, or the error that reading it raised.

        Raises:
            RemoteError: the registry cannot be reached, refuses access or misbehaves.
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
                    yield parse_header(start[PREFIX_SIZE:], size)
                elif start is not None:
                    yield start
            except InvalidHeader as error:
                yield BlobDamaged(f"blob {digest}: {error}")

    def _starts(self, blobs: Sequence[tuple[Digest, int]]) -> list[bytes | Damaged]:
        """Return the bytes of headers, from the local cache if it has them."""
        text = "".join(f"{digest.hex} {size}\n" for digest, size in blobs)
        key = Digest.of(b"headers of blobs in registries\n" + text.encode())
        cached = _unpacked(self._local.read_index(key)) if self._local is not None else None
        if cached is not None and len(cached) == len(blobs):
            return list(cached)
        with ThreadPoolExecutor(_STREAMS, thread_name_prefix="blobstore-headers") as threads:
            starts = list(threads.map(lambda blob: self._start(*blob), blobs))
        found = [start for start in starts if isinstance(start, bytes)]
        if self._local is not None and len(found) == len(starts):
            # A checksum, then each header with its length.
            data = b"".join(part for start in found for part in (_LENGTH.pack(len(start)), start))
            self._local.write_index(key, Digest.of(data).hex.encode() + data)
        return starts

    def _start(self, digest: Digest, size: int) -> bytes | Damaged:
        """Return the header of a blob with its prefix, or the error that reading it raised."""
        try:
            start = bytearray(min(size, HEADER_REQUEST))
            self.read_into(digest, size, 0, memoryview(start))
            end = PREFIX_SIZE + header_size(bytes(start[:PREFIX_SIZE]), size)
            if end > len(start):
                rest = bytearray(end - len(start))
                self.read_into(digest, size, len(start), memoryview(rest))
                start += rest
            return bytes(start[:end])
        except InvalidHeader as error:
            return BlobDamaged(f"blob {digest}: {error}")
        except Damaged as error:
            return error

    def _has_local(self, digest: Digest, size: int) -> bool:
        """Return whether the local store has a blob; a damaged one is read from the registry."""
        if self._local is None:
            return False
        try:
            return self._local.exists(digest, size)
        except Damaged:
            return digest not in self._owners

    def _owner(self, digest: Digest, size: int) -> RemoteSource:
        source, found = self._owners.get(digest, (None, size))
        if source is None:
            raise BlobMissing(f"no model here has the blob {digest}")
        if found != size:
            raise BlobDamaged(f"blob {digest} has {found} bytes, expected {size}")
        return source


def list_tags(
    address: str, *, plain_http: bool | None = None
) -> list[tuple[RemoteReference, Digest | None]]:
    """Return the models in a repository, by their tags in order, with the digests of their manifests.

    Raises:
        InvalidReference: the address is not valid.
        ModelNotFound: the registry has no such repository.
        RemoteError: the registry cannot be reached, refuses access or misbehaves.
    """
    repository = RemoteReference.parse(address)
    with (
        RegistryClient(repository.host, plain_http=plain_http) as client,
        ThreadPoolExecutor(_STREAMS, thread_name_prefix="blobstore-tags") as threads,
    ):
        tags = sorted(client.tags(repository.repository))
        digests = threads.map(lambda tag: client.head_manifest(repository.repository, tag), tags)
        return [
            (RemoteReference(repository.host, repository.repository, tag), digest)
            for tag, digest in zip(tags, digests, strict=True)
        ]


def _unpacked(data: bytes | None) -> list[bytes] | None:
    """Return the headers in the cache; None if it has none, or was altered."""
    length = len(Digest.of(b"").hex)
    if data is None or Digest.of(data[length:]).hex.encode() != data[:length]:
        return None
    starts: list[bytes] = []
    at = length
    while at < len(data):
        (size,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size + size
        starts.append(data[at - size : at])
    return starts
