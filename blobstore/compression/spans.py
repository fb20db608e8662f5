"""Spans: the ranges of a blob that are compressed separately, found from its header."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from zlib_ng.zlib_ng import crc32

from blobstore.compression.block_fields import FIELDS
from blobstore.core.tensor import DType
from blobstore.errors import InvalidHeader
from blobstore.safetensors.header import PREFIX_SIZE, header_size, parse_header

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Final

    from typing_extensions import Buffer

    from blobstore.compression.quant_rule import Rule
    from blobstore.core.tensor import TensorSpec
    from blobstore.gguf.types import GgufType
    from blobstore.safetensors.header import Header


_BLOCKS: Final = {
    # MLX has types with the names of two types of GGUF, which docs/format.md therefore calls otherwise.
    f"{'gguf_' if fields.kind.name in {'MXFP4', 'NVFP4'} else ''}{fields.kind.name.lower()}": fields.kind
    for fields in FIELDS.values()
}
"""Types of blocks by their names in the metadata of blobs."""
_PROBE: Final = 64
"""Last bytes of spans that are compared first."""
_MAX_MERGED: Final = 1 << 16
"""Bytes of spans that are merged if they are not sparse: they share tables of codes."""


class Span(NamedTuple):
    """Consecutive bytes of a blob that have one type."""

    size: int
    dtype: DType | None = None
    """None if the type is unknown."""
    same_as: int | None = None
    """Index of an earlier span with the same bytes and type."""
    base_begin: int | None = None
    """Offset in the base of the bytes that the span is encoded against."""
    factors: bytes | None = None
    """Packed low-rank factors that improve the prediction from those bytes."""
    rule: Rule | None = None
    """How the span is predicted by quantizing elements of the base that begin at ``base_begin``."""
    blocks: GgufType | None = None
    """The type of its blocks, if it is blocks of GGUF; it is not stored."""
    shape: tuple[int, ...] = ()
    """Shape of the tensor; it is not stored."""
    is_sparse: bool = False
    """Whether few elements differ from the base, as far as a sample shows; it is not stored."""


def header_of(start: Buffer, size: int) -> Header | None:
    """Return the header of a blob, or None if it has none.

    Args:
        start: the first bytes of the blob, including its complete header if it has one.
        size: size of the blob.
    """
    view = memoryview(start).cast("B")
    try:
        end = PREFIX_SIZE + header_size(view[:PREFIX_SIZE], size)
        return parse_header(view[PREFIX_SIZE:end], size)
    except InvalidHeader:
        return None


def spans_in(header: Header | None, size: int) -> list[Span]:
    """Return the spans of a blob of this size: its header and tensors, or one span if there is no header."""
    if header is None:
        return [Span(size)] if size else []
    return [
        Span(header.data_start),
        *(
            Span(
                entry.end - entry.begin,
                entry.spec.dtype,
                blocks=blocks_of(entry.spec, header.metadata),
                shape=entry.spec.shape,
            )
            for entry in header.tensors.values()
            if entry.end > entry.begin
        ),
    ]


def blocks_of(spec: TensorSpec, metadata: Mapping[str, str]) -> GgufType | None:
    """Return the type of blocks that the metadata of a blob gives for a tensor; if it is wrong, nothing is saved."""
    name = metadata.get(f"{spec.name}.quant_type") or metadata.get("quant_type", "")
    return _BLOCKS.get(name) if spec.dtype is DType.U8 and spec.shape else None


def split_rows(span: Span) -> list[Span]:
    """Return the spans of a tensor's slices along its first dimension."""
    count, *shape = span.shape
    size = span.size // count
    row = span._replace(size=size, shape=tuple(shape))
    if span.base_begin is None:
        return [row] * count
    begin = span.base_begin
    return [row._replace(base_begin=begin + number * size) for number in range(count)]


def mark_duplicates(spans: Sequence[Span], blob: Buffer) -> list[Span]:
    """Return the spans with ``same_as`` set where an earlier one has the same bytes."""
    data = np.frombuffer(memoryview(blob), np.uint8)
    ends = list(accumulate(span.size for span in spans))
    # Most spans differ from all others in a few bytes, and need not be read for a checksum.
    probes = [
        (*span[:2], data[max(end - span.size, end - _PROBE) : end].tobytes())
        for span, end in zip(spans, ends, strict=True)
    ]
    counts = Counter(probes)
    earlier: dict[tuple[object, ...], int] = {}
    marked = []
    for number, (span, probe, end) in enumerate(zip(spans, probes, ends, strict=True)):
        same = None
        if counts[probe] > 1:
            mine = data[end - span.size : end]
            # A collision, accidental or deliberate, costs one comparison and does no harm.
            other = earlier.setdefault((*probe, crc32(mine)), number)
            theirs = data[ends[other] - span.size : ends[other]]
            same = other if other != number and np.array_equal(mine, theirs) else None
        marked.append(span if span.same_as == same else span._replace(same_as=same))
    return marked


def merge_small(spans: Sequence[Span], begins: Sequence[int] = ()) -> list[Span]:
    """Return the spans, with small or sparse neighbours merged that are neighbours in the base, too.

    Each span takes an entry of the table and tables of codes, which outweigh the differences of small
    tensors. A chunk of a sparse span takes time that hardly depends on its size, so all sparse neighbours
    share whole chunks. Only spans of one type are merged; untyped ones, such as headers, suit any type.

    Given where the parts of the base begin, and where the last one ends, all spans within one of these are
    merged instead: then the chunks lie where those of the base lie.
    """
    originals = {span.same_as for span in spans}
    merged: list[Span] = []
    numbers: list[int] = []
    """The new number of each span."""
    for number, span in enumerate(spans):
        is_alone = not originals.isdisjoint((number - 1, number))
        both = None if is_alone or not merged else _merged(merged[-1], span, begins)
        if both is not None:
            merged[-1] = both
        else:
            merged.append(span)
        numbers.append(len(merged) - 1)
    return [
        span if span.same_as is None else span._replace(same_as=numbers[span.same_as])
        for span in merged
    ]


def _merged(one: Span, two: Span, begins: Sequence[int]) -> Span | None:
    """Return the span of both, or None if they cannot be one span."""
    dtype = two.dtype if one.dtype is None else one.dtype
    # A header stays apart, so that blobs of one tensor have chunks at the same places, sparse or not.
    is_sparse = one.is_sparse and two.is_sparse and None not in {one.dtype, two.dtype}
    if one.base_begin is None or two.base_begin != one.base_begin + one.size:
        return None
    if begins:
        end = two.base_begin + two.size
        suits = bisect_right(begins, one.base_begin) == bisect_left(begins, end)
    else:
        suits = is_sparse or one.size + two.size <= _MAX_MERGED
    if (
        not suits
        or two.dtype not in {None, dtype}
        or not (_is_plain(one) and _is_plain(two))
        or (dtype is not None and (8 * one.size % dtype.bits or 8 * two.size % dtype.bits))
    ):
        return None
    return Span(one.size + two.size, dtype, base_begin=one.base_begin, is_sparse=is_sparse)


def _is_plain(span: Span) -> bool:
    """Return whether a span is predicted by bytes of the base as they are, if by any."""
    return span.same_as is None and span.factors is None and span.rule is None
