"""Finds equal tensor data in blobs, whatever the tensors are called.

A piece is a tensor or one slice of a stacked tensor. Pieces of equal size and element width are compared by
a probe, a few bytes from their middle. Only where probes are equal, all bytes are read: for a checksum if
there are many pieces, and byte by byte before a piece is used as the base of another.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from typing import Final

    from blobstore.core.digest import Digest
    from blobstore.safetensors.header import Header, TensorEntry

    Read = Callable[[memoryview, int], object]
    """Fills a buffer with the bytes of a blob from an offset on."""

MIN_PIECE: Final = 4096
"""Bytes of the smallest piece."""
_PROBE: Final = 128
"""Bytes of a probe."""
_BUFFER: Final = 1 << 20
"""Bytes that are read at once, at most."""
_FIRST_BUFFER: Final = 1 << 14
"""Bytes that are read first: pieces that differ mostly differ there."""
_MAX_COMPARED: Final = 16
"""Pieces with the probe of another that are compared with it."""
_MAX_WIDTH: Final = 8
"""Bytes of the widest element."""
_MIN_STACK_DIMENSIONS: Final = 3
_MAX_SLICES: Final = 4096
_BITS_PER_BYTE: Final = 8

Kind = tuple[int, int]
"""Bytes of a piece and bits of an element: only pieces of one kind can be equal."""
Probe = tuple["Kind", bytes]
"""Equal pieces have equal probes."""
Key = tuple["Kind", int]
"""Equal pieces have equal keys, which have a checksum of all bytes; others hardly ever have."""


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


def probe_of(piece: Piece, read: Read) -> Probe:
    """Return the probe of a piece. Raises what ``read`` raises."""
    probe = bytearray(_PROBE)
    read(memoryview(probe), piece.begin + (piece.size - _PROBE) // 2)
    return piece.kind, bytes(probe)


def is_constant(piece: Piece, probe: Probe, read: Read) -> bool:
    """Return whether a piece repeats one element, as zeros do. A base would save nothing there."""
    element = probe[1][:_MAX_WIDTH]
    return probe[1] == element * (_PROBE // _MAX_WIDTH) and all(
        part == (element * (len(part) // _MAX_WIDTH + 1))[: len(part)]
        for part in _parts(piece, read)
    )


def are_equal(one: Piece, read: Read, other: Piece, read_other: Read) -> bool:
    """Return whether two pieces of one kind have the same bytes. Raises what reading raises."""
    return all(
        mine == theirs
        for mine, theirs in zip(_parts(one, read), _parts(other, read_other), strict=True)
    )


def _parts(piece: Piece, read: Read) -> Iterator[bytearray]:
    done, wanted = 0, _FIRST_BUFFER
    while done < piece.size:
        part = bytearray(min(piece.size - done, wanted))
        read(memoryview(part), piece.begin + done)
        yield part
        done, wanted = done + len(part), _BUFFER


class BlobIndex:
    """Finds pieces in one blob. Probes a kind of piece when it is first asked for."""

    def __init__(self, header: Header, read: Read) -> None:
        """Take the blob's header and a function that reads its bytes."""
        self._read = read
        self._unread: dict[Kind, list[Piece]] = defaultdict(list)
        for whole, slices in pieces_of(header):
            for piece in (whole, *slices):
                self._unread[piece.kind].append(piece)
        self._pieces: dict[Probe, list[Piece]] = defaultdict(list)

    def find(self, piece: Piece, read: Read, preferred: int | None = None) -> int | None:
        """Return the offset of data that equals a piece of another blob; None if there is none.

        Args:
            piece: the piece, of at least ``MIN_PIECE`` bytes.
            read: reads the other blob.
            preferred: the offset of a piece of this kind to look at first.

        Raises what reading the blobs raises.
        """
        for own in self._unread.pop(piece.kind, ()):
            self._pieces[probe_of(own, self._read)].append(own)
        probe = probe_of(piece, read)
        candidates = self._pieces.get(probe, [])[:_MAX_COMPARED]
        if not candidates or is_constant(piece, probe, read):
            return None
        if preferred is not None and preferred != candidates[0].begin:
            there = piece._replace(begin=preferred)
            if probe_of(there, self._read) == probe:
                candidates.insert(0, there)
        return next(
            (own.begin for own in candidates if are_equal(piece, read, own, self._read)), None
        )


class _IndexedBlob(NamedTuple):
    header: Header
    open: Callable[[], Read]
    probes: dict[Piece, Probe]


class TensorIndex:
    """Finds blobs that have equal pieces."""

    def __init__(self) -> None:
        """Start without blobs."""
        self._blobs: dict[Digest, _IndexedBlob] = {}
        self._owners: dict[Probe, set[Digest]] = defaultdict(set)
        self._keys: dict[Digest, dict[Piece, Key]] = {}

    def __contains__(self, digest: Digest) -> bool:
        """Return whether a blob was added."""
        return digest in self._blobs

    def __iter__(self) -> Iterator[Digest]:
        """Yield the blobs that were added."""
        return iter(self._blobs)

    def kinds(self) -> set[Kind]:
        """Return the kinds of all pieces."""
        return {kind for kind, _ in self._owners}

    def add(
        self,
        digest: Digest,
        header: Header,
        open_blob: Callable[[], Read],
        kinds: Collection[Kind] | None = None,
    ) -> None:
        """Add a blob, or only its pieces of some kinds.

        Args:
            digest: the digest of the blob.
            header: its header.
            open_blob: returns a function that reads the blob.
            kinds: the kinds of pieces to add.

        Raises what reading the blob raises.
        """
        read = open_blob()
        probes = {
            piece: probe_of(piece, read)
            for whole, slices in pieces_of(header)
            for piece in (whole, *slices)
            if kinds is None or piece.kind in kinds
        }
        self._blobs[digest] = _IndexedBlob(header, open_blob, probes)
        for probe in probes.values():
            self._owners[probe].add(digest)

    def keys(self, digest: Digest) -> dict[Piece, Key]:
        """Return the keys of the pieces of a blob that other blobs may have too, without constant ones.

        Raises what reading the blob raises.
        """
        if digest not in self._keys:
            blob = self._blobs[digest]
            # A piece whose probe no other blob has need not be read completely.
            shared = {
                piece: probe for piece, probe in blob.probes.items() if len(self._owners[probe]) > 1
            }
            if shared:
                read = blob.open()
                self._keys[digest] = {
                    piece: (piece.kind, _checksum(piece, read))
                    for piece, probe in shared.items()
                    if not is_constant(piece, probe, read)
                }
            else:
                self._keys[digest] = {}
        return self._keys[digest]

    def count_equal(self, digest: Digest, other: Digest) -> int:
        """Return how many bytes of a blob are those of tensors or slices of another."""
        keys, theirs = self.keys(digest), set(self.keys(other).values())
        total = 0
        for whole, slices in pieces_of(self._blobs[digest].header):
            if keys.get(whole) in theirs:
                total += whole.size
            else:
                total += sum(piece.size for piece in slices if keys.get(piece) in theirs)
        return total


def _checksum(piece: Piece, read: Read) -> int:
    from zlib_ng.zlib_ng import crc32

    checksum = 0
    for part in _parts(piece, read):
        checksum = crc32(part, checksum)
    return checksum
