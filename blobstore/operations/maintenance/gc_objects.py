"""The operation ``gc --remote``: deletes blobs of a store in object storage that no manifest references.

Imports wait until it ends, and what they rely on is kept (:mod:`blobstore.objects.leases`). The blobs are listed
first, then leases and manifests are read. Every former manifest is a blob that nothing references.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from blobstore.core.arguments import seconds_of
from blobstore.core.digest import Digest
from blobstore.core.escape import quote
from blobstore.core.workers import WorkerPool
from blobstore.errors import ImplausibleGarbage, InvalidDigest, InvalidManifest, ModelNotFound
from blobstore.manifests.model import Manifest
from blobstore.objects.address import StoreAddress
from blobstore.objects.leases import Collection
from blobstore.objects.store import COLD_BASES, COLD_INDEXES, HEADERS, ObjectStore
from blobstore.remotes.cold_layers import parse_cold_layers

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

    from blobstore.manifests.reference import Reference
    from blobstore.objects.client import ObjectInfo

GRACE: Final = 86400.0
"""The default age in seconds from which blobs are removed; other programs hold no leases."""
_IMPLAUSIBLE: Final = 0.9
_NOTES: Final = (COLD_INDEXES, COLD_BASES, HEADERS)
"""Folders of objects that belong to manifests."""
_STREAMS: Final = 16
_BATCH: Final = 1000
"""Objects whose deletion is requested at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedObjects:
    """The result of :func:`blobstore.gc_remote`."""

    removed: tuple[ObjectInfo, ...] = field(repr=False)
    """Blobs that were deleted, or would be, and notes about manifests that no name has."""
    young: int
    """Blobs that no manifest references, but that are too young."""
    leased: int
    """Blobs that no manifest references, but that imports may rely on: running ones, or killed ones for a day."""
    is_complete: bool
    """Whether nothing was left because time was up."""
    refusal: str = ""
    """Why the same collection fails without ``force``; only a dry run returns this."""

    @property
    def size(self) -> int:
        """Bytes of what was deleted."""
        return sum(item.size for item in self.removed)


def collect_objects(
    address: str | StoreAddress,
    *,
    older_than: float | str = GRACE,
    dry_run: bool = False,
    force: bool = False,
) -> CollectedObjects:
    """Delete blobs of a store in object storage that no manifest references.

    Args:
        address: the store, ``s3://bucket/prefix``, ``gs://``, ``az://`` or ``file:///``.
        older_than: keep blobs that were written within this many seconds, or within a text such as ``1h``.
        dry_run: delete nothing; report what would be deleted.
        force: delete even if there are no manifests, or if over 90 % of the bytes of all blobs would go.

    Returns:
        what was removed or kept, with sizes in bytes.

    Raises:
        ImplausibleGarbage: so much would be deleted that manifests may be missing.
        InvalidManifest: a manifest is damaged, so that the blobs it needs are unknown.
        NotFound: there is no store.
        RemoteError: the object storage cannot be reached, or denies access.
        StoreBusy: another collection is running.
        UsageError: ``older_than`` is negative, or no time.
    """
    age = seconds_of(older_than, "older_than")
    address = address if isinstance(address, StoreAddress) else StoreAddress.parse(address)
    store = ObjectStore(address)
    # Before the note of the collection is written there. A push that was killed leaves a lease alone.
    if not store.exists_at_all() and next(store.client.list(".blobstore"), None) is None:
        raise store.not_found()
    with Collection(store.client) as collection:
        # Blobs first: what is written after the list is no candidate. Leases before names: a push
        # whose lease has ended has written its name.
        blobs = dict(_blobs(store))
        leased = collection.leased()
        references = store.references()
        # After the leases, too: a push writes them before its name.
        notes = [item for folder in _NOTES for item in store.client.list(folder)]
        needed = _needed(store, references, {item.key for item in notes})
        garbage = {digest: item for digest, item in blobs.items() if digest not in needed}
        oldest = collection.now - timedelta(seconds=age)

        def is_old(item: ObjectInfo) -> bool:
            return item.modified <= oldest

        def may_be_leased(item: ObjectInfo) -> bool:
            return leased.since is not None and item.modified >= leased.since

        unused = [
            item
            for digest, item in garbage.items()
            if digest not in leased.digests and not may_be_leased(item)
        ]
        removable = list(filter(is_old, unused))
        refusal = _refusal(store, blobs, removable, references)
        if refusal and not (force or dry_run):
            raise ImplausibleGarbage(refusal, advice="if that is right, pass force=True")
        # Notes about manifests that no name has are of no use, unless one is being given.
        named = {digest.hex for digest in needed | leased.digests}
        removable += [
            item
            for item in notes
            if item.key.rpartition("/")[2] not in named and is_old(item) and not may_be_leased(item)
        ]
        removed = removable if dry_run else list(_delete(store, removable, collection))
    return CollectedObjects(
        removed=tuple(removed),
        young=len(unused) - sum(map(is_old, unused)),
        leased=len(garbage) - len(unused),
        is_complete=len(removed) == len(removable),
        refusal=refusal if not force else "",
    )


