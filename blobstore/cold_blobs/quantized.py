"""Compares blocks of GGUF with tensors that they may have been quantized from, by samples.

Where blocks follow from their weights alone, samples must have equal bytes. Where scales were searched for, also
with an importance matrix, most of the codes must follow from the weights and the scales. Other weights, such as
those of a fine-tune, have fewer such codes. Weights that were rounded to a smaller type before are tried, too.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from blobstore.cold_blobs.tensor_index import MIN_PIECE
from blobstore.core.tensor import DType
from blobstore.errors import BlobDamaged
from blobstore.quantization.metadata import is_blocks, parse_quant_metadata

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import Any, Final

    import numpy as np

    from blobstore.cold_blobs.tensor_index import Read
    from blobstore.compression.base import BaseBlob
    from blobstore.compression.quant_rule import QuantRule
    from blobstore.compression.scaled_rules import Rule
    from blobstore.compression.spans import Span
    from blobstore.safetensors.header import Header, TensorEntry

    Array = np.ndarray[Any, Any]

SOURCES: Final = (DType.F32, DType.F16, DType.BF16)
"""The types of weights that blocks are quantized from."""
_SAMPLE: Final = 256
"""Weights of a sample, if rows have as many."""
_CODED_SAMPLE: Final = 1 << 12
"""Weights of a sample whose codes are compared, at each of the same places."""
MAX_DIFFERING: Final = 0.5
"""The share of bytes of codes that may differ: those of other weights nearly all do."""
NEARLY_ALL: Final = 0.02
"""If so little differs, no other tensor of a base is compared."""
_STACK_DIMENSIONS: Final = 3
PLACES: Final = (0, 3, 5, 8, 11, 13)
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
    slices: int = 1
    """Matrices of a stack, such as the experts of a layer."""

    @classmethod
    def of(cls, entry: TensorEntry, header: Header) -> Blocks | None:
        """Return a tensor of a blob, or None if its blocks or their codes do not follow from weights."""
        size = entry.end - entry.begin
        if size < MIN_PIECE or not is_blocks(entry.spec, header.metadata):
            return None
        from blobstore.gguf.fill_codes import CODED  # imports numpy
        from blobstore.gguf.quantize import QUANTIZED

        try:
            found = parse_quant_metadata(entry.spec, {}, header.metadata)
        except BlobDamaged:  # reported when the tensor is read
            return None
        if found is None or found[0].gguf_name not in QUANTIZED | CODED:
            return None
        item, shape = found[0], entry.spec.shape
        slices = shape[0] if len(shape) == _STACK_DIMENSIONS else 1
        return cls(
            item.gguf_name,
            header.data_start + entry.begin,
            size,
            item.columns(shape[-1]),
            item.group_size,
            item.block_bytes,
            slices,
        )

    def matrices(self) -> list[Blocks]:
        """Return the matrices of a stack; none if they are small, or if there is one matrix only."""
        size = self.size // self.slices
        if self.slices == 1 or size < MIN_PIECE:
            return []
        return [
            self._replace(begin=self.begin + at, size=size, slices=1)
            for at in range(0, self.size, size)
        ]

    @property
    def elements(self) -> int:
        """Number of weights."""
        return self.size // self.block_size * self.weights

    @property
    def sampled(self) -> int:
        """Weights of a sample, which lies in one row."""
        return min(_SAMPLE, self.columns) // self.weights * self.weights

    @property
    def sample_size(self) -> int:
        """Bytes of a sample."""
        return self.sampled // self.weights * self.block_size

    def sample(self, read: Read, offset: int = 0, size: int = 0) -> bytes:
        """Return the bytes of a sample, of the usual size by default. Raises what ``read`` raises."""
        found = bytearray(size or self.sample_size)
        read(memoryview(found), self.begin + offset)
        return bytes(found)

    def find(self, read: Read, base: BaseBlob, base_header: Header) -> Found | None:
        """Return what :func:`find_rule` returns."""
        return find_rule(self, read, base, base_header)

    def unit_vector(self, read: Read) -> Array:
        """Return weights of the first and the last row, as :func:`unit_vector`. Raises what ``read`` raises."""
        import numpy as np

        from blobstore.gguf.dequantize import dequantize

        ends = self.sample(read) + self.sample(read, self.size - self.sample_size)
        return unit_vector(dequantize(self.type_name, np.frombuffer(ends, np.uint8)))


def sources_of(entries: Iterable[TensorEntry], counts: set[int]) -> Iterator[TensorEntry]:
    """Yield the tensors that have one of these numbers of weights."""
    for entry in entries:
        if entry.spec.dtype in SOURCES and math.prod(entry.spec.shape) in counts:
            yield entry


def unit_vector(weights: Array) -> Array:
    """Return weights divided by their length; 0 if that is 0 or not finite."""
    import numpy as np

    with np.errstate(all="ignore"):
        length = np.linalg.norm(weights)
        found: Array = weights / length
    return found if 0 < length < np.inf else np.zeros_like(weights)


class Found(NamedTuple):
    """Weights in a base, and how blocks follow from them."""

    differing: float
    """The share of the bytes of samples that do not follow."""
    begin: int
    """Offset of the weights in the base."""
    rule: Rule

    def of_tensor(self, number: int) -> Found:
        """Return how another tensor of the same quantized weight follows."""
        from blobstore.compression.scaled_rules import AffineRule

        if isinstance(self.rule, AffineRule):
            return self._replace(rule=replace(self.rule, tensor=number))
        return self

    def applied_to(self, span: Span) -> Span:
        """Return a span whose bytes follow so. Rules predict bytes, whatever the type of the elements is."""
        return span._replace(dtype=DType.U8, base_begin=self.begin, rule=self.rule)


def find_rules(
    blocks: Blocks, read: Read, base: BaseBlob, base_header: Header
) -> list[Found | None]:
    """Find the weights in a base that blocks were quantized from, or those of each matrix if they are a stack.

    Takes what :func:`find_rule` takes, and raises the same.

    Returns:
        what :func:`find_rule` returns for each; nothing if there are no weights at all.
    """
    entries = list(base_header.tensors.values())
    found = find_rule(blocks, read, base, base_header, entries)
    if found is not None:
        return [found]
    rules = []
    for matrix in blocks.matrices():
        rules.append(find_rule(matrix, read, base, base_header, entries))
        # Those of a stack mostly follow each other in the base.
        last = rules[-1]
        at = (
            0
            if last is None
            else 1
            + next(
                number
                for number, entry in enumerate(entries)
                if base_header.data_start + entry.begin == last.begin
            )
        )
        entries = entries[at:] + entries[:at]
    return rules if any(rules) else []


def find_rule(
    blocks: Blocks,
    read: Read,
    base: BaseBlob,
    base_header: Header,
    entries: Sequence[TensorEntry] = (),
) -> Found | None:
    """Find the weights in a base that blocks were quantized from.

    Args:
        blocks: the tensor.
        read: reads its blob.
        base: the blob that may have the weights.
        base_header: its header.
        entries: its tensors, those to be tried first first; by default in their order.

    Returns:
        the weights from which most follows; None if no tensor of the base has any.

    Raises what reading the blobs raises.
    """
    from blobstore.compression.quant_rule import QuantRule  # imports numpy
    from blobstore.gguf.fill_codes import CODED
    from blobstore.gguf.quantize import QUANTIZED

    best: Found | None = None
    for entry in sources_of(entries or base_header.tensors.values(), {blocks.elements}):
        begin = base_header.data_start + entry.begin
        pair = _Pair(blocks, read, base, begin)
        found = None
        if blocks.type_name in QUANTIZED:
            found = pair.find(QuantRule(blocks.type_name, entry.spec.dtype))
        if found is None and blocks.type_name in CODED:
            found = pair.find(QuantRule(blocks.type_name, entry.spec.dtype, keeps_scales=True))
        if found is not None and (best is None or found.differing < best.differing):
            best = found
        if best is not None and best.differing <= NEARLY_ALL:
            break
    return best


class _Pair(NamedTuple):
    """Blocks, and the weights that they may have been quantized from."""

    blocks: Blocks
    read: Read
    base: BaseBlob
    begin: int
    """Offset of the weights in the base."""

    def find(self, rule: QuantRule) -> Found | None:
        """Return how blocks follow by a rule, or by it with other casts or a permutation; None if they do not."""
        most = MAX_DIFFERING if rule.keeps_scales else 0.0
        if self._differing(rule, [0], self.blocks.sample_size) > most:
            return None  # a permutation keeps the first row
        offsets = self._offsets(rule)
        differing = self._differing(rule, offsets)
        if differing > most:
            permuted = self._find_permutation(rule, most)
            if permuted is None:
                return None
            rule, differing = permuted, self._differing(permuted, offsets)
        found = Found(differing, self.begin, rule)
        if differing and rule.keeps_scales:
            for cast in SOURCES:
                other = rule._replace(cast=cast)
                differing = self._differing(other, offsets)
                if differing < found.differing:
                    found = found._replace(differing=differing, rule=other)
        return found

    def _offsets(self, rule: QuantRule) -> list[int]:
        """Return where samples begin."""
        last = (self.blocks.size - self._size(rule)) // self.blocks.block_size
        return list(
            dict.fromkeys(last * place // PLACES[-1] * self.blocks.block_size for place in PLACES)
        )

    def _size(self, rule: QuantRule) -> int:
        """Return the size of a sample."""
        if not rule.keeps_scales:
            return self.blocks.sample_size
        return min(_CODED_SAMPLE // self.blocks.weights * self.blocks.block_size, self.blocks.size)

    def _differing(self, rule: QuantRule, offsets: list[int], size: int = 0) -> float:
        """Return the share of the bytes of samples, or of those of their codes, that a rule does not predict."""
        import numpy as np

        differing = total = 0
        for offset in offsets:
            sample = self.blocks.sample(self.read, offset, size or self._size(rule))
            mine = np.frombuffer(sample, np.uint8)
            theirs = rule.expect(
                lambda at, count: self.base.read(self.begin + at, count), offset, mine
            )
            differing += int(np.count_nonzero(mine != theirs))
            total += len(mine) - rule.kept_size(len(mine))
        return differing / total

    def _find_permutation(self, rule: QuantRule, most: float) -> QuantRule | None:
        """Return the rule with llama.cpp's permutation of rows for rotary embeddings; None if it predicts less.

        It keeps the first row of the first head and the last row, and moves row head / 2 to 1.
        """
        row = self.blocks.columns // self.blocks.weights * self.blocks.block_size
        rows = self.blocks.size // row
        offsets = self._offsets(rule)
        for head in range(4, min(rows, _MAX_HEAD) + 1, 2):
            permuted = rule._replace(columns=self.blocks.columns, head=head)
            if (
                rows % head == 0
                and permuted.is_possible(self.blocks.size)
                and self._differing(permuted, [row], self.blocks.sample_size) <= most
                and self._differing(permuted, offsets) <= most
            ):
                return permuted
        return None
