"""Tensor specs: name, element type and shape, as in a safetensors header."""

from __future__ import annotations

import enum
import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Final, Self


class DType(enum.Enum):
    """The element types of the safetensors format, with their names on disk as values.

    A row has the name, the bits per element, and the name that torch and numpy, with ``ml_dtypes``, have for
    the type; it is empty if none of them has one. The type of a framework follows from that name. The
    order is that of the reference library, lowest alignment first. Its writer sorts tensors in the reverse order.
    """

    BOOL = "BOOL", 8, "bool"
    F4 = "F4", 4, "float4_e2m1fn_x2"
    F6_E2M3 = "F6_E2M3", 6, ""
    F6_E3M2 = "F6_E3M2", 6, ""
    U8 = "U8", 8, "uint8"
    I8 = "I8", 8, "int8"
    F8_E5M2 = "F8_E5M2", 8, "float8_e5m2"
    F8_E4M3 = "F8_E4M3", 8, "float8_e4m3fn"
    F8_E8M0 = "F8_E8M0", 8, "float8_e8m0fnu"
    F8_E4M3FNUZ = "F8_E4M3FNUZ", 8, "float8_e4m3fnuz"
    F8_E5M2FNUZ = "F8_E5M2FNUZ", 8, "float8_e5m2fnuz"
    I16 = "I16", 16, "int16"
    U16 = "U16", 16, "uint16"
    F16 = "F16", 16, "float16"
    BF16 = "BF16", 16, "bfloat16"
    I32 = "I32", 32, "int32"
    U32 = "U32", 32, "uint32"
    F32 = "F32", 32, "float32"
    C64 = "C64", 64, "complex64"
    F64 = "F64", 64, "float64"
    I64 = "I64", 64, "int64"
    U64 = "U64", 64, "uint64"

    _value_: str
    bits: int
    """Bits per element."""
    library_name: str
    """The name in torch and numpy; empty if they do not have the type."""
    is_packed: bool
    """Whether an element is not a whole number of bytes, so that elements share some."""
    rank: int
    """Position in this table."""

    def __new__(cls, code: str, bits: int, library_name: str) -> Self:
        """Return the member of a row."""
        member = object.__new__(cls)
        member._value_ = code
        member.bits, member.library_name, member.rank = bits, library_name, len(cls.__members__)
        member.is_packed = bool(bits % 8)
        return member

    # Members are singletons, and the hash of identity is implemented in C. Enum's own, in Python, takes
    # 0.2 us more per lookup, which is noticeable for tens of thousands of tensors.
    __hash__ = object.__hash__


DTYPES: Final[Mapping[str, DType]] = {dtype.value: dtype for dtype in DType}
"""Element types by their name on disk."""
DTYPES_BY_LIBRARY_NAME: Final[Mapping[str, DType]] = {
    dtype.library_name: dtype for dtype in DType if dtype.library_name
}
"""Element types by the names that numpy and torch have for them."""
BYTE_FLOATS: Final = tuple(dtype for dtype in DType if dtype.library_name.startswith("float8_"))
"""The floats of 8 bits."""


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


class FileLayout(NamedTuple):
    """Where the tensors of a weight file are."""

    tensors: Mapping[str, tuple[TensorSpec, int, int]]
    """Each tensor with its first byte and the byte after its last one, by name, in the order of the bytes."""
    data_start: int
    """Bytes of the header, its padding included."""
    alignment: int = 1
    """Gaps of fewer bytes are padding, which is zeros unless a source layer says otherwise."""

    def gaps(self, size: int) -> Iterator[tuple[int, int]]:
        """Yield the first byte of each gap in a file of ``size`` bytes, and the byte after its last one."""
        at = self.data_start
        for _, begin, end in self.tensors.values():
            if begin > at:
                yield at, begin
            at = end
        if size > at:
            yield at, size
