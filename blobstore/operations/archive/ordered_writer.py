"""Several threads write to one file, in a fixed order.

Each thread writes one slot. What it writes before its turn is buffered, up to a limit for all threads
together; a thread that would exceed the limit waits for its turn. The thread whose turn it is never
waits, so there is always progress.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from blobstore.core.digest import Digest, Digester
from blobstore.core.files import write_all
from blobstore.core.mmap import mapped
from blobstore.core.workers import Cancelled

if TYPE_CHECKING:
    from typing import Self

    from typing_extensions import Buffer

_MAX_BUFFERED = 256 << 20
"""Bytes that all threads together may buffer."""


class OrderedWriter:
    """The file that threads write to, slot by slot from number 0."""

    def __init__(self, descriptor: int, prefix: bytes) -> None:
        """Write the bytes before the first slot."""
        self.descriptor = descriptor
        self._end = len(prefix)
        self._turn = 0
        self._buffered = 0
        self._is_closed = False
        self._changed = threading.Condition()
        write_all(descriptor, prefix)

    def reserve(self, size: int) -> bool:
        """Return whether ``size`` more bytes may be buffered, and count them if so."""
        with self._changed:
            is_free = self._buffered + size <= _MAX_BUFFERED
            self._buffered += size if is_free else 0
            return is_free

    def release(self, size: int) -> None:
        """Count ``size`` bytes as no longer buffered."""
        with self._changed:
            self._buffered -= size

    def wait_for_turn(self, number: int) -> int:
        """Wait until all slots before ``number`` are written; return the offset of that slot.

        Raises:
            Cancelled: the writer was closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._turn == number)
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
        self._buffers: list[bytes] = []
        self._begin: int | None = None
        """Offset in the file, once it is this slot's turn."""
        self._digester = Digester()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._writer.close()
            return
        self._take_turn()
        self._writer.end_turn(self.size)

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
        if self._begin is None and not self._writer.reserve(memoryview(data).nbytes):
            self._take_turn()
        if self._begin is None:
            self._buffers.append(bytes(data))
        else:
            write_all(self._writer.descriptor, data)

    def clear(self) -> None:
        """Discard what was written."""
        self._digester = Digester()
        self._drop_buffers()
        if self._begin is not None:
            os.ftruncate(self._writer.descriptor, self._begin)
            os.lseek(self._writer.descriptor, self._begin, os.SEEK_SET)

    def read_back(self) -> memoryview:
        """Map the bytes in the file, after the slot's turn."""
        begin = self._begin or 0
        return mapped(self._writer.descriptor, begin + self.size)[begin:]

    def _take_turn(self) -> None:
        if self._begin is None:
            self._begin = self._writer.wait_for_turn(self._number)
            for buffer in self._buffers:
                write_all(self._writer.descriptor, buffer)
            self._drop_buffers()

    def _drop_buffers(self) -> None:
        self._writer.release(sum(map(len, self._buffers)))
        self._buffers = []
