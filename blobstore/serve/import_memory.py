"""Reserves memory for the documents of an arriving model before they are parsed, and for writing its blobs.

All arriving models share :data:`blobstore.core.limits.IMPORTS`. If the documents of one would take more than
:data:`~blobstore.core.limits.IMPORT`, they are not parsed, and its files are stored as they are.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Final

from blobstore.core import limits, strict_json
from blobstore.core.escape import quote
from blobstore.core.files import open_regular, read_exactly
from blobstore.errors import Damaged, DamagedSource, RemoteError
from blobstore.gguf.header import read_header
from blobstore.safetensors.header import PREFIX_SIZE, header_size
from blobstore.sources.gguf import GGUF
from blobstore.sources.safetensors import SAFETENSORS

if TYPE_CHECKING:
    from pathlib import Path

_MAX_GGUF: Final = 32 << 20
"""Bytes of the header of a GGUF file; the largest known ones have 20 MiB."""
_PER_TENSOR: Final = 600
"""Bytes of memory per tensor of a GGUF file."""
_PER_BLOB: Final = 5500
"""Bytes of memory per blob of an import."""
_estimating = threading.Lock()
"""Held while a document is read for its size: one at a time in the process, because its memory is not held yet."""


class ImportMemory(limits.Held):
    """The memory of one model, each of whose documents counts once until all is released."""

    def __init__(self) -> None:
        """Hold none yet."""
        super().__init__(limits.IMPORTS, limits.IMPORT)
        self._paths: set[Path] = set()

    def hold(self, path: Path) -> None:
        """Hold the memory for a file of JSON, or for the header of a weight file.

        Raises:
            DamagedSource: the model would take too much memory, or the file has no header.
            Crowded: other models take the memory now.
        """
        if path in self._paths:
            return
        try:
            with _estimating:
                size = _memory_of(path)
            self.add(size, quote(path))
        except limits.Crowded:
            raise
        except (Damaged, RemoteError) as error:
            raise DamagedSource(f"{quote(path)}: {error}") from None
        self._paths.add(path)

    def hold_blobs(self, count: int) -> None:
        """Hold the memory for writing so many blobs. Raises as :meth:`hold`."""
        try:
            self.add(count * _PER_BLOB, f"{count:,} blobs")
        except limits.Crowded:
            raise
        except RemoteError as error:
            raise DamagedSource(str(error)) from None

    def release(self) -> None:
        """See :class:`Held`."""
        super().release()
        self._paths.clear()


def _memory_of(path: Path) -> int:
    """Return about how much memory a document takes. Raises Damaged or OSError."""
    descriptor, size = open_regular(path)
    try:
        if path.suffix == SAFETENSORS:
            size = header_size(read_exactly(descriptor, PREFIX_SIZE, 0), size)
            return strict_json.memory_of(read_exactly(descriptor, size, PREFIX_SIZE))
        if path.suffix == GGUF:
            # Without the bytes beyond the limit, a longer header is one that ends too early.
            header = read_header(
                lambda begin, end: read_exactly(descriptor, min(end, _MAX_GGUF) - begin, begin),
                size,
            )
            return 4 * header.data_start + _PER_TENSOR * len(header.tensors)
        # The map of an index is also kept by file.
        return 2 * strict_json.memory_of(read_exactly(descriptor, size, 0))
    finally:
        os.close(descriptor)
