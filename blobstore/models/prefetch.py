"""Tensors of a model that are brought into memory in the background: which blobs, and which bytes of them."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from blobstore.core.slicing import select
from blobstore.models.slice_bytes import slice_ranges
from blobstore.safetensors.prefetch_loader import attempt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from blobstore.core.slicing import Index
    from blobstore.models.header_index import TensorIndex
    from blobstore.models.memory import ModelMemory
    from blobstore.models.slices import SliceReader
    from blobstore.safetensors.cuda import CallerStream

    Item = tuple[str, Index | None]

_REQUEST: Final = 4 << 20
"""Bytes per request."""
_GROUP: Final = 64 << 20
"""Bytes of blobs that are read together, if they are remote."""
_STEPS = 2
"""Times that the next blob was asked for, after which a program is taken to read in order."""
_FIRST_WINDOW = 16 << 20
_MAX_WINDOW = 256 << 20
_NOTHING: Final = range(0)


class Following:
    """Says which blobs a program needs next that asks for tensors in the order of the blobs: ever more of them.

    Args:
        sizes: the bytes of each blob.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._last, self._end, self._window = -1, 0, _FIRST_WINDOW
        self._due = _STEPS - 1
        """The blob at which the next window is read, if the program comes there in order."""

    def after(self, slot: int) -> range:
        """Return the blobs to read ahead, now that one at ``slot`` is used; none if others are on their way.

        Each look-up of a tensor calls it, so most calls end at the first line that can tell. Threads that race read a
        window too few or too many.
        """
        last, self._last = self._last, slot
        if slot == last or (slot == last + 1 and slot < self._due):
            return _NOTHING
        if slot != last + 1:
            self._due, self._end, self._window = slot + _STEPS, 0, _FIRST_WINDOW
            return _NOTHING
        begin = end = max(self._end, slot + 1)
        size = 0
        while end < len(self._sizes) and size < self._window:
            size += self._sizes[end]
            end += 1
        # The next ones when the first of these is used.
        self._due, self._end, self._window = begin, end, min(2 * self._window, _MAX_WINDOW)
        return range(begin, end)


class BlobGroup:
    """Tensors of neighbouring blobs; see :class:`~blobstore.safetensors.prefetch_loader.Group`.

    Args:
        index: the tensors of the model.
        memory: its blobs.
        slices: reads parts of tensors.
        sizes: the bytes of each tensor, or of its part.
        items: names and indexes; None means all of a tensor.
        whole: returns all of a tensor.
        stream: the stream of the GPU that they are made on.
    """

    def __init__(
        self,
        index: TensorIndex,
        memory: ModelMemory,
        slices: SliceReader,
        sizes: Mapping[str, int],
        items: Sequence[Item],
        whole: Callable[[str], Any],
        stream: CallerStream | None,
    ) -> None:
        self.stream = stream
        self.sizes = {name: sizes[name] for name, _ in items}
        self._index = index
        self._memory = memory
        self._slices = slices
        self._items = items
        self._whole = whole

    def begin(self) -> list[Callable[[], object]]:
        """Return the requests."""
        ranges: list[tuple[int, int, int]] = []
        for name, index in self._items:
            location = self._index.location(name)
            slot = location.slot
            if index is None:
                ranges += self._stored_ranges(name)
            elif self._slices.slice(name).spec != location.spec:
                continue  # its parts are dequantized from those of several tensors
            elif not self._memory.reads_parts(slot):
                found = slice_ranges(
                    self._index.blobs[slot], location, select(location.spec, index)
                )
                ranges += ((slot, one.begin, one.end) for one in found)
        slots = frozenset(slot for slot, _, _ in ranges)
        return [
            partial(self._memory.bring, slots, slot, start, min(start + _REQUEST, end))
            for slot, begin, end in dict.fromkeys(ranges)
            for start in range(begin, end, _REQUEST)
        ]

    def _stored_ranges(self, name: str) -> Iterator[tuple[int, int, int]]:
        """Yield slots and bytes of a tensor and of what dequantizing it takes."""
        for stored in self._slices.stored_names(name):
            spec, slot, begin = self._index.location(stored)
            if not self._memory.reads_tensors(slot):
                yield slot, begin, begin + spec.nbytes

    def build(self) -> Iterator[tuple[str, Any]]:
        """Return the tensors."""
        return self._slices.parts(self._items, partial(attempt, self._whole))


def groups(
    index: TensorIndex,
    memory: ModelMemory,
    slices: SliceReader,
    items: Sequence[Item],
    whole: Callable[[str], Any],
    stream: CallerStream | None,
) -> Iterator[BlobGroup]:
    """Yield tensors in the order of their blobs, small neighbours together. Raises as :class:`BlobGroup`."""
    sizes = {name: _size(slices, name, part) for name, part in items}
    ordered = sorted(items, key=lambda item: index.slot(item[0]))
    current: list[Item] = []
    nbytes = 0
    for item in ordered:
        if current and nbytes >= _GROUP:
            yield BlobGroup(index, memory, slices, sizes, current, whole, stream)
            current, nbytes = [], 0
        current.append(item)
        nbytes += sizes[item[0]]
    if current:
        yield BlobGroup(index, memory, slices, sizes, current, whole, stream)


def _size(slices: SliceReader, name: str, index: Index | None) -> int:
    """Return the bytes of a tensor or of a part of it."""
    spec = slices.slice(name).spec
    if index is None:
        return spec.nbytes
    return math.prod(select(spec, index).shape) * spec.dtype.bits // 8
