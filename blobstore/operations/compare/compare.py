"""Workflow: the tensors of a model measured against those of another, such as before quantization.

Every pair of tensors is one independent job on a pool of threads, which reads both a few rows at a
time: packed weights as the float32 numbers that they stand for, plain ones as they are. Sums are in
float64. Memory is some blocks of rows a thread, whatever the size of the model.

What both models share is known to be equal and not read. Of the blobs that are read only the size is
checked, not the digest; ``verify`` does that.
"""

from __future__ import annotations

import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from blobstore.core.mmap import MappedRegion
from blobstore.core.progress import Meter
from blobstore.core.workers import check_jobs
from blobstore.errors import BlobstoreError
from blobstore.manifests.reference import Reference
from blobstore.models.dequantize import plain_pieces, rows_at_once
from blobstore.operations.compare.metrics import ErrorStats, WorstGroup, relative_error, snr_db
from blobstore.operations.compare.pairs import pair_tensors
from blobstore.safetensors.numpy import as_array
from blobstore.store.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy as np

    from blobstore.core.progress import Progress
    from blobstore.operations.compare.pairs import Pair, SourceTensor

    Array = np.ndarray[Any, Any]

_BLOCK_ELEMENTS = 1 << 15
"""Small enough for a processor's cache, and a multiple of every group size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorError:
    """How far a tensor is from that of the same name in the base."""

    name: str
    type: str
    """The quantization type, or the element type."""
    group_size: int
    """Elements of a row that share a scale; 0 for a plain tensor."""
    nbytes: int
    """Bytes in the store, companions included."""
    base_type: str
    base_group_size: int
    base_nbytes: int
    shape: tuple[int, ...]
    squared_error: float
    """Sum of the squared differences."""
    squared_base: float
    """Sum of the base's squares; 0 if the tensor was not read, for it is known to be equal."""
    max_abs_error: float
    nonfinite: int
    """Elements that are left out of all numbers: on either side infinite, not a number or too large
    to be squared, and not the same on both."""
    worst: WorstGroup | None
    """None where no group has an error."""

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_equal(self) -> bool:
        """Whether all elements are the same; -0 is 0."""
        return not self.max_abs_error and not self.nonfinite

    @property
    def relative_error(self) -> float | None:
        """Norm of the difference by the norm of the base; None if no element can be compared.

        0 where nothing differs; infinite where something does and the base has only zeros.
        """
        if self.nonfinite and self.nonfinite == self.elements:
            return None
        return relative_error(self.squared_error, self.squared_base)

    @property
    def snr_db(self) -> float | None:
        """Signal-to-noise ratio in decibels; infinite where nothing differs, None as above."""
        if self.nonfinite and self.nonfinite == self.elements:
            return None
        return snr_db(self.squared_error, self.squared_base)

    @property
    def bits_per_weight(self) -> float | None:
        """Bits of the store an element, None where there is no element."""
        return self.nbytes * 8 / self.elements if self.elements else None

    @property
    def base_bits_per_weight(self) -> float | None:
        """As :attr:`bits_per_weight`, in the base."""
        return self.base_nbytes * 8 / self.elements if self.elements else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What :func:`compare_models` measured."""

    reference: Reference
    base: Reference
    tensors: tuple[TensorError, ...]
    """The tensors of both, in the model's order."""
    only_in_model: tuple[str, ...]
    only_in_base: tuple[str, ...]

    @property
    def differing(self) -> tuple[TensorError, ...]:
        """The tensors that are not equal. Only they count for the errors in all.

        Equal ones are left out because many of them need not be read; so the errors in all do not
        depend on which.
        """
        return tuple(tensor for tensor in self.tensors if not tensor.is_equal)

    @property
    def relative_error(self) -> float | None:
        """As :attr:`TensorError.relative_error`, of all tensors that differ taken as one."""
        return relative_error(*self._squares) if self._is_measured else None

    @property
    def snr_db(self) -> float | None:
        """As :attr:`TensorError.snr_db`, of all tensors that differ taken as one."""
        return snr_db(*self._squares) if self._is_measured else None

    @property
    def max_abs_error(self) -> float:
        """The largest difference of two elements."""
        return max((tensor.max_abs_error for tensor in self.tensors), default=0.0)

    @property
    def nonfinite(self) -> int:
        """Elements that are left out; see :class:`TensorError`."""
        return sum(tensor.nonfinite for tensor in self.tensors)

    @property
    def elements(self) -> int:
        """Elements of all compared tensors."""
        return sum(tensor.elements for tensor in self.tensors)

    @property
    def bits_per_weight(self) -> float | None:
        """Bits of the store an element, over all compared tensors."""
        size = sum(tensor.nbytes for tensor in self.tensors)
        return size * 8 / self.elements if self.elements else None

    @property
    def base_bits_per_weight(self) -> float | None:
        """As :attr:`bits_per_weight`, in the base."""
        size = sum(tensor.base_nbytes for tensor in self.tensors)
        return size * 8 / self.elements if self.elements else None

    @property
    def _squares(self) -> tuple[float, float]:
        differing = self.differing
        return (
            math.fsum(tensor.squared_error for tensor in differing),
            math.fsum(tensor.squared_base for tensor in differing),
        )

    @property
    def _is_measured(self) -> bool:
        differing = self.differing
        return not differing or any(item.relative_error is not None for item in differing)


