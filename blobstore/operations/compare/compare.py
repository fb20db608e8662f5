"""The operation ``compare``: measures the error of each tensor of a model against a base, such as its original.

Each pair of tensors is one job of a thread pool, which reads both a few rows at a time: quantized
weights as the float32 values that they stand for, others as they are. Sums are in float64. Each
thread needs memory for a few blocks of rows, whatever the size of the model.

Tensors that share the bytes of one blob are equal and are not read. Of the blobs that are read only
the size is checked, not the digest; ``verify`` does that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from blobstore.core.arguments import one_or_more
from blobstore.core.mmap import MappedRegion
from blobstore.core.workers import WorkerPool, check_jobs
from blobstore.models.dequantize import plain_pieces, rows_at_once
from blobstore.operations.compare import converted
from blobstore.operations.compare.pairs import pair_tensors
from blobstore.quantization.error_metrics import ErrorStats, WorstGroup, relative_error, snr_db
from blobstore.safetensors.numpy import as_array
from blobstore.store.local import LocalStore, StoreLike
from blobstore.store.with_outside_files import StoreWithFiles, name_or_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from blobstore.core.progress import Progress
    from blobstore.manifests.reference import Reference
    from blobstore.operations.compare.pairs import Pair
    from blobstore.operations.compare.source_tensor import SourceTensor

    Array = np.ndarray[Any, Any]

_BLOCK_ELEMENTS = 1 << 15
"""Small enough for a processor's cache, and a multiple of every group size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorError:
    """The error of a tensor against the base's tensor of the same name."""

    name: str
    type: str
    """The quantization type, or the element type."""
    group_size: int
    """Elements of a row that share a scale; 0 if the tensor is not quantized."""
    nbytes: int
    """Bytes in the store, including scales and biases."""
    base_type: str
    base_group_size: int
    base_nbytes: int
    shape: tuple[int, ...]
    squared_error: float
    """Sum of the squared differences."""
    squared_base: float
    """Sum of the squares of the base; 0 if the tensor was not read because both share its bytes."""
    max_abs_error: float
    nonfinite: int
    """Elements that no other field counts: they differ, and one of the two is infinite, NaN or too
    large to be squared."""
    worst: WorstGroup | None
    """None if the tensors are equal."""

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_equal(self) -> bool:
        """Whether all elements are equal; -0 equals 0."""
        return not self.max_abs_error and not self.nonfinite

    @property
    def relative_error(self) -> float | None:
        """Norm of the difference divided by the norm of the base; None if no element is finite.

        0 if the tensors are equal; infinite if they differ and the base has only zeros.
        """
        if self.nonfinite and self.nonfinite == self.elements:
            return None
        return relative_error(self.squared_error, self.squared_base)

    @property
    def snr_db(self) -> float | None:
        """Signal-to-noise ratio in decibels; infinite if the tensors are equal, None as above."""
        if self.nonfinite and self.nonfinite == self.elements:
            return None
        return snr_db(self.squared_error, self.squared_base)

    @property
    def bits_per_weight(self) -> float | None:
        """Stored bits per element; None for an empty tensor."""
        return self.nbytes * 8 / self.elements if self.elements else None

    @property
    def base_bits_per_weight(self) -> float | None:
        """As :attr:`bits_per_weight`, of the base."""
        return self.base_nbytes * 8 / self.elements if self.elements else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The result of :func:`blobstore.compare`."""

    reference: Reference | str
    """A name, or the path of a GGUF file."""
    base: Reference | str
    tensors: tuple[TensorError, ...] = field(repr=False)
    """The tensors that both models have, in the order of the first."""
    only_in_model: tuple[str, ...]
    only_in_base: tuple[str, ...]

    @property
    def differing(self) -> tuple[TensorError, ...]:
        """The tensors that differ. Only they count for the errors of the model.

        Equal tensors count for nothing because those that share their bytes are not read, and the
        errors of the model must not depend on how tensors are stored.
        """
        return tuple(tensor for tensor in self.tensors if not tensor.is_equal)

    @property
    def relative_error(self) -> float | None:
        """As :attr:`TensorError.relative_error`, of all tensors that differ as if they were one."""
        return relative_error(*self._squares) if self._squares else None

    @property
    def snr_db(self) -> float | None:
        """As :attr:`TensorError.snr_db`, of all tensors that differ as if they were one."""
        return snr_db(*self._squares) if self._squares else None

    @property
    def max_abs_error(self) -> float:
        """The largest difference between two elements."""
        return max((tensor.max_abs_error for tensor in self.tensors), default=0.0)

    @property
    def nonfinite(self) -> int:
        """Elements that are not measured; see :class:`TensorError`."""
        return sum(tensor.nonfinite for tensor in self.tensors)

    @property
    def elements(self) -> int:
        """Number of elements of all compared tensors."""
        return sum(tensor.elements for tensor in self.tensors)

    @property
    def bits_per_weight(self) -> float | None:
        """Stored bits per element, over all compared tensors."""
        size = sum(tensor.nbytes for tensor in self.tensors)
        return size * 8 / self.elements if self.elements else None

    @property
    def base_bits_per_weight(self) -> float | None:
        """As :attr:`bits_per_weight`, of the base."""
        size = sum(tensor.base_nbytes for tensor in self.tensors)
        return size * 8 / self.elements if self.elements else None

    @property
    def _squares(self) -> tuple[float, float] | None:
        """The sums of the squared errors and of the squared base; None if no element is finite."""
        differing = self.differing
        if differing and all(item.relative_error is None for item in differing):
            return None
        return (
            math.fsum(tensor.squared_error for tensor in differing),
            math.fsum(tensor.squared_base for tensor in differing),
        )


def compare_models(
    reference: str | Reference,
    base: str | Reference,
    *,
    store: StoreLike = None,
    patterns: str | Sequence[str] = (),
    names: str | Mapping[str, str] | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Measure the error of every tensor of a model against the tensor of the same name in another.

    If one of the two is of GGUF files and they have no name in common, its tensors are compared under the names,
    in the order and with the values that they had before llama.cpp converted them.

    Args:
        reference: the model, such as a quantized one, or the path of a GGUF file.
        base: the model with the expected values, or such a path.
        store: the store of both models, or its folder; by default the store of
            ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        patterns: shell patterns of tensor names, such as ``*.mlp.*``; by default all tensors.
        names: for GGUF models of other architectures than those of
            :data:`blobstore.gguf.names.ARCHITECTURES`: the one that has the same names. Or names in GGUF files
            and the other model's, such as ``"blk.{layer}.attn_q"`` and ``"layers.{layer}.query"``; see
            docs/reference/commands/compare.md.
        jobs: number of threads; by default one per processor.
        progress: called with the current step, bytes done and total bytes.

    Returns:
        the errors of the tensors that both models have, in the order of the model, and their totals.

    Raises:
        NotFound: a model does not exist, or no tensor of either matches a pattern.
        BlobMissing, BlobDamaged, InvalidManifest: a model is damaged.
        UnsupportedDType: numpy has no type for a tensor's elements.
        BlobstoreError: a tensor has another shape in the base, a blob does not say how it is
            quantized, or the models have no tensor in common, or it is not known which.
        UsageError: ``jobs`` is below 1, or ``names`` is no architecture or not needed.
    """
    check_jobs(jobs)
    store = LocalStore.to_read(store)
    reference, base = name_or_file(reference, store), name_or_file(base, store)
    store = StoreWithFiles(store, (reference, base))
    pairing = pair_tensors(store, reference, base, one_or_more(patterns), names)
    # The largest first, so that the last job to end is a short one.
    pairs = sorted(pairing.pairs, key=_bytes_to_read, reverse=True)
    pool = WorkerPool(jobs, progress, sum(map(_bytes_to_read, pairs)))
    errors = {error.name: error for error in pool.run(pairs, partial(_measure, store, pool))}
    return Comparison(
        reference=reference,
        base=base,
        tensors=tuple(errors[pair.ours.name] for pair in pairing.pairs),
        only_in_model=pairing.only_in_model,
        only_in_base=pairing.only_in_base,
    )


