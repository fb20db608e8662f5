"""Blocks of GGUF, and the rules by which they may follow from weights.

Where blocks follow from their weights alone, samples must have equal bytes. Where scales were searched for, also
with an importance matrix, most of the codes must follow from the weights and the scales. Other weights, such as
those of a fine-tune, have fewer such codes. Weights that were rounded to a smaller type before are tried, too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from blobstore.cold_blobs.weight_search import (
    FLOATS,
    MAX_DIFFERING,
    STACK_DIMENSIONS,
    Found,
    Weight,
    read_bytes,
)
from blobstore.core.tensor import DType

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, Final

    import numpy as np

    from blobstore.cold_blobs.tensor_index import Read
    from blobstore.cold_blobs.weight_search import Sample
    from blobstore.compression.quant_rule import QuantRule, Rule
    from blobstore.quantization.formats import QuantFormat
    from blobstore.safetensors.header import TensorEntry

    Array = np.ndarray[Any, Any]

_MAX_HEAD: Final = 1024
"""Rows of an attention head at most."""


@dataclass(frozen=True)
class Blocks(Weight):
    """A tensor of blocks."""

    type_name: str
    """The name of the type in llama.cpp."""
    block_size: int
    """Bytes of a block."""

    @classmethod
    def of(cls, entry: TensorEntry, item: QuantFormat, data_start: int) -> Blocks | None:
        """Return a tensor of blocks, or None if these or their codes do not follow from weights."""
        from blobstore.gguf.fill_codes import CODED  # imports numpy
        from blobstore.gguf.quantize import QUANTIZED

        if item.gguf_name not in QUANTIZED | CODED:
            return None
        shape, size = entry.spec.shape, entry.end - entry.begin
        columns = item.columns(shape[-1])
        return cls(
            (entry.spec.name,),
            ((data_start + entry.begin, size),),
            size // item.block_bytes * item.group_size // columns,
            columns,
            shape[0] if len(shape) == STACK_DIMENSIONS else 1,
            item.group_size,
            item.gguf_name,
            item.block_bytes,
        )

    @property
    def row_size(self) -> int:
        """Bytes of a row."""
        return self.columns // self.group * self.block_size

    @property
    def sample_size(self) -> int:
        """Bytes of a sample of a row."""
        return self.sampled // self.group * self.block_size

    def weights(self, read: Read, begin: int) -> Array:
        """Return what a sample from a weight on stands for, as float32. Raises what ``read`` raises."""
        import numpy as np

        from blobstore.gguf.dequantize import dequantize

        at = self.places[0][0] + begin // self.group * self.block_size
        data = read_bytes(read, at, self.sample_size)
        return dequantize(self.type_name, np.frombuffer(data, np.uint8))

    def rules(self, read: Read, dtype: DType) -> Iterator[Rule]:
        """Yield the rules by which the codes may follow from weights of a type."""
        from blobstore.compression.quant_rule import Q8_0, QuantRule  # imports numpy
        from blobstore.gguf.fill_codes import CODED
        from blobstore.gguf.quantize import QUANTIZED

        del read  # they do not depend on the bytes
        if dtype is DType.U8 and self.type_name == Q8_0.name:
            return
        if self.type_name in QUANTIZED:
            yield QuantRule(self.type_name, dtype)
        if self.type_name in CODED:
            yield QuantRule(self.type_name, dtype, keeps_scales=True)

    def best_rule(self, sample: Sample, rule: Rule) -> Found | None:
        """Return how blocks follow by a rule, or by it with other casts or a permutation; None if they do not."""
        from blobstore.compression.quant_rule import QuantRule

        most = MAX_DIFFERING if rule.keeps_scales else 0.0
        if not rule.keeps_scales:
            sample = sample._replace(compared=self.sampled)
        if not isinstance(rule, QuantRule) or self._row_differs(sample, rule, 0, most):
            return None  # a permutation keeps the first row
        found = sample.found(rule, most)
        if found is None:
            permuted = self._permutation(sample, rule, most)
            if permuted is None:
                return None
            rule, found = permuted, sample.found(permuted, most)
        if found is not None and found.differing and rule.keeps_scales:
            casts = [sample.found(replace(rule, cast=cast), most) for cast in (*FLOATS, DType.U8)]
            found = min(filter(None, [found, *casts]), key=lambda item: item.differing)
        return found

    def _row_differs(self, sample: Sample, rule: Rule, row: int, most: float) -> bool:
        return sample.differing(rule, [row * self.row_size], self.sample_size) > most

    def _permutation(self, sample: Sample, rule: QuantRule, most: float) -> QuantRule | None:
        """Return the rule with llama.cpp's permutation of rows for rotary embeddings; None if it predicts less.

        It keeps the first row of the first head and the last row, and moves row head / 2 to 1.
        """
        size = self.places[0][1]
        for head in range(4, min(self.rows, _MAX_HEAD) + 1, 2):
            permuted = replace(rule, columns=self.columns, head=head)
            if self.rows % head or not permuted.is_possible(size):
                continue
            if self._row_differs(sample, permuted, 1, most):
                continue
            if sample.found(permuted, most):
                return permuted
        return None
