"""The element types, stated once more: what the tests expect of the table of the package, and of frameworks."""

from __future__ import annotations

import json

import safetensors

from blobstore.core.tensor import DTYPES, DType

TABLE = """
BOOL         8 bool
F4           4 float4_e2m1fn_x2
F6_E2M3      6 -
F6_E3M2      6 -
U8           8 uint8
I8           8 int8
F8_E5M2      8 float8_e5m2
F8_E4M3      8 float8_e4m3fn
F8_E8M0      8 float8_e8m0fnu
F8_E4M3FNUZ  8 float8_e4m3fnuz
F8_E5M2FNUZ  8 float8_e5m2fnuz
I16         16 int16
U16         16 uint16
F16         16 float16
BF16        16 bfloat16
I32         32 int32
U32         32 uint32
F32         32 float32
C64         64 complex64
F64         64 float64
I64         64 int64
U64         64 uint64
"""
"""Name on disk, bits, and the name in torch and numpy, in the order of the reference library."""
ROWS = {code: (int(bits), name) for code, bits, name in map(str.split, TABLE.strip().splitlines())}
NAMES = {DTYPES[code]: name for code, (bits, name) in ROWS.items() if bits >= 8 and name != "-"}
"""The names of types that torch or numpy, with ml_dtypes, has; without the packed types of 4 and 6 bits."""


def _is_in_reference(code: str) -> bool:
    """Return whether the installed reference library reads a type."""
    entry = {"a": {"dtype": code, "shape": [0], "data_offsets": [0, 0]}}
    text = json.dumps(entry).encode()
    try:
        safetensors.deserialize(len(text).to_bytes(8, "little") + text)
    except safetensors.SafetensorError:
        return False
    return True


IN_REFERENCE = [DTYPES[code] for code in ROWS if _is_in_reference(code)]
"""Types that can be compared with the reference library; it may be older than a type."""


def without_newer_types(message: str) -> tuple[str, list[str]]:
    """Return an error of an unknown type, and the types that it lists, of those in the reference library."""
    start, _, listed = message.partition("Supported dtypes: ")
    newer = {dtype.library_name for dtype in DType if dtype not in IN_REFERENCE}
    return start, [name for name in listed.split(", ") if name not in newer]
