"""Blobs made cold: a stream of pieces becomes a stream of stored planes, and a table behind them.

The table comes last, for nobody knows the sizes of planes before they are made: so whatever takes
bytes in order can be written to, nothing is written twice, and a file that was cut short has no
table. What is written depends on the bytes, the outline and the level, and on nothing else. (Of the
outline, factors are found with sums that another kind of processor may round otherwise.)
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from zlib_ng.zlib_ng import crc32

from blobstore.compression.base import Start
from blobstore.compression.chunks import encode_chunk
from blobstore.compression.delta.low_rank import can_predict, unpack
from blobstore.compression.entropy import Method, Plane
from blobstore.compression.scratch import scratch
from blobstore.compression.table import (
    MAX_CHUNK,
    MAX_FACTORS,
    PREFIX,
    Part,
    StoredFactors,
    Table,
    encode_table,
)
from blobstore.compression.transforms import width_of
from blobstore.compression.tuning import Choice, Level
from blobstore.core.digest import Digester
from blobstore.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from concurrent.futures import Executor, Future
    from typing import Final

    from typing_extensions import Buffer

    from blobstore.compression.base import BaseBlob
    from blobstore.compression.delta.low_rank import Factors
    from blobstore.compression.spans import Span
    from blobstore.compression.table import Chunk
    from blobstore.core.digest import Digest

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]
    Write = Callable[[Buffer], object]

_CHUNKS: Final = {1: 1 << 19, 2: 1 << 20, 4: 1 << 19, 8: 1 << 20}
"""Bytes of a chunk, about, by the width of its elements.

With fewer, threads wait for the interpreter's lock more than they work; with more of 32-bit floats, two
kinds of them share a code.
"""
_GRAIN: Final = 1 << 12
"""Bytes that chunks are whole numbers of, but for the last."""
_CHOSEN_FOR: Final = 32
"""Chunks that share a choice of layout."""
_BATCH: Final = 1 << 20
"""Bytes, about, that a thread is given at a time."""
_AHEAD: Final = 4
"""Batches that are begun before the first of them is written."""


class _Task(NamedTuple):
    """A chunk that is to be coded."""

    chunk: memoryview
    width: int
    begin: int
    """Its offset in its part."""
    start: Start | None
    factors: bytes | None
    """What belongs before its planes, for it is a part's first."""
    choice: Choice


def encode(
    pieces: Iterable[Buffer],
    runs: Sequence[Span],
    write: Write,
    *,
    level: Level = Level.FAST,
    digest: Digest | None = None,
    base: BaseBlob | None = None,
    executor: Executor | None = None,
) -> Table:
    """Write the cold form of a blob, and return its table.

    Args:
        pieces: the blob's bytes in order; one piece with all of them is not copied. Each must stay
            as it is until the blob is coded.
        runs: what the blob is made of.
        write: is called with bytes in order, which are good until it returns.
        level: what is sought.
        digest: of the blob, if it is known already; what is decoded later is checked against it.
        base: the blob that runs with a ``base_begin`` are compared with.
        executor: its threads code chunks; else the caller's does.

    Raises:
        UsageError: the pieces are not what the runs describe.
    """
    parts = _parts(runs)
    has_base = any(part.base_begin is not None for part in parts)
    if has_base and base is None:
        raise UsageError("runs that are compared with a base need one")
    digester = Digester()
    source = _Source(pieces if digest is not None else _hashed(pieces, digester))
    chunks: list[Chunk] = []
    write(PREFIX)
    for chunk, planes in _coded(_tasks(source, runs, parts, level, base), executor):
        chunks.append(chunk)
        for plane in planes:
            write(plane.data)
    source.expect_end()
    table = Table(
        digest or digester.digest(),
        sum(run.size for run in runs),
        base.identity if base is not None and has_base else None,
        parts,
        chunks,
    )
    write(encode_table(table))
    return table


def _parts(runs: Sequence[Span]) -> list[Part]:
    parts: list[Part] = []
    for run in runs:
        part = _part(run)
        if run.same_as is not None:
            # It has the chunks of that one, whose base may make them larger.
            part = part._replace(chunk_size=parts[run.same_as].chunk_size)
        parts.append(part)
    return parts


