"""Predicts a tensor from its base plus a product of two narrow matrices.

Fine-tuning often changes a matrix by an update of nearly low rank. Merged adapters do so by construction;
measurements show the same for the first few hundred steps of full fine-tuning. The factors are small
integers times powers of two. Every partial sum of their product is a multiple of the smallest power, and
less than 2**24 times it. So float32 represents it exactly on every machine, in any order, with or without
fused multiplication. One addition to the base and one rounding follow, which IEEE 754 defines completely.
Processors differ in subnormal numbers, infinities and NaN; these are predicted to stay as they are.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from blobstore.compression.entropy import decode_plane, encode_plane
from blobstore.compression.scratch import scratch
from blobstore.core.tensor import DType
from blobstore.errors import ColdDamaged

if TYPE_CHECKING:
    from typing import Final

    Array = np.ndarray[Any, Any]

MAX_RANK: Final = 64
MAX_SIDE: Final = 1 << 20
"""Maximum of rows or columns: a short file may declare any number, and complete rows are computed."""
_EXPONENTS: Final = range(-100, 61)
"""Powers of two of the factors: with these, sums are neither subnormal nor infinite."""
_EXACT: Final = 1 << 24
_SERIAL_PRODUCTS: Final = 1 << 18
"""Multiplications that BLAS does in the calling thread. For more it wakes others, which are busy."""
_HEAD: Final = struct.Struct("<BII")
_PLANE: Final = struct.Struct("<BI")
_FIELDS: Final = {
    DType.BF16: (0x7F80, 0x80),
    DType.F16: (0x7C00, 0x400),
    DType.F32: (0x7F800000, 0x800000),
}
"""The bits of the exponent, and its unit."""


class Factors(NamedTuple):
    """The update of a base of ``rows`` by ``columns``: ``sum(2**e * outer(l, r))``."""

    exponents: tuple[int, ...]
    left: Array
    """int8, one row per term."""
    right: Array
    """int8, one row per term."""

    @property
    def rank(self) -> int:
        """Number of terms."""
        return len(self.exponents)


def can_predict(dtype: DType) -> bool:
    """Return whether low-rank factors can predict elements of ``dtype``."""
    return dtype in _FIELDS


def pack(factors: Factors) -> bytes:
    """Return the factors as bytes."""
    head = _HEAD.pack(factors.rank, factors.left.shape[1], factors.right.shape[1])
    planes = [encode_plane(side.tobytes()) for side in (factors.left, factors.right)]
    tables = [_PLANE.pack(plane.method, plane.size) for plane in planes]
    exponents = struct.pack(f"<{factors.rank}b", *factors.exponents)
    return b"".join([head, exponents, *tables, *(plane.data for plane in planes)])


def unpack(stored: memoryview, elements: int) -> Factors:
    """Return the factors of a tensor of ``elements`` elements.

    Raises:
        ColdDamaged: they are truncated, do not fit the tensor, or their product is not exact.
    """
    try:
        rank, rows, columns = _HEAD.unpack_from(stored)
        fits = rows * columns == elements and max(rows, columns) <= MAX_SIDE
        # Limit the rank to that of a matrix, so that factors need no more memory than the tensor.
        if not 1 <= rank <= min(MAX_RANK, rows, columns) or not fits:
            raise ColdDamaged(
                f"factors of rank {rank}, {rows} by {columns}, for {elements} elements"
            )
        exponents = struct.unpack_from(f"<{rank}b", stored, _HEAD.size)
        at = _HEAD.size + rank
        tables = [_PLANE.unpack_from(stored, at), _PLANE.unpack_from(stored, at + _PLANE.size)]
    except struct.error as error:
        raise ColdDamaged(f"the head of factors is truncated: {error}") from None
    at += 2 * _PLANE.size
    sides = []
    for size, (method, coded) in zip((rows, columns), tables, strict=True):
        side = np.empty((rank, size), np.int8)
        decode_plane(method, stored[at : at + coded], side.reshape(-1).view(np.uint8).data)
        at += coded
        sides.append(side)
    if at != len(stored):
        raise ColdDamaged(f"factors end at byte {at} of {len(stored)}")
    factors = Factors(exponents, *sides)
    _check(factors)
    return factors


def _check(factors: Factors) -> None:
    least = min(factors.exponents)
    largest = sum(
        int(np.abs(left.astype(np.int16)).max()) * int(np.abs(right.astype(np.int16)).max())
        << (exponent - least)
        for exponent, left, right in zip(*factors, strict=True)
    )
    if largest >= _EXACT or not {least, max(factors.exponents)} <= set(_EXPONENTS):
        raise ColdDamaged("factors whose product is not exact")


class LowRankPredictor:
    """Predicts chunks of one tensor from a base and low-rank factors. Threads may share it."""

    def __init__(self, factors: Factors, dtype: DType) -> None:
        powers = np.ldexp(np.float32(1), np.array(factors.exponents))[:, None]
        self._left = np.ascontiguousarray((factors.left * powers).astype(np.float32).T)
        self._right = factors.right.astype(np.float32)
        self._dtype = dtype

    def predict(self, base: Array, first: int) -> Array:
        """Return the predicted elements from number ``first`` on.

        The result is valid until this thread's next call.

        Args:
            base: elements of the base, as unsigned integers.
            first: index in the tensor of the first element.
        """
        columns = self._right.shape[1]
        start, end = first // columns, -(-(first + len(base)) // columns)
        added = scratch("delta added", (end - start) * columns * 4).view(np.float32)
        rows = added.reshape(end - start, columns)
        if len(self._right) == 1:  # BLAS is slow for rank 1
            np.multiply(self._left[start:end], self._right, out=rows)
        else:
            height = max(_SERIAL_PRODUCTS // self._right.size, 1)
            for row in range(0, end - start, height):
                left = self._left[start + row : min(start + row + height, end)]
                np.matmul(left, self._right, out=rows[row : row + height])
        skipped = first - start * columns
        predicted = scratch("delta predicted", base.nbytes).view(base.dtype)
        with np.errstate(all="ignore"):
            _ADD[self._dtype](base, added[skipped : skipped + len(base)], predicted)
        # Elements that are 0, subnormal or not finite are predicted to stay as they are.
        mask, unit = _FIELDS[self._dtype]
        exponents = scratch("delta shifted", base.nbytes).view(base.dtype)
        np.bitwise_and(base, mask, out=exponents)
        np.subtract(exponents, unit, out=exponents)
        if exponents.max(initial=0) >= mask - unit:
            np.copyto(predicted, base, where=exponents >= mask - unit)
        return predicted


def _add_bf16(base: Array, added: Array, out: Array) -> None:
    wide = scratch("delta wide", len(base) * 4).view(np.uint32)
    np.copyto(wide, base)
    np.left_shift(wide, 16, out=wide)
    np.add(wide.view(np.float32), added, out=wide.view(np.float32))
    np.add(wide, 0x8000, out=wide)
    np.right_shift(wide, 16, out=wide)
    np.copyto(out, wide, casting="unsafe")


def _add_f16(base: Array, added: Array, out: Array) -> None:
    wide = scratch("delta wide", len(base) * 4).view(np.float32)
    np.copyto(wide, base.view(np.float16))
    np.add(wide, added, out=wide)
    np.copyto(out.view(np.float16), wide, casting="same_kind")


def _add_f32(base: Array, added: Array, out: Array) -> None:
    np.add(base.view(np.float32), added, out=out.view(np.float32))


_ADD: Final = {DType.BF16: _add_bf16, DType.F16: _add_f16, DType.F32: _add_f32}


def quantized(left: Array, right: Array, limit: int) -> Factors | None:
    """Return integer factors that approximate ``left.T @ right``, or None if there are none.

    Args:
        left: array of terms by rows, as float32.
        right: array of terms by columns, as float32.
        limit: the largest integer, at most 127.
    """
    if not len(right):
        return None
    largest = np.maximum(right.max(axis=1), -right.min(axis=1))
    scaled = left * (largest / np.float32(limit))[:, None]
    reaches = np.maximum(scaled.max(axis=1), -scaled.min(axis=1))
    if not (np.isfinite(reaches).all() and (reaches > 0).all()):
        return None
    wanted = np.ceil(np.log2(reaches / limit)).astype(np.int64)
    # Terms far below the largest are coarser, so that their sums with it are exact.
    distance = ((_EXACT - 1) // (len(right) * limit * limit)).bit_length() - 1
    exponents = np.maximum(wanted, wanted.max() - distance)
    if not {int(exponents.min()), int(exponents.max())} <= set(_EXPONENTS):
        return None
    scaled *= np.ldexp(np.float32(1), -exponents)[:, None]
    lefts = np.rint(scaled, out=scaled).astype(np.int8)
    rights = np.rint(right * (np.float32(limit) / largest)[:, None]).astype(np.int8)
    return Factors(tuple(exponents.tolist()), lefts, rights)
