"""Where the storages of a checkpoint are, and their bytes."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Protocol

from blobstore.errors import CheckpointRefused
from blobstore.sources.pytorch.zip_entries import read_entry

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Final

    from blobstore.sources.pytorch.tensors import Storage
    from blobstore.sources.pytorch.zip_entries import ZipEntry
    from blobstore.sources.unpickler.machine import Result


MAX_PICKLE_SIZE: Final = 64 * 2**20
"""Bytes of the pickle of a checkpoint; real ones need 200 a tensor."""
_CHECK_SIZE = 1 << 20


class Container(Protocol):
    """A file that holds a pickle and storages."""

    kind: str
    """What it is, for people."""
    result: Result
    """What the pickle holds."""
    pickle_size: int
    """Bytes of the pickle."""
    is_swapped: bool
    """Whether its numbers are big-endian."""

    def locate(self, storages: Mapping[str, Storage]) -> dict[str, ZipEntry]:
        """Return where the storages are, by their keys.

        Raises:
            CheckpointRefused: one is not there, or not of the size that it should be.
        """

    def notices(self) -> list[str]:
        """Return what a person should know of the file."""


class StorageReader:
    """Reads parts of storages, on any number of threads, and checks them as it goes.

    A storage that is read in one go is checked on the way; one of which only a part is wanted is
    read once beforehand.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._checked: set[str] = set()
        self._lock = threading.Lock()
        self._unpacked: tuple[str, bytes] = ("", b"")
        """The compressed storage of which a part was wanted last."""

    def read(
        self, place: ZipEntry, begin: int, end: int, buffer: memoryview
    ) -> Iterator[memoryview]:
        """Yield bytes of a storage in pieces, each in ``buffer`` until the next is asked for.

        Raises:
            DamagedSource: the file was cut short, or its check sum is wrong.
        """
        if begin == 0 and end == place.size:
            yield from read_entry(self._descriptor, place, buffer)
            self._checked.add(place.name)
        elif place.is_deflated:
            yield memoryview(self._unpack(place))[begin:end]
        else:
            self._check(place)
            yield from self._read(place.offset + begin, end - begin, buffer)

    def copy(self, place: ZipEntry, begin: int, end: int) -> bytearray:
        """Return bytes of a storage.

        Raises:
            DamagedSource: as :meth:`read` does.
        """
        data = bytearray(end - begin)
        done = 0
        for piece in self.read(place, begin, end, memoryview(bytearray(_CHECK_SIZE))):
            data[done : done + len(piece)] = piece
            done += len(piece)
        return data

    def _check(self, place: ZipEntry) -> None:
        """Read a storage of which only a part is wanted, for its check sum."""
        if not place.crc or place.name in self._checked:
            return
        with self._lock:
            if place.name not in self._checked:
                for _ in read_entry(self._descriptor, place, memoryview(bytearray(_CHECK_SIZE))):
                    pass
                self._checked.add(place.name)

    def _unpack(self, place: ZipEntry) -> bytes:
        with self._lock:
            if self._unpacked[0] != place.name:
                self._unpacked = ("", b"")
                buffer = memoryview(bytearray(_CHECK_SIZE))
                data = b"".join(map(bytes, read_entry(self._descriptor, place, buffer)))
                self._unpacked = (place.name, data)
            return self._unpacked[1]

    def _read(self, offset: int, left: int, buffer: memoryview) -> Iterator[memoryview]:
        while left:
            count = os.preadv(self._descriptor, [buffer[:left]], offset)
            if not count:
                raise CheckpointRefused(
                    f"the file ended at byte {offset}: it was cut short while it was read"
                )
            yield buffer[:count]
            offset += count
            left -= count
