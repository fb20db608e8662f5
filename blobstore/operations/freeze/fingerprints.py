"""Where a blob has the bytes of another's tensor, whatever it calls them: told by some samples.

Tensors, and the slices of stacked ones, are pieces. Pieces of one size and width whose samples are equal
are taken for equal. That need not be true: who codes one by the other is right whatever the bytes are.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Final

    from blobstore.safetensors.header import Header, TensorEntry

    Read = Callable[[memoryview, int], object]
    """Fills a buffer with bytes of a blob from an offset on."""

LEAST_PIECE: Final = 4096
"""Bytes of a piece at least."""
_SAMPLE: Final = 64
_SAMPLES: Final = (1, 4, 7)
"""Where samples are, in eighths of a piece."""
_EIGHTHS: Final = 8
_WIDEST: Final = 8
"""Bytes of an element at most."""
_LEAST_STACK: Final = 3
"""Dimensions of a tensor that is looked at by slices."""
_MOST_SLICES: Final = 4096
_BYTE: Final = 8

Kind = tuple[int, int]
"""Bytes of a piece, and bits of an element."""
Print = tuple[Kind, bytes]
"""The kind of a piece, and its samples."""


class Piece(NamedTuple):
    """A tensor of a blob, or a slice of one."""

    begin: int
    """Where it begins in the blob."""
    size: int
    bits: int

    @property
    def kind(self) -> Kind:
        """What equal pieces have in common."""
        return self.size, self.bits


def whole_of(entry: TensorEntry, data_start: int) -> Piece:
    """Return a tensor as a piece."""
    return Piece(data_start + entry.begin, entry.end - entry.begin, entry.spec.dtype.bits)


def slices_of(entry: TensorEntry, data_start: int) -> list[Piece]:
    """Return the slices of a tensor along its first dimension, if it is a stack of some size."""
    shape, bits = entry.spec.shape, entry.spec.dtype.bits
    size = entry.end - entry.begin
    if len(shape) < _LEAST_STACK or bits < _BYTE or not 1 < shape[0] <= _MOST_SLICES:
        return []
    if size // shape[0] < LEAST_PIECE:
        return []
    step, begin = size // shape[0], data_start + entry.begin
    return [Piece(begin + number * step, step, bits) for number in range(shape[0])]


def pieces_of(header: Header) -> Iterator[tuple[Piece, list[Piece]]]:
    """Yield the tensors of a blob that are large enough, each with its slices."""
    for entry in header.tensors.values():
        if entry.end - entry.begin >= LEAST_PIECE:
            yield whole_of(entry, header.data_start), slices_of(entry, header.data_start)


def print_of(piece: Piece, read: Read) -> Print | None:
    """Return what equal pieces have in common; None for what is one element over and over.

    Raises what ``read`` raises.
    """
    samples = bytearray(_SAMPLE * len(_SAMPLES))
    for number, eighth in enumerate(_SAMPLES):
        part = memoryview(samples)[number * _SAMPLE : (number + 1) * _SAMPLE]
        read(part, piece.begin + piece.size * eighth // _EIGHTHS)
    return (piece.kind, bytes(samples)) if samples[_WIDEST:] != samples[:-_WIDEST] else None


class FingerprintIndex:
    """The pieces of a blob, sampled as far as that is asked for."""

    def __init__(self, header: Header, read: Read) -> None:
        """Take the header of the blob, and what reads it."""
        self._read = read
        self._left: dict[Kind, list[Piece]] = defaultdict(list)
        for whole, slices in pieces_of(header):
            for piece in (whole, *slices):
                self._left[piece.kind].append(piece)
        self._found: dict[Print, int] = {}

    def place_of(self, printed: Print | None) -> int | None:
        """Return where a piece begins that looks like another; None if there is none.

        Raises what reading the blob raises.
        """
        if printed is None:
            return None
        for piece in self._left.pop(printed[0], ()):
            found = print_of(piece, self._read)
            if found is not None:
                self._found.setdefault(found, piece.begin)
        return self._found.get(printed)
