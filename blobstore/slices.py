"""Parts of a model's tensors, as ranks of tensor parallelism take them, without reading the rest.

Of a blob in memory, a part is a view where a framework has views of what does not lie together, so
that only its pages are touched. Of a blob that is to be read and is not in memory, only the runs of
bytes are read that the part has: near ones with one request, and the gaps between into a waste bin.
"""

from __future__ import annotations

import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from blobstore.core.escape import quoted
from blobstore.core.slicing import runs
from blobstore.core.tensor import TensorSpec
from blobstore.errors import BlobDamaged, BlobMissing, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from blobstore.core.digest import Digest
    from blobstore.core.slicing import Cut, Runs
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
    part: Cut,
    *,
    has_views: bool,
) -> Any:
    """Return a part of the tensor ``spec`` at ``offset`` of ``memory``.

    It is a view where ``convert`` gives one, if its bytes lie together or ``has_views``.
    """
    if has_views and spec.dtype.bits >= _BYTE:
        return convert(memory, offset, spec)[(*part.taken, ...)]  # ..., else numpy gives scalars
    where, of_part = runs(spec, part), TensorSpec(spec.name, spec.dtype, part.shape)
    if not where.repeats:
        return convert(memory, offset + where.begin, of_part)
    buffer, rest = memoryview(bytearray(of_part.nbytes)), memoryview(memory)[offset:]
    for number, start in enumerate(where.offsets):
        at = number * where.length
        buffer[at : at + where.length] = rest[start : start + where.length]
    return convert(buffer, 0, of_part)


def read_part(store: LocalStore, stored: Stored, part: Cut) -> tuple[memoryview, TensorSpec]:
    """Read the bytes of a part of a tensor from its blob, and no others that lie far from them.

    Returns memory of its own, and the spec of the part.

    Raises:
        BlobMissing, BlobDamaged: the blob is not whole.
        StoreError: it cannot be read.
        UsageError: as :func:`~blobstore.core.slicing.runs`.
    """
    spec = TensorSpec(stored.spec.name, stored.spec.dtype, part.shape)
    where = runs(stored.spec, part)
    buffer = _memory(spec.nbytes)
    digest, size = stored.blob
    try:
        descriptor = store.hot.open(digest, size)
    except BlobMissing:
        _read_cold(store, stored, list(_requests(where, buffer)))
        return buffer, spec
    try:
        _read_all(descriptor, stored.begin, list(_requests(where, buffer)))
    except EOFError:
        message = f"blob {quoted(store.layout.blob(digest))} ended before its last byte of {size}"
        raise BlobDamaged(message) from None
    except OSError as error:
        message = f"blob {quoted(store.layout.blob(digest))} cannot be read: {error.strerror}"
        raise StoreError(message) from None
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
