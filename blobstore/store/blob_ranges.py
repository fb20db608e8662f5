"""Parts of blobs that are read into memory together, instead of one after the other."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from blobstore.core.digest import Digest


class BlobRange(NamedTuple):
    """Some of the bytes of a blob."""

    digest: Digest
    size: int
    """Of the whole blob."""
    begin: int
    end: int


class LoadedRanges:
    """Parts of blobs in memory."""

    def __init__(self, loaded: Mapping[Digest, Sequence[tuple[int, memoryview]]]) -> None:
        """Take parts of blobs: where each begins, in order, and its bytes."""
        self._loaded = loaded
        self._taken: set[tuple[Digest, int]] = set()

    def parts(self, digest: Digest) -> Sequence[tuple[int, memoryview]]:
        """Return where each part of a blob begins, in order, and its bytes."""
        return self._loaded.get(digest, ())

    def take(self, digest: Digest, begin: int, end: int) -> memoryview | None:
        """Return memory that has just these bytes and is not returned again; None if none does."""
        for start, memory in self.parts(digest):
            if start == begin and len(memory) == end - begin and (digest, begin) not in self._taken:
                self._taken.add((digest, begin))
                return memory
        return None

    def find(self, digest: Digest, begin: int, end: int) -> memoryview:
        """Return bytes of a blob. Raises KeyError if not all of them were read."""
        parts = self._loaded[digest]
        start, memory = parts[bisect_right(parts, begin, key=lambda part: part[0]) - 1]
        if not start <= begin <= end <= start + len(memory):
            raise KeyError(digest)
        return memory[begin - start : end - start]
