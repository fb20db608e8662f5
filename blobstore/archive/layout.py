"""A layout: one way in which the elements of a chunk become planes, and planes elements again.

``split`` gives the planes of a chunk, or None where the layout does not suit it. ``merge`` writes the
chunk that planes stand for; whatever they hold, it writes some chunk or raises ColdDamaged. Both
work on bytes of one dimension, and in memory of the thread (:mod:`blobstore.archive.scratch`), which
the next call uses again: planes are good until then. Layouts of deltas are given the same bytes of a
base beside the chunk; all others are given None.

Chunks begin where their elements are aligned; planes that ``merge`` is given may begin anywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]
    Sizes = Callable[[int], tuple[int, ...]]
    Split = Callable[[Bytes, Bytes | None], Sequence[Bytes] | None]
    Merge = Callable[[Sequence[Bytes], Bytes, Bytes | None], None]


class Layout(NamedTuple):
    """One way to split chunks."""

    number: int
    """What a file states."""
    width: int
    """Bytes of an element."""
    sizes: Sizes
    """Bytes of each plane of so many elements; ``-n`` means any number up to n.

    None at all if the layout does not suit so many.
    """
    split: Split
    merge: Merge
    needs_base: bool = False
    worth: int = 1 << 8
    """Where speed counts it is taken unless a later one saves one byte in so many."""
