"""Workflow: what is the same in two models, what has changed, and what only one has.

Tensors are matched by the names that they had in their source, however experts are stored. The same place
in the same blob is the same tensor, and is not read; of others the bytes are compared, if type and shape
agree. Files and the config are compared by digest. Of the blobs that are read only the size is checked.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blobstore.core.progress import Meter
from blobstore.core.workers import check_jobs
from blobstore.errors import BlobstoreError
from blobstore.manifests import media_types
from blobstore.manifests.check import say_the_same
from blobstore.manifests.reference import Reference
from blobstore.operations.compare.pairs import Pair, source_tensors
from blobstore.store.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from blobstore.core.digest import Digest
    from blobstore.core.progress import Progress
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.manifests.model import Manifest
    from blobstore.operations.compare.pairs import SourceTensor

_BUFFER_SIZE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSide:
    """A tensor in one of the models."""

    type: str
    """The quantization type, or the element type."""
    group_size: int
    """Elements of a row that share a scale; 0 for a plain tensor."""
    shape: tuple[int, ...]
    """The logical shape, unpacked."""
    nbytes: int
    """Bytes in the store, companions included."""
    blob: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """A tensor of two models. A side is None where the model does not have it."""

    name: str
    ours: TensorSide | None
    theirs: TensorSide | None
    changes: tuple[str, ...]
    """Which of ``type``, ``shape`` and ``bytes`` differ; bytes count where the others agree. Empty
    for a tensor that is the same, and for one that only one model has."""
    is_shared: bool
    """Whether both are the same place of the same blob."""

    @property
    def is_same(self) -> bool:
        """Whether both models have it, bit for bit."""
        return not self.changes and self.ours is not None and self.theirs is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDifference:
    """A layer of two models that holds no tensor, or their configs. None is a layer that is not there."""

    name: str
    """Empty where the layer has no name, as Ollama's licenses."""
    media_type: str
    ours: Descriptor | None
    theirs: Descriptor | None
    is_same: bool
    """Whether both models have it, bit for bit; of configs, but for the digest of the layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What :func:`diff_models` found."""

    ours: Reference
    theirs: Reference
    tensors: tuple[TensorDifference, ...]
    """All tensors, also those that are the same: in the order of the first model, then the others."""
    files: tuple[FileDifference, ...]
    """All other layers and the config, in the same order."""

    @property
    def is_same(self) -> bool:
        """Whether nothing differs."""
        tensors = all(item.is_same for item in self.tensors)
        return tensors and all(item.is_same for item in self.files)


