"""Weights whose scales are tensors of their own, and the rules by which they may follow from others.

These are the integers of MLX, whose codes, scales and biases follow from the weights, and 8-bit floats, whose codes
follow from the weights and the scales. Quotients of 8-bit floats may have been rounded to a smaller type before.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from blobstore.cold_blobs.weight_search import FLOATS, STACK_DIMENSIONS, Weight, read_bytes
from blobstore.core.tensor import DType

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any, Final

    import numpy as np

    from blobstore.cold_blobs.tensor_index import Read
    from blobstore.compression.quant_rule import Rule
    from blobstore.compression.scaled_rules import Float8Rule
    from blobstore.quantization.formats import QuantFormat
    from blobstore.safetensors.header import TensorEntry

    Array = np.ndarray[Any, Any]

_MAX_BLOCK: Final = 0xFFFF


@dataclass(frozen=True)
class ScaledWeight(Weight):
    """A quantized weight of a blob, and the tensors of its scales."""

    item: QuantFormat
    scale: DType
    """The type of its scales."""

    @classmethod
    def of(
        cls, tensors: Sequence[TensorEntry], item: QuantFormat, group: int, data_start: int
    ) -> ScaledWeight | None:
        """Return the weight of these tensors, the codes first; None if the codes do not follow from others."""
        weight, scale = tensors[0].spec, tensors[1].spec.dtype
        is_float8 = item.float8 is not None and weight.dtype is DType.F8_E4M3
        if not (is_float8 or (item.mode == "affine" and scale in FLOATS)):
            return None
        names = tuple(part.spec.name for part in tensors)
        shape = item.logical_shape(weight.shape)
        return cls(
            names[:1] if is_float8 else names,
            tuple((data_start + part.begin, part.end - part.begin) for part in tensors),
            math.prod(shape[:-1]),
            shape[-1],
            shape[0] if len(shape) == STACK_DIMENSIONS else 1,
            1 if is_float8 else group,
            item,
            scale,
        )

    @property
    def is_divisible(self) -> bool:
        """Whether its rows follow by rules of their own: not if they may share scales."""
        return self.item.float8 is None

    def weights(self, read: Read, begin: int) -> Array:
        """Return what a sample from a weight on stands for, as float32. Raises what ``read`` raises."""
        import ml_dtypes
        import numpy as np

        from blobstore.quantization.quantize_numpy import dequantize

        if self.item.float8 is not None:  # whose scales change angles little
            data = read_bytes(read, self.places[0][0] + begin, self.sampled)
            return np.frombuffer(data, ml_dtypes.float8_e4m3fn).astype(np.float32)
        codes, *factors = (
            read_bytes(
                read, place + size * begin // self.elements, size * self.sampled // self.elements
            )
            for place, size in self.places
        )
        kinds = {DType.F32: np.float32, DType.F16: np.float16, DType.BF16: ml_dtypes.bfloat16}
        scales, biases = (np.frombuffer(item, kinds[self.scale])[None] for item in factors)
        words = np.frombuffer(codes, np.uint32)[None]
        values = dequantize(words, scales, biases, self.item, self.group, "float32")
        return values.reshape(-1)

    def rules(self, read: Read, dtype: DType) -> Iterator[Rule]:
        """Yield the rules by which the codes may follow from weights of a type."""
        from blobstore.compression.scaled_rules import CODES, AffineRule  # imports numpy

        if dtype not in FLOATS:
            return
        if self.item.float8 is None:
            yield AffineRule(dtype, self.scale, CODES, self.item.bits, self.group)
            return
        rule = self._float8_rule(read, dtype, self.item.float8.block)
        if max(rule.block) <= _MAX_BLOCK and rule.is_possible(self.places[0][1]):
            for quotient in FLOATS:
                yield replace(rule, cast=quotient)

    def _float8_rule(self, read: Read, dtype: DType, block: tuple[int, int]) -> Float8Rule:
        """Return the rule of 8-bit floats with scales of ``block``, rows and columns."""
        from blobstore.compression.quant_rule import weights_of
        from blobstore.compression.scaled_rules import Float8Rule

        begin, size = self.places[1]
        height, width = block
        shared = 0 if height >= self.rows else height, 0 if width >= self.columns else width
        rule = Float8Rule(dtype, self.columns, shared)
        scales = read_bytes(read, begin, size)
        if self.scale is DType.F8_E8M0:  # exponents, as float32 has them
            scales = struct.pack(f"<{size}I", *(exponent << 23 for exponent in scales))
        else:
            scales = weights_of(scales, self.scale).tobytes()
        return rule.with_scales(scales, self.places[0][1])
