"""Where steps are written: a store in a folder, or one in object storage.

The coordinator begins an import there, and the other ranks join it by its name. Each rank adds blobs; the coordinator
gives the names. In object storage, blobs have their final keys at once: a lease that is written before the first one
keeps them from being collected, and no manifest lists them until all are there.
"""

from __future__ import annotations

import contextlib
import secrets
import tempfile
from typing import TYPE_CHECKING

from blobstore.core.digest import Digest, Digester
from blobstore.core.files import pieces_of, write_all
from blobstore.core.workers import WorkerPool
from blobstore.errors import BlobDamaged, InvalidReference, StoreBusy
from blobstore.manifests import media_types
from blobstore.manifests.reference import Reference
from blobstore.objects.address import StoreAddress, is_address
from blobstore.objects.leases import leased
from blobstore.objects.response_rules import LOOK_FOR_BLOB
from blobstore.objects.store import ObjectStore
from blobstore.operations.create.create import publish_blobs, with_space
from blobstore.remotes.model_reader import pack_headers
from blobstore.store.ingest import Ingested
from blobstore.store.local import LocalStore
from blobstore.store.names import NewModel

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping
    from typing import TypeAlias

    from blobstore.manifests.model import Manifest
    from blobstore.operations.create.step import StepPlan
    from blobstore.store.ingest import Buffers, Ingest
    from blobstore.store.local import StoreLike

    # What is in object storage does what that of folders says.
    Place: TypeAlias = "_Folder | _Objects"
    StepBlobs: TypeAlias = "Ingest | _Objects"

_REQUESTS = 16


def can_be_step(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Return whether it can be the name of a step."""
    with contextlib.suppress(InvalidReference):
        Reference.of(str(checkpoint_id))
        return True
    return False


def open_place(store: StoreLike) -> Place:
    """Return where one step can be written, of a folder or an address. Raises InvalidReference, or as :class:`ObjectStore`."""
    if is_address(store):
        return _Objects(ObjectStore(StoreAddress.parse(str(store))))
    return _Folder(LocalStore.of(store))


class _Folder:
    """A step in a folder. Nothing has a name before all of it has."""

    blobs: Ingest
    """Adds blobs, when the import has begun or was joined."""

    def __init__(self, store: LocalStore) -> None:
        self._store = store
        self._open = contextlib.ExitStack()

    def begin(self, plan: StepPlan, reference: Reference) -> str:
        """Begin the import of a step, on the coordinator; return its name."""
        names = plan.names(reference)
        for name in names:
            self._store.names.check_name(name)
        self._updates = [self._store.names.seen(name) for name in names]
        with with_space(self._store, plan.blobs, sum(blob.size for blob in plan.blobs)):
            self.blobs = self._open.enter_context(self._store.ingest())
        return self.blobs.name

    def join(self, name: str) -> None:
        """Join an import, on another rank."""
        self.blobs = joined = self._store.join_ingest(name, sync_later=True)
        self._open.callback(joined.close)

    def checked(self) -> contextlib.AbstractContextManager[None]:
        """Explain the errors of a full disk in a block."""
        return with_space(self._store, (), 0)

    def publish(
        self, plan: StepPlan, added: Mapping[str, Ingested], record: bytes
    ) -> tuple[list[Manifest], bool]:
        """Give the step its names; return the manifests, and whether the last name was that of another model.

        Raises as :meth:`StepPlan.manifests` and :func:`create`.
        """
        manifests = plan.manifests(self.blobs, added, record)
        new = [
            NewModel(update, manifest.to_bytes(), manifest.blobs)
            for update, manifest in zip(self._updates, manifests, strict=True)
        ]
        publish_blobs(self._store, self.blobs, [model.data for model in new])
        former = self._store.names.install(new, ingest=self.blobs, is_brought=False)
        return manifests, former[-1] is not None

    def close(self) -> None:
        """End the import, and remove what has no name, or leave it."""
        self._open.close()


class _Objects:
    """A step in object storage, which adds its blobs itself."""

    machine_folder = ""
    """No file can be written in parts."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._written: set[Digest] = set()
        self._open = contextlib.ExitStack()

    @property
    def blobs(self) -> _Objects:
        """See :attr:`_Folder.blobs`."""
        return self

    def begin(self, plan: StepPlan, reference: Reference) -> str:
        objects = self._objects
        self._names = [(name, *objects.read_former(name)) for name in plan.names(reference)]
        # Before the first blob is written: a collection keeps what is younger than any lease.
        self._open.enter_context(leased(objects.client, []))
        return secrets.token_hex(8)

    def join(self, name: str) -> None:
        """Do nothing: the lease of the coordinator keeps all that is written while it lives."""

    def checked(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def add(self, size: int, buffers: Buffers, *, once: bool = False) -> Ingested:
        """Add a blob; see :meth:`Ingest.add`.

        A key is the digest of all bytes. So those that can be read only once wait in a temporary file, one blob at a
        time.
        """
        with tempfile.TemporaryFile(prefix="blobstore-step-", buffering=0) as spool:
            digester = Digester()
            for buffer in buffers():
                digester.update(buffer)
                if once:
                    write_all(spool.fileno(), buffer)
            digest = digester.digest()
            found = self.find(digest, size)
            if found is not None:
                return found
            again = pieces_of(spool.fileno()) if once else buffers()
            self._objects.put_blob(digest, size, again)
            self._written.add(digest)
            return Ingested(digest, size, written=True)

    def find(self, digest: Digest, size: int) -> Ingested | None:
        """Return a blob that is there now; :meth:`publish` looks for it again."""
        with contextlib.suppress(BlobDamaged):  # it has another size, and is replaced
            if self._objects.exists(digest, size, LOOK_FOR_BLOB):
                return Ingested(digest, size, written=False)
        return None

    def adopt(self, item: Ingested) -> None:
        """Do nothing but remember: what is in object storage has its name."""
        if item.written:
            self._written.add(item.digest)

    def sync(self) -> None:
        """Do nothing: what is in object storage is durable."""

    def publish(
        self, plan: StepPlan, added: Mapping[str, Ingested], record: bytes
    ) -> tuple[list[Manifest], bool]:
        objects = self._objects
        manifests = plan.manifests(self, added, record)
        data = [manifest.to_bytes() for manifest in manifests]
        blobs = {blob.id for manifest in manifests for blob in manifest.blobs}
        digests = [*map(Digest.of, data), *(blob.digest for blob in blobs)]
        with leased(objects.client, digests) as check:
            # Only now they are kept: a collection may have removed those that were found before.
            old = [blob for blob in blobs if blob.digest not in self._written]
            if None in WorkerPool(_REQUESTS, None, 0).run(old, lambda blob: self.find(*blob)):
                raise StoreBusy(
                    "garbage was collected while the step was written, and parts of it are gone",
                    advice="save the step again",
                )
            starts = {added[blob.name].digest: blob.header for blob in plan.blobs}
            for manifest, one in zip(manifests, data, strict=True):
                layers = manifest.layers_of(media_types.TENSOR)
                headers = {layer.digest: starts[layer.digest] for layer in layers}
                objects.put_headers(Digest.of(one), pack_headers(headers))
            for (name, _, tag), one in zip(self._names, data, strict=True):
                objects.place(name, one, tag, check)
        return manifests, self._names[-1][1] not in (None, data[-1])

    def close(self) -> None:
        self._open.close()
