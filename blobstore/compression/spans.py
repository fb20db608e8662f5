"""What a blob is made of: the runs of bytes that are coded apart, found from its first bytes."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from zlib_ng.zlib_ng import crc32

from blobstore.errors import InvalidHeader
from blobstore.safetensors.header import PREFIX_SIZE, header_size, parse_header

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer

    from blobstore.core.tensor import DType


class Span(NamedTuple):
    """Bytes of a blob that have one type."""

    size: int
    dtype: DType | None = None
    """None where nothing is known of them."""
    same_as: int | None = None
    """The number of an earlier run of the same bytes and the same type."""
    base_begin: int | None = None
    """Where what they are to be compared with begins in the base blob."""
    factors: bytes | None = None
    """What predicts them from that, packed, with the run's type."""
    shape: tuple[int, ...] = ()
    """Of the tensor that they are; nothing is written of it."""


def spans_of(start: Buffer, size: int) -> list[Span]:
    """Return the runs of a blob of ``size`` bytes: a header and tensors, or one run of bytes.

    Args:
        start: the first bytes of the blob, with all of its header, if it has one.
        size: of the blob.
    """
    view = memoryview(start).cast("B")
    try:
        end = PREFIX_SIZE + header_size(view[:PREFIX_SIZE], size)
        header = parse_header(view[PREFIX_SIZE:end], size)
    except InvalidHeader:
        return [Span(size)] if size else []
    return [
        Span(end),
        *(
            Span(entry.end - entry.begin, entry.spec.dtype, shape=entry.spec.shape)
            for entry in header.tensors.values()
            if entry.end > entry.begin
        ),
    ]


def split(run: Span) -> list[Span]:
    """Return the runs of the slices of a tensor along its first dimension."""
    count, *shape = run.shape
    size = run.size // count
    part = run._replace(size=size, shape=tuple(shape))
    if run.base_begin is None:
        return [part] * count
    begin = run.base_begin
    return [part._replace(base_begin=begin + number * size) for number in range(count)]


def with_equals(runs: Sequence[Span], blob: Buffer) -> list[Span]:
    """Return the runs with those marked that have the bytes of an earlier one."""
    data = np.frombuffer(memoryview(blob), np.uint8)
    ends = list(accumulate(run.size for run in runs))
    counts = Counter(run[:2] for run in runs)
    earlier: dict[tuple[object, ...], int] = {}
    marked = []
    for number, (run, end) in enumerate(zip(runs, ends, strict=True)):
        same = None
        if counts[run[:2]] > 1:
            mine = data[end - run.size : end]
            # A sum that is equal by chance, or by design, costs one comparison and no harm.
            other = earlier.setdefault((*run[:2], crc32(mine)), number)
            theirs = data[ends[other] - run.size : ends[other]]
            same = other if other != number and np.array_equal(mine, theirs) else None
        marked.append(run._replace(same_as=same))
    return marked
