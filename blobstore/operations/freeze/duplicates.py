"""Blobs whose tensors lie in other blobs under other names: tied weights, renamed ones, other stacks.

Who knows only names and sizes looks at samples: of all blobs that are to be frozen, and of those of some
other models that are as large as one of these, or have experts too. So what is read is a header and
three samples a tensor, of the models to be frozen and of at most eight others; and where more come into
question, of one blob of each, 256 models at most. An estimate has the last word.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from blobstore.core.digest import BlobId
from blobstore.errors import BlobstoreError
from blobstore.operations.freeze.blob_encoder import BlobEncoder
from blobstore.operations.freeze.fingerprints import pieces_of, print_of
from blobstore.safetensors.header import Header

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from typing import Final

    from blobstore.core.digest import Digest
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.operations.freeze.blob_encoder import Level
    from blobstore.operations.freeze.fingerprints import Kind, Piece, Print
    from blobstore.store.local import LocalStore

_MOST_MODELS: Final = 8
_MOST_PROBED: Final = 256
"""Models of which one blob is looked at, to find those."""
_HEADER: Final = 1 << 10
"""How far the sizes of blobs of one equal tensor may lie apart: their headers differ."""
_EXPERTS: Final = "experts"
"""In the names of blobs that have the same tensors, whatever their sizes are."""
_LEAST_BLOB: Final = 1 << 14
_LEAST_SHARE: Final = 0.1
"""The part of a blob that another must have."""
_MOST_BASES: Final = 16
"""Blobs with one piece that are looked at as bases."""
_NEARLY_NOTHING: Final = 0.02
"""The part of what is equal that an estimate may leave of it."""
_TABLE: Final = 4096
"""Bytes beside that a cold blob has."""


class _Tensor(NamedTuple):
    """The samples of a tensor, and of its slices."""

    size: int
    whole: Print | None
    slices: Sequence[Print | None]

    def found_in(self, prints: Collection[Print]) -> int:
        """Return how many of its bytes are among those that have been sampled."""
        if self.whole in prints:
            return self.size
        count = sum(item in prints for item in self.slices)
        return count * (self.size // max(len(self.slices), 1))

    def prints(self) -> Iterator[Print]:
        """Yield all samples that tell something."""
        yield from (item for item in (self.whole, *self.slices) if item is not None)


class _Edge(NamedTuple):
    """A blob that has bytes of another."""

    blob: Digest
    base: Digest
    saved: int


class DuplicateFinder:
    """The blobs that are to be frozen, and those of other models that may have the same tensors."""

    def __init__(
        self,
        store: LocalStore,
        level: Level,
        frozen: Mapping[Digest, Descriptor],
        coded: Mapping[Digest, Digest],
    ) -> None:
        """Take the blobs that are to be frozen, and those that are coded by others already, with these."""
        self._store = store
        self._level: Level = level
        self._frozen = {digest: item for digest, item in frozen.items() if digest not in coded}
        self._coded = coded
        self._bases = set(coded.values())
        self._named = {(item.name, item.size) for item in self._frozen.values()}
        self._ordered = sorted(item.size for item in self._frozen.values())
        self._has_experts = any(_EXPERTS in item.name for item in self._frozen.values())
        self._sizes = {digest: item.size for digest, item in self._frozen.items()}
        self._singles: set[Digest] = set()
        self._tensors: dict[Digest, list[_Tensor]] = {}

    def look_at(self, models: Sequence[Mapping[str, Descriptor]]) -> None:
        """Take samples of what is to be frozen, and of some of the models."""
        self._sample(self._frozen.values())
        kinds = {item[0] for item in self._prints(self._frozen)}
        near = [found for layers in models if (found := self._near(layers))]
        near.sort(
            key=lambda found: -sum(item.size for item in found)
        )  # the first of equal ones first
        if len(near) > _MOST_MODELS:
            known = set(self._prints(self._frozen))
            near = near[:_MOST_PROBED]
            near.sort(key=lambda found: not self._is_known(found, known, kinds))
        for found in near[:_MOST_MODELS]:
            self._sample(found, kinds)

    def _near(self, layers: Mapping[str, Descriptor]) -> list[Descriptor]:
        """Return the blobs of a model that may have tensors of what is to be frozen, by their sizes."""
        return [
            item
            for item in layers.values()
            if item.size >= _LEAST_BLOB
            and item.digest not in self._coded
            and (item.name, item.size) not in self._named  # what differs in nothing but its bytes
            and self._is_near(item)
        ]

    def _is_near(self, item: Descriptor) -> bool:
        if self._has_experts and _EXPERTS in item.name:
            return True
        place = bisect_left(self._ordered, item.size - _HEADER)
        return place < len(self._ordered) and self._ordered[place] <= item.size + _HEADER

    def _is_known(
        self, found: Sequence[Descriptor], known: Collection[Print], kinds: Collection[Kind]
    ) -> bool:
        """Tell whether one blob of a model has anything that has been seen."""
        largest = max(found, key=lambda item: item.size)
        self._sample([largest], kinds)
        tensors = self._tensors.get(largest.digest, ())
        return any(item in known for tensor in tensors for item in tensor.prints())

    def _prints(self, digests: Iterable[Digest]) -> Iterator[Print]:
        for digest in digests:
            for tensor in self._tensors.get(digest, ()):
                yield from tensor.prints()

    def joined(self, deltas: Mapping[Digest, BlobId]) -> dict[Digest, BlobId]:
        """Return by what blobs are best coded: those that have the bytes of others by these.

        Args:
            deltas: by what they would be coded if none were equal.
        """
        copies = self._copies({base.digest for base in deltas.values()}, deltas)
        joined: dict[Digest, BlobId] = {}
        for blob, base in deltas.items():
            head = copies.get(base.digest, base)
            if head.digest != blob:
                joined[blob] = head
        for digest in {base.digest for base in joined.values()}:
            joined.pop(digest, None)  # edges are one deep
        clusters: dict[Digest, dict[Digest, BlobId]] = defaultdict(dict)
        for blob, base in copies.items():
            clusters[base.digest][blob] = base
        for first, members in clusters.items():
            self._join(joined, first, members)
        return joined

    def _join(
        self, joined: dict[Digest, BlobId], head: Digest, members: Mapping[Digest, BlobId]
    ) -> None:
        """Code blobs by one whose bytes they have, unless all are smaller by what that is coded by."""
        base = joined.get(head)
        if base is None:
            for blob, copied in members.items():
                other = joined.get(blob)
                if other is None or self._size(blob, copied) < self._size(blob, other):
                    joined[blob] = copied
            return
        beside = {head: base} | {blob: joined.get(blob, base) for blob in members}
        alone = self._size(head, None) + sum(self._size(*item) for item in members.items())
        if sum(self._size(*item) for item in beside.items()) < alone:
            joined.update(beside)
        else:
            del joined[head]
            joined.update(members)

    def _size(self, digest: Digest, base: BlobId | None) -> int:
        """Return about what a blob comes to."""
        size = self._sizes[digest]
        try:
            return BlobEncoder(self._store, BlobId(digest, size), self._level, base).estimate()
        except BlobstoreError:  # told when it is its turn
            return size

    def _copies(
        self, bases: Collection[Digest], deltas: Collection[Digest]
    ) -> dict[Digest, BlobId]:
        """Return blobs that are to be coded by others, and these, none of which is coded itself.

        Args:
            bases: what others are to be coded by anyway.
            deltas: what is to be coded by others anyway, and could be no base then.
        """
        chosen: dict[Digest, BlobId] = {}
        heads: set[Digest] = set()

        def rank(edge: _Edge) -> tuple[object, ...]:
            return (
                -edge.saved,
                -edge.saved / self._sizes[edge.blob],
                edge.base in self._frozen,
                edge.base in deltas,
                edge.base.hex,
                edge.blob.hex,
            )

        for edge in sorted(self._edges(), key=rank):
            is_free = edge.blob not in chosen and edge.blob not in heads and edge.base not in chosen
            # What is coded by a base finds its tensors there by their names, or if each has but one.
            is_alone = edge.blob not in bases or {edge.blob, edge.base} <= self._singles
            if is_free and is_alone and self._is_real(edge):
                chosen[edge.blob] = BlobId(edge.base, self._sizes[edge.base])
                heads.add(edge.base)
        return chosen

    def _edges(self) -> Iterator[_Edge]:
        prints = {digest: set(self._prints([digest])) for digest in self._tensors}
        having: dict[Print, list[Digest]] = defaultdict(list)
        for digest in sorted(prints, key=lambda item: (item in self._frozen, item.hex)):
            for item in prints[digest]:
                if len(having[item]) < _MOST_BASES:
                    having[item].append(digest)
        for digest in self._frozen:
            if digest in self._bases or not self._store.has_hot(digest):
                continue
            for base in {base for item in prints.get(digest, ()) for base in having[item]}:
                saved = sum(item.found_in(prints[base]) for item in self._tensors[digest])
                is_much = saved >= max(_LEAST_BLOB // 2, _LEAST_SHARE * self._sizes[digest])
                if base != digest and is_much:
                    yield _Edge(digest, base, saved)

    def _is_real(self, edge: _Edge) -> bool:
        """Tell whether what looks equal in few samples does so in many."""
        size = self._sizes[edge.blob]
        try:
            base = BlobId(edge.base, self._sizes[edge.base])
            coding = BlobEncoder(self._store, BlobId(edge.blob, size), "fast", base)
            most = size - edge.saved + _NEARLY_NOTHING * edge.saved + _TABLE
            return coding.has_base and coding.estimate() <= most
        except BlobstoreError:
            return False

    def _sample(self, blobs: Iterable[Descriptor], kinds: Collection[Kind] | None = None) -> None:
        """Take samples of the tensors of blobs, of some kinds if these are given."""
        wanted = {
            item.digest: item.size
            for item in blobs
            if item.size >= _LEAST_BLOB and item.digest not in self._tensors
        }
        headers = self._store.read_headers(wanted.items())
        for (digest, size), header in zip(wanted.items(), headers, strict=True):
            if not isinstance(header, Header):
                continue
            try:
                self._tensors[digest] = list(self._sampled(digest, size, header, kinds))
            except BlobstoreError:
                continue
            self._sizes[digest] = size
            if len(header.tensors) == 1:
                self._singles.add(digest)

    def _sampled(
        self, digest: Digest, size: int, header: Header, kinds: Collection[Kind] | None
    ) -> Iterator[_Tensor]:
        base = self._store.base(digest, size)

        def printed(piece: Piece) -> Print | None:
            is_wanted = kinds is None or piece.kind in kinds
            return print_of(piece, base.read_into) if is_wanted else None

        for whole, slices in pieces_of(header):
            yield _Tensor(whole.size, printed(whole), [printed(piece) for piece in slices])
