"""The names that numpy (with ml_dtypes) and torch give to the element types."""

from __future__ import annotations

from blobstore.core.tensor import DType

NAMES = {
    DType.BOOL: "bool",
    DType.U8: "uint8",
    DType.I8: "int8",
    DType.F8_E5M2: "float8_e5m2",
    DType.F8_E4M3: "float8_e4m3fn",
    DType.F8_E8M0: "float8_e8m0fnu",
    DType.F8_E4M3FNUZ: "float8_e4m3fnuz",
    DType.F8_E5M2FNUZ: "float8_e5m2fnuz",
    DType.I16: "int16",
    DType.U16: "uint16",
    DType.F16: "float16",
    DType.BF16: "bfloat16",
    DType.I32: "int32",
    DType.U32: "uint32",
    DType.F32: "float32",
    DType.C64: "complex64",
    DType.F64: "float64",
    DType.I64: "int64",
    DType.U64: "uint64",
}
"""Without the packed types of 4 and 6 bits."""
