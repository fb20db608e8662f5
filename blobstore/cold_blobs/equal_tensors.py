"""Finds blobs whose tensors lie in other blobs under other names: tied or renamed weights, other stacks.

The data of the blobs to be frozen is compared with that of other models' blobs of about the same sizes, and
with that of their experts if the frozen blobs have experts (:mod:`.tensor_index`).
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from blobstore.cold_blobs.tensor_index import TensorIndex
from blobstore.core.digest import BlobId
from blobstore.errors import BlobstoreError
from blobstore.safetensors.header import Header

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from typing import Final

    from blobstore.cold_blobs.blob_encoder import SizeEstimator
    from blobstore.cold_blobs.tensor_index import Key, Kind, Read
    from blobstore.core.digest import Digest
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.store.local import LocalStore

_MAX_HEADER_DIFFERENCE: Final = 1 << 10
"""The most by which the sizes of blobs with one equal tensor may differ: their headers differ."""
_EXPERTS: Final = ("experts", "_exps")
"""Parts of the names of blobs that may have equal tensors whatever their sizes are; GGUF files have the second."""
_MIN_BLOB: Final = 1 << 14
_MIN_SHARE: Final = 0.1
"""The share of a blob that another must contain."""

_MAX_BASES: Final = 16
"""Blobs with one tensor that are considered as bases."""


class _Duplicate(NamedTuple):
    """A blob that has bytes of another."""

    blob: Digest
    base: Digest
    saved: int


def _is_experts(item: Descriptor) -> bool:
    return any(part in item.name for part in _EXPERTS)


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
        self._sorted = sorted(self._sizes.values())
        self._named = {(item.name, item.size) for item in self._frozen.values()}
        self._has_experts = any(map(_is_experts, self._frozen.values()))
        self._singles: set[Digest] = set()
        """Blobs of a single tensor."""
        self._index = TensorIndex()

    def read(self, models: Sequence[Mapping[str, Descriptor]]) -> None:
        """Read the tensors of the blobs to be frozen, and those of the other models that may match."""
        self._add(self._frozen.values())
        # Only pieces of these kinds can be equal to one of them, so no others are probed.
        kinds = self._index.kinds()
        blobs = [item for layers in models for item in layers.values() if self.may_match(item)]
        self._add(blobs, kinds)

    def may_match(self, item: Descriptor) -> bool:
        """Return whether a blob of another model may have equal tensors, by the name and size of its layer."""
        if item.size < _MIN_BLOB or item.digest in self._deltas:
            return False
        if (item.name, item.size) in self._named:  # the same tensor with other values
            return False
        if self._has_experts and _is_experts(item):
            return True
        nearest = bisect_left(self._sorted, item.size - _MAX_HEADER_DIFFERENCE)
        is_near = nearest < len(self._sorted)
        return is_near and self._sorted[nearest] <= item.size + _MAX_HEADER_DIFFERENCE

    def _add(self, blobs: Iterable[Descriptor], kinds: Collection[Kind] | None = None) -> None:
        """Add blobs to the index, or only their pieces of some kinds."""
        wanted = [
            item.id
            for item in {blob.digest: blob for blob in blobs}.values()
            if item.size >= _MIN_BLOB and item.digest not in self._index
        ]
        headers = self._store.read_headers(wanted)
        for (digest, size), header in zip(wanted, headers, strict=True):
            if isinstance(header, Header):
                with contextlib.suppress(BlobstoreError):  # reported when the blob is compressed
                    self._index.add(digest, header, partial(self._open, digest, size), kinds)
                    self._sizes[digest] = size
                    if len(header.tensors) == 1:
                        self._singles.add(digest)

    def choose_bases(
        self, likely: Mapping[Digest, BlobId], *, chains: bool = False
    ) -> dict[Digest, BlobId]:
        """Return the best base of each blob that has one, duplicates considered.

        Args:
            likely: the bases that the blobs would have without duplicates.
            chains: whether bases may have bases themselves. They may make cycles, too.
        """
        copies = self._find_copies({base.digest for base in likely.values()}, likely)
        chosen: dict[Digest, BlobId] = {}
        for blob, base in likely.items():
            original = copies.get(base.digest, base)
            if original.digest != blob:
                chosen[blob] = original
        for digest in () if chains else {base.digest for base in chosen.values()}:
            chosen.pop(digest, None)  # a base has no base itself
        groups: dict[Digest, dict[Digest, BlobId]] = defaultdict(dict)
        for blob, original in copies.items():
            groups[original.digest][blob] = original
        for digest, members in groups.items():
            self._join_group(chosen, digest, members, chains=chains)
        return chosen

    def _join_group(
        self,
        chosen: dict[Digest, BlobId],
        original: Digest,
        members: Mapping[Digest, BlobId],
        *,
        chains: bool,
    ) -> None:
        """Choose the bases of an original and its copies.

        If the original has a base, the copies can use that too, or the original stays without one,
        unless there may be chains.
        """
        base = chosen.get(original)
        if base is None or chains:
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
            return self._estimator.estimate(blob, base)
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
                # Digests decide ties, so that a store always gets the same plan.
                item.base.hex,
                item.blob.hex,
            )

        for item in sorted(self._duplicates(), key=rank):
            is_free = (
                item.blob not in copies and item.blob not in originals and item.base not in copies
            )
            # A delta finds the tensors of its base by name, unless each has only one tensor.
            is_replaceable = item.blob not in bases or {item.blob, item.base} <= self._singles
            if is_free and is_replaceable:
                copies[item.blob] = BlobId(item.base, self._sizes[item.base])
                originals.add(item.base)
        return copies

    def _duplicates(self) -> Iterator[_Duplicate]:
        bases = set(self._deltas.values())
        owners: dict[Key, list[Digest]] = defaultdict(list)
        for digest in sorted(self._index, key=lambda item: (item in self._frozen, item.hex)):
            for key in set(self._keys(digest)):
                # A piece that very many blobs have would be compared quadratically often.
                if len(owners[key]) < _MAX_BASES:
                    owners[key].append(digest)
        for digest in self._frozen:
            # Only hot blobs are encoded, and a base has no base itself.
            if digest in bases or digest not in self._index or not self._store.has_hot(digest):
                continue
            least = max(_MIN_BLOB // 2, _MIN_SHARE * self._sizes[digest])
            for base in {base for key in self._keys(digest) for base in owners[key]} - {digest}:
                saved = self._index.count_equal(digest, base)
                if saved >= least:
                    yield _Duplicate(digest, base, saved)

    def _open(self, digest: Digest, size: int) -> Read:
        return self._store.base(digest, size).read_into

    def _keys(self, digest: Digest) -> Collection[Key]:
        try:
            return self._index.keys(digest).values()
        except BlobstoreError:  # reported when the blob is compressed
            return ()
