"""Layouts that know nothing of numbers: a chunk as it is, or a plane for each byte of an element."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from blobstore.archive.layout import Layout
from blobstore.archive.scratch import scratch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Final

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_UINTS: Final[dict[int, np.dtype[Any]]] = {width: np.dtype(f"<u{width}") for width in (2, 4, 8)}


def whole(number: int, width: int) -> Layout:
    """Return the layout of one plane that is the chunk as it is."""
    return Layout(number, width, lambda elements: (elements * width,), _same, _copy)


def bytewise(number: int, width: int) -> Layout:
    """Return the layout of a plane for each byte of an element, the lowest byte first."""
    dtype = _UINTS[width]
    return Layout(
        number,
        width,
        lambda elements: (elements,) * width,
        partial(_split, dtype),
        partial(_merge, dtype),
    )


def _same(chunk: Bytes, _base: Bytes | None) -> Sequence[Bytes]:
    return (chunk,)


def _copy(planes: Sequence[Bytes], out: Bytes, _base: Bytes | None) -> None:
    np.copyto(out, planes[0])


def _split(dtype: np.dtype[Any], chunk: Bytes, _base: Bytes | None) -> Sequence[Bytes]:
    values = chunk.view(dtype)
    wide = scratch("bytewise", len(chunk)).view(dtype)
    planes = [scratch(f"byte {place}", len(values)) for place in range(dtype.itemsize)]
    for place, plane in enumerate(planes):
        np.right_shift(values, place * 8, out=wide)
        np.copyto(plane, wide, casting="unsafe")
    return planes


def _merge(dtype: np.dtype[Any], planes: Sequence[Bytes], out: Bytes, _base: Bytes | None) -> None:
    values = out.view(dtype)
    wide = scratch("bytewise", len(out)).view(dtype)
    np.copyto(values, planes[0])
    for place in range(1, dtype.itemsize):
        np.copyto(wide, planes[place])
        np.multiply(wide, dtype.type(1 << place * 8), out=wide)  # faster than numpy's shift
        np.bitwise_or(values, wide, out=values)
