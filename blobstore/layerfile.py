"""The bytes of a planned blob, as a stream of buffers. Pure: it neither opens nor writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blobstore.safetensors.header import encode_header

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from typing_extensions import Buffer

    from blobstore.plan import BlobPlan
    from blobstore.quantization.recipes import Recipe


def blob_header(blob: BlobPlan) -> bytes:
    """Return the header of a blob; its data follows.

    Raises:
        InvalidHeader: the tensors' names cannot stand in a header, or it is over the size limit.
    """
    return encode_header(blob.stored, blob.metadata)


def blob_size(blob: BlobPlan) -> int:
    """Return the size in bytes of a blob, header included. Raises as :func:`blob_header`."""
    return len(blob_header(blob)) + sum(spec.nbytes for spec in blob.stored)


def blob_buffers(blob: BlobPlan, make: Callable[[Recipe], Iterable[Buffer]]) -> Iterator[Buffer]:
    """Yield the bytes of a blob; ``make`` gives the bytes of a tensor and its companions.

    A buffer is good until the next one is asked for.
    """
    yield blob_header(blob)
    for recipe in blob.tensors:
        yield from make(recipe)
