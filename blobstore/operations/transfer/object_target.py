"""Object storage as the target of a push: blobs first, the manifest last, only if nobody else wrote it."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from blobstore.core.digest import Digest
from blobstore.core.escape import quote
from blobstore.errors import BlobDamaged, BlobMissing, Conflict, InvalidHeader, ModelNotFound
from blobstore.manifests import media_types
from blobstore.objects.address import ModelAddress, StoreAddress, has_tag, model_addresses
from blobstore.objects.leases import leased
from blobstore.objects.response_rules import LOOK_FOR_BLOB, READ_COLD_INDEX
from blobstore.objects.store import COLD_BASES, COLD_INDEXES, ObjectStore
from blobstore.operations.transfer.push_target import PushedModel, Sent
from blobstore.remotes.checked_pieces import PushedBlob
from blobstore.remotes.cold_layers import ColdLayer, format_cold_layers, parse_cold_layers
from blobstore.remotes.model_reader import pack_headers
from blobstore.safetensors.header import PREFIX_SIZE, header_size

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    from blobstore.core.digest import BlobId
    from blobstore.core.rate_limit import RateLimiter
    from blobstore.manifests.reference import Reference
    from blobstore.store.local import LocalStore


def find_target(text: str) -> StoreAddress | ModelAddress:
    """Return the store that an address names, or if it ends with a tag, the model with its store.

    The address of a model may mean several stores. One that has models wins, so that no store is made within it.

    Raises:
        InvalidReference: the address is not valid.
        RemoteError: the object storage cannot be reached.
    """
    if not has_tag(text):
        return StoreAddress.parse(text)
    meanings = list(model_addresses(text))
    has_models = (place for place in meanings if ObjectStore(place.store).has_names())
    return next(has_models, meanings[0])


@contextlib.contextmanager
def open_objects(
    store: LocalStore,
    reference: Reference,
    address: StoreAddress | ModelAddress,
    limiter: RateLimiter | None,
    *,
    dry_run: bool,
) -> Iterator[ObjectTarget]:
    """Yield a store in object storage as the target of a model, which keeps its name unless there is another."""
    if isinstance(address, StoreAddress):
        address = ModelAddress(address, reference)
    target = ObjectTarget(store, reference, ObjectStore(address.store), address.reference, limiter)
    objects = target.objects
    digests = [blob.digest for blob in target.model.blobs]
    with store.lease_if_writable(digests):
        if dry_run:
            yield target
            return
        # Before the first look for a blob, so that blobs which are found stay.
        with leased(objects.client, [target.model.digest, *digests]) as target.check_lease:
            yield target


class ObjectTarget:
    """A store in object storage that a model is pushed to."""

    kind = "the object storage"
    # Object storage takes any bytes as a manifest, so blobs are always looked for.
    checks_manifests = False

    def __init__(
        self,
        store: LocalStore,
        reference: Reference,
        objects: ObjectStore,
        name: Reference,
        limiter: RateLimiter | None,
    ) -> None:
        """Read which manifest the name has there."""
        self._store, self._reference, self.objects = store, name, objects
        self._limiter = limiter
        self._stopping = threading.Event()
        self.check_lease: Callable[[], None] = lambda: None
        """Raises StoreBusy if the lease has come to its end."""
        store.resolve(reference)  # checks it
        self._data, self._manifest = store.parse(reference)  # it may be another one by now
        # Read before anything is sent. The name is given only if it still has this version.
        former, self._tag = objects.read_former(name)
        self.model = PushedModel(
            address=ModelAddress(objects.address, name),
            digest=Digest.of(self._data),
            layout="store",
            manifests=1,
            blobs=[PushedBlob.of(blob, store) for blob in self._manifest.blobs],
            is_published=former == self._data and objects.has_copy(self._data),
            replaced=None if former in {None, self._data} else Digest.of(former or b""),
        )
        self.notices: Sequence[str] = (
            () if former or objects.has_names() else tuple(_overlaps(objects))
        )
        self._leased = {blob.digest for blob in self.model.blobs}

    def has(self, blob: PushedBlob) -> bool:
        """Return whether a blob is there, and the lease names it.

        Garbage collection may remove any other blob, such as a cold layer that is not listed yet, unless it
        is new.
        """
        with contextlib.suppress(BlobDamaged):  # it has another size, and is replaced
            return blob.digest in self._leased and self.objects.exists(*blob.id, LOOK_FOR_BLOB)
        return False

    def send(self, blob: PushedBlob, report: Callable[[int], object]) -> Mapping[Sent, int]:
        """Write a blob, which is hashed on the way."""

        def pieces() -> Generator[bytes | memoryview, None, None]:
            with contextlib.closing(blob.pieces()) as source:
                for piece in source:
                    self._limit(piece)
                    yield piece
                    report(len(piece))

        try:
            self.objects.put_blob(*blob.id, pieces())
        except (BlobDamaged, BlobMissing) as error:
            raise error.at(f"layer {quote(blob.label)}") from None
        return {"sent": blob.size}

    def publish(self, *_: object) -> None:
        """Write the headers of the blobs, and the manifest if the name still has the former one."""
        if not self.model.is_published:
            # Before the name: a client that sees it asks for the headers at once.
            self.objects.put_headers(self.model.digest, pack_headers(self._headers()))
            self.objects.place(self._reference, self._data, self._tag, self.check_lease)

    def _headers(self) -> Mapping[Digest, bytes]:
        """Return the headers of all tensor blobs, so that readers need one request for them.

        Raises:
            BlobMissing, BlobDamaged: a blob cannot be read.
            InvalidHeader: the header of a blob is damaged.
        """
        starts = {}
        for layer in self._manifest.layers_of(media_types.TENSOR):
            prefix = bytearray(PREFIX_SIZE)
            self._store.read_into(*layer.id, 0, memoryview(prefix))
            try:
                start = bytearray(PREFIX_SIZE + header_size(bytes(prefix), layer.size))
            except InvalidHeader as error:
                raise error.at(f"layer {quote(layer.name)}: blob {layer.digest}") from None
            self._store.read_into(*layer.id, 0, memoryview(start))
            starts[layer.digest] = bytes(start)
        return starts

    def send_signatures(self) -> int:
        """Write the signatures that the store has of the manifest; return their number."""
        signatures = list(self._store.signatures(self.model.digest))
        for signature in signatures:
            self.objects.keep_signature(self.model.digest, signature)
        return len(signatures)

    def read_cold_layers(self, *, verify: bool) -> Mapping[Digest, ColdLayer]:
        """Return the cold layers that are listed with the manifest."""
        del verify  # the list is one object, and always read
        listed = self.objects.read_for_manifest(COLD_INDEXES, self.model.digest)
        return parse_cold_layers(listed or b"")

    def read_forms_with(self, model: Reference) -> Mapping[Digest, ColdLayer]:
        """Return the cold layers that are listed with another model, and those of bases."""
        found: dict[Digest, ColdLayer] = {}
        try:
            manifest = Digest.of(self._store.read_manifest(model))
        except ModelNotFound:  # removed since its blobs were chosen as bases
            return found
        for folder in (COLD_BASES, COLD_INDEXES):
            data = self.objects.read_for_manifest(folder, manifest, READ_COLD_INDEX)
            found |= parse_cold_layers(data or b"")
        return found

    def list_cold_layers(self, layers: Sequence[ColdLayer], bases: Sequence[ColdLayer]) -> None:
        """Add cold layers to the lists, unless these have smaller ones by now."""
        # Those of bases first: a push that is interrupted between the two sends both lists again.
        if bases:
            self._add_to_list(COLD_BASES, bases)
        self._add_to_list(COLD_INDEXES, layers)

    def _add_to_list(self, folder: str, layers: Sequence[ColdLayer]) -> None:
        def add(data: bytes | None) -> bytes:
            listed = parse_cold_layers(data or b"")
            for layer in layers:
                there = listed.get(layer.blob.digest)
                if there is None or layer.stored.size < there.stored.size:
                    listed[layer.blob.digest] = layer
            return format_cold_layers(listed.values())

        self.objects.change_cold_index(folder, self.model.digest, add)

    def check_manifests(self) -> None:
        """Read back which manifest the name has. Raises Conflict."""
        if self.objects.read_manifest(self._reference) != self._data:
            raise Conflict(f"{quote(self.model.address)} has another model by now")

    def read(self, blob: BlobId) -> Generator[memoryview, None, None]:
        """Yield the bytes of a blob, unchecked."""
        for piece in self.objects.read_pieces(*blob):
            self._limit(piece)
            yield piece

    def abort(self) -> None:
        """End the pauses of the rate limit. Jobs end when they report their next piece."""
        self._stopping.set()

    def _limit(self, piece: bytes | memoryview) -> None:
        if self._limiter is not None:
            self._limiter.spend(len(piece), self._stopping.wait)


def _overlaps(objects: ObjectStore) -> Iterator[str]:
    """Yield notices about a store without models yet: it may lie within another, or around it."""
    new = objects.address
    for other in objects.overlapping():
        outer, inner = sorted((new, other), key=lambda place: len(place.prefix))
        yield (
            f"{quote(new)} is a new store {'within' if inner == new else 'around'} {quote(other)}, and they "
            f"share no blobs; push to {quote(f'{outer}/NAME:TAG')} to keep all models in one"
        )
