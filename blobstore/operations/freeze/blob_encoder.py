"""The bytes of a hot blob made cold, alone or by a base, and an estimate of what that comes to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from blobstore.errors import Damaged, InvalidHeader, StoreError
from blobstore.operations.freeze.fingerprints import (
    LEAST_PIECE,
    FingerprintIndex,
    print_of,
    slices_of,
    whole_of,
)
from blobstore.safetensors.header import PREFIX_SIZE, Header, header_size, parse_header

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from blobstore.compression.base import BaseBlob
    from blobstore.compression.estimate import Known
    from blobstore.compression.spans import Span
    from blobstore.core.digest import BlobId
    from blobstore.operations.freeze.fingerprints import Piece
    from blobstore.safetensors.header import TensorEntry
    from blobstore.store.local import LocalStore

Level = Literal["fast", "small"]

_PIECE = 16 << 20


class BlobEncoder:
    """A hot blob that is to be coded, by ``base`` if that is given and has tensors like it.

    Raises:
        BlobMissing, BlobDamaged: it is not there.
        StoreError: it cannot be read.
    """

    def __init__(
        self, store: LocalStore, blob: BlobId, level: Level, base: BlobId | None = None
    ) -> None:
        from blobstore.compression.spans import spans_of  # brings numpy
        from blobstore.compression.tuning import Level as Effort

        self._digest = blob.digest
        self._level = Effort(level)
        self._data = store.mmap_hot(blob.digest, blob.size)
        self._runs = spans_of(self._data, blob.size)
        self._compared = self._runs
        self._base: BaseBlob | None = None
        self._known: Known = {}
        if base is not None:
            self._compare(store, base)

    @property
    def has_base(self) -> bool:
        """Whether there is a base with tensors like those of the blob."""
        return self._base is not None

    def alone(self) -> None:
        """Use no base after all."""
        self._base, self._compared, self._known = None, self._runs, {}

    def write(self, write: Callable[..., object], tell: Callable[[int], None]) -> None:
        """Code the blob; ``tell`` gets the bytes that are being coded."""
        from blobstore.compression.encoder import encode
        from blobstore.compression.estimate import fit_low_rank
        from blobstore.compression.spans import with_equals

        runs: Sequence[Span] = self._compared
        if self._base is not None:
            runs = list(fit_low_rank(self._data, runs, self._base, self._level, self._known))
        runs = [
            run if run.same_as is None else run._replace(base_begin=None, factors=None)
            for run in with_equals(runs, self._data)
        ]
        encode(
            self._pieces(tell), runs, write, level=self._level, digest=self._digest, base=self._base
        )

    def estimate(self) -> int:
        """Return about how many bytes it comes to, from some slices of each tensor; seldom fewer."""
        from blobstore.compression.estimate import estimate_size

        return estimate_size(self._data, self._compared, self._base, self._level, self._known)

    def _pieces(self, tell: Callable[[int], None]) -> Iterator[memoryview]:
        size = len(self._data)
        for begin in range(0, size, _PIECE):
            yield self._data[begin : begin + _PIECE]
            tell(min(_PIECE, size - begin))

    def _compare(self, store: LocalStore, blob: BlobId) -> None:
        """Note for each tensor where the one lies in the base that it is to be compared with."""
        try:
            theirs = store.read_blob_header(*blob)
            base = store.base(*blob)
        except (Damaged, StoreError):
            return
        mine = _header(self._data)
        if mine is None:
            return
        try:
            compared = list(_Compared(self._data, mine, theirs, base).runs(self._runs))
        except (Damaged, StoreError):
            return
        if any(run.base_begin is not None for run in compared):
            self._compared, self._base = compared, base


def _header(data: memoryview) -> Header | None:
    try:
        end = PREFIX_SIZE + header_size(data[:PREFIX_SIZE], len(data))
        return parse_header(data[PREFIX_SIZE:end], len(data))
    except InvalidHeader:
        return None


class _Compared:
    """The runs of a blob, with the places in a base that they are compared with.

    What has the bytes of a tensor is compared with these, whatever the name is; a stack also by slices.
    All else is compared with the tensor of its name, or with the only one if it is the only one, if that
    has its type and shape.
    """

    def __init__(self, data: memoryview, mine: Header, theirs: Header, base: BaseBlob) -> None:
        self._data = data
        self._mine = mine
        self._theirs = theirs
        self._base = base
        self._pieces = FingerprintIndex(theirs, base.read_into)

    def runs(self, runs: Sequence[Span]) -> Iterator[Span]:
        """Yield the runs, of which the first is the header."""
        yield runs[0]
        named = [(name, item) for name, item in self._mine.tensors.items() if item.end > item.begin]
        for run, (name, entry) in zip(runs[1:], named, strict=True):
            yield from self._compared(run, name, entry)

    def _compared(self, run: Span, name: str, entry: TensorEntry) -> Sequence[Span]:
        whole = whole_of(entry, self._mine.data_start)
        by_name = self._by_name(name, entry)
        place = self._place(whole, by_name)
        if place is not None or by_name is not None:
            return [run._replace(base_begin=by_name if place is None else place)]
        from blobstore.compression.spans import split

        places = [self._place(piece) for piece in slices_of(entry, self._mine.data_start)]
        if all(place is None for place in places):
            return [run]
        return [
            part._replace(base_begin=place) for part, place in zip(split(run), places, strict=True)
        ]

    def _by_name(self, name: str, entry: TensorEntry) -> int | None:
        is_single = len(self._mine.tensors) == len(self._theirs.tensors) == 1
        tensors = self._theirs.tensors
        other = next(iter(tensors.values())) if is_single else tensors.get(name)
        if other is None or other.spec[1:] != entry.spec[1:]:
            return None
        return self._theirs.data_start + other.begin

    def _place(self, piece: Piece, first: int | None = None) -> int | None:
        """Return where the base has a piece's bytes, if it does: at ``first``, or elsewhere."""
        if piece.size < LEAST_PIECE:
            return None
        printed = print_of(piece, self._read)
        if first is not None and printed is not None:
            there = print_of(piece._replace(begin=first), self._base.read_into)
            if there == printed:
                return first
        return self._pieces.place_of(printed)

    def _read(self, out: memoryview, begin: int) -> None:
        out[:] = self._data[begin : begin + len(out)]
