"""Parses the items of data files: each is a complete zip checkpoint that ``torch.save`` wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from blobstore.core.escape import quote
from blobstore.errors import DamagedSource
from blobstore.sources.distributed.pieces import Piece
from blobstore.sources.pytorch.checkpoint import check_globals
from blobstore.sources.pytorch.tensors import TensorReader
from blobstore.sources.pytorch.zip import ZipCheckpoint
from blobstore.unpickler.values import is_tensor

if TYPE_CHECKING:
    from collections.abc import Iterable

    from blobstore.sources.distributed.files import DataFile
    from blobstore.sources.distributed.metadata import Stored, StoredPiece, StoredTensor
    from blobstore.sources.distributed.templates import Templates


def read_piece(
    descriptor: int,
    file: DataFile,
    tensor: StoredTensor,
    piece: StoredPiece,
    templates: Templates,
) -> Piece:
    """Read the item of a piece, except its data, and check that it matches the metadata.

    ``templates`` are the items that were read before, and get this one.

    Raises:
        CheckpointRefused: it is damaged, or no checkpoint.
        UnreadableTensor: its kind of tensor is not supported.
        DamagedSource: it has another type or shape, or not exactly its own elements.
        OSError: it cannot be read.
    """
    if (known := templates.match(descriptor, file, tensor, piece)) is not None:
        return known
    stored, box = piece.stored, piece.box
    item = _opened(descriptor, stored)
    # Before the value is looked at: what it seems to be depends on its globals.
    check_globals(item.result)
    value = item.result.value
    if not is_tensor(value):
        raise DamagedSource("it is not a tensor")
    found = TensorReader(item.result.persistents, item.locate, is_swapped=item.is_swapped).read(
        "", value
    )
    expected = box.sizes
    if tensor.dtype is not None and tensor.dtype.is_packed:  # torch counts pairs
        expected = (*expected[:-1], expected[-1] * 2)
    if found.spec.dtype is not tensor.dtype or found.spec.shape != expected:
        raise DamagedSource(
            f"it is a tensor of {found.spec.dtype.value} {list(found.spec.shape)}, not of "
            f"torch.{tensor.type_name} {list(box.sizes)}"
        )
    place = found.place
    # The writer of torch saves a copy of every tensor that is a part of a larger storage. With this rule
    # and without compression, a checkpoint cannot be larger than its files.
    if (
        place.is_deflated
        or item.is_swapped
        or place.size != found.nbytes
        or found.extent.span != found.extent.elements
    ):
        raise DamagedSource(
            f"its storage of {place.size} bytes is compressed, big-endian, or has not exactly the "
            f"{found.nbytes} bytes of the tensor"
        )
    if found.is_direct:
        templates.add(descriptor, tensor, piece, item.entries, place)
    strided = None if found.is_direct else found
    return Piece(box, file, place.offset, place.size, place.crc, strided)


def read_value(descriptor: int, stored: Stored) -> Any:
    """Return the inert value of an item that is not a tensor; its globals are not checked.

    Raises:
        CheckpointRefused: it is damaged, or no checkpoint.
        OSError: it cannot be read.
    """
    return _opened(descriptor, stored).result.value


def _opened(descriptor: int, stored: Stored) -> ZipCheckpoint:
    item = ZipCheckpoint(descriptor, stored.size, stored.begin)
    if item.pickle_size > stored.size:  # many small items could have large pickles
        raise DamagedSource("its pickle is compressed, which torch never does")
    return item


def check_places(stored: Iterable[Stored], files: dict[str, DataFile]) -> None:
    """Check that items are inside their files and do not overlap.

    Raises:
        DamagedSource: one does not.
    """
    reached: dict[str, int] = {}
    # By file and offset, so that each item is compared with the one before it.
    for item in sorted(stored):
        if item.begin < reached.get(item.file, 0):
            raise DamagedSource(
                f"two items overlap at byte {item.begin} of {quote(files[item.file].path)}"
            )
        end = reached[item.file] = item.begin + item.size
        if end > files[item.file].version.size:
            raise DamagedSource(
                f"{quote(files[item.file].path)} has {files[item.file].version.size} bytes, but an item ends at "
                f"byte {end}: the file was truncated, or belongs to another checkpoint"
            )