def _bytes_to_read(pair: Pair) -> int:
    return 0 if pair.is_shared else pair.ours.nbytes + pair.base.nbytes


def _measure(store: LocalStore, pool: WorkerPool, pair: Pair) -> TensorError:
    """Return the error of one tensor: a job of ``pool``."""
    stats = ErrorStats(pair.group_size)
    if not pair.is_shared:
        total, elements, done, reported = _bytes_to_read(pair), math.prod(pair.ours.shape), 0, 0
        ours_has_one, base_has_one = (bool(part.origin and part.origin.adds_one) for part in pair)
        sides = (
            tensor_blocks(store, pair.ours, plus_one=base_has_one and not ours_has_one),
            tensor_blocks(store, pair.base, plus_one=ours_has_one and not base_has_one),
        )
        for (row, column, values), (_, _, base_values) in zip(*sides, strict=True):
            stats.add(row, column, values, base_values)
            done += values.size
            reached = total * done // elements
            pool.report(reached - reported, pair.ours.name)
            reported = reached
    ours, base = pair
    return TensorError(
        name=ours.name,
        type=ours.type,
        group_size=ours.group_size,
        nbytes=ours.nbytes,
        base_type=base.type,
        base_group_size=base.group_size,
        base_nbytes=base.nbytes,
        shape=ours.shape,
        squared_error=stats.squared_error,
        squared_base=stats.squared_base,
        max_abs_error=stats.max_abs_error,
        nonfinite=stats.nonfinite,
        worst=stats.worst,
    )


