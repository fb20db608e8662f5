"""Reads the storages of a checkpoint, and verifies their checksums."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

from blobstore.sources.pytorch.zip_entries import read_entry, read_stored

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Final

    from blobstore.sources.pytorch.tensors import Storage
    from blobstore.sources.pytorch.zip_entries import ZipEntry
    from blobstore.unpickler.machine import Result


MAX_PICKLE_SIZE: Final = 64 * 2**20
"""Bytes of the pickle of a checkpoint. Real ones need 200 per tensor."""
_CHECK_SIZE = 1 << 20


class Container(Protocol):
    """A checkpoint file: a pickle and storages."""

    kind: str
    """Kind of the file, for messages."""
    result: Result
    """Contents of the pickle."""
    pickle_size: int
    """Bytes of the pickle."""
    is_swapped: bool
    """Whether its values are big-endian."""

    def locate(self, storages: Mapping[str, Storage]) -> dict[str, ZipEntry]:
        """Return the places of the storages in the file, by key.

        Raises:
            CheckpointRefused: a storage is missing or has the wrong size.
        """

    def notices(self) -> list[str]:
        """Return remarks about the file."""


class StorageReader:
    """Reads storages or parts of them, from any number of threads, and verifies their checksums.

    A storage that is read completely is verified on the way. Before the first part of a storage is
    read, all of it is read once.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._checked: set[str] = set()
        self._lock = threading.Lock()
        self._unpacked: tuple[str, bytes] = ("", b"")
        """Name and content of the compressed storage that was read last."""

    def read(
        self, place: ZipEntry, begin: int, end: int, buffer: memoryview
    ) -> Iterator[memoryview]:
        """Yield bytes of a storage in pieces, each in ``buffer`` and valid until the next one.

        Raises:
            DamagedSource: the file was truncated, or the checksum does not match.
        """
        if begin == 0 and end == place.size:
            yield from read_entry(self._descriptor, place, buffer)
            self._checked.add(place.name)
        elif place.is_deflated:
            with self._lock:
                if self._unpacked[0] != place.name:
                    self._unpacked = ("", b"")
                    whole = memoryview(bytearray(_CHECK_SIZE))
                    data = b"".join(map(bytes, read_entry(self._descriptor, place, whole)))
                    self._unpacked = (place.name, data)
                data = self._unpacked[1]
            yield memoryview(data)[begin:end]
        else:
            if place.crc and place.name not in self._checked:
                with self._lock:
                    if place.name not in self._checked:
                        for _ in read_entry(
                            self._descriptor, place, memoryview(bytearray(_CHECK_SIZE))
                        ):
                            pass
                        self._checked.add(place.name)
            yield from read_stored(self._descriptor, place, begin, end, buffer)

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
