"""Tensors from the files of blobs to the memory of a device, by way of a ring of staging buffers.

The bytes of all tensors make one stream, which is cut into jobs of one buffer each: a large tensor
goes through many buffers, and many small ones through one. Threads take the jobs: each waits for the
oldest buffer to have left, reads the files into it, and asks for the copies to the device, which go
on behind its back. Files are read and not mapped: that gives an error and no signal if one shrinks.

All that depends on the device is in a :class:`DeviceStream`. The caller's thread alone takes memory of the
device, so that it comes from where the caller wants it and is there for the caller's stream.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import traceback
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from blobstore.core.progress import Meter
from blobstore.core.tensor import DTYPES, TensorSpec
from blobstore.errors import BlobstoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
    from concurrent.futures import Future

    from blobstore.core.progress import Progress
    from blobstore.models.frameworks import Dequantize, DeviceStream, Move, StagingBuffer
    from blobstore.models.index import Place
    from blobstore.models.quantized import QuantizedWeights

    Read = Callable[[int, int, memoryview], None]
    _Flight = tuple["_Job", Future[Any]]


_BUFFER = 16 << 20
_THREADS = 8
_SPARE = 2
"""Buffers beyond those that threads read into, so that none waits for its own copy."""
_ALIGNMENT = 64
"""Of tensors in a buffer; those that are no multiples of it cost a request each."""


class Upload(NamedTuple):
    """A tensor, and where its bytes are."""

    spec: TensorSpec
    blob: int
    """Place of the blob among those of the model."""
    begin: int
    """Offset in the blob of the first byte."""


def transfer(
    parts: Sequence[Upload],
    lane: DeviceStream,
    read: Read,
    *,
    progress: Progress | None = None,
    buffer: int = _BUFFER,
) -> Generator[tuple[str, Any], None, None]:
    """Yield the names and tensors of ``parts`` in their order, in the memory of ``lane``'s device.

    A tensor may be used at once on the stream that is current when it is yielded. Those that follow
    are on their way by then, as many as the buffers hold. When an error is raised or the generator
    is closed, no copy is under way any more, and what was not yielded is let go of.

    Args:
        parts: the tensors.
        lane: the way to the device.
        read: fills memory with the bytes of the blob at a place, from an offset on; it is called by
            many threads at once.
        progress: told of the bytes that have been read.
        buffer: bytes of one staging buffer.

    Raises:
        BlobstoreError: the device has no memory left, or fails. Otherwise what ``read`` raises.
    """
    sizes = [part.spec.nbytes for part in parts]
    meter = Meter(progress, sum(sizes))
    size = min(buffer, sum(map(_aligned, sizes)))
    ring = _Ring(lane, size, _THREADS + _SPARE)
    flights: deque[_Flight] = deque()
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="blobstore") as pool:
        try:
            for flight in _departures(_jobs(parts, lane, size), pool, ring, read):
                flights.append(flight)
                if len(flights) == _THREADS + _SPARE:
                    yield from _arrivals(flights, lane, meter)
            while flights:
                yield from _arrivals(flights, lane, meter)
            lane.drain()
        except BaseException as error:  # also Ctrl-C, and the end of the generator
            pool.shutdown(wait=True, cancel_futures=True)
            with contextlib.suppress(BlobstoreError):
                lane.drain()
            # Whoever keeps the error keeps these frames, but shall not keep tensors by that.
            traceback.clear_frames(error.__traceback__)
            for job, _ in flights:
                job.forget()
            raise


class _Job:
    """What goes through one buffer at once."""

    def __init__(self) -> None:
        self.filled = 0
        self.nbytes = 0
        self.reads: list[tuple[int, int, int, int]] = []
        """Blob, offset in it, offset in the buffer, and count of bytes that are read at once."""
        self.moves: list[Move] = []
        self.finished: deque[tuple[str, Any]] = deque()
        """Tensors whose last byte is among these."""

    def add(self, tensor: Any, start: int, count: int, blob: int, begin: int) -> None:
        """Take bytes of a blob along, which are those of ``tensor`` from ``start`` on."""
        at = _aligned(self.filled)
        self.moves.append((tensor, start, at, count))
        end = self.reads[-1] if self.reads and at == self.filled else (-1, 0, 0, 0)
        if (end[0], end[1] + end[3]) == (blob, begin):
            self.reads[-1] = (blob, end[1], end[2], end[3] + count)
        else:
            self.reads.append((blob, begin, at, count))
        self.filled = at + count
        self.nbytes += count

    def room(self, size: int) -> int:
        """Return how many bytes a buffer of ``size`` has left."""
        return max(size - _aligned(self.filled), 0)

    def forget(self) -> None:
        """Let go of the tensors."""
        self.moves.clear()
        self.finished.clear()


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT


def _jobs(parts: Sequence[Upload], lane: DeviceStream, size: int) -> Iterator[_Job]:
    """Cut the bytes of ``parts`` into jobs, taking memory for each tensor when its turn comes."""
    job = _Job()
    for spec, blob, begin in parts:
        tensor = lane.room(spec)
        done, nbytes = 0, spec.nbytes
        while done < nbytes:
            count = min(job.room(size), nbytes - done)
            if count:
                job.add(tensor, done, count, blob, begin + done)
                done += count
            else:
                yield job
                job = _Job()
        job.finished.append((spec.name, tensor))
    yield job


class _Ring:
    """At most ``count`` staging buffers, made when they are needed, the oldest taken first.

    There must be more than threads take at a time.
    """

    def __init__(self, lane: DeviceStream, size: int, count: int) -> None:
        self.lane = lane
        self._size = size
        self._to_make = count
        self._free: deque[StagingBuffer] = deque()
        self._lock = threading.Lock()

    def take(self) -> StagingBuffer:
        """Return a buffer whose bytes have left."""
        with self._lock:
            is_new = self._to_make > 0
            if is_new:
                self._to_make -= 1
            else:
                staging = self._free.popleft()
        if is_new:
            return self._made()
        staging.wait()
        return staging

    def give(self, staging: StagingBuffer) -> None:
        """Take back a buffer whose bytes are on their way."""
        with self._lock:
            self._free.append(staging)

    def _made(self) -> StagingBuffer:
        try:
            return self.lane.staging(self._size)
        except BaseException:
            with self._lock:
                self._to_make += 1
            raise


def _departures(
    jobs: Iterator[_Job], pool: ThreadPoolExecutor, ring: _Ring, read: Read
) -> Iterator[_Flight]:
    for job in jobs:
        after = ring.lane.mark()
        yield job, pool.submit(_carry, job, after, ring, read)


def _carry(job: _Job, after: Any, ring: _Ring, read: Read) -> Any:
    """Read the bytes of a job and send them off; return what tells of their arrival."""
    staging = ring.take()
    try:
        for blob, begin, at, count in job.reads:
            read(blob, begin, staging.memory[at : at + count])
        return staging.send(job.moves, after)
    finally:
        job.moves.clear()
        ring.give(staging)


def _arrivals(
    flights: deque[_Flight], lane: DeviceStream, meter: Meter
) -> Iterator[tuple[str, Any]]:
    """Yield the tensors that the oldest job has finished."""
    job, flight = flights[0]
    lane.receive(flight.result())
    meter.add(job.nbytes, "loading")
    while job.finished:
        yield job.finished.popleft()
    flights.popleft()


def upload_tensors(
    names: Iterable[str],
    places: Mapping[str, Place],
    packed: QuantizedWeights,
    lane: DeviceStream,
    read: Callable[[int, int, memoryview], None],
    *,
    dequantize: Dequantize | None = None,
    progress: Progress | None = None,
) -> Iterator[tuple[str, Any]]:
    """Yield names and tensors in the order of ``names``.

    Args:
        names: of the tensors.
        places: where the tensors of the model are.
        packed: the quantized weights of the model.
        lane: the way to the device.
        read: fills memory with the bytes of a blob; see :func:`~blobstore.models.device.transferred`.
        dequantize: makes plain numbers of quantized weights, if they are to be such; on the device.
        progress: told of the bytes that have been read.

    Raises:
        UnsupportedDType: the framework has no type for a tensor, or a weight does not say how it is
            quantized. Otherwise as :func:`~blobstore.models.device.transferred`.
    """
    needed: dict[str, tuple[str, ...]] = {}
    for name in names:
        is_packed = dequantize is not None and name in packed
        needed[name] = (name, *packed.companions(name).values()) if is_packed else ()
    stored = itertools.chain.from_iterable(ends or (name,) for name, ends in needed.items())
    parts = [_part(end, places[end]) for end in stored]
    with contextlib.closing(transfer(parts, lane, read, progress=progress)) as arriving:
        for name, ends in needed.items():
            if dequantize is None or not ends:
                yield next(arriving)
            else:
                arrays = itertools.islice(arriving, len(ends))
                yield name, packed.numbers(name, dict(arrays), dequantize)
        next(arriving, None)  # to its end, where it waits for the device


def _part(name: str, place: Place) -> Upload:
    dtype, shape, blob, begin = place
    return Upload(TensorSpec(name, DTYPES[dtype], tuple(shape)), blob, begin)
