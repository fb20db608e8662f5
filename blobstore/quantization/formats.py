"""The quantization types, one table that everything asks.

Packed weights are U32 words; element ``i`` of a row takes bits ``i * bits`` to ``(i + 1) * bits`` of the
row's words read as one little-endian stream, as MLX writes them.
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
    """Bits of one packed element."""
    group_size: int
    """Elements of a row that share a scale, unless something else is asked for."""
    mode: Mode
    """What MLX calls the way elements and scales become numbers."""
    group_sizes: tuple[int, ...]
    """All group sizes that MLX can compute with."""
    aliases: tuple[str, ...] = ()
    is_target: bool = True
    """Whether we quantize to it; the others only come from sources that are quantized already."""

    @property
    def has_bias(self) -> bool:
        """Whether each group has an offset beside its scale."""
        return self.mode == "affine"

    def scale_dtype(self, dtype: DType) -> DType:
        """Return the type of the scales of a weight that had ``dtype``.

        Affine scales have the weight's own. U8 holds E4M3 bits for nvfp4 and E8M0 exponents for mxfp4
        and mxfp8.
        """
        return dtype if self.mode == "affine" else DType.U8

    def words(self, columns: int) -> int:
        """Return the packed words of a row of ``columns`` elements, which fill them exactly."""
        return columns * self.bits // WORD_BITS

    def columns(self, words: int) -> int:
        """Return the elements in a row of ``words`` packed words."""
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
    "fp8": "Ollama takes it for int8, which is no floating-point type; say int8 or mxfp8",
    "fp4": "Ollama takes it for int4, which is no floating-point type; say int4, nvfp4 or mxfp4",
}


def parse_format(text: str) -> QuantFormat:
    """Return the type that a user asks for, by name or alias, in any case.

    Raises:
        UsageError: there is no such type to quantize to, or the name is misleading.
    """
    key = text.strip().lower()
    found = _TARGETS.get(key)
    if found is not None:
        return found
    known = ", ".join(item.name for item in FORMATS.values() if item.is_target)
    reason = _AMBIGUOUS.get(key, f"expected one of {known}")
    raise UsageError(f"cannot quantize to {quote(text)}: {reason}")


def check_group_size(item: QuantFormat, group_size: int) -> None:
    """Check that a type can have groups of ``group_size``.

    Raises:
        UsageError: it cannot; the message lists the sizes.
    """
    if group_size not in item.group_sizes:
        sizes = ", ".join(map(str, item.group_sizes))
        raise UsageError(f"{item.name} cannot have groups of {group_size}; possible: {sizes}")
