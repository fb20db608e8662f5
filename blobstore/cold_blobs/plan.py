"""Decides what to freeze: which blobs, and against which bases."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from blobstore.cold_blobs.base_search import BaseFinder, tensor_layers
from blobstore.cold_blobs.equal_tensors import DuplicateFinder
from blobstore.cold_blobs.gguf_parents import ParentFinder
from blobstore.cold_blobs.searched_models import SearchedModels
from blobstore.errors import ModelNotFound
from blobstore.manifests import media_types
from blobstore.manifests.step_record import is_state, state_of, step_of
from blobstore.store.reachability import ReachableBlobs

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from blobstore.cold_blobs.blob_encoder import SizeEstimator
    from blobstore.core.digest import BlobId, Digest
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.manifests.model import Manifest
    from blobstore.manifests.reference import Reference
    from blobstore.store.local import LocalStore


@dataclass(slots=True)
class FreezePlan:
    """What to freeze. A name counts as frozen if any of its blobs is cold only."""

    reachable: ReachableBlobs
    """The blobs that the manifests need, as of its last update."""
    references: list[Reference] = field(default_factory=list)
    blobs: dict[Digest, Descriptor] = field(default_factory=dict)
    """The tensor blobs of the models, each once."""
    models: dict[Reference, Collection[Digest]] = field(default_factory=dict)
    """The tensor blobs of each model."""
    bases: dict[Reference, Reference] = field(default_factory=dict)
    """The base models of models."""
    base_blobs: dict[Digest, BlobId] = field(default_factory=dict)
    """The bases of blobs."""
    frozen: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The manifests of frozen models, and of those to be frozen, by path: they need no hot tensors."""

    def needing(self, blobs: Collection[Digest]) -> list[str]:
        """Return the paths of the manifests of models that are not frozen and need one of these blobs."""
        return [
            path
            for path, manifest in self.reachable.needing(blobs).items()
            if self.frozen.get(path) != manifest.state
        ]


def plan_freeze(
    store: LocalStore,
    named: Sequence[Reference],
    estimator: SizeEstimator,
    *,
    older_than: float | None,
    base: Reference | None,
    find_base: bool,
    chains: bool = False,
    report: Callable[[str], object] = lambda _: None,
) -> FreezePlan:
    """Choose the models and blobs to freeze, and their bases.

    Args:
        store: the store.
        named: the models; if there are none, all models of the store.
        estimator: estimates what bases save.
        older_than: skip models that were created, copied or thawed within so many seconds.
        base: the base model of the others.
        find_base: search for base models if ``base`` is not given, and for duplicates in any case.
        chains: whether bases may be deltas themselves, as the result is not kept in the store.
        report: called with the state of the search for bases, in words.

    Raises:
        ModelNotFound: a named model or the base model does not exist.
        InvalidManifest: a manifest of the store cannot be read.
        StoreError: the store cannot be read.
    """
    store.check_root()
    plan = FreezePlan(ReachableBlobs(store, lists_all=False))
    # Before models are read: a manifest that is replaced from now on does not count as frozen.
    plan.reachable.update()
    searched = SearchedModels(store, plan.reachable)
    if base is not None:
        store.resolve(base)
    chosen: dict[Reference, Manifest] = {}
    for reference in named or [name for name, _ in plan.reachable.by_name()]:
        try:
            chosen[reference] = store.resolve(reference)
        except ModelNotFound:
            if named:
                raise
            continue  # removed since the names were listed
    _choose_models(store, plan, chosen, older_than, is_named=bool(named))
    if base is not None or find_base:
        _choose_bases(store, plan, chosen, searched, estimator, base, report, chains=chains)
    return plan


