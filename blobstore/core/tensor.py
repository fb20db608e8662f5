"""Tensor specs: name, element type and shape, as in a safetensors header."""

from __future__ import annotations

import enum
import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Final


class DType(enum.Enum):
    """The element types of the safetensors format, with their names on disk as values.

    The order is that of the reference library, lowest alignment first. Its writer sorts tensors in
    the reverse order.
    """

    BOOL = "BOOL"
    F4 = "F4"
    F6_E2M3 = "F6_E2M3"
    F6_E3M2 = "F6_E3M2"
    U8 = "U8"
    I8 = "I8"
    F8_E5M2 = "F8_E5M2"
    F8_E4M3 = "F8_E4M3"
    F8_E8M0 = "F8_E8M0"
    F8_E4M3FNUZ = "F8_E4M3FNUZ"
    F8_E5M2FNUZ = "F8_E5M2FNUZ"
    I16 = "I16"
    U16 = "U16"
    F16 = "F16"
    BF16 = "BF16"
    I32 = "I32"
    U32 = "U32"
    F32 = "F32"
    C64 = "C64"
    F64 = "F64"
    I64 = "I64"
    U64 = "U64"

    bits: int
    """Bits per element."""
    rank: int
    """Position in this table."""

    # Members are singletons, and the hash of identity is implemented in C. Enum's own, in Python, takes
    # 0.2 us more per lookup, which is noticeable for tens of thousands of tensors.
    __hash__ = object.__hash__


_BITS: Final = {
    DType.F4: 4,
    DType.F6_E2M3: 6,
    DType.F6_E3M2: 6,
    DType.I16: 16,
    DType.U16: 16,
    DType.F16: 16,
    DType.BF16: 16,
    DType.I32: 32,
    DType.U32: 32,
    DType.F32: 32,
    DType.C64: 64,
    DType.F64: 64,
    DType.I64: 64,
    DType.U64: 64,
}
for _rank, _dtype in enumerate(DType):
    _dtype.bits = _BITS.get(_dtype, 8)
    _dtype.rank = _rank

DTYPES: Final[Mapping[str, DType]] = {dtype.value: dtype for dtype in DType}
"""Element types by their name on disk."""


class TensorSpec(NamedTuple):
    """Name, type and shape of a tensor. A tuple, because models have tens of thousands of them."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed elements."""
        return self.elements * self.dtype.bits // 8


class TensorView(NamedTuple):
    """A tensor's bytes: C order, little-endian, packed. The view keeps its memory alive."""

    spec: TensorSpec
    data: memoryview
