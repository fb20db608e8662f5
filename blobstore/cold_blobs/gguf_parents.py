"""Finds blobs with the weights that blocks of GGUF were quantized from: the parents of a ladder of quantizations.

What a parent is called does not matter: weights of its first and its last row are compared with those that the
blocks stand for, and samples decide between those that are similar. So the tensors of safetensors files are
found as well as those of GGUF files. The rows of queries and keys, which llama.cpp permutes, have the same first
and the same last row.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from blobstore.cold_blobs.quantized import weights_in
from blobstore.cold_blobs.weight_search import WeightSearch, differing_of, sources_in
from blobstore.core.fork import cached_property
from blobstore.errors import BlobstoreError
from blobstore.safetensors.header import Header

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import Final

    import numpy as np

    from blobstore.cold_blobs.blob_encoder import SizeEstimator
    from blobstore.cold_blobs.weight_search import Source, Weight
    from blobstore.core.digest import BlobId, Digest
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.store.local import LocalStore

    Layers = Mapping[str, Descriptor]
    Array = np.ndarray[Any, Any]
    _Samples = dict[tuple[int, int], list[tuple["_Candidate", Array]]]
    """Unit vectors of the weights of candidates, by the number of weights and the length of a sample."""

_MAX_HEADER: Final = 1 << 16
"""Bytes of the header of a blob with one tensor, at most."""
_EXPERTS: Final = "experts"
"""Blobs with this in their name may have several tensors of one size."""
_DIVIDED: Final = (
    "_exps",
    _EXPERTS,
    "qkv",
    "W_pack",
    "gate_up",
    "embd",
    "embed",
    "lm_head",
    "output.weight",
)
"""Parts of the names of weights that other files have in parts, fused with others, or with more rows."""
_WIDTHS: Final = (34 / 32, 2, 4)
"""Bytes of a weight: in blocks of Q8_0, and as floats."""
_FUSED: Final = 3
"""Weights that are fused with others, as queries are with keys and values."""
_MOST_PARTS: Final = 16
"""The most by which the sizes of such weights differ, unless they are experts."""
_MAX_COMPARED: Final = 8
"""Tensors that are similar to a blob and compared with it."""
_MIN_COSINE: Final = 0.3
"""Of the angle between similar weights: ternary codes may leave as little. Others are nearly at right angles."""


class _Child(NamedTuple):
    """A blob whose only or first weight is quantized."""

    blob: Descriptor
    weight: Weight


class _Candidate(NamedTuple):
    """A blob that has weights."""

    blob: Descriptor
    header: Header


class ParentFinder:
    """Finds parents among the blobs of some models."""

    def __init__(
        self,
        store: LocalStore,
        estimator: SizeEstimator,
        frozen: Mapping[Digest, Descriptor],
        deltas: Mapping[Digest, Digest],
    ) -> None:
        """Take the blobs to be frozen, and the existing deltas with their bases."""
        self._store = store
        self._estimator = estimator
        self._frozen = frozen
        self._deltas = deltas

    def choose_bases(
        self, models: Iterable[Layers], others: Mapping[Digest, BlobId]
    ) -> dict[Digest, BlobId]:
        """Return the bases of blobs, with parents as the bases of blocks.

        Args:
            models: the tensor layers of each model whose blobs can be bases.
            others: the bases that blobs would have without parents.
        """
        children = self._children
        chosen = dict(others)
        if not children:
            return chosen
        parents: dict[BlobId, list[BlobId]] = defaultdict(list)
        needed: dict[Digest, list[BlobId]] = defaultdict(list)
        for digest, base in others.items():
            needed[base.digest].append(self._frozen[digest].id)
        for child, parent in self._find(children, models, others):
            blob = child.blob.id
            lost = sum(self._size(one) - self._size(one, blob) for one in needed[blob.digest])
            if lost < self._size(blob):  # a base has no base itself
                parents[parent].append(blob)
        ladders: set[Digest] = set()
        for parent, ladder in parents.items():
            serving = parent
            if known := chosen.get(parent.digest):
                saved = self._size(parent) - self._size(parent, known)
                # As a delta the parent saves more than the ladder takes next to the base.
                if saved >= sum(self._size(blob, known) for blob in ladder):
                    serving = known
                else:
                    del chosen[parent.digest]
            chosen.update((blob.digest, serving) for blob in ladder)
            ladders.update(blob.digest for blob in ladder)
        # A blob of a ladder has a base now, so it cannot be the base of others.
        return {blob: base for blob, base in chosen.items() if base.digest not in ladders}

    def may_have(self, blob: Descriptor) -> bool:
        """Return whether a blob may have the weights of a child, by its name and size."""
        if blob.digest in self._deltas:
            return False
        for count, is_divided in self._counts.items():
            size = count * min(_WIDTHS)
            if _EXPERTS in blob.name and size <= blob.size:
                return True
            may_differ = is_divided or _is_divided(blob.name)
            if may_differ and size <= _FUSED * blob.size and blob.size <= _MOST_PARTS * size:
                return True
            if any(count * width < blob.size <= count * width + _MAX_HEADER for width in _WIDTHS):
                return True
        return False

    @cached_property
    def _counts(self) -> dict[int, bool]:
        """The numbers of weights of children, and whether one of them may be in parts elsewhere."""
        counts: dict[int, bool] = defaultdict(bool)
        for child in self._children:
            counts[child.weight.elements] |= _is_divided(child.blob.name)
        return dict(counts)

    @cached_property
    def _children(self) -> list[_Child]:
        """The blobs to be frozen with a weight that may follow from others.

        A stack is followed by its first matrix.
        """
        bases = set(self._deltas.values())
        wanted = [
            blob
            for digest, blob in self._frozen.items()
            if digest not in self._deltas and digest not in bases and self._store.has_hot(digest)
        ]
        return [
            _Child(blob, each)
            for blob, header in self._with_headers(wanted)
            for weight in islice(weights_in(header), 1)
            for each in (weight, *weight.matrices()[:1])
        ]

    def _find(
        self, children: list[_Child], models: Iterable[Layers], others: Mapping[Digest, BlobId]
    ) -> Iterator[tuple[_Child, BlobId]]:
        """Yield children with their parents."""
        samples = self._samples(models)
        weights = {one.blob.digest for known in samples.values() for one, _ in known}
        found: set[Digest] = set()
        # Blocks that may be parents come first: those that get a parent are not parents themselves.
        for child in sorted(children, key=lambda child: child.blob.digest not in weights):
            if child.blob.digest in found:
                continue
            parent = None
            with contextlib.suppress(BlobstoreError):  # reported when the blob is compressed
                similar = [
                    item for item in self._similar(child, samples) if item.blob.digest not in found
                ]
                parent = self._best_parent(child, similar, others)
            if parent is not None:
                found.add(child.blob.digest)
                yield child, parent

    def _samples(self, models: Iterable[Layers]) -> _Samples:
        """Return samples of the weights of candidates."""
        lengths: dict[int, set[int]] = defaultdict(set)
        for child in self._children:
            lengths[child.weight.elements].add(child.weight.sampled)
        samples: _Samples = defaultdict(list)
        for candidate in self._candidates(models):
            base = self._store.base(*candidate.blob.id)
            for source in sources_in(candidate.header):
                places = {
                    (place, length)
                    for count in lengths
                    for place in self._places(source, count, candidate.blob.name)
                    for length in lengths[count]
                    if length % source.grain == 0
                }
                for place, length in sorted(places):
                    with contextlib.suppress(BlobstoreError):
                        vector = place.unit_vector(base, length)
                        samples[place.elements, length].append((candidate, vector))
        return samples

    def _places(self, source: Source, count: int, name: str) -> list[Source]:
        """Return what of a tensor may be so many weights, or their first rows."""
        if source.elements == count:
            return [source]
        if not (self._counts[count] or _is_divided(name)):
            return []
        if source.elements < count:
            return [source] if count <= _FUSED * source.elements else []
        return source.parts(count)[:_MOST_PARTS]

    def _similar(self, child: _Child, samples: _Samples) -> list[_Candidate]:
        """Return the candidates with weights in the direction of a child's, or of its first rows."""
        import numpy as np

        read = self._store.base(*child.blob.id).read_into
        weight, similar = child.weight, []
        for (count, length), known in samples.items():
            rows, rest = divmod(count, weight.columns)
            is_part = rows < weight.rows and weight.is_divisible and self._counts[weight.elements]
            if length != weight.sampled or rest or not (count == weight.elements or is_part):
                continue
            part = weight.part(0, rows) if is_part else weight
            cosines = np.stack([vector for _, vector in known]) @ part.unit_vector(read)
            nearest = np.argsort(-cosines, kind="stable")[:_MAX_COMPARED].tolist()
            similar += [known[at][0] for at in nearest if cosines[at] >= _MIN_COSINE]
        return similar

    def _best_parent(
        self, child: _Child, similar: list[_Candidate], others: Mapping[Digest, BlobId]
    ) -> BlobId | None:
        """Return the blob that most follows from: of several preferably one of the same name, and no delta."""

        def rank(item: _Candidate) -> tuple[bool, bool, str]:
            digest = item.blob.digest
            return digest in others, item.blob.name != child.blob.name, digest.hex

        best, parent = 1.0, None
        read = self._store.base(*child.blob.id).read_into
        for item in sorted(similar, key=rank):
            with contextlib.suppress(BlobstoreError):  # reported when the blob is compressed
                search = WeightSearch(read, self._store.base(*item.blob.id), item.header)
                differing = differing_of(search.matches(child.weight))
                if differing < best:
                    best, parent = differing, item.blob.id
            if not best:
                break
        return parent

    def _candidates(self, models: Iterable[Layers]) -> Iterator[_Candidate]:
        """Yield the blobs that may have the weights of children."""
        found = (blob for layers in models for blob in layers.values() if self.may_have(blob))
        blobs = {blob.digest: blob for blob in found}
        for blob, header in self._with_headers(blobs.values()):
            yield _Candidate(blob, header)

    def _with_headers(self, blobs: Iterable[Descriptor]) -> Iterator[tuple[Descriptor, Header]]:
        """Yield the blobs that can be read, with their headers."""
        known = list(blobs)
        headers = self._store.read_headers(blob.id for blob in known)
        for blob, header in zip(known, headers, strict=True):
            if isinstance(header, Header):
                yield blob, header

    def _size(self, blob: BlobId, base: BlobId | None = None) -> int:
        try:
            return self._estimator.estimate(blob, base)
        except BlobstoreError:  # reported when the blob is compressed
            return blob.size


def _is_divided(name: str) -> bool:
    return any(part in name for part in _DIVIDED)
