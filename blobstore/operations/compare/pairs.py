"""Pairs the tensors of two models by the names that they had in their source.

Stacked experts are split, so that models that store experts differently can be compared. The tensors of a GGUF
model get the names of the other model (:mod:`.converted`). Only manifests and the headers of blobs are read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from blobstore.core import interrupts
from blobstore.core.escape import quote
from blobstore.core.globs import any_glob_matches, glob_matches
from blobstore.errors import BlobDamaged, BlobstoreError, NotFound, UsageError
from blobstore.gguf.names import ARCHITECTURES, architecture_of
from blobstore.manifests import media_types
from blobstore.models.source_layers import gguf_metadata, read_stacks
from blobstore.models.tensors import read_tensors
from blobstore.operations.compare.converted import pair_names
from blobstore.operations.compare.source_tensor import SourceTensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from blobstore.manifests.model import Manifest
    from blobstore.models.tensors import ModelTensors
    from blobstore.store.protocols import ModelInspector
    from blobstore.store.with_outside_files import ModelOrFile

_PLAIN_GROUP = 64
"""Group size of a pair in which neither tensor is quantized."""


class Pair(NamedTuple):
    """A tensor of the model and the tensor of the same name in the base."""

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
            and self.ours.origin == self.base.origin
        )

    @property
    def group_size(self) -> int:
        """Elements of a row whose error is measured together."""
        return self.ours.group_size or self.base.group_size or _PLAIN_GROUP


class Pairing(NamedTuple):
    """The tensors of two models, or those whose names match the patterns."""

    pairs: Sequence[Pair]
    """The tensors that both have, in the order of the first."""
    only_in_model: tuple[str, ...]
    only_in_base: tuple[str, ...]


def pair_tensors(
    store: ModelInspector,
    reference: ModelOrFile,
    base: ModelOrFile,
    patterns: Sequence[str],
    names: str | Mapping[str, str] | None = None,
) -> Pairing:
    """Return the tensors of two models whose names match a pattern, or all if there is none.

    Args:
        store: the store of both.
        reference: the model.
        base: the base.
        patterns: patterns of names, of source tensors or of stored ones.
        names: see :func:`~blobstore.gguf.names.architecture_of`.

    Raises:
        NotFound: a model does not exist, or neither has a tensor that matches a pattern.
        BlobMissing, BlobDamaged, InvalidManifest: a model is damaged.
        BlobstoreError: two tensors of one name cannot be compared, or there is no such pair.
        UsageError: ``names`` is no architecture, or is not needed.
    """
    manifests = store.resolve(reference), store.resolve(base)
    for name, manifest in zip((reference, base), manifests, strict=True):
        if not manifest.layers_of(*media_types.WEIGHTS):
            raise BlobstoreError(
                f"model {name} has no tensor layers, so there is nothing to compare"
            )
    models = (reference, manifests[0]), (base, manifests[1])
    ours, theirs = _converted(store, models, *source_tensors(store, *models), names)
    if patterns:
        ours, theirs = _matching(ours, theirs, patterns, models)
    pairs = [_cut(Pair(part, theirs[name])) for name, part in ours.items() if name in theirs]
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


_Models = tuple[tuple["ModelOrFile", "Manifest"], tuple["ModelOrFile", "Manifest"]]
_Tensors = Mapping[str, SourceTensor]


def _matching(
    ours: _Tensors, theirs: _Tensors, patterns: Sequence[str], models: _Models
) -> tuple[_Tensors, _Tensors]:
    """Return the tensors that match a pattern by the name of the source, or by one of the stored names."""
    spelled = [{name, part.stored.name} for parts in (ours, theirs) for name, part in parts.items()]
    for pattern in patterns:
        if not any(glob_matches(name, pattern) for names in spelled for name in names):
            (reference, _), (base, _) = models
            raise NotFound(f"no tensor of {reference} or {base} matches {quote(pattern)}")
    chosen = {
        name
        for parts in (ours, theirs)
        for name, part in parts.items()
        if any_glob_matches(name, patterns) or any_glob_matches(part.stored.name, patterns)
    }
    first, second = (
        {name: part for name, part in parts.items() if name in chosen} for parts in (ours, theirs)
    )
    return first, second


def _converted(
    store: ModelInspector,
    models: _Models,
    ours: _Tensors,
    theirs: _Tensors,
    names: str | Mapping[str, str] | None,
) -> tuple[_Tensors, _Tensors]:
    """Return the tensors, those of a GGUF model under the names that the other model has."""
    if names is None and ours.keys() & theirs.keys():
        return ours, theirs
    read = [gguf_metadata(store, manifest) for _, manifest in models]
    for place, metadata in enumerate(read):
        if metadata is None or read[1 - place] is not None:
            continue
        reference, base = models[place][0], models[1 - place][0]
        with _located(reference):
            architecture = architecture_of(metadata, names)
            if architecture is None:
                raise BlobstoreError(
                    f"the names that {base} has for tensors of the architecture "
                    f"{quote(str(metadata.get('general.architecture')))} are not known, only those of "
                    f"{', '.join(ARCHITECTURES)}; give names"
                )
            if not place:
                return pair_names(ours, architecture, metadata, theirs)
            theirs, ours = pair_names(theirs, architecture, metadata, ours)
            return ours, theirs
    if names is not None:
        (reference, _), (base, _) = models
        raise UsageError(
            f"names are for a GGUF model and another one; {reference} and {base} are not"
        )
    return ours, theirs


def _cut(pair: Pair) -> Pair:
    """Return a pair without the rows that only one side has of a tensor with a row per token."""
    ours, base = (part.shape for part in pair)
    is_vocabulary = any(part.origin is not None and part.origin.is_vocabulary for part in pair)
    if not is_vocabulary or ours == base or len(ours) == 1 or ours[1:] != base[1:]:
        return pair
    length = min(ours[0], base[0])
    return Pair(*(part._replace(length=length) for part in pair))


def source_tensors(
    store: ModelInspector, ours: tuple[ModelOrFile, Manifest], base: tuple[ModelOrFile, Manifest]
) -> tuple[dict[str, SourceTensor], dict[str, SourceTensor]]:
    """Return the tensors of two models by the names that they had in their sources.

    Raises:
        BlobMissing, BlobDamaged: a model is damaged.
    """
    read = []
    for reference, manifest in (ours, base):
        with _located(reference):
            read.append((read_tensors(store, manifest), read_stacks(store, manifest)))
    (contents, stacks), (base_contents, base_stacks) = read
    with _located(ours[0]):
        tensors = _unstacked(contents, stacks, base_stacks)
    with _located(base[0]):
        return tensors, _unstacked(base_contents, base_stacks, stacks)


@contextlib.contextmanager
def _located(reference: ModelOrFile) -> Iterator[None]:
    """Put the name of the model in front of the message of an error."""
    try:
        yield
    except BlobstoreError as error:
        raise error.at(f"model {reference}") from error


def _unstacked(
    contents: ModelTensors,
    stacks: Mapping[str, Sequence[str]],
    foreign: Mapping[str, Sequence[str]],
) -> dict[str, SourceTensor]:
    """Return the tensors of a model as its source had them.

    A tensor that was already a stack in its source is split by ``foreign``, the list of stacks of
    the other model, if that names it and has as many members.
    """
    found: dict[str, SourceTensor] = {}
    for stored in contents.tensors.values():
        interrupts.check()
        names = stacks.get(stored.name)
        if names is None and stored.shape[:1] == (len(foreign.get(stored.name, ())),):
            names = foreign.get(stored.name)
        members = names or ()
        if members and stored.shape[:1] != (len(members),):
            raise BlobDamaged(
                f"tensor {quote(stored.name)} of shape {list(stored.shape)} is listed as a stack "
                f"of length {len(members)}"
            )
        parts = [
            SourceTensor(name, stored, place, len(members)) for place, name in enumerate(members)
        ]
        for tensor in parts or [SourceTensor(stored.name, stored)]:
            if found.setdefault(tensor.name, tensor) is not tensor:
                raise BlobDamaged(f"two tensors would both be called {quote(tensor.name)}")
    return found


def _check(pair: Pair, *references: ModelOrFile) -> None:
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
