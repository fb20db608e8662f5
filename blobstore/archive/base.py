"""The blob that a delta starts from, hot or cold."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from blobstore.archive.scratch import scratch
from blobstore.archive.table import Base
from blobstore.digest import Digest

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from typing_extensions import Buffer

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class BaseBlob(NamedTuple):
    """A base and its bytes."""

    identity: Base
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
        return cls(Base(digest or Digest.of(view), len(view)), partial(_copy, view))

    def read(self, begin: int, size: int) -> Bytes:
        """Return bytes of it, aligned, which are good until the thread asks again."""
        out = scratch("base", size)
        self.read_into(out.data, begin)
        return out


def _copy(data: memoryview, out: Buffer, begin: int) -> None:
    target = memoryview(out).cast("B")
    target[:] = data[begin : begin + len(target)]
