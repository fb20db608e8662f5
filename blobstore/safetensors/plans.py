"""Which bytes of files a plan needs: the parts of tensors, and the requests that bring them."""

from __future__ import annotations

import math
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from blobstore.safetensors.prefetch_loader import attempt
from blobstore.safetensors.slices import select

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from blobstore.core.tensor import TensorSpec
    from blobstore.safetensors.cuda import CallerStream
    from blobstore.safetensors.header import TensorEntry
    from blobstore.safetensors.reader import Reader
    from blobstore.safetensors.slices import Selection

_BYTE = 8
_DENSE = 2
"""If this times the bytes of a part are more than those from its first to its last, all of these are read."""


class Wanted(NamedTuple):
    """A tensor of a plan, or a part of it."""

    name: str
    nbytes: int
    begin: int
    """In the file."""
    end: int
    """Equal to ``begin`` if :attr:`read` brings the bytes itself."""
    read: Callable[[Reader], Any]
    """Returns it from a reader of these bytes."""


class FileGroup:
    """Neighbouring tensors of a file, which are brought with requests of equal size."""

    def __init__(
        self, reader: Reader, wanted: Sequence[Wanted], stream: CallerStream | None
    ) -> None:
        self.stream = stream
        self._reader = reader
        self._wanted = wanted
        self.sizes: Mapping[str, int] = {one.name: one.nbytes for one in wanted}
        self._begin, self._end = wanted[0].begin, max(one.end for one in wanted)

    def begin(self) -> list[Callable[[], None]]:
        """Allocate memory; see :class:`~blobstore.safetensors.prefetch_loader.Group`."""
        step = self._reader.request
        self._reader, bring = self._reader.fetch(self._begin, self._end)
        return [
            partial(bring, start, min(start + step, self._end))
            for start in range(self._begin, self._end, step)
        ]

    def build(self) -> Iterator[tuple[str, Any]]:
        """Return the tensors."""
        for one in self._wanted:
            yield one.name, attempt(one.read, self._reader)


def whole(entry: TensorEntry, start: int, read: Callable[[Reader], Any]) -> Wanted:
    """Return a complete tensor of a file whose data begin at ``start``."""
    return Wanted(entry.spec.name, entry.spec.nbytes, start + entry.begin, start + entry.end, read)


def part(
    entry: TensorEntry, start: int, index: Any, read: Callable[[Selection, Reader], Any]
) -> Wanted:
    """Return a part of a tensor. Raises as :func:`~blobstore.safetensors.slices.select`."""
    spec = entry.spec
    selection = select(spec.shape, index)
    elements = math.prod(map(len, selection.ranges)) if all(selection.ranges) else 0
    nbytes = -(-elements * spec.dtype.bits // _BYTE)
    first, last = _extent(spec, selection) if elements else (0, 0)
    if last - first > _DENSE * nbytes:
        first = last = 0
    begin = start + entry.begin
    return Wanted(spec.name, nbytes, begin + first, begin + last, partial(read, selection))


def groups(
    reader: Reader, wanted: Iterable[Wanted], stream: CallerStream | None = None
) -> Iterator[FileGroup]:
    """Yield tensors of a file in the order of their bytes, small neighbours together."""
    current: list[Wanted] = []
    scattered: list[Wanted] = []
    end = 0
    for one in sorted(wanted, key=attrgetter("begin", "end")):
        if one.nbytes and one.begin == one.end:
            scattered.append(one)
            continue
        if current and (
            one.begin - end > reader.gap or one.end - current[0].begin > reader.request
        ):
            yield FileGroup(reader, current, stream)
            current, end = [], 0
        current.append(one)
        end = max(end, one.end)
    if current:
        yield FileGroup(reader, current, stream)
    yield from (FileGroup(reader, [one], stream) for one in scattered)


def _extent(spec: TensorSpec, selection: Selection) -> tuple[int, int]:
    """Return where the bytes of a selection begin and end, relative to those of the tensor."""
    if spec.dtype.bits < _BYTE:  # there is no address within a byte
        return 0, spec.nbytes
    first = last = 0
    stride = spec.dtype.bits
    for positions, size in zip(reversed(selection.ranges), reversed(spec.shape), strict=True):
        first += min(positions[0], positions[-1]) * stride
        last += max(positions[0], positions[-1]) * stride
        stride *= size
    return first // _BYTE, -(-(last + spec.dtype.bits) // _BYTE)
