"""The bytes of a hot blob made cold, alone or by a base, and an estimate of what that comes to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from blobstore.errors import Damaged, InvalidHeader, StoreError
from blobstore.safetensors.header import PREFIX_SIZE, Header, header_size, parse_header

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from blobstore.archive.base import BaseBlob
    from blobstore.archive.outline import Run
    from blobstore.digest import Digest
    from blobstore.store.local import LocalStore

Level = Literal["fast", "small"]

_PIECE = 16 << 20
_SLICES = 4
_SLICE = 256 << 10
_GRAIN = 1 << 12


class Blob(NamedTuple):
    """A blob by its name."""

    digest: Digest
    size: int


class Coding:
    """A hot blob that is to be coded, by ``base`` if that is given and has tensors like it.

    Raises:
        BlobMissing, BlobDamaged: it is not there.
        StoreError: it cannot be read.
    """

    def __init__(
        self, store: LocalStore, blob: Blob, level: Level, base: Blob | None = None
    ) -> None:
        from blobstore.archive.choice import Level as Effort
        from blobstore.archive.outline import outline  # brings numpy

        self._digest = blob.digest
        self._level = Effort(level)
        self._data = store.hot.whole(blob.digest, blob.size)
        self._runs = outline(self._data, blob.size)
        self._compared = self._runs
        self._base: BaseBlob | None = None
        if base is not None:
            self._compare(store, base)

    @property
    def has_base(self) -> bool:
        """Whether there is a base with tensors like those of the blob."""
        return self._base is not None

    def alone(self) -> None:
        """Use no base after all."""
        self._base, self._compared = None, self._runs

    def write(self, write: Callable[..., object], tell: Callable[[int], None]) -> None:
        """Code the blob; ``tell`` gets the bytes that are being coded."""
        from blobstore.archive.encoding import encode
        from blobstore.archive.outline import with_equals

        runs = [
            run if run.same_as is None else run._replace(base_begin=None)
            for run in with_equals(self._compared, self._data)
        ]
        encode(
            self._pieces(tell), runs, write, level=self._level, digest=self._digest, base=self._base
        )

    def estimate(self) -> int:
        """Return about how many bytes it comes to, from some slices of each tensor."""
        from blobstore.archive.encoding import encode

        total, begin = 0.0, 0
        for run in self._compared:
            offsets = _offsets(run.size)
            length = min(run.size, _SLICE) if len(offsets) > 1 else run.size
            stored = 0
            for offset in offsets:
                data = self._data[begin + offset : begin + offset + length]
                at = None if run.base_begin is None else run.base_begin + offset
                sampled = [run._replace(size=length, base_begin=at)]
                table = encode(
                    [data], sampled, _pass, level=self._level, digest=self._digest, base=self._base
                )
                stored += sum(plane.size for chunk in table.chunks for plane in chunk.planes)
            total += stored * run.size / (length * len(offsets))
            begin += run.size
        return int(total)

    def _pieces(self, tell: Callable[[int], None]) -> Iterator[memoryview]:
        size = len(self._data)
        for begin in range(0, size, _PIECE):
            yield self._data[begin : begin + _PIECE]
            tell(min(_PIECE, size - begin))

    def _compare(self, store: LocalStore, blob: Blob) -> None:
        """Note for each tensor where the one lies in the base that it is to be compared with."""
        try:
            theirs = store.read_blob_header(*blob)
            base = store.base(*blob)
        except (Damaged, StoreError):
            return
        mine = _header(self._data)
        if mine is None:
            return
        compared = list(_compared(self._runs, mine, theirs))
        if any(run.base_begin is not None for run in compared):
            self._compared, self._base = compared, base


def _header(data: memoryview) -> Header | None:
    try:
        end = PREFIX_SIZE + header_size(data[:PREFIX_SIZE], len(data))
        return parse_header(data[PREFIX_SIZE:end], len(data))
    except InvalidHeader:
        return None


def _compared(runs: Sequence[Run], mine: Header, theirs: Header) -> Iterator[Run]:
    yield runs[0]
    named = [(name, entry) for name, entry in mine.tensors.items() if entry.end > entry.begin]
    is_single = len(mine.tensors) == len(theirs.tensors) == 1
    for run, (name, entry) in zip(runs[1:], named, strict=True):
        other = next(iter(theirs.tensors.values())) if is_single else theirs.tensors.get(name)
        is_alike = other is not None and (other.spec.dtype, other.spec.shape) == (
            entry.spec.dtype,
            entry.spec.shape,
        )
        if is_alike and other is not None:
            yield run._replace(base_begin=theirs.data_start + other.begin)
        else:
            yield run


def _offsets(size: int) -> list[int]:
    """Return where the slices of a run begin that are tried; a short one is tried whole."""
    if size <= 2 * _SLICES * _SLICE:
        return [0]
    step = (size - _SLICE) // (_SLICES - 1) // _GRAIN * _GRAIN
    return [step * number for number in range(_SLICES)]


def _pass(piece: object) -> None:
    """Write to nowhere."""
    del piece
