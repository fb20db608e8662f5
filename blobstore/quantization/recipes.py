"""Recipes: how the tensors of a blob are made from tensors of a source. Pure values.

A recipe describes one logical tensor of a model under its name in the model. It says which tensors a
blob stores for it (the weight and its quantization parameters), and from which source tensors they are made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from blobstore.core.tensor import DType, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from blobstore.quantization.formats import QuantFormat

SCALE, BIAS, GLOBAL_SCALE = ".scale", ".bias", ".global_scale"
"""Suffixes of a quantized weight's quantization parameters in a blob, in the order of the data."""


@dataclass(frozen=True, slots=True)
class Copied:
    """A tensor whose bytes are those of source tensors, concatenated."""

    spec: TensorSpec
    sources: tuple[str, ...]
    is_reciprocal: bool = False
    """Whether the single F32 value is stored as its reciprocal."""

    @property
    def stored(self) -> tuple[TensorSpec, ...]:
        """The tensors of the blob."""
        return (self.spec,)


@dataclass(frozen=True, slots=True)
class Decoded:
    """8-bit floats times their scales, stored as plain values of ``spec``.

    ``spec`` has the shape of the weight, or of the stacked weights. Each source weight of R rows and C
    columns has its own tensor of ceil(R / block[0]) x ceil(C / block[1]) scales.
    """

    spec: TensorSpec
    sources: tuple[str, ...]
    scales: tuple[str, ...]
    weight: TensorSpec
    """Element type and shape of each source weight."""
    scale: TensorSpec
    """Element type and shape of each source tensor of scales."""
    block: tuple[int, int]

    @property
    def stored(self) -> tuple[TensorSpec, ...]:
        """The tensors of the blob."""
        return (self.spec,)


@dataclass(frozen=True, slots=True)
class Quantized:
    """A plain tensor to quantize along its last dimension."""

    dense: Copied | Decoded
    item: QuantFormat
    group_size: int

    @property
    def spec(self) -> TensorSpec:
        """The logical tensor before quantization."""
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
    """A tensor that is quantized in the source: packed weight and quantization parameters are copied."""

    parts: tuple[Copied, ...]
    """The weight, then its quantization parameters, under their names in the blob."""
    item: QuantFormat
    group_size: int | None
    """None is not written to the metadata; the type then has only one size."""

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
    """Return recipes that keep every source tensor unchanged."""
    return {name: Copied(spec, (name,)) for name, spec in specs.items()}
