"""Chooses transforms and coders for a part by trying them on a sample."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from blobstore.compression.chunks import Pipeline
from blobstore.compression.delta import codec as delta
from blobstore.compression.entropy import Coder, encode_plane
from blobstore.compression.transforms import IDENTITY, delta_transform, transforms_for, width_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Final

    from blobstore.compression.level import Level
    from blobstore.compression.transforms import Transform
    from blobstore.core.tensor import DType
    from blobstore.gguf.types import GgufType

    Array = np.ndarray[Any, Any]
    Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Choice(NamedTuple):
    """How to encode chunks that resemble a sample."""

    pipelines: list[Pipeline]
    """The best first; a chunk uses the first one that is applicable to it."""
    ratio_alone: float
    """The ratio of the encoded size to the size if a sample is encoded without its base.

    It is 1 where the delta is so small that this does not matter.
    """
    planes: Sequence[Bytes] | None = None
    """The planes of the chunk by the first pipeline, if they were needed for the choice."""


class _Settings(NamedTuple):
    coders: tuple[Coder, ...]
    """Coders for compressible planes; each is tried only if the previous one came near the best."""
    delta: delta.DeltaSettings
    sample_size: int
    """Bytes of the sample."""
    coder_gain: int
    """A slower coder must save one byte in so many."""
    transform_gain: int
    """A slower transform must save one byte in so many, or in the faster one's ``min_gain``."""


_SETTINGS: Final[dict[Level, _Settings]] = {
    "fast": _Settings((Coder.ZSTD,), delta.FAST, 1 << 15, 1 << 7, 0),
    "small": _Settings((Coder.ZSTD, Coder.ZSTD_SMALL), delta.SMALL, 1 << 16, 1 << 6, 1 << 10),
}
_NEAR: Final = 1 << 5
"""A coder is near the best if it needs at most one byte in so many more."""
_NOISE: Final = 1 << 4
"""A plane is noise if a Huffman code saves less than one byte in so many."""
_FEW_VALUES: Final = 1 << 2
"""A plane that a Huffman code shrinks to this fraction may have only two values."""
_TINY: Final = 1 << 4
"""A delta is tiny if it takes less than one byte in so many."""
_SLICES: Final = 4
_BLOCKS: Final = 4
"""The size of samples of blocks, in sizes of other samples, because the planes of blocks are smaller."""


def choose_pipelines(
    chunk: Bytes,
    base: Array | None,
    dtype: DType | None,
    level: Level,
    blocks: GgufType | None = None,
    *,
    keeps_scales: bool = False,
) -> Choice:
    """Return pipelines for the chunks that resemble ``chunk``.

    Args:
        chunk: a sample.
        base: what its deltas are encoded against.
        dtype: the type of its elements.
        level: what to optimise for.
        blocks: the type of its blocks, if it is blocks of GGUF.
        keeps_scales: whether only the codes of these follow from the base, which is their weights.
    """
    settings = _SETTINGS[level]
    size, width = settings.sample_size, width_of(dtype)
    is_typed = dtype is not None
    differences = None
    tried: list[tuple[float, Pipeline]] = []
    if base is not None:
        # Deltas have many small planes, whose overhead a sample does not show.
        coded = blocks.name if blocks is not None and keeps_scales else ""
        delta_of_type = delta_transform(dtype, settings.delta, coded)
        differences = delta_of_type.encode(chunk, base)
        is_tiny = differences is not None and _TINY * len(differences[0]) < len(chunk)
        if is_tiny and not coded:
            # Nothing comes near it, and no coder finds more in it.
            transforms = delta_of_type, IDENTITY[width]
            return Choice([Pipeline(item, [()]) for item in transforms], 1.0, differences)
    name = "" if blocks is None else blocks.name
    if blocks is not None:
        size, width = _BLOCKS * size, blocks.size
    sample = _sample(chunk, size, width)
    for group in transforms_for(dtype, name):
        for transform in group:
            planes = transform.encode(sample, None)
            if planes is not None:
                tried.append(_try(transform, planes, len(sample), settings, is_typed=is_typed))
                break
    alone = min(ratio for ratio, _ in tried)
    if differences is not None:
        tried.append(_try(delta_of_type, differences, len(chunk), settings, is_typed=is_typed))
    least = min(ratio for ratio, _ in tried)
    best = next(
        pipeline
        for ratio, pipeline in tried
        if ratio <= least + least / max(pipeline.transform.min_gain, settings.transform_gain)
    )
    others = sorted((item for item in tried if item[1] is not best), key=lambda item: item[0])
    is_delta = best.transform.needs_base
    pipelines = [best, *(pipeline for _, pipeline in others)]
    return Choice(pipelines, alone, differences if is_delta else None)


def _try(
    transform: Transform, planes: Sequence[Bytes], size: int, settings: _Settings, *, is_typed: bool
) -> tuple[float, Pipeline]:
    """Return the ratio of the encoded size of planes to ``size``, and how it is reached."""
    found = [_choose_coders(plane, settings, is_typed=is_typed) for plane in planes]
    total = sum(size for _, size in found)
    return total / max(size, 1), Pipeline(transform, [coders for coders, _ in found])


def _choose_coders(
    plane: Bytes, settings: _Settings, *, is_typed: bool
) -> tuple[tuple[Coder, ...], int]:
    """Return the coders that compress a plane of the sample best, and the resulting size."""
    huffman = encode_plane(plane.data, (Coder.HUFFMAN,))
    coders = (Coder.HUFFMAN,) if huffman.method else ()
    least = huffman.size
    if least <= len(plane) // _FEW_VALUES:
        bits = encode_plane(plane.data, (Coder.BITS,))
        if bits.method and bits.size < least + least // _NEAR:
            return (Coder.BITS, Coder.HUFFMAN), bits.size
    if is_typed and least > len(plane) - len(plane) // _NOISE:
        return coders, least  # with nearly uniform frequencies, repeated sequences are unlikely
    for coder in settings.coders:
        size = encode_plane(plane.data, (coder,)).size
        if size > huffman.size + huffman.size // _NEAR:
            break
        if size < least - least // settings.coder_gain:
            coders, least = (coder,), size
    return coders, least


def _sample(chunk: Bytes, size: int, width: int) -> Bytes:
    """Return slices of a chunk with ``size`` bytes in total, or the chunk if it has no more."""
    if len(chunk) <= size:
        return chunk
    length = size // _SLICES // width * width
    step = (len(chunk) - length) // (_SLICES - 1) // width * width
    return np.concatenate(
        [chunk[start : start + length] for start in range(0, _SLICES * step, step)]
    )
