"""Quantizes with a real build of llama.cpp: the library in the package ``xllamacpp``."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np

from blobstore.gguf.types import TYPES
from tests.real.packages import package

LLAMA_CPP = "xllamacpp==2026.10.11549"
_NUMBERS = {kind.name: number for number, kind in TYPES.items()}

Array = np.ndarray[Any, Any]


@cache
def _library() -> Any:
    library = ctypes.CDLL(str(package(LLAMA_CPP) / "xllamacpp" / "xllamacpp.abi3.so"))
    quantize_chunk = library.ggml_quantize_chunk
    quantize_chunk.restype = ctypes.c_size_t
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, number, number, number, pointer]
    return library


def quantized_by_llama_cpp(
    type_name: str, weights: Array, importance: Array | None = None
) -> Array:
    """Return blocks of a float32 matrix, uint8 ``[rows, bytes of a row]``.

    Args:
        type_name: the type of the blocks.
        weights: the matrix.
        importance: float32, of each column, as in an importance matrix.
    """
    number = _NUMBERS[type_name]
    kind = TYPES[number]
    rows, columns = weights.shape
    source = np.ascontiguousarray(weights, np.float32)
    out = np.zeros((rows, columns // kind.weights * kind.size), np.uint8)
    matrix = None if importance is None else importance.ctypes.data
    size = _library().ggml_quantize_chunk(
        number, source.ctypes.data, out.ctypes.data, 0, rows, columns, matrix
    )
    assert size == out.nbytes
    return out
