"""Finds the weights in a blob that others were quantized from: samples decide, so that a wrong parent costs little.

Weights may be a tensor of the parent, or a part of one: an expert of a stack, or what was fused with others, as queries
are with keys and values. Quantized weights are divided in turn if their parts follow from several tensors. If one of
both has more rows, as padded vocabularies do, the first rows follow.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from blobstore.cold_blobs.tensor_index import MIN_PIECE
from blobstore.core.tensor import DType

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any, Final, Self

    import numpy as np

    from blobstore.cold_blobs.tensor_index import Read
    from blobstore.compression.base import BaseBlob
    from blobstore.compression.quant_rule import Rule
    from blobstore.compression.spans import Span
    from blobstore.safetensors.header import Header

    Array = np.ndarray[Any, Any]

FLOATS: Final = (DType.F32, DType.F16, DType.BF16)
"""The types of weights that others are quantized from, besides blocks of Q8_0."""
MAX_DIFFERING: Final = 0.5
"""The share of bytes of codes that may differ: those of other weights nearly all do."""
_NEARLY_ALL: Final = 0.02
"""If so little differs, no other tensor of a base is compared."""
_PLACES: Final = (0, 3, 5, 8, 11, 13)
"""Where samples lie, in thirteenths: at rows of attention heads that a permutation moves."""
_COMPARED: Final = 1 << 12
"""Weights whose codes are compared at each of these places, if some may differ."""
_SAMPLE: Final = 256
"""Weights of a sample of the first and of the last row, if rows have as many."""
STACK_DIMENSIONS: Final = 3
_MAX_SLOTS: Final = 512
"""Parts of a tensor that may be the weights: so many experts, of which two matrices are fused."""
_MAX_FUSED: Final = 8
"""The first rows that follow are at least such a part of a weight."""


class Source(NamedTuple):
    """Weights, or blocks of Q8_0, that others may be quantized from."""

    name: str
    dtype: DType
    """U8 for blocks."""
    begin: int
    """Offset in the blob."""
    elements: int
    """Number of weights."""

    @property
    def grain(self) -> int:
        """Weights that are read together at least."""
        return 32 if self.dtype is DType.U8 else 1

    def parts(self, count: int) -> list[Source]:
        """Return the parts of so many weights, one after the other; none if there are too many."""
        from blobstore.compression.quant_rule import size_of_weights  # imports numpy

        number, step = self.elements // count, size_of_weights(self.dtype, count)
        return [
            self._replace(begin=self.begin + at * step, elements=count)
            for at in range(number if number <= _MAX_SLOTS else 0)
        ]

    def unit_vector(self, base: BaseBlob, length: int) -> Array:
        """Return so many of the first and of the last weights as :func:`unit_vector`."""
        from blobstore.compression.quant_rule import size_of_weights, weights_of

        size = size_of_weights(self.dtype, length)
        end = self.begin + size_of_weights(self.dtype, self.elements)
        ends = [base.read(at, size).tobytes() for at in (self.begin, end - size)]
        return unit_vector(weights_of(b"".join(ends), self.dtype))


def sources_in(header: Header) -> Iterator[Source]:
    """Yield the tensors of a blob that others may be quantized from."""
    from blobstore.compression.quant_rule import Q8_0  # imports numpy
    from blobstore.compression.spans import blocks_of

    for entry in header.tensors.values():
        begin, dtype = header.data_start + entry.begin, entry.spec.dtype
        if dtype in FLOATS:
            yield Source(entry.spec.name, dtype, begin, math.prod(entry.spec.shape))
        elif blocks_of(entry.spec, header.metadata) == Q8_0:
            count = (entry.end - entry.begin) // Q8_0.size * Q8_0.weights
            yield Source(entry.spec.name, dtype, begin, count)


def unit_vector(weights: Array) -> Array:
    """Return weights divided by their length; 0 if that is 0 or not finite."""
    import numpy as np

    with np.errstate(all="ignore"):
        length = np.linalg.norm(weights)
        found: Array = weights / length
    return found if 0 < length < np.inf else np.zeros_like(weights)


def read_bytes(read: Read, begin: int, size: int) -> bytes:
    """Return bytes of a blob."""
    found = bytearray(size)
    read(memoryview(found), begin)
    return bytes(found)


class Found(NamedTuple):
    """Weights in a base, and how others follow from them."""

    differing: float
    """The share of the bytes of samples that do not follow."""
    begin: int
    """Offset of the weights in the base."""
    rule: Rule

    def of_tensor(self, number: int) -> Found:
        """Return how another tensor of the same weight follows."""
        from blobstore.compression.scaled_rules import AffineRule

        if isinstance(self.rule, AffineRule):
            return self._replace(rule=replace(self.rule, tensor=number))
        return self

    def applied_to(self, span: Span) -> Span:
        """Return a span whose bytes follow so. Rules predict bytes, whatever the type of the elements is."""
        return span._replace(dtype=DType.U8, base_begin=self.begin, rule=self.rule)


@dataclass(frozen=True)
class Weight(ABC):
    """A quantized weight of a blob, or consecutive rows of one."""

    tensors: tuple[str, ...]
    """The names of the tensors that follow from weights: the codes first."""
    places: tuple[tuple[int, int], ...]
    """The offset in the blob and the size of the codes, then of scales and biases if they are tensors."""
    rows: int
    columns: int
    """Weights of a row."""
    slices: int
    """Matrices of a stack, such as the experts of a layer."""
    group: int
    """Weights that are quantized together."""

    @property
    def elements(self) -> int:
        """Number of weights."""
        return self.rows * self.columns

    @property
    def sampled(self) -> int:
        """Weights of a sample, which lies in one row."""
        return min(_SAMPLE, self.columns) // self.group * self.group

    @property
    def is_divisible(self) -> bool:
        """Whether its rows follow by rules of their own."""
        return True

    @abstractmethod
    def weights(self, read: Read, begin: int) -> Array:
        """Return what a sample from a weight on stands for, as float32. Raises what ``read`` raises."""

    @abstractmethod
    def rules(self, read: Read, dtype: DType) -> Iterator[Rule]:
        """Yield the rules by which the codes may follow from weights of a type."""

    def best_rule(self, sample: Sample, rule: Rule) -> Found | None:
        """Return how the codes follow by a rule; None if they do not."""
        return sample.found(rule, MAX_DIFFERING)

    def part(self, first: int, rows: int) -> Self:
        """Return some of the rows."""
        places = tuple(
            (begin + size // self.rows * first, size // self.rows * rows)
            for begin, size in self.places
        )
        return replace(self, places=places, rows=rows, slices=1)

    def matrices(self) -> list[Self]:
        """Return the matrices of a stack; none if there is one matrix only."""
        rows = self.rows // self.slices
        count = self.slices if self.slices > 1 and self.is_divisible else 0
        return [self.part(number * rows, rows) for number in range(count)]

    def unit_vector(self, read: Read) -> Array:
        """Return the first and the last weights as :func:`unit_vector`. Raises what ``read`` raises."""
        import numpy as np

        ends = [self.weights(read, begin) for begin in (0, self.elements - self.sampled)]
        return unit_vector(np.concatenate(ends))


class Match(NamedTuple):
    """Rows of a weight, and the weights that they follow from, if there are any."""

    weight: Weight
    found: Found | None


class Sample(NamedTuple):
    """Codes of a weight, compared with those that follow from weights of a base."""

    weight: Weight
    read: Read
    base: BaseBlob
    source: Source
    compared: int = _COMPARED
    """Weights at each of the places."""

    def found(self, rule: Rule, most: float) -> Found | None:
        """Return how the codes follow by a rule; None if more than ``most`` of a sample differ."""
        differing = self.differing(rule, self.offsets(rule))
        return None if differing > most else Found(differing, self.source.begin, rule)

    def offsets(self, rule: Rule) -> list[int]:
        """Return where samples begin in the codes."""
        last = (self.weight.places[0][1] - self._size(rule)) // rule.kind.size
        return list(
            dict.fromkeys(last * place // _PLACES[-1] * rule.kind.size for place in _PLACES)
        )

    def _size(self, rule: Rule) -> int:
        size = self.compared // rule.kind.weights * rule.kind.size
        return min(size, self.weight.places[0][1])

    def differing(self, rule: Rule, offsets: Sequence[int], size: int = 0) -> float:
        """Return the share of the bytes of samples, or of those of their codes, that a rule does not predict."""
        import numpy as np

        begin, differing, total = self.weight.places[0][0], 0, 0
        for offset in offsets:
            sample = read_bytes(self.read, begin + offset, size or self._size(rule))
            mine = np.frombuffer(sample, np.uint8)
            theirs = rule.expect(self._read_base, offset, mine)
            differing += int(np.count_nonzero(mine != theirs))
            total += len(mine) - len(mine) // rule.kind.size * rule.kept
        return differing / total

    def _read_base(self, at: int, count: int) -> Array:
        return self.base.read(self.source.begin + at, count)


class WeightSearch:
    """Finds what the rows of one weight follow from."""

    def __init__(self, read: Read, base: BaseBlob, base_header: Header) -> None:
        """Take a function that reads the blob of the weight, and the blob that may have its parents."""
        self._read = read
        self._base = base
        self._sources = list(sources_in(base_header))
        self._places: dict[int, list[Source]] = {}
        """The parts of tensors that have a number of weights."""

    def matches(self, weight: Weight) -> list[Match]:
        """Return the rows of a weight in their order, with what they follow from.

        Raises what reading the blobs raises.
        """
        found = None
        if weight.places[0][1] >= MIN_PIECE:
            found = self._find(weight)
        if found is not None:
            return [Match(weight, found)]
        if matrices := weight.matrices():
            return [match for matrix in matrices for match in self.matches(matrix)]
        return self._by_first_rows(weight) or [Match(weight, None)]

    def _find(self, weight: Weight) -> Found | None:
        """Return the weights from which most of a weight follows; None if nothing does."""
        if weight.elements not in self._places:
            whole = [item for item in self._sources if item.elements == weight.elements]
            whole.sort(key=lambda item: item.name != weight.tensors[0])
            larger = [item for item in self._sources if item.elements > weight.elements]
            parts = [part for item in larger for part in item.parts(weight.elements)]
            self._places[weight.elements] = whole + parts
        places, best, last = self._places[weight.elements], None, 0
        for number, source in enumerate(places):
            found = self._compare(weight, source)
            if found is not None and (best is None or found.differing < best.differing):
                best, last = found, number
            if best is not None and best.differing <= _NEARLY_ALL:
                break
        if best is not None:
            # Those of a stack mostly follow each other in the base.
            self._places[weight.elements] = places[last + 1 :] + places[: last + 1]
        return best

    def _by_first_rows(self, weight: Weight) -> list[Match]:
        """Return what the first rows follow from, and then the others; nothing unless the first ones do."""
        for source in sorted(self._sources, key=lambda item: -item.elements):
            rows = source.elements // weight.columns
            # Smaller parts could be any number.
            if not weight.is_divisible or _MAX_FUSED * rows < weight.rows:
                break
            if source.elements % weight.columns or rows >= weight.rows:
                continue
            first = weight.part(0, rows)
            if first.places[0][1] >= MIN_PIECE and (found := self._compare(first, source)):
                rest = weight.part(rows, weight.rows - rows)
                return [Match(first, found), *self.matches(rest)]
        return []

    def _compare(self, weight: Weight, source: Source) -> Found | None:
        """Return how a weight follows from as many others; None if it does not."""
        sample, best = Sample(weight, self._read, self._base, source), None
        for rule in weight.rules(self._read, source.dtype):
            found = weight.best_rule(sample, rule)
            if found is not None and (best is None or found.differing < best.differing):
                best = found
            if best is not None and not best.differing:
                break
        return best


def differing_of(matches: Sequence[Match]) -> float:
    """Return the share of rows that do not follow, about."""
    shares = [
        match.weight.rows * (1.0 if match.found is None else match.found.differing)
        for match in matches
    ]
    return sum(shares) / sum(match.weight.rows for match in matches)
