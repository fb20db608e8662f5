"""Models in object storage, read and written as in a store.

Keys are the paths of a store's folder: ``blobs/sha256-<hex>`` and ``manifests/<host>/<namespace>/<model>/<tag>``.
The bytes of each manifest are a blob as well, so that a digest finds what a name was before.
"""

from __future__ import annotations

import contextlib
import hashlib
from itertools import islice
from typing import TYPE_CHECKING, Final

from blobstore.core import limits
from blobstore.core.digest import Digest
from blobstore.core.escape import quote
from blobstore.errors import (
    BlobDamaged,
    BlobMissing,
    Conflict,
    InvalidReference,
    ModelNotFound,
    NotFound,
    RemoteError,
)
from blobstore.manifests.model import MAX_MANIFEST_SIZE
from blobstore.manifests.reference import Reference
from blobstore.objects.address import StoreAddress
from blobstore.objects.conditional_writes import ConditionalClient
from blobstore.objects.response_rules import (
    LIST_SIGNATURES,
    LOOK_FOR_BLOB,
    LOOK_FOR_STORE,
    READ,
    READ_FORMER,
    READ_SIGNATURE,
    WRITE_HEADERS,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator

    from typing_extensions import Buffer

    from blobstore.objects.client import ObjectInfo, ObjectTag
    from blobstore.objects.response_rules import Request

PIECE: Final = 8 * 2**20
"""Bytes of a request for the content of a blob."""
_ATTEMPTS: Final = 5
_MAX_OVERLAPS: Final = 20
"""Folders that are looked at for other stores."""
COLD_INDEXES: Final = ".blobstore/cold"
"""Lists of compressed forms of the blobs of a manifest."""
COLD_BASES: Final = ".blobstore/cold-bases"
"""Lists of those of the bases of these forms, and of their bases."""
HEADERS: Final = ".blobstore/headers"
_BLOBS, _MANIFESTS = "blobs", "manifests"


def blob_key(digest: Digest) -> str:
    """Return the key of a blob."""
    return f"{_BLOBS}/{digest.file_name}"


def manifest_key(reference: Reference) -> str:
    """Return the key of the manifest of a name."""
    return "/".join((_MANIFESTS, *reference.parts))


def _signature_key(manifest: Digest) -> str:
    return f".blobstore/signatures/{manifest.hex}"


class ObjectStore:
    """A store of models under a prefix of a bucket. Any number of threads may use it."""

    def __init__(self, address: StoreAddress) -> None:
        """Send nothing yet. Raises as :class:`ConditionalClient`."""
        self.address = address
        self.client = ConditionalClient(address)

    def __repr__(self) -> str:
        return f"<ObjectStore {self.address}>"

    # Names

    def references(self) -> list[Reference]:
        """Return the names of the models, sorted."""
        return sorted(reference for reference, _ in self.list_manifests())

    def list_manifests(self) -> Iterator[tuple[Reference, ObjectInfo]]:
        """Yield each name with what the listing says about its manifest. Other keys are skipped."""
        for item in self.client.list(_MANIFESTS):
            try:
                yield Reference(*item.key.split("/")[1:]), item
            except (InvalidReference, TypeError):
                continue

    def has_names(self) -> bool:
        """Return whether the store has any model, as far as the user may see."""
        return next(self.client.list(_MANIFESTS, LOOK_FOR_STORE), None) is not None

    def exists_at_all(self) -> bool:
        """Return whether there is a store: one whose names were all removed has blobs still.

        Raises:
            RemoteError: the prefix cannot be listed.
        """
        return any(next(self.client.list(folder), None) for folder in (_MANIFESTS, _BLOBS))

    def not_found(self) -> NotFound:
        """Return the error that there is no store, with those that are near."""
        others = ", ".join(quote(other) for other in self.overlapping())
        return NotFound(
            f"there is no store or model at {quote(self.address)}",
            advice=f"there is one at {others}" if others else "",
        )

    def overlapping(self) -> Iterator[StoreAddress]:
        """Yield stores whose prefixes begin this one's, and those one folder below, as far as the user may see."""
        here = self.address
        parts = here.prefix.split("/") if here.prefix else []
        prefixes = ["/".join(parts[:count]) for count in reversed(range(len(parts)))]
        below = sorted(
            set(self.client.folders(LOOK_FOR_STORE)) - {_BLOBS, _MANIFESTS, ".blobstore"}
        )
        prefixes += [f"{here.prefix}/{name}".lstrip("/") for name in below[:_MAX_OVERLAPS]]
        for prefix in prefixes:
            with contextlib.suppress(InvalidReference):
                place = StoreAddress(here.scheme, here.bucket, prefix)
                if ObjectStore(place).has_names():
                    yield place

    def has_model(self, reference: Reference) -> bool:
        """Return whether there is a model of that name, as far as the user may see."""
        return self.client.size(manifest_key(reference), READ_FORMER) is not None

    def read_manifest(self, reference: str | Reference) -> bytes:
        """Return the bytes of a manifest. Raises ModelNotFound and RemoteError."""
        return self.read_version(reference)[0]

    def read_version(
        self, reference: str | Reference, request: Request = READ
    ) -> tuple[bytes, ObjectTag | None]:
        """Return the bytes of a manifest, and the tag that :meth:`place` takes.

        Raises:
            ModelNotFound: there is no such name.
            RemoteError: the manifest cannot be read.
        """
        reference = Reference.of(reference)
        found = self.client.get(manifest_key(reference), MAX_MANIFEST_SIZE, request)
        if found is None:
            raise ModelNotFound(f"{quote(self.address)} has no model {quote(reference)}")
        return found.data, found.tag

    def read_former(self, reference: Reference) -> tuple[bytes | None, ObjectTag | None]:
        """Return what :meth:`read_version` does, as far as the user may see; None twice if there is no such name."""
        with contextlib.suppress(ModelNotFound):
            return self.read_version(reference, READ_FORMER)
        return None, None

    def tag_of(self, reference: Reference) -> ObjectTag | None:
        """Return the tag that the manifest of a name has now; None if there is no such name. Raises RemoteError."""
        return self.client.tag(manifest_key(reference))

    def place(
        self,
        reference: Reference,
        manifest: bytes,
        tag: ObjectTag | None,
        check_lease: Callable[[], object],
    ) -> None:
        """Give a manifest a name, whose manifest must still have the tag ``tag`` (None: must not exist).

        ``check_lease`` is of a lease on all blobs that the manifest needs (:func:`blobstore.objects.leases.leased`):
        without one, a collection that does not see the name would delete them.

        Raises:
            Conflict: another process has given the name another manifest.
            StoreBusy: the lease has come to its end.
        """
        check_lease()
        # Also as a blob, so that the digest finds it when the name has another manifest.
        self.client.put(blob_key(Digest.of(manifest)), manifest)
        self.client.replace(manifest_key(reference), manifest, tag)

    def has_copy(self, manifest: bytes) -> bool:
        """Return whether the copy of a manifest is there, judged by its size."""
        with contextlib.suppress(BlobDamaged):  # it has another size
            return self.exists(Digest.of(manifest), len(manifest), LOOK_FOR_BLOB)
        return False

    def remove(self, references: Iterable[Reference]) -> None:
        """Remove names; their blobs stay until garbage is collected."""
        self.client.delete(map(manifest_key, references))

    # Blobs

    def exists(self, digest: Digest, size: int, request: Request = READ) -> bool:
        """Return whether the blob exists. Raises BlobDamaged if it has another size."""
        found = self.client.size(blob_key(digest), request)
        if found not in {None, size}:
            raise BlobDamaged(f"{self._blob(digest)} has {found} bytes, expected {size}")
        return found is not None

    def check_size(self, digest: Digest, size: int) -> None:
        """Check that the blob exists. Raises BlobMissing or BlobDamaged."""
        if not self.exists(digest, size):
            raise BlobMissing(f"{self._blob(digest)} is missing")

    def read(
        self, digest: Digest, size: int, begin: int, end: int
    ) -> Generator[memoryview, None, None]:
        """Yield the bytes of a blob from ``begin`` to before ``end``; nothing is hashed.

        Raises:
            BlobMissing, BlobDamaged: it does not exist, or has another size.
            RemoteError: it cannot be read.
        """
        if not 0 <= begin <= end <= size:
            raise BlobDamaged(f"blob {digest} of {size} bytes ends before byte {end}")
        for at in range(begin, end, PIECE):
            until = min(at + PIECE, end)
            piece = self.client.read(blob_key(digest), at, until)
            if piece is None:
                raise BlobMissing(f"{self._blob(digest)} is missing")
            if len(piece.data) != until - at:
                raise BlobDamaged(
                    f"{self._blob(digest)} ends at byte {at + len(piece.data)}, expected {size} bytes"
                )
            if piece.size != size:
                raise BlobDamaged(f"{self._blob(digest)} has {piece.size} bytes, expected {size}")
            yield piece.data

    def read_pieces(self, digest: Digest, size: int) -> Generator[memoryview, None, None]:
        """Yield the bytes of a blob in order. Raises as :meth:`read`."""
        # Without bytes no request is sent, so this one asks whether the blob exists.
        if not size:
            self.check_size(digest, size)
        yield from self.read(digest, size, 0, size)

    def read_into(self, digest: Digest, size: int, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes of a blob from ``offset`` on. Raises as :meth:`read`."""
        for piece in self.read(digest, size, offset, offset + len(buffer)):
            buffer[: len(piece)] = piece
            buffer = buffer[len(piece) :]

    def put_blob(self, digest: Digest, size: int, pieces: Iterable[Buffer]) -> None:
        """Write a blob whose bytes have this digest.

        Raises:
            BlobDamaged: they have not; no blob is written.
        """

        def checked() -> Iterator[bytes]:
            hashed, done = hashlib.sha256(), 0
            for piece in pieces:
                data = bytes(piece)  # a piece is valid until the next one is asked for
                hashed.update(data)
                done += len(data)
                yield data
            # The error ends the upload before it is complete, so no object appears.
            if done != size or hashed.hexdigest() != digest.hex:
                raise BlobDamaged(f"the bytes of blob {digest} have changed while they were sent")

        # Joined, so that it is checked before it is sent, and can be sent again.
        if size <= PIECE:
            self.client.put(blob_key(digest), b"".join(checked()))
        else:
            self.client.put(blob_key(digest), checked())

    # What belongs to a manifest: a list of compressed forms, and the headers of its blobs

    def read_for_manifest(
        self, folder: str, manifest: Digest, request: Request = READ
    ) -> bytes | None:
        """Return the object for a manifest in one of these folders, unchecked."""
        limit = limits.PACKED_HEADERS if folder == HEADERS else limits.COLD_INDEX
        found = self.client.get(f"{folder}/{manifest.hex}", limit.one, request)
        return None if found is None else found.data

    def put_headers(self, manifest: Digest, data: bytes) -> None:
        """Keep the headers of the blobs of a manifest, so that one request reads all of them."""
        self.client.put(f"{HEADERS}/{manifest.hex}", data, WRITE_HEADERS)

    def change_cold_index(
        self, folder: str, manifest: Digest, change: Callable[[bytes | None], bytes | None]
    ) -> None:
        """Replace a list of compressed forms by the result of ``change``; None leaves it unchanged.

        A list that is too large to be read is not written either. ``folder`` is :data:`COLD_INDEXES` or :data:`COLD_BASES`.

        Raises:
            Conflict: other processes changed it again and again.
        """
        key = f"{folder}/{manifest.hex}"
        for attempt in range(_ATTEMPTS):
            found = self.client.get(key, limits.COLD_INDEX.one, READ_FORMER)
            data, tag = (None, None) if found is None else (found.data, found.tag)
            changed = change(data)
            if changed is None or changed == data or len(changed) > limits.COLD_INDEX.one:
                return
            try:
                self.client.replace(key, changed, tag)
            except Conflict:
                # Another process was faster: change what it has written.
                if attempt == _ATTEMPTS - 1:
                    raise
            else:
                return

    # Signatures

    def read_signatures(
        self, manifest: Digest, on_error: Callable[[RemoteError], object] = lambda _: None
    ) -> Iterator[bytes]:
        """Yield the signatures of a manifest; those beyond the limits or of other bytes are left out.

        ``on_error`` is called with why they cannot be listed, or one cannot be read.
        """
        limit, size = limits.SIGNATURES, 0
        try:
            listed = self.client.list(_signature_key(manifest), LIST_SIGNATURES)
            for item in islice(listed, limit.count):
                if item.size <= limit.one and size + item.size <= limit.all:
                    size += item.size
                    yield from self._signature(item.key, on_error)
        except RemoteError as error:
            on_error(error)

    def _signature(self, key: str, on_error: Callable[[RemoteError], object]) -> Iterator[bytes]:
        try:
            version = self.client.get(key, limits.SIGNATURES.one, READ_SIGNATURE)
        except RemoteError as error:
            on_error(error)
            return
        # The key has the digest of the content, so altered bytes are left out.
        if version and key.endswith(f"/{Digest.of(version.data).hex}.sig"):
            yield version.data

    def keep_signature(self, manifest: Digest, data: bytes) -> None:
        """Keep a signature of a manifest."""
        self.client.put(f"{_signature_key(manifest)}/{Digest.of(data).hex}.sig", data)

    def _blob(self, digest: Digest) -> str:
        return f"{quote(self.address)}: blob {digest}"
