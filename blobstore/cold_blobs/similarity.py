"""Samples of blobs, which tell about how much of a blob another one saves as its base."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from blobstore.safetensors.header import Header

if TYPE_CHECKING:
    from typing import Final

    import numpy as np

    from blobstore.core.digest import BlobId
    from blobstore.store.local import LocalStore

    Array = np.ndarray[Any, Any]

_SLICES: Final = 4
_ELEMENTS: Final = 1 << 11
"""Elements of a slice."""
_BITS_PER_BYTE: Final = 8


class BlobSampler:
    """Compares samples of the largest tensors of blobs. Each blob is sampled once."""

    def __init__(self, store: LocalStore) -> None:
        self._store = store
        self._samples: dict[BlobId, Array | None] = {}
        self._bits: dict[BlobId, float] = {}

    def saved(self, blob: BlobId, base: BlobId) -> float:
        """Return the share of the compressed size of a blob that a base saves.

        Raises:
            BlobMissing, BlobDamaged, ColdDamaged: a blob cannot be read.
            StoreError: the store cannot be read.
        """
        mine, theirs = self._sample(blob), self._sample(base)
        if mine is None or theirs is None or mine.dtype != theirs.dtype or len(mine) != len(theirs):
            return 0.0
        if blob not in self._bits:
            self._bits[blob] = _entropy(mine)
        # A constant sample has no entropy.
        return 1 - _entropy(_differences(mine, theirs)) / max(self._bits[blob], 1.0)

    def _sample(self, blob: BlobId) -> Array | None:
        """Return elements of the largest tensor of a blob; None if it has no tensors."""
        if blob not in self._samples:
            self._samples[blob] = self._read(blob)
        return self._samples[blob]

    def _read(self, blob: BlobId) -> Array | None:
        import numpy as np

        from blobstore.compression.transforms import width_of

        (header,) = self._store.read_headers([blob])
        if not isinstance(header, Header) or not header.tensors:
            return None
        entry = max(header.tensors.values(), key=lambda item: item.end - item.begin)
        width = width_of(entry.spec.dtype)
        size = min((entry.end - entry.begin) // width // _SLICES, _ELEMENTS) * width
        if not size:
            return None
        step = (entry.end - entry.begin - size) // (_SLICES - 1) // width * width
        sample = np.empty(_SLICES * size, np.uint8)
        base = self._store.base(*blob, in_chain=True)
        for number in range(_SLICES):
            target = sample[number * size : (number + 1) * size]
            base.read_into(target.data, header.data_start + entry.begin + number * step)
        return sample.view(f"<u{width}")


def _differences(mine: Array, theirs: Array) -> Array:
    """Return the differences of elements, small ones of either sign as small numbers."""
    signed = (mine - theirs).view(f"<i{mine.itemsize}")
    found: Array = (signed << 1) ^ (signed >> (_BITS_PER_BYTE * mine.itemsize - 1))
    return found


def _entropy(elements: Array) -> float:
    """Return the bits that the bytes of elements take, each byte of an element with its own code."""
    import numpy as np

    columns = elements.view(np.uint8).reshape(-1, elements.itemsize)
    total = 0.0
    for number in range(elements.itemsize):
        counts = np.bincount(columns[:, number])
        counts = counts[counts > 0]
        total -= float((counts * np.log2(counts / len(elements))).sum())
    return total
