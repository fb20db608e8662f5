"""Whether a quantization type can represent values: those that would be read back as others are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from blobstore.errors import DamagedSource

if TYPE_CHECKING:
    import numpy as np

    from blobstore.quantization.recipes import Quantized

    Array = np.ndarray[Any, Any]

_MAX_EXPONENT = 224
"""Larger E8M0 bytes may have wrapped around: the scale of the least float32, 2^-149 / 448, is 225."""


class UnreadableGroups(DamagedSource):
    """A tensor cannot be quantized: some of its values would be read back as others, or infinite."""

    tensor: str = ""
    """Its name, as policies know it."""


def check_scales(scale: Array, recipe: Quantized) -> None:
    """Check that all groups of a tensor are read back as finite values. MLX does not.

    Raises:
        UnreadableGroups: a group is not.
    """
    if not _is_readable(scale, recipe.item.mode, recipe.item.bits):
        error = UnreadableGroups(
            f"the values of a group are too small, too large or too far apart for "
            f"{recipe.item.name}; keep the tensor with an override to none"
        )
        error.tensor = recipe.spec.name
        raise error


def _is_readable(scale: Array, mode: str, bits: int) -> bool:
    import numpy as np

    if mode.startswith("mx"):
        # Groups of values below about 1e-36 would be read back as 1e38.
        return int(scale.max(initial=0)) <= _MAX_EXPONENT
    if mode != "affine":
        return True
    # Readers round the product of scale and code before they add the bias.
    with np.errstate(over="ignore"):
        largest = (scale.astype(np.float32) * np.float32(2**bits - 1)).astype(scale.dtype)
    return bool(np.isfinite(largest.astype(np.float32)).all())


def check_finite(array: Array, recipe: Quantized, before: int) -> None:
    """Check the values of a tensor that follow ``before`` others. Raises DamagedSource."""
    import numpy as np

    from blobstore.quantization.quantize_numpy import first_nonfinite

    index = first_nonfinite(array)
    if index is not None:
        position = [int(number) for number in np.unravel_index(before + index, recipe.spec.shape)]
        raise DamagedSource(
            f"element {position} is {array.flat[index]}, which cannot be quantized; keep the tensor "
            "with an override to none"
        )
