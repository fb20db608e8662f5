"""Sampled fingerprints of tensor data, which find equal tensors whatever their names are.

A piece is a tensor or one slice of a stacked tensor. Two pieces of equal size and element width whose
samples match are assumed to be equal. The assumption may be wrong, so it only guides the choice of a
delta's base: a delta is exact whatever the base's bytes are.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Final

    from blobstore.safetensors.header import Header, TensorEntry

    Read = Callable[[memoryview, int], object]
    """Fills a buffer with the bytes of a blob from an offset on."""

MIN_PIECE: Final = 4096
"""Bytes of the smallest piece."""
_SAMPLE: Final = 64
_SAMPLES: Final = (1, 4, 7)
"""Positions of the samples, in eighths of a piece."""
_EIGHTHS: Final = 8
_MAX_WIDTH: Final = 8
"""Bytes of the widest element."""
_MIN_STACK_DIMENSIONS: Final = 3
_MAX_SLICES: Final = 4096
_BITS_PER_BYTE: Final = 8

Kind = tuple[int, int]
"""Bytes of a piece and bits of an element: only pieces of one kind can be equal."""


class Fingerprint(NamedTuple):
    """Equal pieces have equal fingerprints."""

    kind: Kind
    samples: bytes


class Piece(NamedTuple):
    """A tensor of a blob, or a slice of one."""

    begin: int
    """Offset in the blob."""
    size: int
    bits: int

    @property
    def kind(self) -> Kind:
        """The properties that equal pieces share."""
        return self.size, self.bits


def whole_of(entry: TensorEntry, data_start: int) -> Piece:
    """Return a tensor as a piece."""
    return Piece(data_start + entry.begin, entry.end - entry.begin, entry.spec.dtype.bits)


def slices_of(entry: TensorEntry, data_start: int) -> list[Piece]:
    """Return the slices of a stacked tensor along its first dimension; none for other tensors."""
    shape, bits = entry.spec.shape, entry.spec.dtype.bits
    size = entry.end - entry.begin
    if len(shape) < _MIN_STACK_DIMENSIONS or bits < _BITS_PER_BYTE:
        return []
    if not 1 < shape[0] <= _MAX_SLICES or size // shape[0] < MIN_PIECE:
        return []
    step, begin = size // shape[0], data_start + entry.begin
    return [Piece(begin + number * step, step, bits) for number in range(shape[0])]


def pieces_of(header: Header) -> Iterator[tuple[Piece, list[Piece]]]:
    """Yield the tensors of a blob that have at least ``MIN_PIECE`` bytes, each with its slices."""
    for entry in header.tensors.values():
        if entry.end - entry.begin >= MIN_PIECE:
            yield whole_of(entry, header.data_start), slices_of(entry, header.data_start)


def fingerprint_of(piece: Piece, read: Read) -> Fingerprint | None:
    """Return the fingerprint of a piece; None if its samples repeat one element.

    Such samples say nothing: most of them are zeros. Raises what ``read`` raises.
    """
    samples = bytearray(_SAMPLE * len(_SAMPLES))
    for number, eighth in enumerate(_SAMPLES):
        part = memoryview(samples)[number * _SAMPLE : (number + 1) * _SAMPLE]
        read(part, piece.begin + piece.size * eighth // _EIGHTHS)
    if samples[_MAX_WIDTH:] == samples[:-_MAX_WIDTH]:
        return None
    return Fingerprint(piece.kind, bytes(samples))


class FingerprintIndex:
    """Finds the pieces of one blob by fingerprint. Samples a kind of piece when it is first asked for."""

    def __init__(self, header: Header, read: Read) -> None:
        self._read = read
        self._unread: dict[Kind, list[Piece]] = defaultdict(list)
        for whole, slices in pieces_of(header):
            for piece in (whole, *slices):
                self._unread[piece.kind].append(piece)
        self._begins: dict[Fingerprint, int] = {}

    def find(self, fingerprint: Fingerprint | None) -> int | None:
        """Return the offset of the first piece with a fingerprint; None if there is none.

        Raises what reading the blob raises.
        """
        if fingerprint is None:
            return None
        for piece in self._unread.pop(fingerprint.kind, ()):
            found = fingerprint_of(piece, self._read)
            if found is not None:
                self._begins.setdefault(found, piece.begin)
        return self._begins.get(fingerprint)
