"""The operation ``diff``: lists which tensors and files of two models are equal, changed, or in only one.

Tensors are matched by the names that they had in their source, so the two ways to store experts can
be compared. Tensors at the same place of the same blob are equal and are not read. Otherwise the
bytes are compared if type and shape agree. Files and configs are compared by digest. Of the blobs
that are read only the size is checked.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from blobstore.core.workers import WorkerPool, check_jobs
from blobstore.manifests import media_types
from blobstore.manifests.layers_digest import say_the_same
from blobstore.manifests.reference import Reference
from blobstore.operations.compare.pairs import Pair, source_tensors
from blobstore.remotes.addresses import is_address, reading_models
from blobstore.store.local import LocalStore, StoreLike

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blobstore.core.progress import Progress
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.manifests.model import Manifest
    from blobstore.operations.compare.source_tensor import SourceTensor
    from blobstore.store.protocols import ModelInspector

_BUFFER_SIZE = 1 << 20
_OF_TENSORS = (*media_types.WEIGHTS, media_types.STACKS, media_types.SOURCE)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """How a tensor differs between two models. A side is None if that model does not have it."""

    name: str
    ours: SourceTensor | None
    theirs: SourceTensor | None
    changes: tuple[str, ...]
    """Which of ``type``, ``shape`` and ``bytes`` differ; bytes are compared if the others agree.
    Empty if nothing differs, or only one model has the tensor."""
    is_shared: bool
    """Whether both are at the same place of the same blob."""

    @property
    def is_same(self) -> bool:
        """Whether both models have it, with equal bytes."""
        return not self.changes and self.ours is not None and self.theirs is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDifference:
    """How a file or the config differs between two models. A side is None if that model lacks it."""

    name: str
    """Empty if the layer has no name, as Ollama's licenses."""
    media_type: str
    ours: Descriptor | None
    theirs: Descriptor | None
    is_same: bool
    """Whether both models have it, with equal bytes. Configs may differ in the digest of the layers."""
    is_derived: bool = False
    """Whether a difference follows from how tensors were imported, as in the config of their model."""

    @property
    def is_config(self) -> bool:
        """Whether this is the config of the manifest, which has no name."""
        return self.media_type == media_types.CONFIG


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The result of :func:`blobstore.diff`."""

    ours: Reference | str
    """The name of the first model; a text if it is an address in a registry."""
    theirs: Reference | str
    tensors: tuple[TensorDifference, ...] = field(repr=False)
    """All tensors, including equal ones: those of the first model, then the others."""
    files: tuple[FileDifference, ...] = field(repr=False)
    """All layers without tensors, and the config, in the same order."""

    @property
    def is_same(self) -> bool:
        """Whether the models are equal, except for what is derived."""
        tensors = all(item.is_same for item in self.tensors)
        return tensors and all(item.is_same or item.is_derived for item in self.files)


def diff_models(
    ours: str | Reference,
    theirs: str | Reference,
    *,
    store: StoreLike = None,
    jobs: int | None = None,
    plain_http: bool | None = None,
    progress: Progress | None = None,
) -> Difference:
    """List which tensors and files of two models are equal, changed, or in only one of them.

    Args:
        ours: the first model; ``oci://`` begins an address in a registry.
        theirs: the second model.
        store: the store of both models, or its folder; by default the store of
            ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        jobs: number of threads; by default one per processor.
        plain_http: whether to use HTTP without TLS for registries; by default only for this machine.
        progress: called with the current step, bytes done and total bytes.

    Returns:
        all tensors and files of both models, with their differences.

    Raises:
        ModelNotFound: a model does not exist.
        BlobMissing, BlobDamaged, InvalidManifest: a model is damaged.
        RemoteError: a registry cannot be reached, refuses access or misbehaves.
        UsageError: ``jobs`` is below 1.
    """
    check_jobs(jobs)
    with reading_models(LocalStore.to_read(store), ours, theirs, plain_http=plain_http) as (
        reader,
        names,
    ):
        found = _diff(reader, names, jobs, progress)
    spelled = [name if is_address(name) else Reference.of(name) for name in (ours, theirs)]
    return replace(found, ours=spelled[0], theirs=spelled[1])


def _diff(
    store: ModelInspector,
    names: Sequence[Reference],
    jobs: int | None,
    progress: Progress | None,
) -> Difference:
    ours, theirs = names
    manifests = store.resolve(ours), store.resolve(theirs)
    found, others = source_tensors(store, (ours, manifests[0]), (theirs, manifests[1]))
    pairs: list[_Sides] = [(tensor, others.get(name)) for name, tensor in found.items()]
    pairs += [(None, tensor) for name, tensor in others.items() if name not in found]
    pool = WorkerPool(jobs, progress, sum(map(_bytes_to_read, pairs)))
    return Difference(
        ours=ours,
        theirs=theirs,
        tensors=tuple(pool.run(pairs, partial(_compare, store, pool))),
        files=_diff_files(store, *manifests),
    )


# Tensors

_Sides = tuple["SourceTensor | None", "SourceTensor | None"]


def _bytes_to_read(pair: _Sides) -> int:
    ours, theirs = pair
    if ours is None or theirs is None or Pair(ours, theirs).is_shared or _changes(ours, theirs):
        return 0
    return sum(size for _, size in _extents(ours))


def _compare(store: ModelInspector, pool: WorkerPool, pair: _Sides) -> TensorDifference:
    """Return how the tensors of a pair differ: a job of ``pool``."""
    ours, theirs = pair
    changes: tuple[str, ...] = ()
    is_shared = False
    if ours is not None and theirs is not None:
        is_shared = Pair(ours, theirs).is_shared
        changes = () if is_shared else _changes(ours, theirs)
        if not is_shared and not changes and not _has_same_bytes(store, pool, ours, theirs):
            changes = ("bytes",)
    return TensorDifference(
        name=next(tensor.name for tensor in pair if tensor is not None),
        ours=ours,
        theirs=theirs,
        changes=changes,
        is_shared=is_shared,
    )


def _has_same_bytes(
    store: ModelInspector, pool: WorkerPool, ours: SourceTensor, theirs: SourceTensor
) -> bool:
    def read(tensor: SourceTensor, begin: int, count: int, buffer: bytearray) -> bytearray:
        layer = tensor.stored.layer
        store.read_into(layer.digest, layer.size, begin, memoryview(buffer)[:count])
        return buffer if count == len(buffer) else buffer[:count]

    buffers = bytearray(_BUFFER_SIZE), bytearray(_BUFFER_SIZE)
    left = _bytes_to_read((ours, theirs))
    for (begin, size), (their_begin, their_size) in zip(
        _extents(ours), _extents(theirs), strict=True
    ):
        # Scales can differ in size if their blobs do not say how the weights are quantized.
        if size != their_size:
            pool.report(left, ours.name)
            return False
        for done in range(0, size, _BUFFER_SIZE):
            count = min(size - done, _BUFFER_SIZE)
            data = read(ours, begin + done, count, buffers[0])
            if data != read(theirs, their_begin + done, count, buffers[1]):
                pool.report(left, ours.name)  # the rest does not have to be read
                return False
            pool.report(count, ours.name)
            left -= count
    return True


def _changes(ours: SourceTensor, theirs: SourceTensor) -> tuple[str, ...]:
    """Return which of type and shape differ, by the headers."""
    type_changes = ("type",) if _type(ours) != _type(theirs) else ()
    return type_changes + (("shape",) if ours.shape != theirs.shape else ())


def _type(part: SourceTensor) -> tuple[object, ...]:
    stored = part.stored
    qparams = [(suffix, entry.spec.dtype) for suffix, entry in stored.qparams.items()]
    return stored.type_name, stored.group_size, stored.entry.spec.dtype, qparams


def _extents(part: SourceTensor) -> list[tuple[int, int]]:
    """Return offset and size of a tensor and its quantization parameters in the blob."""
    stored = part.stored
    found = []
    for entry in (stored.entry, *stored.qparams.values()):
        begin, size = stored.header.data_start + entry.begin, entry.end - entry.begin
        if part.place is not None and entry.spec.shape[:1] == (part.parts,):
            size //= part.parts
            begin += part.place * size
        found.append((begin, size))
    return found


# Files


def _diff_files(
    store: ModelInspector, ours: Manifest, theirs: Manifest
) -> tuple[FileDifference, ...]:
    found, others = _other_layers(ours), _other_layers(theirs)
    have_tensors = all(manifest.layers_of(*media_types.WEIGHTS) for manifest in (ours, theirs))
    differences = []
    for key in dict.fromkeys([*found, *others]):
        media_type, name, _ = key
        mine, other = found.get(key), others.get(key)
        is_same = mine is not None and other is not None and mine.digest == other.digest
        if mine and other and not is_same and media_type == media_types.CONFIG:
            is_same = say_the_same(
                *(store.read_blob(side.digest, side.size) for side in (mine, other))
            )
        differences.append(
            FileDifference(
                name=name,
                media_type=media_type,
                ours=mine,
                theirs=other,
                is_same=is_same,
                is_derived=have_tensors and media_type == media_types.CONFIG,
            )
        )
    return tuple(differences)


def _other_layers(manifest: Manifest) -> dict[tuple[str, str, int], Descriptor]:
    """Return config and layers without tensors, by media type, name and count of that name."""
    found: dict[tuple[str, str, int], Descriptor] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for layer in (manifest.config, *manifest.layers):
        # The names of stacked tensors are compared with the tensors. Equal models may have other sources.
        if layer.media_type not in _OF_TENSORS:
            key = layer.media_type, layer.name
            found[(*key, counts[key])] = layer
            counts[key] += 1
    return found
