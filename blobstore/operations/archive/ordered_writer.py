"""Threads that write to one file at once, each in its turn.

What a thread makes before its turn is kept, as long as all together keep no more than some hundred
megabytes; then it waits. The one whose turn it is never waits, so the line always moves on.
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

_KEPT = 256 << 20
"""Bytes that all threads together keep before their turns."""


class OrderedWriter:
    """What threads write to one file, in the order of numbers from 0 on."""

    def __init__(self, descriptor: int, begin: bytes) -> None:
        """Write what comes before the first."""
        self.descriptor = descriptor
        self._at = len(begin)
        self._turn = 0
        self._kept = 0
        self._is_closed = False
        self._changed = threading.Condition()
        write_all(descriptor, begin)

    def keep(self, size: int) -> bool:
        """Tell whether so many more bytes may be kept."""
        with self._changed:
            is_room = self._kept + size <= _KEPT
            self._kept += size if is_room else 0
            return is_room

    def give_back(self, size: int) -> None:
        """Tell that so many bytes are not kept any more."""
        with self._changed:
            self._kept -= size

    def wait(self, number: int) -> int:
        """Wait until all before have been written, and return where the next begins.

        Raises:
            Stopped: that will never be.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._turn == number)
            if self._is_closed:
                raise Cancelled("stopped")
            return self._at

    def pass_on(self, size: int) -> None:
        """End a turn in which so many bytes were written."""
        with self._changed:
            self._at += size
            self._turn += 1
            self._changed.notify_all()

    def close(self) -> None:
        """Let nobody wait any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


class OrderedSlot:
    """What one thread writes: kept until it is its turn, then written.

    An error in the block ends the whole line.
    """

    def __init__(self, line: OrderedWriter, number: int) -> None:
        self._line = line
        self._number = number
        self._pieces: list[bytes] = []
        self._kept = 0
        self._begin: int | None = None
        self._digester = Digester()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._line.close()
            return
        self._take_turn()
        self._line.pass_on(self.size)

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._digester.size

    @property
    def digest(self) -> Digest:
        """Their digest."""
        return self._digester.digest()

    def write(self, data: Buffer) -> None:
        """Add bytes."""
        self._digester.update(data)
        size = memoryview(data).nbytes
        if self._begin is None and not self._line.keep(size):
            self._take_turn()
        if self._begin is None:
            self._kept += size
            self._pieces.append(bytes(data))
        else:
            write_all(self._line.descriptor, data)

    def clear(self) -> None:
        """Take back all that was written."""
        self._digester = Digester()
        self._drop()
        if self._begin is not None:
            os.ftruncate(self._line.descriptor, self._begin)
            os.lseek(self._line.descriptor, self._begin, os.SEEK_SET)

    def read_back(self) -> memoryview:
        """Map what was written, when its turn is over."""
        begin = self._begin or 0
        return mapped(self._line.descriptor, begin + self.size)[begin:]

    def _take_turn(self) -> None:
        if self._begin is None:
            self._begin = self._line.wait(self._number)
            for piece in self._pieces:
                write_all(self._line.descriptor, piece)
            self._drop()

    def _drop(self) -> None:
        self._line.give_back(self._kept)
        self._pieces, self._kept = [], 0