def compare_models(
    reference: str | Reference,
    base: str | Reference,
    *,
    store: LocalStore | None = None,
    patterns: Sequence[str] = (),
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Measure every tensor of a model against the tensor of the same name in another.

    Args:
        reference: the model, quantized for example.
        base: what its tensors should be.
        store: of both; by default the store of ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        patterns: shell patterns of names, such as ``*.mlp.*``; none means all tensors.
        jobs: threads; by default the machine's processors.
        progress: called with what is being done, bytes done and bytes in all.

    Raises:
        NotFound: a model does not exist, or neither has a tensor that matches a pattern.
        BlobMissing, BlobDamaged, InvalidManifest: a model is not whole.
        UnsupportedDType: numpy has no type for a tensor's elements.
        BlobstoreError: a tensor has another shape in the base, or a blob does not say how it is
            quantized; or the models have no tensor in common.
        UsageError: ``jobs`` is below 1.
    """
    check_jobs(jobs)
    if isinstance(reference, str):
        reference = Reference.parse(reference)
    if isinstance(base, str):
        base = Reference.parse(base)
    store = store or LocalStore()
    pairing = pair_tensors(store, reference, base, patterns)
    return Comparison(
        reference=reference,
        base=base,
        tensors=tuple(_measured(store, pairing.pairs, jobs, progress)),
        only_in_model=pairing.only_in_model,
        only_in_base=pairing.only_in_base,
    )


def _measured(
    store: LocalStore, pairs: Sequence[Pair], jobs: int | None, progress: Progress | None
) -> list[TensorError]:
    """Return what each pair of tensors measures, in their order."""
    meter = Meter(progress, sum(map(_size, pairs)))
    work = _Work(store, meter)
    found: dict[str, TensorError] = {}
    with ThreadPoolExecutor(jobs or os.cpu_count(), thread_name_prefix="blobstore") as pool:
        try:
            # The largest first, lest one thread still has it when the others are done.
            in_order = sorted(pairs, key=_size, reverse=True)
            for job in as_completed([pool.submit(work.measure, pair) for pair in in_order]):
                found[job.result().name] = job.result()
        except BaseException:  # also Ctrl-C: stop the threads
            work.stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    return [found[pair.ours.name] for pair in pairs]


def _size(pair: Pair) -> int:
    return 0 if pair.is_shared else pair.ours.nbytes + pair.base.nbytes


class _Work:
    """The job of one pair, with what all jobs share."""

    def __init__(self, store: LocalStore, meter: Meter) -> None:
        self.stop = threading.Event()
        self._store = store
        self._meter = meter

    def measure(self, pair: Pair) -> TensorError:
        """Return how far a tensor is from its base.

        Raises:
            BlobMissing, BlobDamaged: a blob is not whole.
            UnsupportedDType: numpy has no type for its elements.
        """
        deviation = ErrorStats(pair.group_size)
        if not pair.is_shared:
            self._read(pair, deviation)
        ours, base = pair.ours.stored, pair.base.stored
        return TensorError(
            name=pair.ours.name,
            type=ours.type_name,
            group_size=ours.group_size,
            nbytes=pair.ours.nbytes,
            base_type=base.type_name,
            base_group_size=base.group_size,
            base_nbytes=pair.base.nbytes,
            shape=pair.ours.shape,
            squared_error=deviation.squared_error,
            squared_base=deviation.squared_base,
            max_abs_error=deviation.max_abs_error,
            nonfinite=deviation.nonfinite,
            worst=deviation.worst,
        )

    def _read(self, pair: Pair, deviation: ErrorStats) -> None:
        total, elements, done, reported = _size(pair), math.prod(pair.ours.shape), 0, 0
        sides = (self._blocks(pair.ours), self._blocks(pair.base))
        for (row, column, numbers), (_, _, base) in zip(*sides, strict=True):
            if self.stop.is_set():
                raise BlobstoreError("stopped")
            deviation.add(row, column, numbers, base)
            done += numbers.size
            reached = total * done // elements
            self._meter.add(reached - reported, pair.ours.name)
            reported = reached

    def _blocks(self, part: SourceTensor) -> Iterator[tuple[int, int, Array]]:
        """Yield a tensor in blocks: row, column and numbers. They depend on its shape alone."""
        stored = part.stored
        blob = (stored.layer.digest, stored.layer.size)
        # A map of its own, so that memory is only mapped while it is read.
        region = MappedRegion([stored.layer.size])
        for _ in self._store.map_blobs([blob], [0], region):
            pass
        if part.is_quantized:
            pieces: Iterable[Array] = plain_pieces(stored, region.memory, "float32", part.place)
        else:
            array = as_array(
                region.memory, stored.header.data_start + stored.entry.begin, stored.entry.spec
            )
            pieces = _pieces(array if part.place is None else array[part.place])
        yield from _cut(pieces)


def _pieces(array: Array) -> Iterator[Array]:
    """Yield the rows of a plain tensor in pieces such as a packed one of its shape has."""
    if not array.size:
        return
    rows = array.reshape(-1, array.shape[-1] if array.ndim else 1)
    height = rows_at_once(rows.shape[1])
    for row in range(0, len(rows), height):
        yield rows[row : row + height]


def _cut(pieces: Iterable[Array]) -> Iterator[tuple[int, int, Array]]:
    """Yield pieces as blocks small enough to compute with."""
    first = 0
    for piece in pieces:
        rows, columns = piece.shape
        height = max(_BLOCK_ELEMENTS // columns, 1)
        for row in range(0, rows, height):
            for column in range(0, columns, _BLOCK_ELEMENTS):
                block = piece[row : row + height, column : column + _BLOCK_ELEMENTS]
                yield first + row, column, block
        first += rows
