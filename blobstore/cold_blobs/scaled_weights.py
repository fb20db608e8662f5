"""Compares weights with scales of their own with tensors that they may have been quantized from, by samples.

These are the integers of MLX, whose codes, scales and biases follow from the weights, and 8-bit floats, whose codes
follow from the weights and the scales. Quotients of 8-bit floats may have been rounded to a smaller type before.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from blobstore.cold_blobs.quantized import (
    MAX_DIFFERING,
    NEARLY_ALL,
    PLACES,
    SOURCES,
    Found,
    sources_of,
    unit_vector,
)
from blobstore.cold_blobs.tensor_index import MIN_PIECE
from blobstore.core.tensor import DType
from blobstore.errors import BlobDamaged
from blobstore.quantization.metadata import parse_quant_metadata, qparam_names
from blobstore.quantization.recipes import BIAS, SCALE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any, Final

    import numpy as np

    from blobstore.cold_blobs.tensor_index import Read
    from blobstore.compression.base import BaseBlob
    from blobstore.compression.scaled_rules import AffineRule, Float8Rule
    from blobstore.quantization.formats import QuantFormat
    from blobstore.safetensors.header import Header, TensorEntry

    Array = np.ndarray[Any, Any]

_SAMPLE: Final = 256
"""Weights of a sample of the first and of the last row, if rows have as many."""
_COMPARED: Final = 1 << 12
"""Weights of a sample whose codes are compared."""
_STACK_DIMENSIONS: Final = 3
_MAX_BLOCK: Final = 0xFFFF


class ScaledWeight(NamedTuple):
    """A quantized weight of a blob, and the tensors of its scales."""

    tensors: tuple[str, ...]
    """The names of the tensors that follow from weights: the codes first."""
    item: QuantFormat
    group_size: int
    scale: DType
    """The type of its scales."""
    shape: tuple[int, ...]
    """Of its weights."""
    places: tuple[tuple[int, int], ...]
    """The offset in the blob and the size of the codes, the scales, and the biases if there are any."""

    @property
    def elements(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)

    @property
    def sampled(self) -> int:
        """Weights of a sample, which lies in one row."""
        group = self.group_size if self.item.float8 is None else 1
        return min(_SAMPLE, self.shape[-1]) // group * group

    def matrices(self) -> list[ScaledWeight]:
        """Return the matrices of a stack; none if they are small, or if there is one matrix only."""
        count, *shape = self.shape
        if len(shape) < _STACK_DIMENSIONS - 1 or self.item.float8 is not None:
            return []
        sizes = [size // count for _, size in self.places]
        if count == 1 or sizes[0] < MIN_PIECE:
            return []
        begins = [begin for begin, _ in self.places]
        return [
            self._replace(
                shape=tuple(shape),
                places=tuple(
                    (begin + at * size, size) for begin, size in zip(begins, sizes, strict=True)
                ),
            )
            for at in range(count)
        ]

    def unit_vector(self, read: Read) -> Array:
        """Return weights of the first and the last row, as :func:`unit_vector`. Raises what ``read`` raises."""
        import ml_dtypes
        import numpy as np

        from blobstore.quantization.numpy import dequantize

        counts = [self.sampled * self.item.bits // 8]
        if self.item.float8 is None:
            counts += [self.sampled // self.group_size * self.scale.bits // 8] * 2
        ends = [
            [_read(read, begin + at * (size - count), count) for at in (0, 1)]
            for (begin, size), count in zip(self.places, counts, strict=False)
        ]
        data = [b"".join(item) for item in ends]
        if self.item.float8 is not None:  # whose scales change angles little
            return unit_vector(np.frombuffer(data[0], ml_dtypes.float8_e4m3fn).astype(np.float32))
        words = np.frombuffer(data[0], np.uint32)[None]
        kinds = {DType.F32: np.float32, DType.F16: np.float16, DType.BF16: ml_dtypes.bfloat16}
        scales, biases = (np.frombuffer(item, kinds[self.scale])[None] for item in data[1:])
        values = dequantize(words, scales, biases, self.item, self.group_size, "float32")
        return unit_vector(values.reshape(-1))

    def find(self, read: Read, base: BaseBlob, base_header: Header) -> Found | None:
        """Return the weights in a base from which most of the codes follow, and their rule; None if none do."""
        best: Found | None = None
        entries = sources_of(base_header.tensors.values(), {self.elements})
        for entry in sorted(entries, key=lambda entry: entry.spec.name != self.tensors[0]):
            begin = base_header.data_start + entry.begin
            for rule in self._rules(read, entry.spec.dtype):
                found = self._compare(rule, read, base, begin)
                if found is not None and (best is None or found.differing < best.differing):
                    best = found
            if best is not None and best.differing <= NEARLY_ALL:
                break
        return best

    def _rules(self, read: Read, dtype: DType) -> Iterator[AffineRule | Float8Rule]:
        from blobstore.compression.scaled_rules import CODES, AffineRule  # imports numpy

        if self.item.float8 is None:
            yield AffineRule(dtype, self.scale, CODES, self.item.bits, self.group_size)
            return
        rule = self._float8_rule(read, dtype, self.item.float8.block)
        if max(rule.block) <= _MAX_BLOCK and rule.is_possible(self.places[0][1]):
            for quotient in SOURCES:
                yield replace(rule, quotient=quotient)

    def _compare(
        self, rule: AffineRule | Float8Rule, read: Read, base: BaseBlob, begin: int
    ) -> Found | None:
        """Return how many codes of samples differ; None if too many do."""
        import numpy as np

        place, size = self.places[0]
        unit = rule.kind
        length = min(_COMPARED // unit.weights * unit.size, size)
        last = (size - length) // unit.size
        differing = total = 0
        for number in PLACES:
            offset = last * number // PLACES[-1] * unit.size
            mine = np.frombuffer(_read(read, place + offset, length), np.uint8)
            theirs = rule.predict(lambda at, count: base.read(begin + at, count), offset, length)
            differing += int(np.count_nonzero(mine != theirs))
            total += length
            if differing > MAX_DIFFERING * total:
                return None
        return Found(differing / total, begin, rule)

    def _float8_rule(self, read: Read, dtype: DType, block: tuple[int, int]) -> Float8Rule:
        """Return the rule of 8-bit floats with scales of ``block``, rows and columns."""
        from blobstore.compression.quant_rule import weights_of
        from blobstore.compression.scaled_rules import Float8Rule

        begin, size = self.places[1]
        rows, columns = self.elements // self.shape[-1], self.shape[-1]
        height, width = block
        rule = Float8Rule(
            dtype, columns, (0 if height >= rows else height, 0 if width >= columns else width)
        )
        scales = weights_of(_read(read, begin, size), self.scale).tobytes()
        return rule.with_scales(scales, self.places[0][1])


def scaled_weights(header: Header) -> Iterator[ScaledWeight]:
    """Yield the weights of a blob whose codes follow from others."""
    for name, entry in header.tensors.items():
        if entry.end - entry.begin < MIN_PIECE:
            continue
        known = {
            suffix: header.tensors[other]
            for suffix, other in qparam_names(entry.spec, header.metadata)
            if other in header.tensors
        }
        if SCALE not in known:
            continue
        specs = {suffix: other.spec for suffix, other in known.items()}
        try:
            found = parse_quant_metadata(entry.spec, specs, header.metadata)
        except BlobDamaged:  # reported when the tensor is read
            continue
        if found is None or not _is_known(entry, found[0], specs[SCALE].dtype):
            continue
        item, group_size = found
        tensors = [entry, *(known[suffix] for suffix in (SCALE, BIAS) if suffix in known)]
        names = (name,) if item.float8 else tuple(part.spec.name for part in tensors)
        yield ScaledWeight(
            names,
            item,
            group_size,
            specs[SCALE].dtype,
            item.logical_shape(entry.spec.shape),
            tuple((header.data_start + part.begin, part.end - part.begin) for part in tensors),
        )


def _is_known(entry: TensorEntry, item: QuantFormat, scale: DType) -> bool:
    is_float8 = item.float8 is not None and entry.spec.dtype is DType.F8_E4M3
    return scale in SOURCES and (is_float8 or item.mode == "affine")


def find_scaled_rules(
    header: Header, read: Read, base: BaseBlob, base_header: Header
) -> dict[str, Sequence[Found | None]]:
    """Find the weights in a base that weights of a blob were quantized from.

    Returns:
        how the tensors of the blob follow, by their names: of a stack, each of its matrices.

    Raises what reading the blobs raises.
    """
    rules: dict[str, Sequence[Found | None]] = {}
    for weight in scaled_weights(header):
        found: Sequence[Found | None] = [weight.find(read, base, base_header)]
        if found == [None]:
            found = [matrix.find(read, base, base_header) for matrix in weight.matrices()]
        if not any(found):
            continue
        for number, name in enumerate(weight.tensors):
            rules[name] = [item and item.of_tensor(number) for item in found]
    return rules


def _read(read: Read, begin: int, size: int) -> bytes:
    found = bytearray(size)
    read(memoryview(found), begin)
    return bytes(found)
