"""The header of a blob that holds tensors: of a safetensors file, or of a GGUF file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blobstore.errors import InvalidHeader
from blobstore.store.gguf_blob import MAGIC, is_gguf, read_gguf_header

if TYPE_CHECKING:
    from collections.abc import Callable

    from blobstore.safetensors.header import Header
    from blobstore.store.gguf_blob import Read


def read_blob_header(read_safetensors: Callable[[], Header], read: Read, size: int) -> Header:
    """Return what ``read_safetensors`` returns, or the header of a blob of ``size`` bytes that is a GGUF file.

    A safetensors file that begins as a GGUF file does would have a header of more than a gigabyte.

    Raises:
        InvalidHeader: the blob breaks its format.
    """
    try:
        return read_safetensors()
    except InvalidHeader:
        if not is_gguf(read(0, len(MAGIC))):
            raise
    return read_gguf_header(read, size)
