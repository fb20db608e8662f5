"""Slices of a model's tensors, and how little is read for them."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, NamedTuple

from blobstore.core.escape import quote
from blobstore.core.slicing import byte_runs, select
from blobstore.core.tensor import TensorSpec
from blobstore.core.workers import WorkerPool
from blobstore.errors import (
    BlobDamaged,
    BlobMissing,
    Damaged,
    StoreError,
    TensorNotFound,
    UsageError,
)
from blobstore.models.files import locate_damage

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from typing_extensions import TypeVar

    from blobstore.core.digest import Digest
    from blobstore.core.slicing import Index, Runs, Selection
    from blobstore.models.frameworks import ArrayTarget, Convert
    from blobstore.models.index import TensorIndex, TensorLocation
    from blobstore.models.memory import ModelMemory
    from blobstore.models.quantized import QuantizedWeights
    from blobstore.store.local import LocalStore

    Array = TypeVar("Array", default=Any)
else:
    from typing import TypeVar

    Array = TypeVar("Array")

Plan = Mapping[str, "Index"] | Callable[[str], "Index | None"]
"""Which part to take of each tensor, by name; None or no entry means all of it."""

_REQUEST = 4 << 20
"""Bytes per request, gaps included."""
_REQUESTS = 8
"""Concurrent requests."""
_GAP = 16 << 10
"""Gaps of at most so many bytes are read too, which costs less than another request."""
_BUFFERS = 1000
"""Buffers per request; systems accept 1,024."""
_OWN_MAP = 1 << 20
"""Buffers of at least so many bytes are maps of their own, in large pages."""
_BYTE = 8


class TensorSlice(Generic[Array]):
    """A tensor that can be read in parts, like the result of ``get_slice()`` in ``safetensors``.

    ``slice[a:b, c:d]`` takes integers, slices of step 1 and ``...``. Bounds are clipped as Python
    does.
    """

    def __init__(self, spec: TensorSpec, read: Callable[[Index], Array]) -> None:
        self.spec = spec
        """Name, element type and shape of the whole tensor."""
        self._read = read

    def __repr__(self) -> str:
        name, dtype, shape = self.spec
        return f"<TensorSlice of {quote(name)}: {dtype.value} {list(shape)}>"

    def get_shape(self) -> list[int]:
        """Return the shape of the whole tensor."""
        return list(self.spec.shape)

    def get_dtype(self) -> str:
        """Return the element type by its name in safetensors files."""
        name: str = self.spec.dtype.value
        return name

    def __getitem__(self, index: Index) -> Array:
        """Return a part of the tensor.

        Raises:
            UsageError: the index is out of range, or does not select a part. Otherwise as
                :meth:`Model.__getitem__`.
        """
        return self._read(index)

    __iter__ = None  # otherwise Python would iterate over slice[0], slice[1] and so on


class SliceReader:
    """Reads parts of a model's tensors.

    Args:
        index: the tensors of the model.
        memory: its blobs.
        weights: its quantized weights.
        target: the framework and device of the arrays.
    """

    def __init__(
        self,
        index: TensorIndex,
        memory: ModelMemory,
        weights: QuantizedWeights,
        target: ArrayTarget,
    ) -> None:
        self._index = index
        self._memory = memory
        self._weights = weights
        self._target = target

    def slice(self, name: str) -> TensorSlice:
        """Return a tensor of the index, to be read in parts; see :meth:`Model.get_slice`."""
        if name in self._weights.dequantized:

            def read(index: Index) -> Any:
                part = self._weights.part(name, index, widened=True)
                arrays = {one: self._read(one, taken) for one, taken in part.selections.items()}
                return self._weights.dequantize(name, arrays)[(..., *part.requested)]

            return TensorSlice(self._weights.dequantized_spec(name), read)
        spec = self._index.spec(name)
        return TensorSlice(spec, lambda index: self._read(name, select(spec, index)))

    def read_quantized(self, name: str, index: Index) -> dict[str, Any]:
        """Return a part of a quantized weight; see :meth:`Model.quantized_slice`."""
        if name not in self._weights:
            raise TensorNotFound(
                f"model {self._memory.files.reference} has no quantized weight {quote(name)}"
            )
        selections = self._weights.part(name, index).selections
        return {stored: self._read(stored, part) for stored, part in selections.items()}

    def planned(self, plan: Plan, whole: Callable[[str], Any]) -> Callable[[str], Any]:
        """Return a function that reads the planned part of a tensor.

        Args:
            plan: which part to take of each tensor.
            whole: reads the tensors that the plan does not restrict.

        Raises:
            TensorNotFound: the plan names a tensor that the model does not have.
            UsageError: the plan names a companion, which is sliced with its weight.
        """
        owners, dequantized = self._weights.owners(), self._weights.dequantized
        if isinstance(plan, Mapping):
            model = self._memory.files.reference
            for name in plan:
                if name not in self._index.entries or owners.get(name) in dequantized:
                    raise TensorNotFound(f"model {model} has no tensor {quote(name)} to slice")
                if name in owners:
                    raise UsageError(
                        f"tensor {quote(name)} of {model} is sliced with {quote(owners[name])}: "
                        "slice that tensor instead"
                    )
            plan = plan.get
        choose = plan
        stored = {
            part: weight
            for part, weight in (owners | {name: name for name in owners.values()}).items()
            if weight not in dequantized
        }

        def read(name: str) -> Any:
            weight = stored.get(name, name)
            index = choose(weight)
            if index is None:
                return whole(name)
            if name in stored:
                return self._read(name, self._weights.part(weight, index).selections[name])
            return self.slice(name)[index]

        return read

    def _read(self, name: str, part: Selection) -> Any:
        """Return a part of a tensor as stored, from memory or from its file."""
        location = self._index.location(name)
        slot, target = location.slot, self._target
        if not self._memory.reads_parts(slot):
            region = self._memory.load((slot,))
            offset = region.offsets[slot] + location.begin
            has_views = target.has_views
            return view_part(
                target.convert, region.memory, offset, location.spec, part, has_views=has_views
            )
        self._memory.load()  # raises an error if the model is closed
        files = self._memory.files
        try:
            buffer, spec = read_part(files.store, self._index.blobs[slot], location, part)
        except Damaged as error:
            raise locate_damage(files, error) from None
        return target.convert(buffer if target.is_writable else buffer.toreadonly(), 0, spec)


def view_part(
    convert: Convert,
    memory: mmap.mmap | memoryview,
    offset: int,
    spec: TensorSpec,
    part: Selection,
    *,
    has_views: bool,
) -> Any:
    """Return a part of the tensor ``spec`` at ``offset`` of ``memory``.

    The result is a view where ``convert`` returns one, provided that the part's bytes are
    contiguous or ``has_views`` is true.
    """
    if has_views and spec.dtype.bits >= _BYTE:
        return convert(memory, offset, spec)[
            (*part.array_index, ...)
        ]  # without ..., numpy gives scalars
    runs, part_spec = byte_runs(spec, part), TensorSpec(spec.name, spec.dtype, part.shape)
    if not runs.repeats:
        return convert(memory, offset + runs.begin, part_spec)
    buffer, rest = memoryview(bytearray(part_spec.nbytes)), memoryview(memory)[offset:]
    for number, start in enumerate(runs.offsets):
        at = number * runs.length
        buffer[at : at + runs.length] = rest[start : start + runs.length]
    return convert(buffer, 0, part_spec)


def read_part(
    store: LocalStore, blob: tuple[Digest, int], location: TensorLocation, part: Selection
) -> tuple[memoryview, TensorSpec]:
    """Read a part of a tensor from its blob, with few requests and little else.

    Returns:
        New memory, and the spec of the part.

    Raises:
        BlobMissing, BlobDamaged: the blob is missing or damaged.
        StoreError: the blob cannot be read.
        UsageError: as :func:`~blobstore.core.slicing.byte_runs`.
    """
    spec = TensorSpec(location.spec.name, location.spec.dtype, part.shape)
    buffer = _new_buffer(spec.nbytes)
    requests = list(_requests(byte_runs(location.spec, part), buffer))
    digest, size = blob
    try:
        descriptor = store.open_hot(digest, size)
    except BlobMissing:
        _read_cold(store, blob, location.begin, requests)
        return buffer, spec

    try:
        if len(requests) == 1:
            requests[0].read(descriptor, location.begin)
        elif requests:
            pool = WorkerPool(_REQUESTS, None, 0)
            pool.run(requests, lambda request: request.read(descriptor, location.begin))
    except EOFError:
        raise BlobDamaged(
            f"blob {quote(store.blob_path(digest))} ended before its last byte of {size}"
        ) from None
    except OSError as error:
        raise StoreError(
            f"blob {quote(store.blob_path(digest))} cannot be read: {error.strerror}"
        ) from None
    finally:
        os.close(descriptor)
    return buffer, spec


class _Request(NamedTuple):
    begin: int
    buffers: list[memoryview]

    def has_space(self, end: int) -> bool:
        """Return whether the request can be extended to the offset ``end``."""
        return end - self.begin <= _REQUEST and len(self.buffers) + 2 <= _BUFFERS

    def read(self, descriptor: int, start: int) -> None:
        """Fill the buffers with bytes of a file, in which the tensor begins at ``start``."""
        offset, buffers = start + self.begin, self.buffers
        while buffers:
            count = os.preadv(descriptor, buffers, offset)
            if not count:
                raise EOFError
            offset += count
            done = 0
            while done < len(buffers) and count >= len(buffers[done]):
                count -= len(buffers[done])
                done += 1
            buffers = buffers[done:]
            if count:
                buffers[0] = buffers[0][count:]


def _requests(runs: Runs, buffer: memoryview) -> Iterator[_Request]:
    """Yield requests that fill ``buffer`` with the runs, and read small gaps into a spare buffer."""
    spare = memoryview(bytearray(_GAP))
    request: _Request | None = None
    end = 0
    for start in runs.offsets:
        for begin in range(start, start + runs.length, _REQUEST):
            length = min(_REQUEST, start + runs.length - begin)
            gap = begin - end
            if request is not None and gap <= _GAP and request.has_space(begin + length):
                request.buffers.extend(
                    (spare[:gap], buffer[:length]) if gap else (buffer[:length],)
                )
            else:
                if request is not None:
                    yield request
                request = _Request(begin, [buffer[:length]])
            buffer, end = buffer[length:], begin + length
    if request is not None:
        yield request


def _read_cold(
    store: LocalStore, blob: tuple[Digest, int], start: int, requests: Sequence[_Request]
) -> None:
    """Fill the buffers from a blob that is cold, or was: decode all bytes from first to last."""
    if not requests:
        return
    first, last = requests[0], requests[-1]
    end = last.begin + sum(map(len, last.buffers))
    memory = _new_buffer(end - first.begin)
    store.read_into(*blob, start + first.begin, memory)
    for begin, buffers in requests:
        at = begin - first.begin
        for buffer in buffers:
            buffer[:] = memory[at : at + len(buffer)]
            at += len(buffer)


def _new_buffer(size: int) -> memoryview:
    if size < _OWN_MAP:
        return memoryview(bytearray(size))
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # In small pages, allocating the memory takes as long as reading the bytes.
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)
