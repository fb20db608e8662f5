"""What a base is worth to a tensor, judged by a sample: which of several is the nearest?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from blobstore.archive.delta_groups import (
    choose_classes,
    classes_of,
    exponent_bits,
    exponents_of,
    has_classes,
)
from blobstore.archive.delta_segments import bits_of

if TYPE_CHECKING:
    from typing import Final

    from blobstore.core.tensor import DType

    Array = np.ndarray[Any, Any]

_RUNS: Final = 16
_RUN: Final = 1 << 10
_CLASSES: Final = 8


def sampled_gain(tensor: Array, base: Array, dtype: DType) -> int:
    """Return how many bytes ``tensor`` takes less beside ``base`` than alone, about; 0 if none.

    The answer is the same at every call: the sample is runs of elements at even distances.

    Args:
        tensor: elements as :func:`~blobstore.archive.delta.as_elements` gives them.
        base: as many of the base.
        dtype: the type of both.
    """
    if not len(tensor):
        return 0
    elements, start = _sample(tensor), _sample(base)
    sizes = [len(elements)]
    difference = elements - start
    if has_classes(dtype):
        classes = choose_classes(start, dtype, _CLASSES)
        places = classes_of(start, dtype, classes)
        difference = difference[places.argsort(kind="stable")]
        sizes = np.bincount(places, minlength=classes.many).tolist()
    signed = difference.view(f"<i{difference.itemsize}")
    gain = _alone(elements, dtype) - bits_of(signed, sizes)
    return max(int(gain * len(tensor) / len(elements) / 8), 0)


def _sample(elements: Array) -> Array:
    if len(elements) <= _RUNS * _RUN:
        return elements
    starts = [number * (len(elements) - _RUN) // (_RUNS - 1) for number in range(_RUNS)]
    return np.concatenate([elements[start : start + _RUN] for start in starts])


def _alone(elements: Array, dtype: DType) -> float:
    """Return the bits of elements without a base: the entropy of what an exponent has, or of bytes."""
    if has_classes(dtype):
        rest = dtype.bits - exponent_bits(dtype)
        return _entropy(exponents_of(elements, dtype)) + rest * len(elements)
    planes = elements.view(np.uint8).reshape(len(elements), -1).T
    return sum(_entropy(plane) for plane in planes)


def _entropy(values: Array) -> float:
    counts = np.bincount(values)
    counts = counts[counts > 0]
    return float((counts * np.log2(len(values) / counts)).sum())
