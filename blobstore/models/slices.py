"""Parts of the tensors of an opened model: slices, and plans of which rank takes what."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from blobstore.core.escape import quote
from blobstore.core.slicing import byte_runs, select
from blobstore.core.tensor import DTYPES, TensorSpec
from blobstore.errors import BlobDamaged, BlobMissing, StoreError, TensorNotFound, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from blobstore.core.digest import Digest
    from blobstore.core.slicing import Index, Runs, Selection
    from blobstore.models.frameworks import Dequantize
    from blobstore.models.index import Place
    from blobstore.models.quantized import QuantizedWeights
    from blobstore.store.local import LocalStore


_REQUEST = 4 << 20
"""Bytes of one request, gaps included."""
_REQUESTS = 8
"""Requests at a time."""
_GAP = 16 << 10
"""Bytes between two runs that are rather read than asked for a second time."""
_BUFFERS = 1000
"""Buffers of one request; systems take 1,024."""
_OWN_MAP = 1 << 20
"""Bytes from which on memory comes in large pages, in a map of its own."""
_BYTE = 8


class Stored(NamedTuple):
    """Where a tensor lies."""

    spec: TensorSpec
    blob: tuple[Digest, int]
    begin: int
    """The offset in the blob of its first byte."""


def view_part(
    convert: Callable[[Any, int, TensorSpec], Any],
    memory: mmap.mmap | memoryview,
    offset: int,
    spec: TensorSpec,
    part: Selection,
    *,
    has_views: bool,
) -> Any:
    """Return a part of the tensor ``spec`` at ``offset`` of ``memory``.

    It is a view where ``convert`` gives one, if its bytes lie together or ``has_views``.
    """
    if has_views and spec.dtype.bits >= _BYTE:
        return convert(memory, offset, spec)[(*part.taken, ...)]  # ..., else numpy gives scalars
    where, of_part = byte_runs(spec, part), TensorSpec(spec.name, spec.dtype, part.shape)
    if not where.repeats:
        return convert(memory, offset + where.begin, of_part)
    buffer, rest = memoryview(bytearray(of_part.nbytes)), memoryview(memory)[offset:]
    for number, start in enumerate(where.offsets):
        at = number * where.length
        buffer[at : at + where.length] = rest[start : start + where.length]
    return convert(buffer, 0, of_part)


def read_part(store: LocalStore, stored: Stored, part: Selection) -> tuple[memoryview, TensorSpec]:
    """Read the bytes of a part of a tensor from its blob, and no others that lie far from them.

    Returns memory of its own, and the spec of the part.

    Raises:
        BlobMissing, BlobDamaged: the blob is not whole.
        StoreError: it cannot be read.
        UsageError: as :func:`~blobstore.core.slicing.runs`.
    """
    spec = TensorSpec(stored.spec.name, stored.spec.dtype, part.shape)
    where = byte_runs(stored.spec, part)
    buffer = _memory(spec.nbytes)
    digest, size = stored.blob
    try:
        descriptor = store.open_hot(digest, size)
    except BlobMissing:
        _read_cold(store, stored, list(_requests(where, buffer)))
        return buffer, spec
    try:
        _read_all(descriptor, stored.begin, list(_requests(where, buffer)))
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


def _read_cold(store: LocalStore, stored: Stored, requests: Sequence[_Request]) -> None:
    """Fill buffers from a blob that is cold, or was: all between the first byte and the last."""
    if not requests:
        return
    first, last = requests[0], requests[-1]
    end = last.begin + sum(map(len, last.buffers))
    memory = _memory(end - first.begin)
    store.read_into(*stored.blob, stored.begin + first.begin, memory)
    for begin, buffers in requests:
        at = begin - first.begin
        for buffer in buffers:
            buffer[:] = memory[at : at + len(buffer)]
            at += len(buffer)


class _Request(NamedTuple):
    begin: int
    buffers: list[memoryview]

    def has_room(self, end: int) -> bool:
        """Tell whether bytes to ``end`` can be read along."""
        return end - self.begin <= _REQUEST and len(self.buffers) + 2 <= _BUFFERS


def _requests(where: Runs, buffer: memoryview) -> Iterator[_Request]:
    """Yield requests that fill ``buffer`` with the runs, with what lies between near ones in a bin."""
    waste = memoryview(bytearray(_GAP))
    request: _Request | None = None
    end = 0
    for start, length in _pieces(where):
        gap = start - end
        if request is not None and gap <= _GAP and request.has_room(start + length):
            request.buffers.extend((waste[:gap], buffer[:length]) if gap else (buffer[:length],))
        else:
            if request is not None:
                yield request
            request = _Request(start, [buffer[:length]])
        buffer, end = buffer[length:], start + length
    if request is not None:
        yield request


def _pieces(where: Runs) -> Iterator[tuple[int, int]]:
    """Yield the beginning and length of the runs, or of parts of them that are not too long."""
    for start in where.offsets:
        for begin in range(start, start + where.length, _REQUEST):
            yield begin, min(_REQUEST, start + where.length - begin)


def _read_all(descriptor: int, begin: int, requests: Sequence[_Request]) -> None:
    if len(requests) == 1:
        _read(descriptor, begin + requests[0].begin, requests[0].buffers)
    elif requests:
        with ThreadPoolExecutor(_REQUESTS, thread_name_prefix="blobstore") as pool:
            work = [pool.submit(_read, descriptor, begin + at, buffers) for at, buffers in requests]
            try:
                for done in work:
                    done.result()
            except BaseException:  # also Ctrl-C
                pool.shutdown(wait=True, cancel_futures=True)
                raise


def _read(descriptor: int, offset: int, buffers: list[memoryview]) -> None:
    """Fill the buffers with the bytes of a file from ``offset`` on."""
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


def _memory(size: int) -> memoryview:
    if size < _OWN_MAP:
        return memoryview(bytearray(size))
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Fresh memory in small pages takes as long to come by as the bytes to be read.
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


Plan = Mapping[str, "Index"] | Callable[[str], "Index | None"]
"""What is taken of each tensor, by name; None or nothing means all of it."""


class TensorSlice:
    """A tensor of which parts are taken, as ``get_slice()`` of ``safetensors`` gives it.

    ``slice[a:b, c:d]`` takes whole numbers, slices of step 1 and ``...``; bounds are clipped as
    Python does.
    """

    def __init__(self, spec: TensorSpec, take: Callable[[Index], Any]) -> None:
        self.spec = spec
        """Name, element type and shape of the whole tensor."""
        self._take = take

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

    def __getitem__(self, index: Index) -> Any:
        """Return a part of the tensor.

        Raises:
            UsageError: the index means no part, or one that is not there. Otherwise as
                :meth:`Model.__getitem__`.
        """
        return self._take(index)

    __iter__ = None  # else Python would look for the parts 0, 1, 2 and so on


class SliceReader:
    """Takes parts of a model's tensors.

    Args:
        name: the model's, for messages.
        places: where its tensors are.
        packed: its quantized weights.
        take: gives a part of what is stored under a name.
        dequantize: gives the arithmetic of the arrays' framework, if weights are given as plain
            numbers.
    """

    def __init__(
        self,
        name: str,
        places: Mapping[str, Place],
        packed: QuantizedWeights,
        take: Callable[[str, Selection], Any],
        dequantize: Callable[[], Dequantize] | None,
    ) -> None:
        self._name = name
        self._places = places
        self._packed = packed
        self._take = take
        self._dequantize = dequantize

    def slice_of(self, name: str) -> TensorSlice:
        """Return a tensor that is there, to take parts of; see :meth:`Model.get_slice`."""
        if (dequantize := self._dequantize) and name in self._packed:
            spec = self._packed.plain_spec(name)
            return TensorSlice(spec, lambda index: self._plain(name, index, dequantize()))
        dtype, shape, _, _ = self._places[name]
        spec = TensorSpec(name, DTYPES[dtype], tuple(shape))
        return TensorSlice(spec, lambda index: self._take(name, select(spec, index)))

    def quantized(self, name: str, index: Index) -> dict[str, Any]:
        """Return a part of a packed weight; see :meth:`Model.quantized_slice`."""
        if name not in self._packed:
            raise TensorNotFound(f"model {self._name} has no quantized weight {quote(name)}")
        cuts = self._packed.part(name, index).cuts
        return {end: self._take(end, part) for end, part in cuts.items()}

    def planned(self, plan: Plan, whole: Callable[[str], Any]) -> Callable[[str], Any]:
        """Return what gives the part of each tensor, and by ``whole`` those that are not cut.

        Raises:
            TensorNotFound: the plan has a name that is none of the model's.
            UsageError: it has the name of what is cut with its weight.
        """
        owners = self._packed.owners()
        if isinstance(plan, Mapping):
            self._check(plan, owners)
            plan = plan.get
        chosen = plan
        packed = {} if self._dequantize else owners | {name: name for name in owners.values()}

        def take(name: str) -> Any:
            weight = packed.get(name, name)
            index = chosen(weight)
            if index is None:
                return whole(name)
            if name in packed:
                return self._take(name, self._packed.part(weight, index).cuts[name])
            return self.slice_of(name)[index]

        return take

    def _check(self, plan: Mapping[str, Index], owners: Mapping[str, str]) -> None:
        for name in plan:
            if name not in self._places or (self._dequantize and name in owners):
                raise TensorNotFound(
                    f"model {self._name} has no tensor {quote(name)} to take a part of"
                )
            if name in owners:
                raise UsageError(
                    f"tensor {quote(name)} of {self._name} is cut with {quote(owners[name])}: "
                    "take a part of that"
                )

    def _plain(self, name: str, index: Index, dequantize: Dequantize) -> Any:
        part = self._packed.part(name, index, widened=True)
        arrays = {end: self._take(end, taken) for end, taken in part.cuts.items()}
        return self._packed.numbers(name, arrays, dequantize)[..., part.inner]
