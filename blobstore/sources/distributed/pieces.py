"""A piece of a tensor: its place in the tensor, and the place of its bytes in a file."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from blobstore.sources.distributed.files import DataFile
    from blobstore.sources.pytorch.tensors import StridedTensor


class Box(NamedTuple):
    """A range of indexes in each dimension of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Piece(NamedTuple):
    """A box of a tensor whose bytes are in a file."""

    box: Box
    file: DataFile
    begin: int
    """Offset of its first byte in the file."""
    size: int
    """Bytes of its elements."""
    crc: int = 0
    """CRC-32 of its bytes; 0 if it is not known."""
    strided: StridedTensor | None = None
    """The order of its elements in the file, if it is not C order."""
    check: Callable[[int], None] | None = None
    """Called with the open file before the piece is read, to verify the storage that it is a part of."""
