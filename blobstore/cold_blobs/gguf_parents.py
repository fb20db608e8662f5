"""Finds blobs with the weights that blocks of GGUF were quantized from: the parents of a ladder of quantizations.

What a parent is called does not matter: weights of its first and its last row are compared with those that the
blocks stand for, and samples decide between those that are similar. So the tensors of safetensors files are
found as well as those of GGUF files. The rows of queries and keys, which llama.cpp permutes, have the same first
and the same last row.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from blobstore.cold_blobs.quantized import Blocks, Found, sources_of, unit_vector
from blobstore.cold_blobs.scaled_weights import ScaledWeight, scaled_weights
from blobstore.errors import BlobstoreError
from blobstore.safetensors.header import Header

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import Final

    import numpy as np

    from blobstore.cold_blobs.blob_encoder import SizeEstimator
    from blobstore.core.digest import BlobId, Digest
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.safetensors.header import TensorEntry
    from blobstore.store.local import LocalStore

    Layers = Mapping[str, Descriptor]
    Array = np.ndarray[Any, Any]

_MAX_HEADER: Final = 1 << 16
"""Bytes of the header of a blob with one tensor, at most."""
_EXPERTS: Final = "experts"
"""Blobs with this in their name may have several tensors of one size."""
_WIDTHS: Final = (2, 4)
"""Bytes of a weight."""
_MAX_COMPARED: Final = 8
"""Tensors that are similar to a blob and compared with it."""
_MIN_COSINE: Final = 0.3
"""Of the angle between similar weights: ternary codes may leave as little. Others are nearly at right angles."""


class _Child(NamedTuple):
    """A blob whose only or first weight is quantized."""

    blob: Descriptor
    blocks: Blocks | ScaledWeight
    sample: Array
    """A unit vector of weights."""


class _Candidate(NamedTuple):
    """A blob that has weights."""

    blob: Descriptor
    header: Header


class _Samples(NamedTuple):
    """The tensors of candidates that have one number of weights."""

    candidates: list[_Candidate]
    vectors: list[Array]
    """A unit vector of weights of each, all of the same length."""


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
            if parent.digest in chosen:
                saved = self._size(parent) - self._size(parent, chosen[parent.digest])
                # As a delta the parent saves more than the ladder takes without it.
                if saved >= sum(self._size(blob) for blob in ladder):
                    continue
                del chosen[parent.digest]
            chosen.update((blob.digest, parent) for blob in ladder)
            ladders.update(blob.digest for blob in ladder)
        # A blob of a ladder has a base now, so it cannot be the base of others.
        return {blob: base for blob, base in chosen.items() if base.digest not in ladders}

    def may_have(self, blob: Descriptor) -> bool:
        """Return whether a blob may have a tensor of as many weights as a child, by its name and size."""
        counts = {child.blocks.elements for child in self._children}
        if not counts or blob.digest in self._deltas or blob.size < min(_WIDTHS) * min(counts):
            return False
        if _EXPERTS in blob.name:
            return True
        sizes = (count * width for count in counts for width in _WIDTHS)
        return any(size < blob.size <= size + _MAX_HEADER for size in sizes)

    @cached_property
    def _children(self) -> list[_Child]:
        """The blobs to be frozen with blocks or codes that may follow from weights.

        A stack is followed by its first matrix.
        """
        return list(self._find_children())

    def _find_children(self) -> Iterator[_Child]:
        bases = set(self._deltas.values())
        wanted = [
            blob
            for digest, blob in self._frozen.items()
            if digest not in self._deltas and digest not in bases and self._store.has_hot(digest)
        ]
        for blob, header in self._with_headers(wanted):
            blocks: Blocks | ScaledWeight | None
            if len(header.tensors) == 1:
                blocks = Blocks.of(next(iter(header.tensors.values())), header)
            else:
                blocks = next(scaled_weights(header), None)
            if blocks is not None:
                with contextlib.suppress(BlobstoreError):  # reported when the blob is compressed
                    read = self._store.base(*blob.id).read_into
                    for each in (blocks, *blocks.matrices()[:1]):
                        yield _Child(blob, each, each.unit_vector(read))

    def _find(
        self, children: list[_Child], models: Iterable[Layers], others: Mapping[Digest, BlobId]
    ) -> Iterator[tuple[_Child, BlobId]]:
        """Yield children with their parents."""
        import numpy as np

        sampled: dict[int, set[int]] = defaultdict(set)
        for child in children:
            sampled[child.blocks.elements].add(child.blocks.sampled)
        samples: dict[tuple[int, int], _Samples] = defaultdict(lambda: _Samples([], []))
        for candidate in self._candidates(models):
            for entry in sources_of(candidate.header.tensors.values(), set(sampled)):
                count = math.prod(entry.spec.shape)
                for length in sampled[count]:
                    with contextlib.suppress(BlobstoreError):
                        vector = self._unit_vector(candidate, entry, length)
                        samples[count, length].vectors.append(vector)
                        samples[count, length].candidates.append(candidate)
        found: set[Digest] = set()
        for child in children:
            candidates, vectors = samples[child.blocks.elements, child.blocks.sampled]
            if not vectors or child.blob.digest in found:
                continue
            cosines = np.stack(vectors) @ child.sample
            nearest = np.argsort(-cosines, kind="stable")[:_MAX_COMPARED].tolist()
            similar = [candidates[at] for at in nearest if cosines[at] >= _MIN_COSINE]
            parent = self._best_parent(child, similar, others)
            if parent is not None:
                found.add(child.blob.digest)
                yield child, parent

    def _best_parent(
        self, child: _Child, similar: list[_Candidate], others: Mapping[Digest, BlobId]
    ) -> BlobId | None:
        """Return the blob that most follows from: of several preferably one of the same name, and no delta."""

        def rank(item: _Candidate) -> tuple[bool, bool, str]:
            digest = item.blob.digest
            return digest in others, item.blob.name != child.blob.name, digest.hex

        best: tuple[Found, BlobId] | None = None
        read = self._store.base(*child.blob.id).read_into
        for item in sorted(similar, key=rank):
            found = None
            with contextlib.suppress(BlobstoreError):  # reported when the blob is compressed
                base = self._store.base(*item.blob.id)
                found = child.blocks.find(read, base, item.header)
            if found is not None and (best is None or found.differing < best[0].differing):
                best = found, item.blob.id
                if not found.differing:
                    break
        return None if best is None else best[1]

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

    def _unit_vector(self, candidate: _Candidate, entry: TensorEntry, length: int) -> Array:
        """Return so many of the first and of the last weights of a tensor as a unit vector."""
        from blobstore.compression.quant_rule import weights_of  # imports numpy

        base = self._store.base(*candidate.blob.id)
        width = entry.spec.dtype.bits // 8
        size = length * width
        begin = candidate.header.data_start + entry.begin
        end = candidate.header.data_start + entry.end
        ends = [base.read(at, size).tobytes() for at in (begin, end - size)]
        return unit_vector(weights_of(b"".join(ends), entry.spec.dtype))

    def _size(self, blob: BlobId, base: BlobId | None = None) -> int:
        try:
            return self._estimator.estimate(blob, base)
        except BlobstoreError:  # reported when the blob is compressed
            return blob.size
