"""Several threads write to one file, in a fixed order.

Each thread writes one slot. What it writes is kept in memory, or in a temporary file if all threads
together keep too much, and can be read back and discarded. When the slot is complete, the thread waits for
its turn and copies it to the file.
"""

from __future__ import annotations

import tempfile
import threading
from typing import TYPE_CHECKING

from zlib_ng.zlib_ng import crc32

from blobstore.cold_blobs.blob_encoder import chunks_of
from blobstore.core.digest import Digest, Digester
from blobstore.core.files import write_all
from blobstore.core.mmap import mapped
from blobstore.core.workers import Cancelled

if TYPE_CHECKING:
    from pathlib import Path
    from typing import IO, Self

    from typing_extensions import Buffer

_MAX_BUFFERED = 256 << 20
"""Bytes that all threads together may keep in memory."""


class OrderedWriter:
    """The file that threads write to, slot by slot from number 0."""

    def __init__(self, descriptor: int, folder: Path, prefix: bytes) -> None:
        """Write the bytes before the first slot; ``folder`` is for temporary files."""
        self.descriptor = descriptor
        self.folder = folder
        self._end = len(prefix)
        self._turn = 0
        self._buffered = 0
        self._is_closed = False
        self._changed = threading.Condition()
        write_all(descriptor, prefix)

    def reserve(self, size: int) -> bool:
        """Return whether ``size`` more bytes may be kept in memory, and count them if so."""
        with self._changed:
            is_free = self._buffered + size <= _MAX_BUFFERED
            self._buffered += size if is_free else 0
            return is_free

    def release(self, size: int) -> None:
        """Count ``size`` bytes as no longer in memory."""
        with self._changed:
            self._buffered -= size

    def wait_until(self, number: int) -> int:
        """Wait until all slots before ``number`` are written; return the offset of the next slot.

        Raises:
            Cancelled: the writer was closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._turn >= number)
            if self._is_closed:
                raise Cancelled("stopped")
            return self._end

    def end_turn(self, size: int) -> None:
        """Give the turn to the next slot, after a slot of ``size`` bytes was written."""
        with self._changed:
            self._end += size
            self._turn += 1
            self._changed.notify_all()

    def close(self) -> None:
        """Stop all threads that wait, now and later."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


class OrderedSlot:
    """A context manager in which one thread writes one slot. An error in it closes the writer."""

    def __init__(self, writer: OrderedWriter, number: int) -> None:
        self._writer = writer
        self._number = number
        self._memory = bytearray()
        self._file: IO[bytes] | None = None
        """A temporary file, which replaces the memory if that is not enough."""
        self._begin = 0
        """Offset in the file, once the slot is written."""
        self._is_written = False
        self._digester = Digester()
        self._checksum = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._writer.close()
            self.clear()
            return
        self._begin = self._writer.wait_until(self._number)
        for piece in chunks_of(self.read_back(), lambda _: None):
            write_all(self._writer.descriptor, piece)
        self._is_written = True
        self._writer.end_turn(self.size)
        self._discard()

    @property
    def size(self) -> int:
        """Number of bytes written so far."""
        return self._digester.size

    @property
    def digest(self) -> Digest:
        """Digest of the bytes written so far."""
        return self._digester.digest()

    def write(self, data: Buffer) -> None:
        """Append bytes."""
        self._digester.update(data)
        self._checksum = crc32(data, self._checksum)
        if self._file is None:
            if self._writer.reserve(memoryview(data).nbytes):
                self._memory += data
                return
            file = tempfile.TemporaryFile(dir=self._writer.folder, buffering=0)  # noqa: SIM115
            write_all(file.fileno(), self._memory)
            self._discard()
            self._file = file
        write_all(self._file.fileno(), data)

    def clear(self) -> None:
        """Discard what was written."""
        self._digester, self._checksum = Digester(), 0
        self._discard()

    def read_back(self) -> memoryview:
        """Return the bytes: those in the file, once the slot is written."""
        if self._is_written:
            return mapped(self._writer.descriptor, self._begin + self.size)[self._begin :]
        if self._file is not None:
            return mapped(self._file.fileno(), self.size)
        return memoryview(self._memory)

    def is_intact(self) -> bool:
        """Return whether the bytes read back are those that were written."""
        return crc32(self.read_back()) == self._checksum

    def _discard(self) -> None:
        self._writer.release(len(self._memory))
        self._memory = bytearray()
        if self._file is not None:
            self._file.close()
            self._file = None
