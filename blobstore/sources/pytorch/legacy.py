"""Reads PyTorch's streams of pickles and storages, which ``torch.save`` wrote up to version 1.5.

A stream has five pickles: a magic number, a protocol number, properties of the machine, the object and
the list of storage keys. Then follow, for each key, the number of elements and the elements.
(``_legacy_save`` in ``torch/serialization.py``.)
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from blobstore.core.escape import quote
from blobstore.core.files import read_exactly
from blobstore.errors import CheckpointDamaged, CheckpointRefused, CheckpointUnsupported
from blobstore.sources.pytorch.storages import MAX_PICKLE_SIZE
from blobstore.sources.pytorch.zip_entries import ZipEntry
from blobstore.unpickler.machine import Result, run
from blobstore.unpickler.state import CutShort

if TYPE_CHECKING:
    from collections.abc import Mapping

    from blobstore.sources.pytorch.tensors import Storage

MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_PICKLES = 5
"""Pickles before the storages."""
_PROTOCOL = 1001
_HEAD = 1 << 12
_WINDOW = 1 << 20
_COUNT = struct.Struct("<q")


def is_legacy(head: bytes) -> bool:
    """Return whether the first bytes of a file are a pickle of the magic number."""
    try:
        return bool(run(head[:_HEAD]).value == MAGIC)
    except CheckpointRefused:
        return False


class LegacyStream:
    """A stream whose pickles have been read."""

    kind = "legacy stream"

    def __init__(self, descriptor: int, size: int) -> None:
        """Read the pickles.

        Raises:
            CheckpointRefused: the stream is damaged.
        """
        self._descriptor = descriptor
        self._size = size
        self._window = b""
        magic = self._pickle(0)
        protocol = self._pickle(magic.end)
        machine = self._pickle(protocol.end)
        self.result = self._pickle(machine.end)
        self.pickle_size = self.result.end - machine.end
        keys = self._pickle(self.result.end)
        if magic.value != MAGIC or protocol.value != _PROTOCOL:
            raise CheckpointDamaged("this is not a stream of torch's protocol 1001")
        facts = machine.value
        is_little = facts.get("little_endian") if type(facts) is dict else None
        if type(is_little) is not bool:
            raise CheckpointDamaged("the stream does not say its byte order")
        self.is_swapped = not is_little
        if type(keys.value) is not list or not all(type(key) is str for key in keys.value):
            raise CheckpointDamaged("the list of storage keys is not a list of strings")
        if len(set(keys.value)) != len(keys.value):
            raise CheckpointDamaged("the list of storage keys has a key twice")
        self._keys: list[str] = keys.value
        self._end = keys.end
        for part in (magic, protocol, machine, keys):
            if part.globals:
                raise CheckpointDamaged(f"the stream's header uses {quote(part.globals[0])}")

    def locate(self, storages: Mapping[str, Storage]) -> dict[str, ZipEntry]:
        """See :class:`Container`.

        The stream has numbers of elements and not sizes, so a storage can be found only if the types
        of all storages before it are known.
        """
        if set(self._keys) != set(storages):
            odd = sorted(set(self._keys) ^ set(storages))
            raise CheckpointDamaged(
                f"storage {quote(odd[0])} is in the list of keys or in a tensor, but not in both"
            )
        offset = self._end
        places = {}
        for key in self._keys:
            storage = storages[key]
            data = read_exactly(self._descriptor, _COUNT.size, offset)
            count = _COUNT.unpack(data)[0] if len(data) == _COUNT.size else -1
            if count != storage.elements:
                raise CheckpointDamaged(
                    f"byte {offset}: storage {quote(key)} has {count} elements, but its tensors "
                    f"say {storage.elements}"
                )
            begin = offset + _COUNT.size
            if not storage.itemsize:
                raise CheckpointUnsupported(
                    f"the size of torch.{storage.kind} {quote(key)} is unknown"
                )
            offset = begin + storage.nbytes
            if offset > self._size:
                raise CheckpointDamaged(
                    f"storage {quote(key)} ends at byte {offset}, but the file at {self._size}: "
                    "it was truncated"
                )
            places[key] = ZipEntry(key, begin, storage.nbytes, storage.nbytes, 0, is_deflated=False)
        if offset != self._size:
            raise CheckpointDamaged(
                f"{self._size - offset} bytes follow the last storage at byte {offset}"
            )
        return places

    def notices(self) -> list[str]:
        """See :class:`Container`."""
        return []

    def _pickle(self, start: int) -> Result:
        """Read one pickle. Its length is known only after that."""
        while True:
            try:
                return run(self._window, start=start)
            except CutShort:
                known = len(self._window)
                if known >= min(self._size, MAX_PICKLE_SIZE):
                    raise
                wanted = min(max(_WINDOW, known * 4), MAX_PICKLE_SIZE)
                self._window += read_exactly(self._descriptor, wanted - known, known)
                if len(self._window) == known:
                    raise