def diff_models(
    ours: str | Reference,
    theirs: str | Reference,
    *,
    store: LocalStore | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Difference:
    """Tell what is the same in two models, what has changed, and what only one has.

    Args:
        ours: the one model.
        theirs: the other.
        store: of both; by default the store of ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        jobs: threads; by default the machine's processors.
        progress: called with what is being done, bytes done and bytes in all.

    Raises:
        ModelNotFound: a model does not exist.
        BlobMissing, BlobDamaged, InvalidManifest: a model is not whole.
        UsageError: ``jobs`` is below 1.
    """
    check_jobs(jobs)
    names = [Reference.parse(name) if isinstance(name, str) else name for name in (ours, theirs)]
    store = store or LocalStore()
    models = [(name, store.resolve(name)) for name in names]
    sides = source_tensors(store, *models)
    pairs: list[_Sides] = [(part, sides[1].get(name)) for name, part in sides[0].items()]
    pairs += [(None, part) for name, part in sides[1].items() if name not in sides[0]]
    return Difference(
        ours=names[0],
        theirs=names[1],
        tensors=tuple(_compared(store, pairs, jobs, progress)),
        files=tuple(_files(store, *(manifest for _, manifest in models))),
    )


# Tensors

_Sides = tuple["SourceTensor | None", "SourceTensor | None"]


def _compared(
    store: LocalStore,
    pairs: Sequence[_Sides],
    jobs: int | None,
    progress: Progress | None,
) -> list[TensorDifference]:
    """Return how the tensors of each pair differ, in their order."""
    work = _Work(store, Meter(progress, sum(_bytes_to_read(pair) for pair in pairs)))
    with ThreadPoolExecutor(jobs or os.cpu_count(), thread_name_prefix="blobstore-diff") as pool:
        try:
            return list(pool.map(work.compare, pairs))
        except BaseException:  # also Ctrl-C: stop the threads
            work.stop.set()
            pool.shutdown(cancel_futures=True)
            raise


def _bytes_to_read(pair: _Sides) -> int:
    ours, theirs = pair
    if ours is None or theirs is None or Pair(ours, theirs).is_shared or _changes(ours, theirs):
        return 0
    return sum(size for _, size in _extents(ours))


class _Work:
    """The job of one pair, with what all jobs share."""

    def __init__(self, store: LocalStore, meter: Meter) -> None:
        self.stop = threading.Event()
        self._store = store
        self._meter = meter

    def compare(self, pair: _Sides) -> TensorDifference:
        """Return how the tensors of a pair differ.

        Raises:
            BlobMissing, BlobDamaged: a blob is not whole.
        """
        ours, theirs = pair
        changes: tuple[str, ...] = ()
        is_shared = False
        if ours is not None and theirs is not None:
            is_shared = Pair(ours, theirs).is_shared
            changes = () if is_shared else _changes(ours, theirs)
            if not is_shared and not changes and not self._have_same_bytes(ours, theirs):
                changes = ("bytes",)
        return TensorDifference(
            name=next(part.name for part in pair if part is not None),
            ours=_side(ours),
            theirs=_side(theirs),
            changes=changes,
            is_shared=is_shared,
        )

    def _have_same_bytes(self, ours: SourceTensor, theirs: SourceTensor) -> bool:
        buffers = bytearray(_BUFFER_SIZE), bytearray(_BUFFER_SIZE)
        left = _bytes_to_read((ours, theirs))
        for (begin, size), (their_begin, their_size) in zip(
            _extents(ours), _extents(theirs), strict=True
        ):
            if size != their_size:  # scales of packed weights that do not say how
                self._meter.add(left, ours.name)
                return False
            for done in range(0, size, _BUFFER_SIZE):
                if self.stop.is_set():
                    raise BlobstoreError("stopped")
                count = min(size - done, _BUFFER_SIZE)
                found = (
                    self._read(ours, begin + done, count, buffers[0]),
                    self._read(theirs, their_begin + done, count, buffers[1]),
                )
                if found[0] != found[1]:
                    self._meter.add(left, ours.name)  # the rest needs not to be read
                    return False
                self._meter.add(count, ours.name)
                left -= count
        return True

    def _read(self, part: SourceTensor, begin: int, count: int, buffer: bytearray) -> bytearray:
        layer = part.stored.layer
        self._store.read_into(layer.digest, layer.size, begin, memoryview(buffer)[:count])
        return buffer if count == len(buffer) else buffer[:count]


def _changes(ours: SourceTensor, theirs: SourceTensor) -> tuple[str, ...]:
    """Return what differs, as headers tell."""
    found = (
        ("type", _type(ours) != _type(theirs)),
        ("shape", ours.shape != theirs.shape),
    )
    return tuple(what for what, differs in found if differs)


def _type(part: SourceTensor) -> tuple[object, ...]:
    stored = part.stored
    companions = [(suffix, entry.spec.dtype) for suffix, entry in stored.companions.items()]
    return stored.type_name, stored.group_size, stored.entry.spec.dtype, companions


def _side(part: SourceTensor | None) -> TensorSide | None:
    if part is None:
        return None
    stored = part.stored
    return TensorSide(
        type=stored.type_name,
        group_size=stored.group_size,
        shape=part.shape,
        nbytes=part.nbytes,
        blob=stored.layer.digest,
    )


def _extents(part: SourceTensor) -> list[tuple[int, int]]:
    """Return where the bytes of a tensor are in its blob: offset and size, its companions' too."""
    stored = part.stored
    found = []
    for entry in (stored.entry, *stored.companions.values()):
        begin, size = stored.header.data_start + entry.begin, entry.end - entry.begin
        if part.place is not None and entry.spec.shape[:1] == (part.parts,):
            size //= part.parts
            begin += part.place * size
        found.append((begin, size))
    return found


# Files


def _files(store: LocalStore, ours: Manifest, theirs: Manifest) -> Iterator[FileDifference]:
    found, others = _other_layers(ours), _other_layers(theirs)
    for key in [*found, *(key for key in others if key not in found)]:
        media_type, name, _ = key
        sides = found.get(key), others.get(key)
        yield FileDifference(
            name=name,
            media_type=media_type,
            ours=sides[0],
            theirs=sides[1],
            is_same=_is_same_file(store, *sides),
        )


def _is_same_file(store: LocalStore, ours: Descriptor | None, theirs: Descriptor | None) -> bool:
    if ours is None or theirs is None or ours.digest == theirs.digest:
        return ours is not None and theirs is not None
    if ours.media_type != media_types.CONFIG:
        return False
    return say_the_same(*(store.read_blob(side.digest, side.size) for side in (ours, theirs)))


def _other_layers(manifest: Manifest) -> dict[tuple[str, str, int], Descriptor]:
    """Return what holds no tensor by media type, name, and place among those that have both."""
    found: dict[tuple[str, str, int], Descriptor] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for layer in (manifest.config, *manifest.layers):
        # What was stacked tells the names of tensors, and differs if they do.
        if layer.media_type not in (media_types.TENSOR, media_types.STACKS):
            key = layer.media_type, layer.name
            found[(*key, counts[key])] = layer
            counts[key] += 1
    return found
