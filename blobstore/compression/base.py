"""The base of a delta: another blob, hot or cold, or a prediction made from it by factors or quantization.

A base that is a delta itself makes a chain. Each of its chunks is decoded when a chunk of the delta asks
for it, so the time for a chunk grows with the length of the chain. Chunks of a chain begin and end at the
same places: otherwise each could ask for two, each of these for two more, and so on.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from blobstore.compression.delta import MAX_CHAIN
from blobstore.compression.delta.codec import as_elements
from blobstore.compression.delta.low_rank import LowRankPredictor
from blobstore.compression.scratch import scratch
from blobstore.core.digest import BlobId, Digest
from blobstore.errors import ColdDamaged

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Buffer

    from blobstore.compression.delta.low_rank import Factors
    from blobstore.compression.quant_rule import Rule
    from blobstore.compression.table import Part, Table
    from blobstore.core.tensor import DType

    Array = np.ndarray[Any, Any]
    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_ALIGNMENT = 8
"""Bytes of the widest elements that are encoded."""


def _nothing(begin: int, end: int) -> None:
    """Touch nothing: the bytes are in memory, or are mapped by a program that counts on its files."""


class BaseBlob(NamedTuple):
    """A base and a way to read its bytes."""

    identity: BlobId
    read_into: Callable[[Buffer, int], object]
    """Fills a buffer with the bytes from an offset on."""
    data: memoryview | None = None
    """All of its bytes, if they are in memory."""
    table: Table | None = None
    """The table of its file, if it is a delta itself."""
    depth: int = 0
    """Deltas that are decoded to read it: it and its bases, as far as they are deltas."""
    touch: Callable[[int, int], object] = _nothing
    """Is called with a range of ``data`` before that is read; see :class:`~blobstore.core.mmap.MappedFile`."""

    def check_chain(self, parts: Sequence[Part]) -> None:
        """Check that a delta with these parts can be decoded chunk by chunk, as its base is.

        Raises:
            ColdDamaged: this base is a delta, and the chain is too long, its chunks lie at other places, or
                the delta has factors, which take much memory, or rules, which read many chunks.
        """
        if self.table is None:
            return
        if self.depth >= MAX_CHAIN:
            raise ColdDamaged(f"a chain has more than {MAX_CHAIN} deltas")
        if any(part.factors is not None or part.rule is not None for part in parts):
            raise ColdDamaged("a delta against a delta has factors or rules")
        begins = list(accumulate((part.size for part in self.table.parts), initial=0))
        for number, part in enumerate(parts):
            if part.base_begin is None:
                continue
            other = bisect_right(begins, part.base_begin) - 1
            theirs, end = self.table.parts[other], part.base_begin + part.size
            is_whole = end == begins[other + 1] or not part.size % part.chunk_size
            if (
                theirs.chunk_size != part.chunk_size
                or (part.base_begin - begins[other]) % part.chunk_size
                or end > begins[other + 1]
                or not is_whole
            ):
                raise ColdDamaged(
                    f"the chunks of part {number} do not lie where those of its base lie, "
                    f"which is a delta: {self.identity.digest}"
                )

    @classmethod
    def hot(
        cls,
        data: Buffer,
        digest: Digest | None = None,
        touch: Callable[[int, int], object] = _nothing,
    ) -> BaseBlob:
        """Return a base whose bytes are in memory.

        Args:
            data: all of its bytes.
            digest: the digest that the caller has verified; by default the bytes are hashed.
            touch: called with each range before that is read.
        """
        view = memoryview(data).cast("B")

        def read_into(out: Buffer, begin: int) -> None:
            target = memoryview(out).cast("B")
            wanted = view[begin : begin + len(target)]
            touch(begin, begin + len(wanted))
            target[:] = wanted

        return cls(BlobId(digest or Digest.of(view), len(view)), read_into, view, touch=touch)

    def read(self, begin: int, size: int) -> Bytes:
        """Return a range of its bytes, aligned, not to be changed, valid until this thread's next call."""
        if self.data is not None:
            found = np.frombuffer(self.data[begin : begin + size], np.uint8)
            self.touch(begin, begin + len(found))
            first = found[:_ALIGNMENT]
            if len(found) == size >= _ALIGNMENT and first.view(np.uint64).flags.aligned:
                return found
        # To read a chain, all of its bases are read at the same time.
        out = scratch(f"base {self.depth}", size)
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
        rule: Rule | None = None,
    ) -> None:
        """Start at offset ``begin`` of the base; ``dtype`` is the type of the part's elements."""
        self._base = base
        self._begin = begin
        self._dtype = dtype
        self._rule = rule
        self._predictor = LowRankPredictor(factors, dtype) if factors and dtype else None

    def read(self, offset: int, size: int) -> Array:
        """Return the prediction for ``size`` bytes from ``offset`` of the part on.

        If the part keeps the scales of blocks, these are the weights that its codes follow from.

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
