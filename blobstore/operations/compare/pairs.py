"""Which tensors of two models are to be compared, by the names that they had in their source.

Stacked experts are taken apart, so that either form of experts can be compared with the other.
Decided from the manifests and the blobs' headers; no tensor is read.
"""

from __future__ import annotations

import contextlib
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

from blobstore.core.escape import quote
from blobstore.errors import BlobDamaged, BlobstoreError, NotFound
from blobstore.manifests import media_types
from blobstore.models.expert_stacks import read_stacks
from blobstore.models.tensors import read_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from blobstore.manifests.model import Manifest
    from blobstore.manifests.reference import Reference
    from blobstore.models.tensors import ModelTensors, StoredTensor
    from blobstore.store.local import LocalStore

_PLAIN_GROUP = 64
"""Elements of a group where neither side is quantized."""


class SourceTensor(NamedTuple):
    """A tensor under the name that it had in its source."""

    name: str
    stored: StoredTensor
    place: int | None = None
    """Its place in the first dimension of ``stored``, if it was stacked."""
    parts: int = 1
    """How many tensors ``stored`` was made of."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape, unpacked."""
        return self.stored.shape if self.place is None else self.stored.shape[1:]

    @property
    def nbytes(self) -> int:
        """Bytes in the blob, companions included; of a stacked tensor its share."""
        return self.stored.nbytes // self.parts

    @property
    def is_quantized(self) -> bool:
        """Whether it is stored packed."""
        return bool(self.stored.companions)


class Pair(NamedTuple):
    """A tensor of the model and that of the same name in the base."""

    ours: SourceTensor
    base: SourceTensor

    @property
    def is_shared(self) -> bool:
        """Whether both are the same bytes of one blob."""
        ours, base = self.ours.stored, self.base.stored
        return (
            ours.layer.digest == base.layer.digest
            and ours.entry == base.entry
            and self.ours.place == self.base.place
        )

    @property
    def group_size(self) -> int:
        """Elements of a row that are looked at together."""
        return self.ours.stored.group_size or self.base.stored.group_size or _PLAIN_GROUP


class Pairing(NamedTuple):
    """The tensors of two models, as far as they were asked for."""

    pairs: Sequence[Pair]
    """Those of both, in the order of the first."""
    only_in_model: tuple[str, ...]
    only_in_base: tuple[str, ...]


def pair_tensors(
    store: LocalStore, reference: Reference, base: Reference, patterns: Sequence[str]
) -> Pairing:
    """Return the tensors of two models whose names match a pattern, or all if there is none.

    Raises:
        NotFound: a model does not exist, or neither has a tensor that matches a pattern.
        BlobMissing, BlobDamaged, InvalidManifest: a model is not whole.
        BlobstoreError: two tensors of one name cannot be compared, or there is no such pair.
    """
    models = [(name, _with_tensors(store, name)) for name in (reference, base)]
    ours, theirs = source_tensors(store, *models)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in (*ours, *theirs)):
            raise NotFound(f"no tensor of {reference} or {base} matches {quote(pattern)}")
    ours, theirs = _chosen(ours, patterns), _chosen(theirs, patterns)
    pairs = [Pair(part, theirs[name]) for name, part in ours.items() if name in theirs]
    for pair in pairs:
        _check(pair, reference, base)
    if not pairs:
        raise BlobstoreError(
            f"models {reference} and {base} have no tensor of the same name to compare"
        )
    return Pairing(
        pairs,
        tuple(name for name in ours if name not in theirs),
        tuple(name for name in theirs if name not in ours),
    )


def source_tensors(
    store: LocalStore, ours: tuple[Reference, Manifest], base: tuple[Reference, Manifest]
) -> tuple[dict[str, SourceTensor], dict[str, SourceTensor]]:
    """Return the tensors of two models by the names that they had in their sources.

    Raises:
        BlobMissing, BlobDamaged: a model is not whole.
    """
    contents, stacks = _read(store, *ours)
    base_contents, base_stacks = _read(store, *base)
    with _located(ours[0]):
        tensors = _parts(contents, stacks, base_stacks)
    with _located(base[0]):
        return tensors, _parts(base_contents, base_stacks, stacks)


def _with_tensors(store: LocalStore, reference: Reference) -> Manifest:
    manifest = store.resolve(reference)
    if not manifest.layers_of(media_types.TENSOR):
        raise BlobstoreError(
            f"model {reference} has no tensor layers, so there is nothing to compare"
        )
    return manifest


def _read(
    store: LocalStore, reference: Reference, manifest: Manifest
) -> tuple[ModelTensors, Mapping[str, Sequence[str]]]:
    with _located(reference):
        return read_tensors(store, manifest), read_stacks(store, manifest)


@contextlib.contextmanager
def _located(reference: Reference) -> Iterator[None]:
    """Put the model in front of the message of an error."""
    try:
        yield
    except BlobstoreError as error:
        where = f"model {reference}"
        raise error.at(where) from error


def _parts(
    contents: ModelTensors,
    stacks: Mapping[str, Sequence[str]],
    foreign: Mapping[str, Sequence[str]],
) -> dict[str, SourceTensor]:
    """Return the tensors of a model as its source had them.

    ``foreign`` are the stacks of the other model. They name the parts of a tensor that was stacked
    already in its source, if it is of that form.
    """
    found: dict[str, SourceTensor] = {}
    for stored in contents.tensors.values():
        names = stacks.get(stored.name)
        if names is None and stored.shape[:1] == (len(foreign.get(stored.name, ())),):
            names = foreign.get(stored.name)
        for part in _split(stored, names):
            if found.setdefault(part.name, part) is not part:
                raise BlobDamaged(f"two tensors would both be called {quote(part.name)}")
    return found


def _split(stored: StoredTensor, names: Sequence[str] | None) -> Iterator[SourceTensor]:
    if not names:
        yield SourceTensor(stored.name, stored)
        return
    if stored.shape[:1] != (len(names),):
        raise BlobDamaged(
            f"tensor {quote(stored.name)} of shape {list(stored.shape)} is said to be made of "
            f"{len(names)} tensors"
        )
    for place, name in enumerate(names):
        yield SourceTensor(name, stored, place, len(names))


def _chosen(parts: dict[str, SourceTensor], patterns: Sequence[str]) -> dict[str, SourceTensor]:
    if not patterns:
        return parts
    return {
        name: part
        for name, part in parts.items()
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    }


def _check(pair: Pair, *references: Reference) -> None:
    if pair.is_shared:
        return
    for part, reference in zip(pair, references, strict=True):
        if part.is_quantized and part.stored.item is None:
            raise BlobstoreError(
                f"tensor {quote(part.name)} of {reference} is quantized, but its blob does not "
                "say how"
            )
    if pair.ours.shape != pair.base.shape:
        raise BlobstoreError(
            f"tensor {quote(pair.ours.name)} has shape {list(pair.ours.shape)} in "
            f"{references[0]} and {list(pair.base.shape)} in {references[1]}"
        )
