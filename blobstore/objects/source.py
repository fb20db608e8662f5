"""A model in object storage, as :func:`~blobstore.operations.transfer.pull.pull_model` reads it."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from blobstore.core.digest import Digest
from blobstore.core.escape import cli_command, quote, without_secrets
from blobstore.core.workers import Cancelled
from blobstore.errors import ModelNotFound, RemoteError, RemoteRefused
from blobstore.manifests.model import Manifest
from blobstore.objects.address import StoreAddress, has_tag, model_addresses
from blobstore.objects.response_rules import READ_COLD_INDEX, READ_HEADERS
from blobstore.objects.store import COLD_INDEXES, HEADERS, ObjectStore

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from blobstore.core.rate_limit import RateLimiter
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.objects.address import ModelAddress


class ObjectManifest(NamedTuple):
    """The bytes of a manifest, and their digest."""

    digest: Digest
    data: bytes


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model in object storage, which lies there as in a store."""

    manifest: bytes = field(repr=False)
    blobs: tuple[Descriptor, ...] = field(repr=False)
    layout: str = "store"


class ObjectSource:
    """A model in object storage whose manifest was checked. Any number of threads may read its blobs."""

    files = ()
    """Files that another tool has stored; there are none in a store."""

    def __init__(
        self, store: ObjectStore, address: ModelAddress, data: bytes, limiter: RateLimiter | None
    ) -> None:
        """Check a manifest. Raises InvalidManifest."""
        self.store = store
        self.address = address
        self.root = ObjectManifest(Digest.of(data), data)
        self.manifest = Manifest.from_bytes(data)
        self.model = StoredModel(data, self.manifest.blobs)
        self._limiter = limiter
        self._stopping = threading.Event()

    @classmethod
    def find(cls, text: str, limiter: RateLimiter | None = None) -> ObjectSource:
        """Find the model at an address, which may have several meanings.

        Raises:
            InvalidManifest: the manifest breaks its format.
            InvalidReference: the address is not one of a model.
            ModelNotFound: no store there has such a model.
            RemoteError: the object storage cannot be reached, or denies access.
        """
        return cls(*cls.locate(text), limiter)

    @staticmethod
    def locate(text: str) -> tuple[ObjectStore, ModelAddress, bytes]:
        """Return which of its meanings an address has, and the manifest. Raises as :meth:`find`."""
        looked = []
        refused: RemoteRefused | None = None
        for address in model_addresses(text):
            store = ObjectStore(address.store)
            try:
                return store, address, store.read_manifest(address.reference)
            except RemoteRefused as error:  # without the right to list, what is absent is denied
                refused = refused or error
            except ModelNotFound:
                looked.append(f"{quote(address.reference)} in {quote(address.store)}")
        if refused is not None:
            raise refused
        raise ModelNotFound(
            f"no model {quote(text)}; looked for {', '.join(looked)}", advice=_list_advice(text)
        )

    @property
    def data(self) -> bytes:
        """The bytes of the manifest."""
        return self.model.manifest

    @property
    def blobs(self) -> tuple[Descriptor, ...]:
        """The blobs of the model, each once."""
        return self.model.blobs

    @property
    def notices(self) -> tuple[str, ...]:
        """Nothing: object storage serves bytes as they are."""
        return ()

    def cold_index(self, folder: str = COLD_INDEXES) -> bytes | None:
        """Return the list of compressed forms of the blobs, or of their bases; None if the store lacks it.

        The list is not checked.
        """
        return self.store.read_for_manifest(folder, self.root.digest, READ_COLD_INDEX)

    def headers(self) -> bytes | None:
        """Return the headers of the blobs, None if these must be asked. Nothing of it is checked."""
        return self.store.read_for_manifest(HEADERS, self.root.digest, READ_HEADERS)

    def check_size(self, digest: Digest, size: int) -> None:
        """Check that a blob exists. Raises BlobMissing, BlobDamaged and RemoteError."""
        self.store.check_size(digest, size)

    @property
    def client(self) -> ObjectSource:
        """The client, which can end the requests of other threads."""
        return self

    def abort(self) -> None:
        """End the requests of other threads after the pieces that they wait for."""
        self._stopping.set()

    def read(
        self, digest: Digest, size: int, begin: int, end: int
    ) -> Generator[memoryview, None, None]:
        """Yield the bytes of a blob. Raises as :meth:`ObjectStore.read`, and Cancelled after an abort."""
        for piece in self.store.read(digest, size, begin, end):
            yield piece
            if self._limiter is not None:
                self._limiter.spend(len(piece), self._stopping.wait)
            if self._stopping.is_set():
                raise Cancelled("stopped")

    def signatures(self, on_error: Callable[[RemoteError], object]) -> Iterator[bytes]:
        """Yield the signatures that are kept with the manifest; none of them is verified."""
        return self.store.read_signatures(self.root.digest, on_error)


def _list_advice(text: str) -> str:
    """Return the command that lists a store which ``text`` may mean, or which it is itself; empty if none has models."""
    own = [] if has_tag(text) else [StoreAddress.parse(text)]
    with contextlib.suppress(RemoteError):
        for store in (*own, *(address.store for address in model_addresses(text))):
            if ObjectStore(store).has_names():
                return f"{cli_command('list', without_secrets(str(store)))} lists the models there"
    return ""
