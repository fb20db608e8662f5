"""Blobs of a ladder: weights, and blocks of GGUF that they are quantized to."""

from __future__ import annotations

from typing import Any

import numpy as np

from blobstore.core.tensor import DType
from blobstore.gguf.quantize import quantize
from blobstore.gguf.types import TYPES
from tests.support.cold import weights
from tests.support.models import blob

ROWS, COLUMNS = 96, 512
HEAD = 16
"""Rows of an attention head."""
LADDER = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4", "TQ1_0", "TQ2_0")

Array = np.ndarray[Any, Any]
_NUMPY = {DType.F32: "<f4", DType.F16: "<f2", DType.BF16: "<u2"}
_SIZES = {kind.name: kind for kind in TYPES.values()}
_OTHER_NAMES = {"MXFP4": "gguf_mxfp4"}


def source(seed: int, dtype: DType = DType.BF16, rows: int = ROWS) -> Array:
    """Return a matrix of weights; bfloat16 as uint16."""
    data = weights(dtype, rows * COLUMNS, seed)
    return np.frombuffer(data, _NUMPY[dtype]).reshape(rows, COLUMNS)


def weight_blob(name: str, matrix: Array) -> bytes:
    """Return the blob of a matrix of weights."""
    code = {"<f4": "F32", "<f2": "F16", "<u2": "BF16"}[matrix.dtype.str]
    return blob((name, code, matrix.shape, matrix.tobytes()))


def block_blob(name: str, type_name: str, matrix: Array) -> bytes:
    """Return the blob of a matrix that is quantized, as the import of a GGUF file writes it."""
    blocks = quantize(type_name, np.ascontiguousarray(matrix))
    metadata = {
        "quant_type": _OTHER_NAMES.get(type_name, type_name.lower()),
        "group_size": str(_SIZES[type_name].weights),
    }
    return blob((name, "U8", blocks.shape, blocks.tobytes()), **metadata)


def interleaved(matrix: Array, head: int = HEAD) -> Array:
    """Return queries or keys with their rows in the order of llama.cpp."""
    heads = matrix.reshape(-1, 2, head // 2, matrix.shape[1])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(matrix.shape)