def _blobs(store: ObjectStore) -> Iterator[tuple[Digest, ObjectInfo]]:
    for item in store.client.list("blobs"):
        name = item.key.removeprefix("blobs/")
        try:
            digest = Digest.parse(name.replace("-", ":", 1))
        except InvalidDigest:  # not a blob
            continue
        # A key that spells the digest in another way is not the key that a manifest leads to.
        if name == digest.file_name:
            yield digest, item


def _needed(store: ObjectStore, references: list[Reference], notes: set[str]) -> set[Digest]:
    """Return the blobs that the manifests of names need; ``notes`` are the keys of the lists of compressed forms."""

    def needs(reference: Reference) -> set[Digest]:
        try:
            return needed_by(store, reference, store.read_manifest(reference), notes)
        except ModelNotFound:  # removed since; a tag that it got has a lease
            return set()

    return set().union(*WorkerPool(_STREAMS, None, 0).run(references, needs))


def needed_by(
    store: ObjectStore, reference: Reference, data: bytes, notes: Container[str] | None = None
) -> set[Digest]:
    """Return the blobs that a manifest needs, compressed forms and the manifest itself among them.

    Args:
        store: where it is.
        reference: the name that it has, for messages.
        data: its bytes.
        notes: the keys of the lists of compressed forms; by default, those of the manifest are asked for. A push that
            adds one has a lease, which holds the forms.

    Raises:
        InvalidManifest: it is damaged.
        RemoteError: a list cannot be read.
    """
    try:
        manifest = Manifest.from_bytes(data)
    except InvalidManifest as error:
        raise error.at(f"{quote(store.address)}: {quote(reference)}") from None
    digest = Digest.of(data)
    return {
        digest,
        *(blob.digest for blob in manifest.blobs),
        *(
            layer.stored.digest
            for folder in (COLD_INDEXES, COLD_BASES)
            if notes is None or f"{folder}/{digest.hex}" in notes
            for layer in parse_cold_layers(store.read_for_manifest(folder, digest) or b"").values()
        ),
    }


def _refusal(
    store: ObjectStore,
    blobs: dict[Digest, ObjectInfo],
    removable: list[ObjectInfo],
    references: list[Reference],
) -> str:
    if removable and not references:
        return f"{quote(store.address)} has {len(blobs)} blobs and no manifest"
    size = sum(item.size for item in blobs.values())
    garbage = sum(item.size for item in removable)
    if garbage > _IMPLAUSIBLE * size:
        return f"{garbage:,} of {size:,} bytes of blobs in {quote(store.address)} are garbage"
    return ""


def _delete(
    store: ObjectStore, removable: list[ObjectInfo], collection: Collection
) -> Iterator[ObjectInfo]:
    def delete(item: ObjectInfo) -> bool:
        if collection.may_delete:
            store.client.delete([item.key])
            return True
        return False

    workers = WorkerPool(_STREAMS, None, 0)
    for begin in range(0, len(removable), _BATCH):
        batch = removable[begin : begin + _BATCH]
        deleted = workers.run(batch, delete)
        yield from (item for item, is_gone in zip(batch, deleted, strict=True) if is_gone)
