"""The table of quantization types.

Packed weights are U32 words. Element ``i`` of a row takes bits ``i * bits`` to ``(i + 1) * bits`` of the
row's words as one little-endian stream, which is MLX's layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from blobstore.core.escape import quote
from blobstore.core.tensor import DType
from blobstore.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

Mode = Literal["affine", "nvfp4", "mxfp4", "mxfp8"]
WORD_BITS: Final = 32


@dataclass(frozen=True, slots=True)
class QuantFormat:
    """One quantization type."""

    name: str
    bits: int
    """Bits per packed element."""
    group_size: int
    """Default number of elements that share a scale."""
    mode: Mode
    """MLX's name for the arithmetic of elements and scales."""
    group_sizes: tuple[int, ...]
    """All group sizes that MLX supports."""
    aliases: tuple[str, ...] = ()
    is_target: bool = True
    """Whether we quantize to it; other types only come from quantized sources."""

    @property
    def has_bias(self) -> bool:
        """Whether each group has an offset in addition to its scale."""
        return self.mode == "affine"

    def scale_dtype(self, dtype: DType) -> DType:
        """Return the element type of the scales of a weight of ``dtype``.

        Affine scales have the type of the weight. U8 holds E4M3 bits for nvfp4 and E8M0 exponents for mxfp4
        and mxfp8.
        """
        return dtype if self.mode == "affine" else DType.U8

    def words(self, columns: int) -> int:
        """Return the packed words per row of ``columns`` elements, which must fill them exactly."""
        return columns * self.bits // WORD_BITS

    def columns(self, words: int) -> int:
        """Return the elements per row of ``words`` packed words."""
        return words * WORD_BITS // self.bits


_AFFINE_GROUPS: Final = (32, 64, 128)

FORMATS: Final[Mapping[str, QuantFormat]] = {
    item.name: item
    for item in (
        QuantFormat("int4", 4, 32, "affine", _AFFINE_GROUPS, ("q4",)),
        QuantFormat("int8", 8, 64, "affine", _AFFINE_GROUPS, ("q8",)),
        QuantFormat("nvfp4", 4, 16, "nvfp4", (16,)),
        QuantFormat("mxfp8", 8, 32, "mxfp8", (32,)),
        QuantFormat("mxfp4", 4, 32, "mxfp4", (32,)),
        QuantFormat("int2", 2, 64, "affine", _AFFINE_GROUPS, is_target=False),
        QuantFormat("int3", 3, 64, "affine", _AFFINE_GROUPS, is_target=False),
        QuantFormat("int5", 5, 64, "affine", _AFFINE_GROUPS, is_target=False),
        QuantFormat("int6", 6, 64, "affine", _AFFINE_GROUPS, is_target=False),
    )
}
"""Quantization types by name."""

_TARGETS: Final = {
    alias: item
    for item in FORMATS.values()
    if item.is_target
    for alias in (item.name, *item.aliases)
}
_AMBIGUOUS: Final = {
    "fp8": "in Ollama it means int8, which is not a floating-point type; use int8 or mxfp8",
    "fp4": "in Ollama it means int4, which is not a floating-point type; use int4, nvfp4 or mxfp4",
}


def parse_format(text: str) -> QuantFormat:
    """Return the type to quantize to, by name or alias, ignoring case.

    Raises:
        UsageError: there is no such type, or its name is ambiguous.
    """
    key = text.strip().lower()
    found = _TARGETS.get(key)
    if found is not None:
        return found
    known = ", ".join(item.name for item in FORMATS.values() if item.is_target)
    reason = _AMBIGUOUS.get(key, f"expected one of {known}")
    raise UsageError(f"cannot quantize to {quote(text)}: {reason}")


def check_group_size(item: QuantFormat, group_size: int) -> None:
    """Check that a type supports a group size.

    Raises:
        UsageError: it does not; the message lists the possible sizes.
    """
    if group_size not in item.group_sizes:
        sizes = ", ".join(map(str, item.group_sizes))
        raise UsageError(f"{item.name} cannot have groups of {group_size}; possible: {sizes}")