def tensor_blocks(
    store: LocalStore, tensor: SourceTensor, *, plus_one: bool = False
) -> Iterator[tuple[int, int, Array]]:
    """Yield a tensor in blocks: the first row, the first column, and the values.

    Tensors of the same shape have the same blocks, whether they are quantized or not.

    Args:
        store: the store that has the tensor.
        tensor: the tensor.
        plus_one: add 1 to each value as llama.cpp does. The other model has such sums; they are rounded, so
            that subtracting 1 from them would not restore the values.
    """
    stored = tensor.stored
    # One mapping per tensor, so that memory is mapped only while it is read.
    region = MappedRegion([stored.layer.size])
    store.map_blob(stored.layer.digest, stored.layer.size, 0, region)
    order = converted.row_order(tensor)
    pieces: Iterable[Array]
    if tensor.is_quantized:
        pieces = plain_pieces(stored, region.memory, "float32", tensor.place, order=order)
    else:
        start = stored.header.data_start + stored.entry.begin
        array = as_array(region.memory, start, stored.entry.spec)
        pieces = _plain_rows(array if tensor.place is None else array[tensor.place], order)
    first, end = 0, math.prod(tensor.shape[:-1])
    factors = _row_factors(store, tensor, end)
    for found in pieces:
        piece = found[: end - first]
        if factors is not None:
            piece = piece * factors[first : first + len(piece)]
        if plus_one:
            piece = converted.plus_one(piece)
        rows, columns = piece.shape
        height = max(_BLOCK_ELEMENTS // columns, 1)
        for row in range(0, rows, height):
            for column in range(0, columns, _BLOCK_ELEMENTS):
                block = piece[row : row + height, column : column + _BLOCK_ELEMENTS]
                yield first + row, column, block
        first += rows


def _row_factors(store: LocalStore, tensor: SourceTensor, rows: int) -> Array | None:
    """Return the factors of the rows, float32 ``[rows, 1]``; None if the tensor has no scale."""
    scale = tensor.scale
    if scale is None:
        return None
    data = bytearray(scale.nbytes)
    begin = scale.header.data_start + scale.entry.begin
    store.read_into(scale.layer.digest, scale.layer.size, begin, memoryview(data))
    factors = np.frombuffer(data, "<f4")
    if tensor.place is not None and len(factors) > 1:
        factors = factors[tensor.place : tensor.place + 1]
    return factors.repeat(rows // len(factors))[:, None]


def _plain_rows(array: Array, order: Array | None) -> Iterator[Array]:
    """Yield the rows of an array, as many at once as :func:`plain_pieces` yields of a tensor of this shape."""
    if not array.size:
        return
    if order is not None and array.ndim == 1:
        array, order = array[order], None
    flat = array.reshape(-1, array.shape[-1] if array.ndim else 1)
    step = rows_at_once(flat.shape[1])
    for row in range(0, len(flat), step):
        yield flat[row : row + step] if order is None else flat[order[row : row + step]]
