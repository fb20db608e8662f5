"""Tensors copied from blob files into a device's memory, through a ring of staging buffers.

The bytes of all tensors form one stream, which is cut into jobs of one buffer each: a large tensor
goes through many buffers, and many small tensors through one. Each thread takes a job, waits until
the copies from the oldest buffer are done, reads files into that buffer, and requests the copies to
the device, which happen in the background. Files are read and not mapped: if one shrinks, that
raises an error instead of a signal.

Everything that depends on the device is in a :class:`DeviceStream`. Only the caller's thread
allocates device memory, so that it comes from the pool that the caller has chosen and belongs to the
caller's stream.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import traceback
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from blobstore.core.progress import Meter
from blobstore.errors import BlobstoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
    from concurrent.futures import Future

    from blobstore.core.progress import Progress
    from blobstore.models.frameworks import DeviceStream, Move, StagingBuffer
    from blobstore.models.header_index import TensorIndex, TensorLocation
    from blobstore.models.quantized import QuantizedWeights

    Read = Callable[[int, int, memoryview], None]
    """Fills memory with bytes of the blob in a slot, from an offset on."""

_BUFFER = 16 << 20
_THREADS = 8
_SPARE = 2
"""Buffers beyond those that threads read into, so that no thread waits for its own copy."""
_ALIGNMENT = 64
"""Alignment of tensors in a buffer. A tensor of another size needs a request of its own."""


def upload_tensors(
    names: Iterable[str],
    index: TensorIndex,
    weights: QuantizedWeights,
    stream: DeviceStream,
    read: Read,
    *,
    progress: Progress | None = None,
) -> Iterator[tuple[str, Any]]:
    """Yield names and tensors in the order of ``names``.

    Args:
        names: the tensors to upload.
        index: the tensors of the model.
        weights: its quantized weights, which are dequantized on the device.
        stream: copies bytes to the device.
        read: reads bytes of a blob; many threads call it at once.
        progress: called with the bytes that were read.

    Raises:
        UnsupportedDType: the framework has no such type, or a weight's blob does not say how it is
            quantized. Otherwise as :func:`transfer`.
    """
    stored_names: dict[str, tuple[str, ...]] = {}
    for name in names:
        is_quantized = name in weights.dequantized
        stored_names[name] = (name, *weights.qparams(name).values()) if is_quantized else (name,)
    tensors = [index.location(name) for name in itertools.chain(*stored_names.values())]
    with contextlib.closing(transfer(tensors, stream, read, progress=progress)) as arriving:
        for name, stored in stored_names.items():
            if name in weights.dequantized:
                yield name, weights.dequantize(name, dict(itertools.islice(arriving, len(stored))))
            else:
                yield next(arriving)
        next(arriving, None)  # run it to its end, where it waits for the device


def transfer(
    tensors: Sequence[TensorLocation],
    stream: DeviceStream,
    read: Read,
    *,
    progress: Progress | None = None,
    buffer: int = _BUFFER,
) -> Generator[tuple[str, Any], None, None]:
    """Yield the names of ``tensors`` and the tensors on the device, in the same order.

    A tensor may be used at once on the stream that is current when it is yielded. That must be the
    same stream for all tensors. By then, the tensors after it are on their way, as many as the
    buffers hold. When an error is raised or the generator is closed, no copy is in progress any
    more, and tensors that were not yielded are freed.

    Args:
        tensors: the tensors to copy.
        stream: copies bytes to the device.
        read: reads bytes of a blob; many threads call it at once.
        progress: called with the bytes that were read.
        buffer: the bytes of one staging buffer.

    Raises:
        BlobstoreError: the device is out of memory, or fails. Otherwise as ``read``.
    """
    sizes = [tensor.spec.nbytes for tensor in tensors]
    meter = Meter(progress, sum(sizes))
    size = min(buffer, sum(map(_aligned, sizes)))
    ring = _Ring(stream, size, _THREADS + _SPARE)
    flights: deque[tuple[_Job, Future[Any]]] = deque()

    def arrive() -> Iterator[tuple[str, Any]]:
        """Yield the tensors that are complete with the oldest job."""
        job, flight = flights[0]
        stream.receive(flight.result())
        meter.add(job.nbytes, "loading")
        while job.finished:
            yield job.finished.popleft()
        flights.popleft()

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="blobstore") as pool:
        try:
            for job in _Job.cut(tensors, stream, size):
                flights.append((job, pool.submit(job.carry, stream.mark(), ring, read)))
                if len(flights) == _THREADS + _SPARE:
                    yield from arrive()
            while flights:
                yield from arrive()
            stream.drain()
        except BaseException as error:  # including Ctrl-C, and closing the generator
            pool.shutdown(wait=True, cancel_futures=True)
            with contextlib.suppress(BlobstoreError):
                stream.drain()
            # Keeping the error keeps these frames alive, and must not keep tensors alive.
            traceback.clear_frames(error.__traceback__)
            for job, _ in flights:
                job.moves.clear()
                job.finished.clear()
            raise


class _Job:
    """The bytes that go through one buffer at once."""

    def __init__(self) -> None:
        self.filled = 0
        self.nbytes = 0
        self.reads: list[tuple[int, int, int, int]] = []
        """Slot, offset in its blob, offset in the buffer, and number of bytes of each read."""
        self.moves: list[Move] = []
        self.finished: deque[tuple[str, Any]] = deque()
        """Tensors whose last byte is among these bytes."""

    @classmethod
    def cut(
        cls, tensors: Sequence[TensorLocation], stream: DeviceStream, size: int
    ) -> Iterator[_Job]:
        """Cut the bytes of ``tensors`` into jobs; allocate each tensor when its turn comes."""
        job = cls()
        for spec, slot, begin in tensors:
            tensor = stream.empty(spec)
            done, nbytes = 0, spec.nbytes
            while done < nbytes:
                count = min(max(size - _aligned(job.filled), 0), nbytes - done)
                if count:
                    job.add(tensor, done, count, slot, begin + done)
                    done += count
                else:
                    yield job
                    job = cls()
            job.finished.append((spec.name, tensor))
        yield job

    def add(self, tensor: Any, start: int, count: int, slot: int, begin: int) -> None:
        """Add bytes of a blob, which belong to ``tensor`` at ``start``."""
        at = _aligned(self.filled)
        self.moves.append((tensor, start, at, count))
        last = self.reads[-1] if self.reads and at == self.filled else (-1, 0, 0, 0)
        if (last[0], last[1] + last[3]) == (slot, begin):
            self.reads[-1] = (slot, last[1], last[2], last[3] + count)
        else:
            self.reads.append((slot, begin, at, count))
        self.filled = at + count
        self.nbytes += count

    def carry(self, after: Any, ring: _Ring, read: Read) -> Any:
        """Read the bytes, request their copies, and return what the stream receives."""
        staging = ring.take()
        try:
            for slot, begin, at, count in self.reads:
                read(slot, begin, staging.memory[at : at + count])
            return staging.send(self.moves, after)
        finally:
            self.moves.clear()
            ring.give(staging)


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT


class _Ring:
    """At most ``count`` staging buffers, made on demand. The oldest one is taken first.

    There must be more buffers than threads take at a time.
    """

    def __init__(self, stream: DeviceStream, size: int, count: int) -> None:
        self._stream = stream
        self._size = size
        self._to_make = count
        self._free: deque[StagingBuffer] = deque()
        self._lock = threading.Lock()

    def take(self) -> StagingBuffer:
        """Return a buffer whose copies are done."""
        with self._lock:
            is_new = self._to_make > 0
            if is_new:
                self._to_make -= 1
            else:
                staging = self._free.popleft()
        if not is_new:
            staging.wait()
            return staging
        try:
            return self._stream.staging(self._size)
        except BaseException:
            with self._lock:
                self._to_make += 1
            raise

    def give(self, staging: StagingBuffer) -> None:
        """Return a buffer whose copies were requested."""
        with self._lock:
            self._free.append(staging)
