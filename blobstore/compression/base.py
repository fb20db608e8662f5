"""What a delta starts from: another blob, hot or cold, or what is predicted from it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from blobstore.compression.delta.codec import as_elements
from blobstore.compression.delta.low_rank import Prediction
from blobstore.compression.scratch import scratch
from blobstore.core.digest import BlobId, Digest

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Buffer

    from blobstore.compression.delta.low_rank import Factors
    from blobstore.core.tensor import DType

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class BaseBlob(NamedTuple):
    """A base and its bytes."""

    identity: BlobId
    read_into: Callable[[Buffer, int], object]
    """Writes its bytes from an offset on into all of a buffer."""

    @classmethod
    def hot(cls, data: Buffer, digest: Digest | None = None) -> BaseBlob:
        """Return a base whose bytes are at hand.

        Args:
            data: all of its bytes.
            digest: of bytes that the caller has checked; they are hashed if it is not given.
        """
        view = memoryview(data).cast("B")
        return cls(BlobId(digest or Digest.of(view), len(view)), partial(_copy, view))

    def read(self, begin: int, size: int) -> Bytes:
        """Return bytes of it, aligned, which are good until the thread asks again."""
        out = scratch("base", size)
        self.read_into(out.data, begin)
        return out


def _copy(data: memoryview, out: Buffer, begin: int) -> None:
    target = memoryview(out).cast("B")
    target[:] = data[begin : begin + len(target)]


class Start:
    """What a part's chunks start from: bytes of the base, or what factors predict from them."""

    def __init__(
        self, base: BaseBlob, begin: int, factors: Factors | None, dtype: DType | None
    ) -> None:
        """Begin at offset ``begin`` of the base; ``dtype`` is that of the elements to predict."""
        self._base = base
        self._begin = begin
        self._dtype = dtype
        self._prediction = Prediction(factors, dtype) if factors and dtype else None

    def read(self, offset: int, size: int) -> Bytes:
        """Return what the bytes from ``offset`` of the part on start from, aligned.

        They are good until the thread asks again.
        """
        start = self._base.read(self._begin + offset, size)
        if self._prediction is None or self._dtype is None:
            return start
        elements = as_elements(start, self._dtype)
        first = offset // elements.itemsize
        return self._prediction.predict(elements, first).view(np.uint8)
