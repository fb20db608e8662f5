"""The quantization types, one table that everything asks.

Packed weights are U32 words with the first element in the lowest bits, as MLX writes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

_WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class QuantFormat:
    """One quantization type."""

    name: str
    bits: int
    group_size: int
    """Elements that share a scale, unless the blob says otherwise."""

    @property
    def pack_factor(self) -> int:
        """Elements in a packed word."""
        return _WORD_BITS // self.bits


FORMATS: Final[Mapping[str, QuantFormat]] = {
    item.name: item
    for item in (
        QuantFormat("int4", 4, 32),
        QuantFormat("int8", 8, 64),
        QuantFormat("nvfp4", 4, 16),
        QuantFormat("mxfp8", 8, 32),
        QuantFormat("mxfp4", 4, 32),
    )
}
