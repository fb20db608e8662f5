"""Blobs of a ladder: weights, and blocks of GGUF that they are quantized to."""

from __future__ import annotations

from typing import Any

import numpy as np

from blobstore.compression.spans import header_of
from blobstore.core.tensor import DType
from blobstore.gguf.fill_codes import codes_of, fill_codes
from blobstore.gguf.quantize import quantize
from blobstore.gguf.simple_blocks import E4M3
from blobstore.gguf.types import TYPES, GgufType
from tests.support.cold import weights
from tests.support.models import blob

ROWS, COLUMNS = 96, 512
HEAD = 16
"""Rows of an attention head."""
LADDER = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4", "TQ1_0", "TQ2_0")

Array = np.ndarray[Any, Any]
_NUMPY = {DType.F32: "<f4", DType.F16: "<f2", DType.BF16: "<u2"}
_SIZES = {kind.name: kind for kind in TYPES.values()}
_OTHER_NAMES = {"MXFP4": "gguf_mxfp4", "NVFP4": "gguf_nvfp4"}
_FULL_SCALES: dict[str, tuple[int, list[tuple[int, int]]]] = {
    "Q2_K": (255, [(80, 15 * 3), (82, -15)]),
    "Q3_K": (255, [(108, 31 * 4)]),
    "Q4_K": (255, [(0, 63 * 15), (2, -63)]),
    "Q5_K": (255, [(0, 63 * 31), (2, -63)]),
    "Q6_K": (127, [(208, 127 * 31)]),
    "Q4_0": (0, [(0, 8)]),
    "Q4_1": (0, [(0, 15), (2, 1)]),
    "Q5_0": (0, [(0, 16)]),
    "Q5_1": (0, [(0, 31), (2, 1)]),
    "IQ4_NL": (0, [(0, 113)]),
    "IQ4_XS": (255, [(0, 31 * 113)]),
}
"""The bytes of the largest scales of parts; then where the scale of a block lies, and the quotient of what it has
to span, and the same of the minimum, if it has one."""
CODED = (*_FULL_SCALES, "MXFP4", "NVFP4")
"""The types whose codes follow from scales."""


def kind_of(name: str) -> GgufType:
    """Return a type by its name."""
    return _SIZES[name]


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
    return _blob(name, type_name, quantize(type_name, np.ascontiguousarray(matrix)))


def coded_blocks(type_name: str, matrix: Array, seed: int = 0) -> Array:
    """Return a matrix that is quantized with scales that do not follow from it, as those of a search do not."""
    if type_name in {"MXFP4", "NVFP4"}:
        return _coded_e2m1(type_name, matrix, seed)
    kind, (filling, ((at, quotient), *minimum)) = _SIZES[type_name], _FULL_SCALES[type_name]
    rows = as_float32(matrix).reshape(-1, kind.weights)
    peaks, least = np.abs(rows).max(1), np.minimum(rows.min(1), 0)
    spans = rows.max(1) - least if minimum else peaks
    spans = spans * np.random.default_rng(seed).uniform(0.8, 1, len(rows))
    blocks = np.full((len(rows), kind.size), filling, np.uint8)
    blocks[:, at : at + 2] = _halves(spans / quotient)
    for at, quotient in minimum:
        blocks[:, at : at + 2] = _halves(least / quotient)
    blocks[:, codes_of(type_name)] = 0
    fill_codes(type_name, np.ascontiguousarray(matrix), blocks)
    return blocks.reshape(len(matrix), -1)


def _coded_e2m1(type_name: str, matrix: Array, seed: int) -> Array:
    kind, count = _SIZES[type_name], 4 if type_name == "NVFP4" else 1
    parts = as_float32(matrix).reshape(-1, kind.weights // count)
    wanted = np.abs(parts).max(1) * np.random.default_rng(seed).uniform(0.6, 1, len(parts)) / 12
    blocks = np.zeros((len(parts) // count, kind.size), np.uint8)
    scales = np.ceil(np.log2(np.maximum(wanted, 1e-30))) + 128
    if type_name == "NVFP4":
        scales = np.minimum(np.searchsorted(E4M3[:127], wanted), 126)
    blocks[:, :count] = scales.reshape(-1, count)
    fill_codes(type_name, np.ascontiguousarray(matrix), blocks)
    return blocks.reshape(len(matrix), -1)


def coded_blob(name: str, type_name: str, matrix: Array, seed: int = 0) -> bytes:
    """Return the blob of a matrix that is quantized with scales that do not follow from it."""
    return _blob(name, type_name, coded_blocks(type_name, matrix, seed))


def with_shape(data: bytes, count: int) -> bytes:
    """Return the blob of one matrix of blocks as one of a stack of ``count`` matrices."""
    header = header_of(data, len(data))
    assert header is not None
    ((name, entry),) = header.tensors.items()
    rows, columns = entry.spec.shape
    shape = (count, rows // count, columns)
    return blob((name, "U8", shape, data[header.data_start :]), **header.metadata)


def as_float32(matrix: Array) -> Array:
    """Return weights as float32."""
    if matrix.dtype == np.uint16:
        return (matrix.astype(np.uint32) << 16).view(np.float32)
    return matrix.astype(np.float32)


def _halves(scales: Array) -> Array:
    return scales.astype("<f2").view(np.uint8).reshape(-1, 2)


def _blob(name: str, type_name: str, blocks: Array) -> bytes:
    metadata = {
        "quant_type": _OTHER_NAMES.get(type_name, type_name.lower()),
        "group_size": str(_SIZES[type_name].weights),
    }
    return blob((name, "U8", blocks.shape, blocks.tobytes()), **metadata)


def interleaved(matrix: Array, head: int = HEAD) -> Array:
    """Return queries or keys with their rows in the order of llama.cpp."""
    heads = matrix.reshape(-1, 2, head // 2, matrix.shape[1])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(matrix.shape)
