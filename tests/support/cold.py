"""Blobs for tests of compression: elements of every type, with values like those of weights."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from blobstore.compression.decoder import ColdBlobDecoder
from blobstore.compression.encoder import encode
from blobstore.compression.spans import Span, header_of, spans_in
from blobstore.compression.table import Table
from blobstore.core.tensor import DType, TensorSpec
from blobstore.safetensors.header import encode_header

_FLOATS: dict[DType, Any] = {
    DType.BF16: ml_dtypes.bfloat16,
    DType.F16: np.float16,
    DType.F32: np.float32,
    DType.F64: np.float64,
    DType.F8_E4M3: ml_dtypes.float8_e4m3fn,
    DType.F8_E5M2: ml_dtypes.float8_e5m2,
}
TYPES = tuple(DType)


def weights(dtype: DType, count: int, seed: int = 0) -> bytes:
    """Return elements that resemble weights, or quantized weights for integer types."""
    random = np.random.default_rng(seed)
    size = count * dtype.bits // 8
    if dtype in _FLOATS:
        numbers = random.standard_normal(count) * 0.02
        return numbers.astype(_FLOATS[dtype]).tobytes()
    codes = random.standard_normal(size) * 20
    return codes.astype(np.int8).tobytes()


def noise(size: int, seed: int = 0) -> bytes:
    """Return incompressible bytes."""
    return np.random.default_rng(seed).bytes(size)


def text(layers: int) -> bytes:
    """Return the header of a file with many tensors, which compresses well."""
    shapes = {"mlp.up_proj": (11008, 4096), "self_attn.q_proj": (4096, 4096), "norm": (4096,)}
    specs = [
        TensorSpec(f"model.layers.{layer}.{name}.weight", DType.BF16, shape)
        for layer in range(layers)
        for name, shape in shapes.items()
    ]
    return encode_header(specs)


def safetensors(tensors: Mapping[str, tuple[DType, bytes]]) -> bytes:
    """Return a safetensors file of one-dimensional tensors."""
    specs = [
        TensorSpec(name, dtype, (len(data) * 8 // dtype.bits,))
        for name, (dtype, data) in tensors.items()
    ]
    return encode_header(specs) + b"".join(data for _, data in tensors.values())


def spans_of(blob: bytes, size: int) -> list[Span]:
    """Return the spans of a blob, of which ``blob`` may be the first bytes alone."""
    return spans_in(header_of(blob, size), size)


def cold(blob: bytes, **options: Any) -> bytes:
    """Return a blob in the cold-blob format."""
    return cold_with_table(blob, **options)[0]


def decoded(blob: ColdBlobDecoder) -> bytes:
    """Return the bytes of a cold blob, verified against its digest."""
    return b"".join(map(bytes, blob.pieces()))


def cold_with_table(blob: bytes, **options: Any) -> tuple[bytes, Table]:
    """Return a blob in the cold-blob format, and its table."""
    written = io.BytesIO()
    spans = options.pop("spans", None) or spans_of(blob, len(blob))
    encoded = encode(options.pop("pieces", [blob]), spans, written.write, **options)
    return written.getvalue(), encoded.table
