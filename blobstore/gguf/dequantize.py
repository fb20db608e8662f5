"""Decodes quantized tensors of GGUF files to float32, as ggml's reference code does, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from blobstore.core.escape import quote
from blobstore.core.workers import WorkerPool
from blobstore.errors import UnsupportedDType, UsageError
from blobstore.gguf import iq_quants, k_quants, simple_blocks
from blobstore.gguf.types import NUMBERS, TYPES

if TYPE_CHECKING:
    from blobstore.gguf.simple_blocks import Decoder

    Array = np.ndarray[Any, Any]

_DECODERS: Final = {**simple_blocks.DECODERS, **k_quants.DECODERS, **iq_quants.DECODERS}
DEQUANTIZED: Final = frozenset(_DECODERS)
"""The names of the types that are decoded."""
_PIECE: Final = 1 << 18
"""Weights that are computed at once: intermediate values stay in the cache, and threads meet rarely."""
_SHARE: Final = 1 << 20
"""Weights of a job. Callers that have threads of their own ask for no more at once."""


def dequantize(type_name: str, blocks: Array, out: Array | None = None) -> Array:
    """Return the weights of rows of blocks, on a thread per processor if there are more than a million.

    Rows are independent: threads may decode parts of a tensor, each into its part of ``out``.

    Args:
        type_name: one of :data:`DEQUANTIZED`.
        blocks: uint8 of shape ``(..., bytes of a row)``. It is copied if it is not contiguous.
        out: contiguous float32 of shape ``(..., weights of a row)``, which is filled and returned.

    Returns:
        float32 of shape ``(..., weights of a row)``.

    Raises:
        UnsupportedDType: the type is not decoded.
        UsageError: the blocks are not whole, or ``out`` has another shape or type.
    """
    decode = _DECODERS.get(type_name)
    if decode is None:
        raise UnsupportedDType(
            f"tensors of type {quote(type_name)} are not dequantized; expected one of "
            f"{', '.join(sorted(DEQUANTIZED))}"
        )
    kind = TYPES[NUMBERS[type_name]]
    if blocks.dtype != np.uint8 or not blocks.ndim or blocks.shape[-1] % kind.size:
        raise UsageError(
            f"blocks of {type_name} are {blocks.dtype} {list(blocks.shape)}, expected uint8 and rows of a "
            f"multiple of {kind.size} bytes"
        )
    shape = (*blocks.shape[:-1], blocks.shape[-1] // kind.size * kind.weights)
    if out is None:
        out = np.empty(shape, np.float32)
    elif out.dtype != np.float32 or out.shape != shape or not out.flags.c_contiguous:
        raise UsageError(
            f"out is {out.dtype} {list(out.shape)}, expected contiguous float32 {list(shape)}"
        )
    packed = np.ascontiguousarray(blocks).reshape(blocks.size // kind.size, kind.size)
    weights = out.reshape(len(packed), kind.weights)
    share = _SHARE // kind.weights

    def run(start: int) -> None:
        part = slice(start, start + share)
        _decode(decode, packed[part], weights[part], _PIECE // kind.weights)

    starts = range(0, len(packed), share)
    if len(starts) > 1:
        WorkerPool(None, None, 0).run(starts, run)
    else:
        run(0)
    return out


def _decode(decode: Decoder, packed: Array, weights: Array, step: int) -> None:
    """Decode ``step`` blocks at a time."""
    # Scales may be infinite, NaN or subnormal: all bytes are valid. The state is that of a thread.
    with np.errstate(all="ignore"):
        for start in range(0, len(packed), step):
            decode(packed[start : start + step], weights[start : start + step])
