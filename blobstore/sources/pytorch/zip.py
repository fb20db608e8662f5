"""Reads PyTorch's zip checkpoints, which ``torch.save`` writes since version 1.6.

One folder has ``data.pkl``, the storages as ``data/KEY``, and records such as ``version`` and
``byteorder``. (``_save`` in ``torch/serialization.py``, ``caffe2/serialize/inline_container.cc``.)
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from blobstore.core.escape import join_some, quote
from blobstore.errors import (
    CheckpointDamaged,
    CheckpointRefused,
    CheckpointUnsupported,
    DamagedSource,
    UnsupportedSource,
)
from blobstore.sources.pytorch.storages import MAX_PICKLE_SIZE
from blobstore.sources.pytorch.zip_entries import read_entries, read_small_entry
from blobstore.unpickler.machine import run

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from blobstore.sources.pytorch.tensors import Storage
    from blobstore.sources.pytorch.zip_entries import ZipEntry

_MAX_RECORD_SIZE = 1 << 10
_MAX_PICKLE_RATIO = 32
_SPARE_PICKLE_SIZE = 4 * 2**20
_LAST_VERSION = 10
"""The newest version that torch 2.13 reads (``kMaxSupportedFileFormatVersion``)."""
_PROGRAMS = {"constants.pkl": "TorchScript", "models/model.json": "torch.export"}
"""Files that only archives with programs have, by the kind of archive."""
_BYTE_ORDERS = {b"little": False, b"big": True}


class ZipCheckpoint:
    """A zip checkpoint: its directory and its pickle."""

    kind = "zip checkpoint"

    def __init__(self, descriptor: int, size: int, start: int = 0) -> None:
        """Read the directory and the pickle of an archive of ``size`` bytes at byte ``start``.

        Raises:
            CheckpointDamaged: the archive is damaged.
            CheckpointUnsupported: it is not a checkpoint, or of a kind that is not read.
        """
        self._descriptor = descriptor
        self._used: Collection[ZipEntry] = ()
        try:
            self._entries = read_entries(descriptor, size, start)
            self._root = self._only_root()
            self.is_swapped = self._check_records()
            pickle = read_pickle(descriptor, self._entries[f"{self._root}data.pkl"])
        except CheckpointRefused:
            raise
        except DamagedSource as error:
            raise CheckpointDamaged(str(error)) from None
        except UnsupportedSource as error:
            raise CheckpointUnsupported(str(error)) from None
        self.pickle_size = len(pickle)
        self.result = run(pickle)
        if self.result.end != len(pickle):
            raise CheckpointDamaged(
                f"{len(pickle) - self.result.end} bytes follow the end of data.pkl's pickle"
            )

    @property
    def entries(self) -> Sequence[ZipEntry]:
        """All entries of the archive."""
        return [*self._entries.values()]

    def locate(self, storages: Mapping[str, Storage]) -> dict[str, ZipEntry]:
        """See :class:`Container`."""
        prefix = f"{self._root}data/"
        entries = self._entries
        places = {}
        for key, storage in storages.items():
            entry = entries.get(prefix + key)
            if entry is None:
                raise CheckpointDamaged(f"there is no entry for storage {quote(key)}")
            if storage.itemsize and entry.size != storage.elements * storage.itemsize:
                raise CheckpointDamaged(
                    f"entry {quote(entry.name)} has {entry.size} bytes, but its tensors say "
                    f"{storage.nbytes}"
                )
            places[key] = entry
        self._used = places.values()
        return places

    def notices(self) -> list[str]:
        """See :class:`Container`."""
        prefix = f"{self._root}data/"
        stored = [name for name in self._entries if name.startswith(prefix)]
        if len(stored) == len(self._used):
            return []
        unused = set(stored) - {entry.name for entry in self._used}
        return [f"no tensor refers to entry {join_some([*map(quote, sorted(unused))], 1)}"]

    def _only_root(self) -> str:
        """Return the one folder of the archive, which must be a checkpoint and no program."""
        first = next(iter(self._entries), "")
        root, slash, _ = first.partition("/")
        if not root or not slash:
            raise CheckpointUnsupported(
                "the zip archive has no folder with a checkpoint in it", advice="unpack it first"
            )
        root += "/"
        for name in self._entries:
            if not name.startswith(root):
                raise CheckpointUnsupported(
                    f"entry {quote(name)} is outside the archive's folder {quote(root)}",
                    advice="unpack it first, if torch.save did not write it",
                )
        for name, kind in _PROGRAMS.items():
            if root + name in self._entries:
                raise CheckpointUnsupported(
                    f"this is a {kind} archive, which has a program",
                    advice="save the model's state_dict() with torch.save instead",
                )
        if f"{root}data.pkl" not in self._entries:
            raise CheckpointUnsupported(
                "this zip archive has no data.pkl, so it is not a PyTorch checkpoint"
            )
        return root

    def _record(self, name: str) -> bytes | None:
        entry = self._entries.get(self._root + name)
        if entry is None:
            return None
        return read_small_entry(self._descriptor, entry, _MAX_RECORD_SIZE)

    def _check_records(self) -> bool:
        """Check byte order and version, and return whether values are big-endian."""
        order = self._record("byteorder")
        if order is None:
            order = b"little"  # torch before 2.1 did not write it
        if order not in _BYTE_ORDERS:
            raise CheckpointDamaged(f"the byte order is {quote(order[:20].decode('latin-1'))}")
        version = self._record("version") or self._record(".data/version") or b""
        is_number = re.fullmatch(rb"[0-9]{1,3}\n?", version)
        if not is_number or not 1 <= int(version) <= _LAST_VERSION:
            kind = CheckpointUnsupported if is_number else CheckpointDamaged
            raise kind(
                f"the archive's version is {quote(version[:20].decode('latin-1'))}, not one of "
                f"1 to {_LAST_VERSION}"
            )
        return _BYTE_ORDERS[order]


def read_pickle(descriptor: int, entry: ZipEntry, limit: int = MAX_PICKLE_SIZE) -> bytes:
    """Return the content of an entry that is a pickle of at most ``limit`` bytes.

    Raises:
        UnsupportedSource: it is larger.
        DamagedSource: it is compressed more than pickles of tensors can be.
        OSError: it cannot be read.
    """
    if entry.size > limit:
        raise UnsupportedSource(
            f"entry {quote(entry.name)} has {entry.size} bytes; pickles of at most {limit} are read"
        )
    # Pickles compress to a fifth, and their values can need a hundred times their size in memory.
    ratio = _SPARE_PICKLE_SIZE + _MAX_PICKLE_RATIO * entry.stored_size
    return read_small_entry(descriptor, entry, ratio)
