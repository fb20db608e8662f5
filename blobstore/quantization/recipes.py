"""What stored tensors are made of. Pure values: no byte is read, no number computed.

A recipe stands for one logical tensor of a model, under the name that it has there. It says which
tensors a blob gets for it, the weight and its companions, and which source tensors they come from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from blobstore.core.tensor import DType, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from blobstore.quantization.formats import QuantFormat

SCALE, BIAS, GLOBAL_SCALE = ".scale", ".bias", ".global_scale"
"""Suffixes of a quantized weight's companions in a blob, in the order of the data."""


@dataclass(frozen=True, slots=True)
class Copied:
    """Source tensors whose bytes, one after another, are the tensor's own."""

    spec: TensorSpec
    sources: tuple[str, ...]
    is_reciprocal: bool = False
    """Whether the one F32 number is stored as its reciprocal."""

    @property
    def stored(self) -> tuple[TensorSpec, ...]:
        """The tensors of the blob."""
        return (self.spec,)


@dataclass(frozen=True, slots=True)
class Decoded:
    """8-bit floats and the scales they are multiplied with, stored as plain numbers of ``spec``.

    ``spec`` is of the shape of the weight, or of the weights stacked. Each source weight of R rows and C
    columns has one source of ceil(R / block[0]) x ceil(C / block[1]) scales.
    """

    spec: TensorSpec
    sources: tuple[str, ...]
    scales: tuple[str, ...]
    weight: TensorSpec
    """Of each source weight: its 8-bit type and its shape."""
    scale: TensorSpec
    """Of each source of scales."""
    block: tuple[int, int]

    @property
    def stored(self) -> tuple[TensorSpec, ...]:
        """The tensors of the blob."""
        return (self.spec,)


@dataclass(frozen=True, slots=True)
class Quantized:
    """A plain tensor that we quantize along its last dimension."""

    dense: Copied | Decoded
    item: QuantFormat
    group_size: int

    @property
    def spec(self) -> TensorSpec:
        """The logical tensor, before it is quantized."""
        return self.dense.spec

    @property
    def sources(self) -> tuple[str, ...]:
        """The source tensors."""
        return self.dense.sources

    @property
    def stored(self) -> tuple[TensorSpec, ...]:
        """The tensors of the blob: packed weight, scales, and biases for affine types."""
        name, dtype, (*rows, columns) = self.spec
        groups = (*rows, columns // self.group_size)
        scale = TensorSpec(name + SCALE, self.item.scale_dtype(dtype), groups)
        weight = TensorSpec(name, DType.U32, (*rows, self.item.words(columns)))
        return (weight, scale, *([scale._replace(name=name + BIAS)] if self.item.has_bias else []))


@dataclass(frozen=True, slots=True)
class Prequantized:
    """A tensor that the source has quantized: packed weight and companions, all copied."""

    parts: tuple[Copied, ...]
    """The weight first, then companions, under their names in the blob."""
    item: QuantFormat
    group_size: int | None
    """None is not told to readers: the type has one size only."""

    @property
    def spec(self) -> TensorSpec:
        """The packed weight."""
        return self.parts[0].spec

    @property
    def sources(self) -> tuple[str, ...]:
        """The source tensors."""
        return tuple(name for part in self.parts for name in part.sources)

    @property
    def stored(self) -> tuple[TensorSpec, ...]:
        """The tensors of the blob."""
        return tuple(part.spec for part in self.parts)


Recipe = Copied | Decoded | Quantized | Prequantized


def copies(specs: Mapping[str, TensorSpec]) -> dict[str, Copied]:
    """Return the recipes that keep every source tensor as it is."""
    return {name: Copied(spec, (name,)) for name, spec in specs.items()}
