"""The base of a delta: another blob, hot or cold, or a prediction made from it by factors or quantization."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from blobstore.compression.delta.codec import as_elements
from blobstore.compression.delta.low_rank import LowRankPredictor
from blobstore.compression.scratch import scratch
from blobstore.core.digest import BlobId, Digest

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Buffer

    from blobstore.compression.delta.low_rank import Factors
    from blobstore.compression.quant_rule import QuantRule
    from blobstore.core.tensor import DType

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_ALIGNMENT = 8
"""Bytes of the widest elements that are encoded."""


class BaseBlob(NamedTuple):
    """A base and a way to read its bytes."""

    identity: BlobId
    read_into: Callable[[Buffer, int], object]
    """Fills a buffer with the bytes from an offset on."""
    data: memoryview | None = None
    """All of its bytes, if they are in memory."""

    @classmethod
    def hot(cls, data: Buffer, digest: Digest | None = None) -> BaseBlob:
        """Return a base whose bytes are in memory.

        Args:
            data: all of its bytes.
            digest: the digest that the caller has verified; by default the bytes are hashed.
        """
        view = memoryview(data).cast("B")

        def read_into(out: Buffer, begin: int) -> None:
            target = memoryview(out).cast("B")
            target[:] = view[begin : begin + len(target)]

        return cls(BlobId(digest or Digest.of(view), len(view)), read_into, view)

    def read(self, begin: int, size: int) -> Bytes:
        """Return a range of its bytes, aligned, not to be changed, valid until this thread's next call."""
        if self.data is not None:
            found = np.frombuffer(self.data[begin : begin + size], np.uint8)
            if len(found) == size and found.ctypes.data % _ALIGNMENT == 0:
                return found
        out = scratch("base", size)
        self.read_into(out.data, begin)
        return out


class Prediction:
    """The bytes that a part is encoded against: those of the base, corrected by factors or quantized if asked to."""

    def __init__(
        self,
        base: BaseBlob,
        begin: int,
        factors: Factors | None,
        dtype: DType | None,
        rule: QuantRule | None = None,
    ) -> None:
        """Start at offset ``begin`` of the base; ``dtype`` is the type of the part's elements."""
        self._base = base
        self._begin = begin
        self._dtype = dtype
        self._rule = rule
        self._predictor = LowRankPredictor(factors, dtype) if factors and dtype else None

    def read(self, offset: int, size: int) -> Bytes:
        """Return the prediction for ``size`` bytes from ``offset`` of the part on.

        The result is aligned, and valid until this thread's next call.
        """
        if self._rule is not None:
            return self._rule.predict(self._read, offset, size)
        base = self._read(offset, size)
        if self._predictor is None or self._dtype is None:
            return base
        elements = as_elements(base, self._dtype)
        return self._predictor.predict(elements, offset // elements.itemsize).view(np.uint8)

    def _read(self, offset: int, size: int) -> Bytes:
        return self._base.read(self._begin + offset, size)