def _part(run: Span) -> Part:
    """Return a part with chunks of about equal size, so that none is a small rest."""
    width = width_of(run.dtype)
    if not run.size or run.size % width:
        raise UsageError(f"a run of {run.size} bytes has no whole elements of {width} bytes")
    wanted = _CHUNKS[width]
    if run.base_begin is not None:
        wanted = MAX_CHUNK
    count = max((run.size + wanted // 2) // wanted, -(-run.size // MAX_CHUNK))
    size = -(-run.size // (count * _GRAIN)) * _GRAIN if count > 1 else -(-run.size // width) * width
    factors = run.factors and StoredFactors(crc32(run.factors), len(run.factors))
    return Part(run.size, width, min(size, MAX_CHUNK), run.same_as, run.base_begin, factors or None)


def _tasks(
    source: _Source,
    runs: Sequence[Span],
    parts: Sequence[Part],
    level: Level,
    base: BaseBlob | None,
) -> Iterator[_Task]:
    """Yield the chunks that are to be coded, each with the choice that it shares."""
    for run, part in zip(runs, parts, strict=True):
        start = None
        if base is not None and part.base_begin is not None:
            factors = _factors(run)
            start = Start(base, part.base_begin, factors, run.dtype)
        for number, begin in enumerate(range(0, part.size, part.chunk_size)):
            chunk = source.take(min(part.chunk_size, part.size - begin))
            if part.same_as is not None:
                continue
            if number % _CHOSEN_FOR == 0:
                known = start.read(begin, len(chunk)) if start is not None else None
                choice = Choice(_aligned(chunk, part.width), known, run.dtype, level)
            before = run.factors if number == 0 else None
            yield _Task(chunk, part.width, begin, start, before, choice)


def _factors(run: Span) -> Factors | None:
    if run.factors is None:
        return None
    if run.dtype is None or not can_predict(run.dtype) or len(run.factors) >= MAX_FACTORS:
        raise UsageError("such factors cannot predict such a run")
    return unpack(memoryview(run.factors), run.size // width_of(run.dtype))


def _coded(
    tasks: Iterator[_Task], executor: Executor | None
) -> Iterator[tuple[Chunk, list[Plane]]]:
    """Yield the chunks and their planes in order, which are good until the next is asked for."""
    if executor is None:
        yield from map(_code, tasks)
        return
    running: deque[Future[list[tuple[Chunk, list[Plane]]]]] = deque()
    try:
        for batch in _batches(tasks):
            running.append(executor.submit(_code_all, batch))
            if len(running) > _AHEAD:
                yield from running.popleft().result()
        while running:
            yield from running.popleft().result()
    finally:
        wait([future for future in running if not future.cancel()])  # they read the pieces


def _code(task: _Task) -> tuple[Chunk, list[Plane]]:
    start = task.start.read(task.begin, len(task.chunk)) if task.start is not None else None
    chunk, planes = encode_chunk(_aligned(task.chunk, task.width), start, task.choice.ways())
    if task.factors is not None:
        planes.insert(0, Plane(Method.RAW, task.factors, len(task.factors)))
    return chunk, planes


def _code_all(tasks: Sequence[_Task]) -> list[tuple[Chunk, list[Plane]]]:
    """Return the chunks with planes that do not lie in the memory of this thread."""
    coded = []
    for task in tasks:
        chunk, planes = _code(task)
        coded.append((chunk, [plane._replace(data=bytes(plane.data)) for plane in planes]))
    return coded


def _batches(tasks: Iterator[_Task]) -> Iterator[list[_Task]]:
    batch: list[_Task] = []
    size = 0
    for task in tasks:
        batch.append(task)
        size += len(task.chunk)
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _aligned(chunk: memoryview, width: int) -> Bytes:
    """Return a chunk as an array, copied if its elements do not lie as processors want them."""
    array = np.frombuffer(chunk, np.uint8)
    if array.ctypes.data % width == 0:
        return array
    copy = scratch("unaligned", len(array))
    np.copyto(copy, array)
    return copy


def _hashed(pieces: Iterable[Buffer], digester: Digester) -> Iterator[Buffer]:
    for piece in pieces:
        digester.update(piece)
        yield piece


class _Source:
    """The pieces of a blob as runs of bytes of any length."""

    def __init__(self, pieces: Iterable[Buffer]) -> None:
        self._pieces = iter(pieces)
        self._piece = memoryview(b"")

    def take(self, size: int) -> memoryview:
        """Return the next bytes: where they lie, or copied together from several pieces."""
        if len(self._piece) < size:
            joined = bytearray(self._piece)
            while len(joined) < size:
                self._next()
                taken = self._piece[: size - len(joined)]
                joined += taken
                self._piece = self._piece[len(taken) :]
            return memoryview(joined)
        taken, self._piece = self._piece[:size], self._piece[size:]
        return taken

    def expect_end(self) -> None:
        """Take what is left, which must be nothing."""
        if len(self._piece) or any(memoryview(piece).nbytes for piece in self._pieces):
            raise UsageError("the pieces have more bytes than the runs describe")

    def _next(self) -> None:
        piece = next(self._pieces, None)
        if piece is None:
            raise UsageError("the pieces have fewer bytes than the runs describe")
        self._piece = memoryview(piece).cast("B")
