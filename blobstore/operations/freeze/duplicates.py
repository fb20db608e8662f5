"""Finds blobs whose tensors lie in other blobs under other names: tied or renamed weights, other stacks.

Names and sizes alone cannot tell, so fingerprints are compared. Reading is limited to headers and three
samples per tensor, of the blobs to be frozen and of at most eight other models. These are the models with
blobs of about the same sizes, or with experts if the frozen blobs have experts. If there are more than
eight, the largest blob of each, for up to 256 models, decides which come first. Because equal samples do
not prove equal data, each duplicate that is found must also pass a size estimate.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from blobstore.core.digest import BlobId
from blobstore.errors import BlobstoreError
from blobstore.operations.freeze.fingerprints import fingerprint_of, pieces_of
from blobstore.safetensors.header import Header

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from typing import Final

    from blobstore.core.digest import Digest
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.operations.freeze.blob_encoder import SizeEstimator
    from blobstore.operations.freeze.fingerprints import Fingerprint, Kind, Piece
    from blobstore.store.local import LocalStore

_MAX_MODELS: Final = 8
_MAX_PROBED: Final = 256
_MAX_HEADER_DIFFERENCE: Final = 1 << 10
"""The most by which the sizes of blobs with one equal tensor may differ: their headers differ."""
_EXPERTS: Final = "experts"
"""Part of the names of blobs that may have equal tensors whatever their sizes are."""
_MIN_BLOB: Final = 1 << 14
_MIN_SHARE: Final = 0.1
"""The share of a blob that another must contain."""
_MAX_BASES: Final = 16
"""Blobs with one fingerprint that are considered as bases."""
_MAX_REMAINDER: Final = 0.02
"""The share of the equal bytes that the estimate of a real duplicate may keep."""
_COLD_OVERHEAD: Final = 4096
"""Bytes of a cold blob in addition to its data."""


class _TensorPrints(NamedTuple):
    """The fingerprints of a tensor and of its slices; None where the samples say nothing."""

    size: int
    whole: Fingerprint | None
    slices: Sequence[Fingerprint | None]

    def count_equal(self, fingerprints: Collection[Fingerprint]) -> int:
        """Return how many bytes of the tensor have one of these fingerprints."""
        if self.whole in fingerprints:
            return self.size
        count = sum(item in fingerprints for item in self.slices)
        return count * (self.size // max(len(self.slices), 1))


class _Duplicate(NamedTuple):
    """A blob that has bytes of another."""

    blob: Digest
    base: Digest
    saved: int


class DuplicateFinder:
    """Finds duplicates among the blobs to be frozen and the blobs of other models."""

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
        self._frozen = {digest: item for digest, item in frozen.items() if digest not in deltas}
        self._deltas = deltas
        self._sizes = {digest: item.size for digest, item in self._frozen.items()}
        self._singles: set[Digest] = set()
        """Blobs of a single tensor."""
        self._tensors: dict[Digest, list[_TensorPrints]] = {}

    # Fingerprints

    def read(self, models: Sequence[Mapping[str, Descriptor]]) -> None:
        """Read the fingerprints of the blobs to be frozen, and of the other models that may match."""
        self._read_blobs(self._frozen.values())
        kinds = {item.kind for item in self._all_of(self._frozen)}
        candidates = self._candidates(models)
        if len(candidates) > _MAX_MODELS:
            known = set(self._all_of(self._frozen))

            def is_unlike(blobs: Sequence[Descriptor]) -> bool:
                largest = max(blobs, key=lambda item: item.size)
                self._read_blobs([largest], kinds)
                return known.isdisjoint(self._all_of([largest.digest]))

            candidates = sorted(candidates[:_MAX_PROBED], key=is_unlike)
        for blobs in candidates[:_MAX_MODELS]:
            self._read_blobs(blobs, kinds)

    def _candidates(self, models: Sequence[Mapping[str, Descriptor]]) -> list[list[Descriptor]]:
        """Return the blobs of each model that may have equal tensors by their sizes, most bytes first."""
        sizes = sorted(self._sizes.values())
        named = {(item.name, item.size) for item in self._frozen.values()}
        has_experts = any(_EXPERTS in item.name for item in self._frozen.values())

        def is_candidate(item: Descriptor) -> bool:
            if item.size < _MIN_BLOB or item.digest in self._deltas:
                return False
            if (item.name, item.size) in named:  # the same tensor with other values
                return False
            if has_experts and _EXPERTS in item.name:
                return True
            nearest = bisect_left(sizes, item.size - _MAX_HEADER_DIFFERENCE)
            return nearest < len(sizes) and sizes[nearest] <= item.size + _MAX_HEADER_DIFFERENCE

        found = [[item for item in layers.values() if is_candidate(item)] for layers in models]
        return sorted(filter(None, found), key=lambda blobs: -sum(item.size for item in blobs))

    def _read_blobs(
        self, blobs: Iterable[Descriptor], kinds: Collection[Kind] | None = None
    ) -> None:
        """Read the fingerprints of blobs, only of some kinds of pieces if these are given."""
        wanted = [
            item.id
            for item in {blob.digest: blob for blob in blobs}.values()
            if item.size >= _MIN_BLOB and item.digest not in self._tensors
        ]
        headers = self._store.read_headers(wanted)
        for (digest, size), header in zip(wanted, headers, strict=True):
            if not isinstance(header, Header):
                continue
            try:
                self._tensors[digest] = list(self._read_tensors(digest, size, header, kinds))
            except BlobstoreError:
                continue
            self._sizes[digest] = size
            if len(header.tensors) == 1:
                self._singles.add(digest)

    def _read_tensors(
        self, digest: Digest, size: int, header: Header, kinds: Collection[Kind] | None
    ) -> Iterator[_TensorPrints]:
        base = self._store.base(digest, size)

        def read(piece: Piece) -> Fingerprint | None:
            is_wanted = kinds is None or piece.kind in kinds
            return fingerprint_of(piece, base.read_into) if is_wanted else None

        for whole, slices in pieces_of(header):
            yield _TensorPrints(whole.size, read(whole), [read(piece) for piece in slices])

    def _all_of(self, digests: Iterable[Digest]) -> Iterator[Fingerprint]:
        for digest in digests:
            for tensor in self._tensors.get(digest, ()):
                yield from filter(None, (tensor.whole, *tensor.slices))

    # Bases

    def choose_bases(self, likely: Mapping[Digest, BlobId]) -> dict[Digest, BlobId]:
        """Return the best base of each blob that has one, duplicates considered.

        Args:
            likely: the bases that the blobs would have without duplicates.
        """
        copies = self._find_copies({base.digest for base in likely.values()}, likely)
        chosen: dict[Digest, BlobId] = {}
        for blob, base in likely.items():
            original = copies.get(base.digest, base)
            if original.digest != blob:
                chosen[blob] = original
        for digest in {base.digest for base in chosen.values()}:
            chosen.pop(digest, None)  # a base has no base itself
        groups: dict[Digest, dict[Digest, BlobId]] = defaultdict(dict)
        for blob, original in copies.items():
            groups[original.digest][blob] = original
        for digest, members in groups.items():
            self._join_group(chosen, digest, members)
        return chosen

    def _join_group(
        self, chosen: dict[Digest, BlobId], original: Digest, members: Mapping[Digest, BlobId]
    ) -> None:
        """Choose the bases of an original and its copies.

        If the original has a base, the copies can use that too, or the original stays without one.
        """
        base = chosen.get(original)
        if base is None:
            for blob, copied in members.items():
                other = chosen.get(blob)
                if other is None or self._size(blob, copied) < self._size(blob, other):
                    chosen[blob] = copied
            return
        deltas = {original: base} | {blob: chosen.get(blob, base) for blob in members}
        size = self._size(original, None) + sum(self._size(*item) for item in members.items())
        if sum(self._size(*item) for item in deltas.items()) < size:
            chosen.update(deltas)
        else:
            del chosen[original]
            chosen.update(members)

    def _size(self, digest: Digest, base: BlobId | None) -> int:
        blob = BlobId(digest, self._sizes[digest])
        try:
            return self._estimator.estimate(blob, base).size
        except BlobstoreError:  # reported when the blob is compressed
            return blob.size

    def _find_copies(
        self, bases: Collection[Digest], deltas: Collection[Digest]
    ) -> dict[Digest, BlobId]:
        """Return the originals of blobs that are copies; no original is a copy itself.

        Args:
            bases: blobs that are likely bases of others.
            deltas: blobs that are likely to have a base, and could not be bases then.
        """
        copies: dict[Digest, BlobId] = {}
        originals: set[Digest] = set()

        def rank(item: _Duplicate) -> tuple[object, ...]:
            return (
                -item.saved,
                -item.saved / self._sizes[item.blob],
                item.base in self._frozen,
                item.base in deltas,
                item.base.hex,
                item.blob.hex,
            )

        for item in sorted(self._duplicates(), key=rank):
            is_free = (
                item.blob not in copies and item.blob not in originals and item.base not in copies
            )
            # A delta finds the tensors of its base by name, unless each has only one tensor.
            is_replaceable = item.blob not in bases or {item.blob, item.base} <= self._singles
            if is_free and is_replaceable and self._is_real(item):
                copies[item.blob] = BlobId(item.base, self._sizes[item.base])
                originals.add(item.base)
        return copies

    def _duplicates(self) -> Iterator[_Duplicate]:
        bases = set(self._deltas.values())
        fingerprints = {digest: set(self._all_of([digest])) for digest in self._tensors}
        owners: dict[Fingerprint, list[Digest]] = defaultdict(list)
        for digest in sorted(fingerprints, key=lambda item: (item in self._frozen, item.hex)):
            for item in fingerprints[digest]:
                if len(owners[item]) < _MAX_BASES:
                    owners[item].append(digest)
        for digest in self._frozen:
            if digest in bases or not self._store.has_hot(digest):
                continue
            least = max(_MIN_BLOB // 2, _MIN_SHARE * self._sizes[digest])
            for base in {base for item in fingerprints.get(digest, ()) for base in owners[item]}:
                saved = sum(item.count_equal(fingerprints[base]) for item in self._tensors[digest])
                if base != digest and saved >= least:
                    yield _Duplicate(digest, base, saved)

    def _is_real(self, item: _Duplicate) -> bool:
        """Return whether an estimate confirms what the few samples of the fingerprints say."""
        blob = BlobId(item.blob, self._sizes[item.blob])
        base = BlobId(item.base, self._sizes[item.base])
        try:
            estimate = self._estimator.estimate(blob, base, "fast")
        except BlobstoreError:
            return False
        most = blob.size - item.saved + _MAX_REMAINDER * item.saved + _COLD_OVERHEAD
        return estimate.has_base and estimate.size <= most
