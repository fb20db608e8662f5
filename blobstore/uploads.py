"""The tensors of an opened model on a device, many on their way there at a time."""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING, Any

from blobstore.core.tensor import DTYPES, TensorSpec
from blobstore.transfer import Part, transferred

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from blobstore.core.progress import Progress
    from blobstore.frameworks import Dequantize, Lane
    from blobstore.packed_weights import PackedWeights
    from blobstore.places import Place


def uploaded(
    names: Iterable[str],
    places: Mapping[str, Place],
    packed: PackedWeights,
    lane: Lane,
    read: Callable[[int, int, memoryview], None],
    *,
    dequantize: Dequantize | None = None,
    progress: Progress | None = None,
) -> Iterator[tuple[str, Any]]:
    """Yield names and tensors in the order of ``names``.

    Args:
        names: of the tensors.
        places: where the tensors of the model are.
        packed: the quantized weights of the model.
        lane: the way to the device.
        read: fills memory with the bytes of a blob; see :func:`~blobstore.transfer.transferred`.
        dequantize: makes plain numbers of quantized weights, if they are to be such; on the device.
        progress: told of the bytes that have been read.

    Raises:
        UnsupportedDType: the framework has no type for a tensor, or a weight does not say how it is
            quantized. Otherwise as :func:`~blobstore.transfer.transferred`.
    """
    needed: dict[str, tuple[str, ...]] = {}
    for name in names:
        is_packed = dequantize is not None and name in packed
        needed[name] = (name, *packed.companions(name).values()) if is_packed else ()
    stored = itertools.chain.from_iterable(ends or (name,) for name, ends in needed.items())
    parts = [_part(end, places[end]) for end in stored]
    with contextlib.closing(transferred(parts, lane, read, progress=progress)) as arriving:
        for name, ends in needed.items():
            if dequantize is None or not ends:
                yield next(arriving)
            else:
                arrays = itertools.islice(arriving, len(ends))
                yield name, packed.numbers(name, dict(arrays), dequantize)
        next(arriving, None)  # to its end, where it waits for the device


def _part(name: str, place: Place) -> Part:
    dtype, shape, blob, begin = place
    return Part(TensorSpec(name, DTYPES[dtype], tuple(shape)), blob, begin)
