"""The header of a blob that is a whole GGUF file, as in the models of Ollama."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blobstore.errors import InvalidHeader
from blobstore.safetensors.header import Header, TensorEntry

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Buffer

    Read = Callable[[int, int], Buffer]
    """Returns the bytes of a blob from one offset to another; fewer at its end."""

MAGIC = b"GGUF"


def is_gguf(start: Buffer) -> bool:
    """Return whether the first bytes of a blob are those of a GGUF file."""
    return bytes(memoryview(start)[: len(MAGIC)]) == MAGIC


def read_gguf_header(read: Read, size: int) -> Header:
    """Return the header of a GGUF file of ``size`` bytes as that of a blob.

    Its tensors are stored as :func:`~blobstore.gguf.layout.stored_spec` says, and its metadata says what their
    bytes mean.

    Raises:
        InvalidHeader: the file breaks the format.
    """
    # Only models of Ollama need these.
    from blobstore.gguf.header import InvalidGguf, read_header
    from blobstore.gguf.layout import stored_spec
    from blobstore.quantization.formats import GGUF_TYPES
    from blobstore.quantization.metadata import quant_metadata, stated

    try:
        parsed = read_header(read, size)
    except InvalidGguf as error:
        raise InvalidHeader(str(error)) from None
    entries, types = {}, {}
    for name, tensor in parsed.tensors.items():
        begin = tensor.begin - parsed.data_start
        entries[name] = TensorEntry(stored_spec(tensor), begin, begin + tensor.size)
        item = GGUF_TYPES.get(tensor.type.name) if tensor.type is not None else None
        types[name] = None if item is None else stated(item, item.group_size)
    return Header(entries, quant_metadata(types), parsed.data_start)
