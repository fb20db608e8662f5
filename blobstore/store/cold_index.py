"""The index of cold blobs: which base each one needs, in one durable file.

So ``gc`` opens no cold blob, and knows the base even of one that cannot be read. Each line is an entry: the
digest, the size and the time of the cold file, its base, and a checksum. Size and time identify the file: a
blob that is frozen again has another entry.

Entries are durable before cold files get their names. An entry that is missing, because an earlier version
wrote the file or the line is damaged, is read from the cold file. So the index may lack entries or have old
ones, but never hides a base.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from typing import TYPE_CHECKING

from blobstore.core.digest import Digest
from blobstore.core.files import (
    FileState,
    FileVersion,
    give_to_owner,
    open_shared,
    read_regular,
    sync_folder,
    write_all,
    write_file,
)
from blobstore.errors import BlobDamaged, BlobMissing, BlobstoreError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from blobstore.store.cold import ColdShelf
    from blobstore.store.layout import Layout

_MAX_SIZE = 1 << 30
_NO_BASE = "-"
# Marks a key that has two different bases: the cold file decides.
_AMBIGUOUS = "?"


class ColdIndex:
    """The bases of a store's cold blobs. A cold file is opened only if it has no entry, and once."""

    def __init__(self, layout: Layout, shelf: ColdShelf) -> None:
        self.path = layout.cold_index
        self._temporary = layout.temporary
        self._shelf = shelf
        self._version: FileVersion | None = None
        self._listed: dict[str, str] = {}
        """The hex digests of bases, by the keys of cold files."""
        self._opened: dict[str, str] = {}
        """The same for cold files without an entry in the index: these were opened."""

    def of(self, digest: Digest, status: os.stat_result) -> Digest | None:
        """Return the base of a cold blob whose file has that status; None if it has no base.

        Raises:
            BlobDamaged: it has no entry, and the file is damaged.
            StoreError: it cannot be read.
        """
        key = _key(digest, FileState.of_status(status))
        # Another process may have added it since.
        if key not in self._listed:
            self._load()
        base = self._listed.get(key, _AMBIGUOUS)
        if base == _AMBIGUOUS:
            if key not in self._opened:
                try:
                    found = self._shelf.open(digest).base
                except BlobMissing:  # thawed since it was listed
                    return None
                self._opened[key] = _NO_BASE if found is None else found.hex
            base = self._opened[key]
        return None if base == _NO_BASE else Digest(base)

    def has(self, digest: Digest, status: os.stat_result) -> bool:
        """Return whether there is an entry for a cold blob whose file has that status.

        If so, the file has the size and time that it had when it was written and verified.
        """
        self._load()
        return _key(digest, FileState.of_status(status)) in self._listed

    def known(self, cold: Mapping[Digest, os.stat_result]) -> dict[Digest, Digest]:
        """Return the bases of the cold blobs that have one, except where it is unknown."""
        bases = {}
        for digest, status in cold.items():
            with contextlib.suppress(BlobDamaged):
                base = self.of(digest, status)
                if base is not None:
                    bases[digest] = base
        return bases

    def append(self, blobs: Iterable[tuple[Digest, FileState, Digest | None]]) -> None:
        """Add cold files that are about to get their names, durably. The caller holds the exclusive lock.

        Args:
            blobs: for each its digest, the state of its file, and its base.

        Raises:
            OSError: the index cannot be written.
        """
        entries = [
            _line(_key(digest, state), _NO_BASE if base is None else base.hex)
            for digest, state, base in blobs
        ]
        if not entries:
            return
        descriptor = open_shared(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            give_to_owner(self.path)
            is_new = os.fstat(descriptor).st_size == 0
            # The last line may be torn.
            write_all(descriptor, "".join(["\n", *entries]).encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        # A new file needs a durable name as well as durable bytes.
        if is_new:
            sync_folder(self.path.parent)

    def rewrite(self, cold: Mapping[Digest, os.stat_result]) -> None:
        """Make the entries those of these cold files. The caller holds the exclusive lock.

        Raises:
            OSError: the index cannot be written.
        """
        self._load()
        current: dict[str, str] = {}
        for digest, status in cold.items():
            with contextlib.suppress(BlobDamaged):
                base = self.of(digest, status)
                key = _key(digest, FileState.of_status(status))
                current[key] = _NO_BASE if base is None else base.hex
        if current != self._listed:
            lines = [_line(key, base).encode() for key, base in current.items()]
            write_file(self.path, [b"".join(lines)], temporary=self._temporary)

    def _load(self) -> None:
        """Read the file if it has changed. Entries that were read before stay true."""
        try:
            # Before the file is read: lines that are appended in between are read next time.
            version = FileVersion.of_status(self.path.stat())
            if version == self._version:
                return
            text = read_regular(self.path, _MAX_SIZE).decode("ascii", "replace")
        except (OSError, BlobstoreError):
            # Without the index cold files are opened, which takes longer and is never wrong.
            return
        self._version, self._listed = version, {}
        for line in text.splitlines():
            entry, _, checksum = line.rpartition(" ")
            key, _, base = entry.rpartition(" ")
            if checksum == _checksum(entry):
                is_same = self._listed.get(key, base) == base
                self._listed[key] = base if is_same else _AMBIGUOUS


def _key(digest: Digest, state: FileState) -> str:
    # Without device and inode, which a copy of the store does not keep.
    return f"{digest.hex} {state.size} {state.modified}"


def _line(key: str, base: str) -> str:
    entry = f"{key} {base}"
    return f"{entry} {_checksum(entry)}\n"


def _checksum(entry: str) -> str:
    return f"{zlib.crc32(entry.encode()):08x}"
