"""The bytes of a part of a tensor, read with few requests and little else."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any, NamedTuple

from blobstore.core.escape import quote
from blobstore.core.files import without_start
from blobstore.core.mmap import new_buffer
from blobstore.core.slicing import byte_runs
from blobstore.core.tensor import TensorSpec
from blobstore.core.workers import WorkerPool
from blobstore.errors import BlobDamaged, BlobMissing, StoreError
from blobstore.store.blob_ranges import BlobRange

if TYPE_CHECKING:
    import mmap
    from collections.abc import Iterator

    from blobstore.core.digest import Digest
    from blobstore.core.slicing import Runs, Selection
    from blobstore.models.frameworks import Convert
    from blobstore.models.header_index import TensorLocation
    from blobstore.store.blob_ranges import LoadedRanges
    from blobstore.store.protocols import BlobAccess

_REQUEST = 4 << 20
"""Bytes per request, gaps included."""
_REQUESTS = 8
"""Concurrent requests."""
_GAP = 16 << 10
"""Gaps of at most so many bytes are read too, which costs less than another request."""
_BUFFERS = 1000
"""Buffers per request; systems accept 1,024."""
_BYTE = 8


def view_slice(
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
        # Without the ellipsis, numpy gives scalars.
        return convert(memory, offset, spec)[(*part.array_index, ...)]
    runs, part_spec = byte_runs(spec, part), TensorSpec(spec.name, spec.dtype, part.shape)
    if not runs.repeats:
        return convert(memory, offset + runs.begin, part_spec)
    buffer, rest = memoryview(bytearray(part_spec.nbytes)), memoryview(memory)[offset:]
    for number, start in enumerate(runs.offsets):
        at = number * runs.length
        buffer[at : at + runs.length] = rest[start : start + runs.length]
    return convert(buffer, 0, part_spec)


def slice_ranges(
    blob: tuple[Digest, int], location: TensorLocation, part: Selection
) -> Iterator[BlobRange]:
    """Yield the ranges of a blob that have a part of a tensor, with small gaps. Raises as :func:`byte_runs`."""
    runs = byte_runs(location.spec, part)
    length, repeats = runs.length, list(runs.repeats)
    while repeats and repeats[-1][1] - length <= _GAP:
        count, stride = repeats.pop()
        length += (count - 1) * stride
    for start in runs._replace(repeats=tuple(repeats)).offsets:
        yield BlobRange(*blob, location.begin + start, location.begin + start + length)


def read_slice(
    store: BlobAccess,
    blob: tuple[Digest, int],
    location: TensorLocation,
    part: Selection,
    loaded: LoadedRanges | None = None,
) -> tuple[memoryview, TensorSpec]:
    """Read a part of a tensor from its blob, with few requests and little else.

    ``loaded`` has the ranges of :func:`slice_ranges` already, if the blob was not local.

    Returns:
        Memory that nothing else uses, which may be read-only, and the spec of the part.

    Raises:
        BlobMissing, BlobDamaged: the blob is missing or damaged.
        StoreError: the blob cannot be read.
        UsageError: as :func:`~blobstore.core.slicing.byte_runs`.
    """
    spec = TensorSpec(location.spec.name, location.spec.dtype, part.shape)
    runs = byte_runs(location.spec, part)
    digest, _ = blob
    if loaded is None or not loaded.parts(digest):
        if store.is_local(digest):
            with contextlib.suppress(BlobMissing):  # it is cold
                return _read_hot(store, blob, location.begin, runs, spec.nbytes), spec
        loaded = store.read_ranges(slice_ranges(blob, location, part))
    return _joined(loaded, digest, location.begin, runs, spec.nbytes), spec


def _read_hot(
    store: BlobAccess, blob: tuple[Digest, int], start: int, runs: Runs, nbytes: int
) -> memoryview:
    """Read the runs of a tensor that begins at ``start`` of its blob's file. Raises BlobMissing if it has none."""
    digest, size = blob
    descriptor = store.open_hot(digest, size)
    buffer = new_buffer(nbytes)
    requests = list(_requests(runs, buffer))
    try:
        if len(requests) == 1:
            requests[0].read(descriptor, start)
        elif requests:
            pool = WorkerPool(_REQUESTS, None, 0)
            pool.run(requests, lambda request: request.read(descriptor, start))
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
    return buffer


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
            buffers = without_start(buffers, count)


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


def _joined(
    loaded: LoadedRanges, digest: Digest, start: int, runs: Runs, nbytes: int
) -> memoryview:
    """Return the runs of a tensor that begins at ``start`` of its blob, in memory of their own."""
    begin = start + runs.begin
    if not runs.repeats and (found := loaded.take(digest, begin, begin + runs.length)):
        return found
    buffer = new_buffer(nbytes)
    for number, offset in enumerate(runs.offsets):
        begin, at = start + offset, number * runs.length
        buffer[at : at + runs.length] = loaded.find(digest, begin, begin + runs.length)
    return buffer
