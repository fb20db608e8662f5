"""Slices of tensors with Python's semantics: which elements an index selects, in the reference's words."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from blobstore.core.escape import escape
from blobstore.core.slicing import expand
from blobstore.errors import SafetensorError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blobstore.core.tensor import TensorSpec


class Selection(NamedTuple):
    """The elements that an index selects: their positions in each dimension."""

    ranges: tuple[range, ...]
    is_kept: tuple[bool, ...]
    """False for a dimension that an integer index removes."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the slice."""
        kept = zip(self.ranges, self.is_kept, strict=True)
        return tuple(len(positions) for positions, is_kept in kept if is_kept)

    @property
    def array_index(self) -> tuple[Any, ...]:
        """The index that selects the slice from an array of the whole tensor, as a view."""
        kept = zip(self.ranges, self.is_kept, strict=True)
        index = (as_slice(positions) if is_kept else positions.start for positions, is_kept in kept)
        return (*index, ...)  # numpy would return a scalar if there were integers alone


class SafeSlice:
    """A tensor of an open file that is read slice by slice.

    It stays valid when the file is closed.
    """

    __slots__ = ("_spec", "_tensors")

    def __init__(self, tensors: SliceReader, spec: TensorSpec) -> None:
        self._tensors = tensors
        self._spec = spec

    def get_shape(self) -> list[int]:
        """Return the shape of the whole tensor: the sizes of its dimensions, in elements."""
        return list(self._spec.shape)

    def get_dtype(self) -> str:
        """Return the type's name in the file, such as ``F32``."""
        return str(self._spec.dtype.value)

    def __getitem__(self, index: Any) -> Any:
        """Return a slice; only the bytes that it needs are read.

        A torch tensor of a map takes every index that torch knows, such as lists and masks.

        Raises:
            SafetensorError: the index has other types than integers, slices and ``...``, or an integer
                is out of range; for a torch tensor of a map, torch's exceptions.
            TypeError: the bounds of a slice are not integers.
        """
        return self._tensors.read_index(self._spec, index)


class SliceReader(Protocol):
    """A reader of parts of tensors."""

    def read_index(self, spec: TensorSpec, index: Any) -> Any:
        """Return the elements that an index selects as a tensor of the framework."""


def as_slice(positions: range) -> slice:
    """Return the slice that selects ``positions``."""
    if not positions:
        return slice(0, 0)
    stop = positions.stop if positions.stop >= 0 else None
    return slice(positions.start, stop, positions.step)


def select(shape: Sequence[int], index: Any) -> Selection:
    """Return the elements of a tensor of ``shape`` that an index selects.

    Slices are clipped and may run backwards. An empty list selects nothing.

    Raises:
        SafetensorError: the index has another type, too many dimensions, or an integer out of range.
        TypeError: the bounds of a slice are not integers.
    """
    full = expand(index, len(shape))
    if any(item is ... for item in full):
        raise SafetensorError("Only one ellipsis (...) is allowed in slice index")
    if len(full) > len(shape):
        raise _failure(index, shape, "more slicing indexes than dimensions in tensor")
    ranges = [
        _positions(item, size, dim, index, shape)
        for dim, (item, size) in enumerate(zip(full, shape, strict=True))
    ]
    return Selection(tuple(ranges), tuple(isinstance(item, slice | list) for item in full))


def _positions(item: Any, size: int, dim: int, index: Any, shape: Sequence[int]) -> range:
    if isinstance(item, list):
        if item:
            raise SafetensorError("Non empty lists are not implemented")
        return range(0)
    if isinstance(item, slice):
        return _range(item, size)
    try:
        number = operator.index(item)
    except TypeError:
        raise _unsupported(dim) from None
    if number < -size:
        raise SafetensorError(f"Invalid index {number} for dimension {dim} of size {size}")
    if number >= size:
        reason = f"index {number} out of bounds for tensor dimension #{dim} of size {size}"
        raise _failure(index, shape, reason)
    return range(number % size, number % size + 1)


def _range(item: slice, size: int) -> range:
    try:
        return range(*item.indices(size))
    except ValueError:
        raise SafetensorError("Slice step must be a non-zero integer, got 0") from None


def _unsupported(position: int) -> SafetensorError:
    return SafetensorError(
        f"Unsupported slice index at position {position}: expected slice, int, or ellipsis"
    )


def _failure(index: Any, shape: Sequence[int], reason: str) -> SafetensorError:
    items = index if isinstance(index, tuple) else (index,)
    text = escape(", ".join(map(_as_text, items)), 200)
    return SafetensorError(f"Error during slicing [{text}] with shape {list(shape)}: {reason}")


def _as_text(item: Any) -> str:
    if item is ...:
        return "..."
    if not isinstance(item, slice):
        return repr(item)
    parts = [item.start, item.stop] if item.step is None else [item.start, item.stop, item.step]
    return ":".join("" if part is None else str(part) for part in parts)