def _choose_models(
    store: LocalStore,
    plan: FreezePlan,
    manifests: Mapping[Reference, Manifest],
    older_than: float | None,
    *,
    is_named: bool,
) -> None:
    states = plan.reachable.by_path()
    for reference, manifest in manifests.items():
        path = str(store.manifest_path(reference))
        layers = manifest.layers_of(media_types.TENSOR)
        if not layers and not is_named:
            continue  # a GGUF model of Ollama
        if older_than is not None:
            # A thawed blob has a new file, so the times of the blobs count as well as that of the
            # manifest.
            modified = 0.0
            for file in (path, *(store.blob_path(layer.digest) for layer in layers)):
                with contextlib.suppress(OSError):
                    status = os.lstat(file)
                    modified = max(modified, status.st_mtime if stat.S_ISREG(status.st_mode) else 0)
            if time.time() - modified < older_than:
                continue
        plan.references.append(reference)
        plan.models[reference] = {layer.digest: layer for layer in layers}
        plan.blobs |= {layer.digest: layer for layer in layers}
        if path in states:
            plan.frozen[path] = states[path].state
    for path, state in plan.reachable.needing(store.frozen()).items():
        plan.frozen.setdefault(path, state.state)


def _choose_bases(
    store: LocalStore,
    plan: FreezePlan,
    chosen: Mapping[Reference, Manifest],
    searched: SearchedModels,
    estimator: SizeEstimator,
    base: Reference | None,
    report: Callable[[str], object],
    *,
    chains: bool,
) -> None:
    deltas = store.cold_bases()
    finder = DuplicateFinder(store, estimator, plan.blobs, deltas)
    parents = ParentFinder(store, estimator, plan.blobs, deltas)

    def is_useful(blob: Descriptor) -> bool:
        return finder.may_match(blob) or parents.may_have(blob)

    if base is not None:
        chosen = {**chosen, base: store.parse(base)[1]}
    manifests = searched.find(chosen, is_useful, with_similar=base is None)
    layers = {reference: tensor_layers(manifest) for reference, manifest in manifests.items()}
    hot = [
        reference
        for reference in plan.references
        if any(store.has_hot(layer.digest) for layer in layers.get(reference, {}).values())
    ]
    if base is None:
        excluded = () if chains else deltas
        uses = searched.uses(layer for found in layers.values() for layer in found.values())
        # A state has its model's base, because they share blobs, and moments say little about which to choose.
        states = {
            name
            for name in manifests
            if is_state(name) and step_of(name) in (chosen if name in chosen else manifests)
        }
        models = {name: one for name, one in manifests.items() if name not in states}
        finder_of_bases = BaseFinder(store, models, excluded, report, uses)
        plan.bases = finder_of_bases.find_bases([name for name in hot if name not in states])
        for state in states.intersection(hot):
            if found := plan.bases.get(step_of(state)):
                plan.bases[state] = state_of(found) if state_of(found) in states else found
    else:
        plan.bases = {reference: base for reference in hot if reference != base}
    likely = {
        layer.digest: theirs.id
        for reference, other in plan.bases.items()
        for name, layer in layers[reference].items()
        if (theirs := layers.get(other, {}).get(name)) and theirs.digest != layer.digest
    }
    others = [layers[name] for name in sorted(layers) if name not in plan.references]
    finder.read(others)
    pairs = parents.choose_bases(layers.values(), finder.choose_bases(likely))
    bases = {blob.digest for blob in pairs.values()} | {*deltas.values()}
    plan.base_blobs = {
        digest: blob
        for digest, blob in pairs.items()
        # In a store, a base has no base itself.
        if chains or (digest not in bases and blob.digest not in deltas)
    }
    for reference in hot:
        holder = _holder(plan, reference, layers)
        if holder is not None:
            plan.bases[reference] = holder


def _holder(
    plan: FreezePlan, reference: Reference, layers: Mapping[Reference, Mapping[str, Descriptor]]
) -> Reference | None:
    """Return the other model that has most of the bases of a model's blobs: of a quantization, its parent.

    The one that was looked for is preferred.
    """
    wanted = {
        plan.base_blobs[digest] for digest in plan.models[reference] if digest in plan.base_blobs
    }
    sizes = {
        other: sum(layer.size for layer in theirs.values() if layer.id in wanted)
        for other, theirs in layers.items()
        if wanted and other != reference
    }
    likely = plan.bases.get(reference)
    best = min(sizes, key=lambda other: (-sizes[other], other != likely, other), default=None)
    return best if best is not None and sizes[best] else None
