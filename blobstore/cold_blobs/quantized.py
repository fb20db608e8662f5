"""Compares blocks of GGUF with tensors that they may have been quantized from: samples must have equal bytes.

Only types whose blocks follow from their weights alone are compared. A file that was quantized with an
importance matrix, or from other weights, has other samples.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from blobstore.cold_blobs.tensor_index import MIN_PIECE
from blobstore.core.tensor import DType
from blobstore.errors import BlobDamaged
from blobstore.quantization.metadata import is_blocks, parse_quant_metadata

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Final

    from blobstore.cold_blobs.tensor_index import Read
    from blobstore.compression.base import BaseBlob
    from blobstore.compression.quant_rule import QuantRule
    from blobstore.safetensors.header import Header, TensorEntry

SOURCES: Final = (DType.F32, DType.F16, DType.BF16)
"""The types of weights that blocks are quantized from."""
SAMPLE: Final = 256
"""Weights of a sample, if rows have as many."""
_PLACES: Final = (0, 3, 5, 8, 11, 13)
"""Where samples lie, in thirteenths: at rows of attention heads that a permutation moves."""
_MAX_HEAD: Final = 1024
"""Rows of an attention head at most."""


class Blocks(NamedTuple):
    """A tensor of blocks."""

    type_name: str
    """The name of the type in llama.cpp."""
    begin: int
    """Offset in the blob."""
    size: int
    columns: int
    """Weights of a row."""
    weights: int
    """Weights of a block."""
    block_size: int
    """Bytes of a block."""

    @classmethod
    def of(cls, entry: TensorEntry, header: Header) -> Blocks | None:
        """Return a tensor of a blob, or None if its type is not one that is quantized without a search."""
        size = entry.end - entry.begin
        if size < MIN_PIECE or not is_blocks(entry.spec, header.metadata):
            return None
        from blobstore.gguf.quantize import QUANTIZED  # imports numpy

        try:
            found = parse_quant_metadata(entry.spec, {}, header.metadata)
        except BlobDamaged:  # reported when the tensor is read
            return None
        if found is None or found[0].gguf_name not in QUANTIZED:
            return None
        item = found[0]
        columns = item.columns(entry.spec.shape[-1])
        begin = header.data_start + entry.begin
        return cls(item.gguf_name, begin, size, columns, item.group_size, item.block_bytes)

    @property
    def elements(self) -> int:
        """Number of weights."""
        return self.size // self.block_size * self.weights

    @property
    def sample_size(self) -> int:
        """Bytes of a sample, which lies in one row."""
        return min(SAMPLE, self.columns) // self.weights * self.block_size

    def sample(self, read: Read, offset: int = 0) -> bytes:
        """Return the bytes of a sample. Raises what ``read`` raises."""
        found = bytearray(self.sample_size)
        read(memoryview(found), self.begin + offset)
        return bytes(found)


def sources_of(header: Header, counts: set[int]) -> Iterator[TensorEntry]:
    """Yield the tensors of a blob that have one of these numbers of weights."""
    for entry in header.tensors.values():
        if entry.spec.dtype in SOURCES and math.prod(entry.spec.shape) in counts:
            yield entry


def find_rule(
    blocks: Blocks, read: Read, base: BaseBlob, base_header: Header
) -> tuple[int, QuantRule] | None:
    """Find the weights in a base that blocks were quantized from; return their offset, and the rule.

    Args:
        blocks: the tensor.
        read: reads its blob.
        base: the blob that may have the weights.
        base_header: its header.

    Returns:
        None if no tensor of the base has weights whose samples become those of the blocks.

    Raises what reading the blobs raises.
    """
    from blobstore.compression.quant_rule import QuantRule  # imports numpy

    for entry in sources_of(base_header, {blocks.elements}):
        begin = base_header.data_start + entry.begin
        pair = _Pair(blocks, read, base, begin)
        rule = QuantRule(blocks.type_name, entry.spec.dtype)
        if pair.is_predicted(rule):
            return begin, rule
        permuted = pair.find_permutation(rule)
        if permuted is not None:
            return begin, permuted
    return None


class _Pair(NamedTuple):
    """Blocks, and the weights that they may have been quantized from."""

    blocks: Blocks
    read: Read
    base: BaseBlob
    begin: int
    """Offset of the weights in the base."""

    def _predict(self, rule: QuantRule, offset: int) -> bytes:
        """Return the bytes that a rule predicts for a sample."""
        found = rule.predict(
            lambda at, size: self.base.read(self.begin + at, size), offset, self.blocks.sample_size
        )
        return found.tobytes()

    def is_predicted(self, rule: QuantRule) -> bool:
        """Return whether a rule predicts all samples."""
        last = (self.blocks.size - self.blocks.sample_size) // self.blocks.block_size
        offsets = [last * place // _PLACES[-1] * self.blocks.block_size for place in _PLACES]
        return all(
            self.blocks.sample(self.read, at) == self._predict(rule, at)
            for at in dict.fromkeys(offsets)
        )

    def find_permutation(self, rule: QuantRule) -> QuantRule | None:
        """Return the rule with llama.cpp's permutation of rows for rotary embeddings; None if it predicts less.

        It keeps the first row of the first head and the last row, and moves row head / 2 to 1.
        """
        row = self.blocks.columns // self.blocks.weights * self.blocks.block_size
        rows = self.blocks.size // row
        if self.blocks.sample(self.read) != self._predict(rule, 0):
            return None
        second = self.blocks.sample(self.read, row) if rows > 1 else b""
        for head in range(4, min(rows, _MAX_HEAD) + 1, 2):
            permuted = rule._replace(columns=self.blocks.columns, head=head)
            if (
                rows % head == 0
                and permuted.is_possible(self.blocks.size)
                and self._predict(rule, head // 2 * row) == second
                and self.is_predicted(permuted)
            ):
                return permuted
        return None
