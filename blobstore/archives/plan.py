"""Plans an archive: which blobs it has, in what order, and the base of each.

A blob that is cold in the store is copied as it is if its base is in the archive too. Other blobs
are compressed, against another blob of the archive where that saves space: one with equal tensors under
other names, or the same layer of a similar model. A base comes before its deltas. It may have a base
itself, unless a cold file that is copied needs it: cold files are not made for chains. The plan depends
only on the content of the store and on the level.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from blobstore.archives.table import ArchivedModel
from blobstore.cold_blobs.base_search import BaseFinder, tensor_layers
from blobstore.cold_blobs.delta_chains import Chains
from blobstore.cold_blobs.equal_tensors import DuplicateFinder
from blobstore.cold_blobs.gguf_parents import ParentFinder
from blobstore.errors import BlobDamaged, BlobMissing, Damaged, InvalidManifest
from blobstore.manifests import media_types

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Final

    from blobstore.cold_blobs.blob_encoder import SizeEstimator
    from blobstore.core.digest import BlobId, Digest
    from blobstore.manifests.reference import Reference
    from blobstore.store.local import LocalStore

_MAX_UNCOMPRESSED: Final = 4096
"""Bytes of a blob that is too small to be compressed alone."""
MAX_WITHOUT_BASE: Final = 512
"""Bytes of a blob that is too small to be compressed with a base either."""


class PlannedMember(NamedTuple):
    """A blob that is to be packed."""

    blob: BlobId
    label: str
    """Its model and layer, for messages."""
    cold: memoryview | None = None
    """The cold file that is to be copied."""
    base: BlobId | None = None
    """The base of the cold file, or the base to try."""

    @property
    def is_too_small(self) -> bool:
        """Whether the blob is too small to be compressed."""
        limit = _MAX_UNCOMPRESSED if self.base is None else MAX_WITHOUT_BASE
        return self.blob.size <= limit


def read_models(store: LocalStore, references: Sequence[Reference]) -> list[ArchivedModel]:
    """Return the models, each once, sorted by name.

    Raises:
        ModelNotFound: the store has no such name.
        InvalidManifest: a manifest was changed since it was written.
    """
    models = []
    for reference in sorted(set(references), key=lambda item: item.full):
        data, manifest = store.parse(reference)
        try:
            store.check_manifest(data, manifest)
        except InvalidManifest as error:
            raise error.at(str(reference)) from None
        models.append(ArchivedModel(reference, data, manifest))
    return models


def plan_members(
    store: LocalStore,
    models: Sequence[ArchivedModel],
    estimator: SizeEstimator,
    report: Callable[[str], object] = lambda _: None,
) -> list[PlannedMember]:
    """Return the blobs of the models and the other bases that they need, in archive order.

    Raises:
        BlobMissing, BlobDamaged: a blob is not in the store, or cannot be read.
        StoreError: the store cannot be read.
    """
    members: dict[Digest, PlannedMember] = {}
    for model in models:
        for blob in (model.manifest.config, *model.manifest.layers):
            label = model.label(blob)
            try:
                store.check_size(blob.digest, blob.size)
            except Damaged as error:
                raise error.at(label) from None
            members.setdefault(blob.digest, PlannedMember(blob.id, label))
    _plan_copies(store, members, estimator)
    _plan_deltas(store, models, members, estimator, report)
    ordered: dict[Digest, PlannedMember] = {}
    for member in members.values():
        chain = [member]
        while (base := chain[-1].base) is not None:
            chain.append(members[base.digest])
        for one in reversed(chain):
            ordered.setdefault(one.blob.digest, one)
    return list(ordered.values())


def _plan_copies(
    store: LocalStore, members: dict[Digest, PlannedMember], estimator: SizeEstimator
) -> None:
    """Plan to copy cold files, with bases of other models if that saves space."""
    deltas: dict[BlobId, list[PlannedMember]] = defaultdict(list)
    """By bases that none of the models has."""
    for digest, member in list(members.items()):
        found = _with_cold_file(store, member)
        if found.base is None or found.base.digest in members:
            members[digest] = found
        else:
            deltas[found.base].append(found)
    for blob, group in deltas.items():
        base = PlannedMember(blob, f"the base of {group[0].label}")
        try:
            base = _with_cold_file(store, base)
            alone = estimator.estimate(blob) if base.cold is None else len(base.cold)
        except (BlobMissing, BlobDamaged):
            continue
        # Compressed without the base, each delta would take about as much as the base.
        stored = sum(len(member.cold) for member in group if member.cold is not None)
        if base.base is None and stored + alone < len(group) * alone:
            members.update((member.blob.digest, member) for member in group)
            members[blob.digest] = base
    # In an intact store no base has a base, but this store may be damaged.
    for digest, member in list(members.items()):
        if member.base is not None and members[member.base.digest].base is not None:
            members[digest] = member._replace(cold=None, base=None)


def _with_cold_file(store: LocalStore, member: PlannedMember) -> PlannedMember:
    """Return a member with the cold file of its blob, if it has one that can be read."""
    try:
        found = store.open_cold(*member.blob)
    except BlobMissing:
        return member
    except BlobDamaged as error:
        if store.has_hot(member.blob.digest):
            return member
        raise error.at(member.label) from None
    if found.stored >= member.blob.size:  # another program's: freezing writes none
        return member
    return member._replace(cold=found.container.data, base=found.container.table.base)


def _plan_deltas(
    store: LocalStore,
    models: Sequence[ArchivedModel],
    members: dict[Digest, PlannedMember],
    estimator: SizeEstimator,
    report: Callable[[str], object],
) -> None:
    """Plan bases for hot blobs, among the blobs of the models."""
    if all(
        member.cold is not None or member.blob.size <= MAX_WITHOUT_BASE
        for member in members.values()
    ):
        return
    deltas = {
        digest: member.base.digest for digest, member in members.items() if member.base is not None
    }
    tensors = {
        layer.digest: layer
        for model in models
        for layer in model.manifest.layers_of(media_types.TENSOR)
    }
    finder = DuplicateFinder(store, estimator, tensors, deltas)
    finder.read(())
    layers = [tensor_layers(model.manifest) for model in models]
    likely = _bases_by_name(store, models, members, report)
    chosen = ParentFinder(store, estimator, tensors, deltas).choose_bases(
        layers, finder.choose_bases(likely, chains=True)
    )
    bases, chains = set(deltas.values()), Chains(deltas)
    for digest, base in chosen.items():
        member = members[digest]
        is_free = member.cold is None and digest not in bases and store.has_hot(digest)
        with_base = member._replace(base=base)
        if is_free and not with_base.is_too_small and chains.add(digest, base.digest):
            members[digest] = with_base


def _bases_by_name(
    store: LocalStore,
    models: Sequence[ArchivedModel],
    members: Mapping[Digest, PlannedMember],
    report: Callable[[str], object],
) -> dict[Digest, BlobId]:
    """Return for each blob the one with its name in the base model of its model, if they differ."""
    layers = {model.reference: tensor_layers(model.manifest) for model in models}
    hot = [
        reference
        for reference, found in layers.items()
        if any(members[layer.digest].cold is None for layer in found.values())
    ]
    manifests = {model.reference: model.manifest for model in models}
    finder = BaseFinder(store, manifests, (), report)
    bases: dict[Digest, BlobId] = {}
    for reference, base in finder.find_bases(hot, chains=True).items():
        for name, layer in layers[reference].items():
            other = layers[base].get(name, layer)
            if other.digest != layer.digest:
                bases.setdefault(layer.digest, other.id)
    return bases
