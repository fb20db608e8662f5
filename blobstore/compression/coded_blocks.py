"""Splits blocks of GGUF into their scales, which are stored, and their codes, which follow from weights.

The codes that a base's weights and the stored scales give are compared with those of the blocks. What differs is
stored as the differences from a base are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from blobstore.compression.block_fields import ranges_of
from blobstore.compression.delta import codec as delta
from blobstore.compression.scratch import scratch
from blobstore.core.tensor import DType
from blobstore.gguf.fill_codes import codes_of, fill_codes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blobstore.gguf.types import GgufType

    Array = np.ndarray[Any, Any]
    Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class CodedBlocks:
    """The planes of blocks of one type: each field of scales, then the differences."""

    def __init__(self, kind: GgufType, settings: delta.DeltaSettings) -> None:
        """Take the type, and the effort for the differences."""
        self._kind = kind
        self._settings = settings
        codes = codes_of(kind.name)
        self._kept = [(begin, end) for begin, end in ranges_of(kind) if begin not in codes]

    def sizes(self, size: int) -> tuple[int, ...]:
        """Return the size of each plane of ``size`` bytes, as transforms do; none unless these are whole blocks."""
        count, rest = divmod(size, self._kind.size)
        return () if rest else (*(count * (end - begin) for begin, end in self._kept), -size)

    def encode(self, chunk: Bytes, weights: Array | None) -> Sequence[Bytes] | None:
        """Return the planes of a chunk, valid until this thread's next call; None if it has no weights."""
        if weights is None or len(chunk) % self._kind.size:
            return None
        predicted = scratch("coded", len(chunk))
        np.copyto(predicted, chunk)
        blocks = predicted.reshape(-1, self._kind.size)
        fill_codes(self._kind.name, weights, blocks)
        planes = []
        for number, (begin, end) in enumerate(self._kept):
            plane = scratch(f"scales {number}", len(blocks) * (end - begin))
            np.copyto(plane.reshape(len(blocks), -1), blocks[:, begin:end])
            planes.append(plane)
        differences = delta.encode_chunk(chunk, predicted, DType.U8, self._settings)
        return [*planes, np.frombuffer(differences, np.uint8)]

    def decode(self, planes: Sequence[Bytes], out: Bytes, weights: Array | None) -> None:
        """Fill a chunk from its planes and the weights of its blocks."""
        blocks = out.reshape(-1, self._kind.size)
        for (begin, end), plane in zip(self._kept, planes, strict=False):
            blocks[:, begin:end] = plane.reshape(len(blocks), -1)
        if weights is not None:  # decoders of parts with such blocks have them
            fill_codes(self._kind.name, weights, blocks)
        delta.decode_chunk(planes[-1].data, out, DType.U8, out)
