"""What goes into an archive: which blobs, in what order, and how each is made smaller.

A blob that is cold in the store is taken as it is there, if what it is coded by comes along. Others are
coded anew, by a blob that is packed too where that saves room: one that has their bytes under another
name, or the same layer of a model like theirs. No blob is coded by one that is coded by another itself,
and a base comes before what needs it. The order, and all that is chosen, depends on what the store has
and on the level alone.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from blobstore.core.escape import quote
from blobstore.errors import BlobDamaged, BlobMissing, Damaged, InvalidManifest
from blobstore.manifests import media_types
from blobstore.operations.freeze.base_search import BaseFinder
from blobstore.operations.freeze.blob_encoder import SizeEstimator
from blobstore.operations.freeze.duplicates import DuplicateFinder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from blobstore.core.digest import BlobId, Digest
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.manifests.model import Manifest
    from blobstore.manifests.reference import Reference
    from blobstore.operations.freeze.blob_encoder import Level
    from blobstore.store.local import LocalStore

SMALLEST = 4096
"""Bytes of a blob that is not worth coding."""


class GatheredModel(NamedTuple):
    """A model that is to be packed."""

    reference: Reference
    data: bytes
    """Of its manifest."""
    manifest: Manifest


class PlannedMember(NamedTuple):
    """A blob that is to be packed."""

    digest: Digest
    size: int
    where: str
    """The model and layer that it is, for people."""
    cold: memoryview | None = None
    """Its cold form, where that is taken."""
    base: BlobId | None = None
    """What it is coded by, or may be."""


def gather_models(store: LocalStore, references: Sequence[Reference]) -> list[GatheredModel]:
    """Return the models, sorted by name.

    Raises:
        ModelNotFound: the store has no such name.
        InvalidManifest: a manifest is not the one that was written.
    """
    models = []
    for reference in sorted(set(references), key=lambda item: item.full):
        data, manifest = store.parse(reference)
        try:
            store.check_manifest(data, manifest)
        except InvalidManifest as error:
            raise error.at(str(reference)) from None
        models.append(GatheredModel(reference, data, manifest))
    return models


def gather_blobs(
    store: LocalStore, models: Sequence[GatheredModel], level: Level
) -> list[PlannedMember]:
    """Return the blobs of the models, and what these are coded by, in the order of the archive.

    Raises:
        BlobMissing, BlobDamaged: a blob is not in the store, or only in a form that cannot be read.
        StoreError: the store cannot be read.
    """
    gathering = _ArchivePlanner(store, models, level)
    gathering.take_cold()
    gathering.compare()
    return list(gathering.in_order())


class _ArchivePlanner:
    def __init__(self, store: LocalStore, models: Sequence[GatheredModel], level: Level) -> None:
        self._store = store
        self._models = models
        self._estimator = SizeEstimator(store, level)
        self._blobs: dict[Digest, PlannedMember] = {}
        for model in models:
            for blob in (model.manifest.config, *model.manifest.layers):
                found = PlannedMember(blob.digest, blob.size, _where(model, blob))
                self._check(found)
                self._blobs.setdefault(blob.digest, found)

    def take_cold(self) -> None:
        """Take the cold forms of blobs whose base comes along, or is worth it."""
        outside: dict[BlobId, list[PlannedMember]] = defaultdict(list)
        for blob in list(self._blobs.values()):
            taken = self._with_cold(blob)
            if taken.base is None or taken.base.digest in self._blobs:
                self._blobs[blob.digest] = taken
            else:
                outside[taken.base].append(taken)
        for base, blobs in outside.items():
            self._take_outside(base, blobs)
        # The store has none whose base is coded by another; but what it has may be damaged.
        for blob in list(self._blobs.values()):
            if blob.base is not None and self._blobs[blob.base.digest].base is not None:
                self._blobs[blob.digest] = blob._replace(cold=None, base=None)

    def compare(self) -> None:
        """Find for hot blobs those of the models by which they may be coded."""
        coded = {
            blob.digest: blob.base.digest for blob in self._blobs.values() if blob.base is not None
        }
        bases = set(coded.values())
        if all(blob.cold is not None or blob.size <= SMALLEST for blob in self._blobs.values()):
            return
        equals = DuplicateFinder(self._store, self._estimator, self._tensors(), coded)
        equals.read(())
        for digest, base in equals.choose_bases(self._likely()).items():
            blob, other = self._blobs[digest], self._blobs[base.digest]
            is_free = blob.cold is None and digest not in bases and self._store.has_hot(digest)
            if is_free and other.base is None and blob.size > SMALLEST:
                self._blobs[digest] = blob._replace(base=base)
                bases.add(base.digest)

    def in_order(self) -> Iterator[PlannedMember]:
        """Yield the blobs: model by model, and what others are coded by before these."""
        done: set[Digest] = set()
        for blob in self._blobs.values():
            chain = [blob] if blob.base is None else [self._blobs[blob.base.digest], blob]
            for item in chain:
                if item.digest not in done:
                    done.add(item.digest)
                    yield item

    def _check(self, blob: PlannedMember) -> None:
        try:
            self._store.check_size(blob.digest, blob.size)
        except Damaged as error:
            raise error.at(blob.where) from None

    def _with_cold(self, blob: PlannedMember) -> PlannedMember:
        """Return a blob with its cold form, if it has one that can be read."""
        try:
            found = self._store.open_cold(blob.digest, blob.size)
        except BlobMissing:
            return blob
        except BlobDamaged as error:
            if self._store.has_hot(blob.digest):
                return blob
            raise error.at(blob.where) from None
        if found.stored >= blob.size:  # of which freezing makes none
            return blob
        base = found.container.table.base
        return blob._replace(cold=found.container.data, base=base)

    def _take_outside(self, base: BlobId, blobs: Sequence[PlannedMember]) -> None:
        """Take blobs with the base that no model of these has, or leave them to be coded alone.

        Coded alone, each would take about what the base takes.
        """
        found = PlannedMember(base.digest, base.size, f"the base of {blobs[0].where}")
        try:
            found = self._with_cold(found)
            alone = self._estimator.estimate(base).size if found.cold is None else len(found.cold)
        except (BlobMissing, BlobDamaged):
            return
        stored = sum(len(blob.cold) for blob in blobs if blob.cold is not None)
        if found.base is None and stored + alone < len(blobs) * alone:
            self._blobs |= {blob.digest: blob for blob in blobs}
            self._blobs[base.digest] = found

    def _tensors(self) -> dict[Digest, Descriptor]:
        return {
            layer.digest: layer
            for model in self._models
            for layer in model.manifest.layers_of(media_types.TENSOR)
        }

    def _likely(self) -> dict[Digest, BlobId]:
        """Return by which blobs others may be coded, as the models are like others."""
        layers = {
            model.reference: {
                layer.name: layer for layer in model.manifest.layers_of(media_types.TENSOR)
            }
            for model in self._models
        }
        manifests = {model.reference: model.manifest for model in self._models}
        relatives = BaseFinder(self._store, manifests, self._estimator)
        hot = [model.reference for model in self._models if self._is_any_hot(model)]
        likely: dict[Digest, BlobId] = {}
        for reference, base in relatives.find_bases(hot).items():
            for name, layer in layers[reference].items():
                other = layers[base].get(name, layer)
                if other.digest != layer.digest:
                    likely.setdefault(layer.digest, other.id)
        return likely

    def _is_any_hot(self, model: GatheredModel) -> bool:
        layers = model.manifest.layers_of(media_types.TENSOR)
        return any(self._blobs[layer.digest].cold is None for layer in layers)


def _where(model: GatheredModel, blob: Descriptor) -> str:
    what = f"layer {quote(blob.name)}" if blob.name else quote(blob.media_type)
    return f"{model.reference}: {what}"
