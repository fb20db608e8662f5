"""A cache of blobs that were hashed and found intact, so that they need not be hashed again.

An entry holds the state of a blob's file just before its bytes were hashed: device, inode, size and the
times of its last changes. While the file still has that state, nobody has written to it. Four traps:

- A file that changes twice within one tick of the clock, before and after it is hashed, looks the same (git
  calls this racily clean). So a file that changed in the last seconds before it was hashed gets no entry;
  the clock is the one that stamps the store's own files.
- The modification time can be set back, the time of the last inode change cannot: both count.
- A cold blob that is a delta comes from the files of its base, too: its entry has the states of all of them.
- Bit rot changes no time, nor does a write through a shared mapping that was already dirty. No cache can
  detect that; callers that must know hash again.

A cache that others could have written is ignored: each user has their own, writable by nobody else.

The file is a hash table, so that a look or a note costs the same however many entries there are. After a page with
the header come 2**n pages of records of fixed width. The first bits of a key say in which page its record is; if that
page is full, the file is replaced by one with twice as many pages. A record holds the key, the five numbers of the
state, and a checksum. Processes write records in place and without a lock: a record that is torn, or lost because
two processes wrote at once, is a blob that is hashed again.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import struct
import time
import zlib
from collections import defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple

from blobstore.core.digest import Digest
from blobstore.core.files import FileVersion, open_own, read_exactly, replacing, write_all
from blobstore.core.fork import cached_property
from blobstore.errors import BlobstoreError, Damaged

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from blobstore.store.blobs import BlobReader
    from blobstore.store.cold import ColdBlob

_PAGE: Final = 4096
_HEADER: Final = b"verified blobs 2\n".ljust(_PAGE, b"\0")
_MAX_PAGES: Final = 1 << 20
"""Four GiB: beyond them, a full page takes no more records."""
_RECORD: Final = struct.Struct("<32s3Q2q")
_SLOT: Final = _RECORD.size + 4
"""Bytes of a record and its checksum. A page holds up to 53."""
_EMPTY: Final = bytes(_SLOT)
_MARGIN_NS = 3 * 10**9
"""More than the coarsest clock of any file system, two seconds on FAT."""


class BlobState(NamedTuple):
    """The files that the bytes of a blob come from, as they are now."""

    key: str
    """The key of an entry: the hex digest of a hot blob, and other digits for a cold one."""
    versions: tuple[FileVersion | None, ...]
    """Of the blob's own file, and of those that its base may have."""


class VerifiedBlobs:
    """The cache of one store and user. Call :meth:`save` to keep new entries."""

    def __init__(self, store: BlobReader) -> None:
        self._store = store
        self._path = store._layout.verified(os.geteuid())
        self._new: dict[str, FileVersion | None] = {}

    def has(self, digest: Digest, size: int, table: _Table | None = None) -> bool:
        """Return whether the blob's file has ``size`` bytes and is unchanged since it was found intact."""
        known = self._known(digest.hex, table)
        if known is None:
            return False
        return known == _version(self._store.blob_path(digest)) and known.size == size

    def has_cold(self, digest: Digest, size: int, table: _Table | None = None) -> bool:
        """Return whether the blob is cold alone, and its files are unchanged since it was found intact."""
        if self._store.has_hot(digest) or not self._store.has_cold(digest):
            return False
        try:
            _, state = self._open_cold(digest, size)
        except BlobstoreError:
            return False
        known = self._known(state.key, table)
        return known is not None and known == state.versions[0]

    def unknown(self, blobs: Iterable[tuple[Digest, int]]) -> set[tuple[Digest, int]]:
        """Return the blobs that neither :meth:`has` nor :meth:`has_cold` knows. The cache is opened once."""
        with _opened(self._path) as table:
            return {
                blob
                for blob in blobs
                if not (self.has(*blob, table) or self.has_cold(*blob, table))
            }

    @property
    def is_kept(self) -> bool:
        """Whether this process can write new entries."""
        return self._latest > 0

    @property
    def saved_at(self) -> float:
        """When blobs were last found intact, in seconds since the epoch; 0 if they never were."""
        with _opened(self._path) as table:
            return os.fstat(table.descriptor).st_mtime if table else 0.0

    @contextlib.contextmanager
    def noting(self, digest: Digest, size: int | None = None) -> Iterator[None]:
        """Record whether the blob is intact: whether the block, which reads it, raises Damaged.

        With its ``size``, also a blob that is cold alone.
        """
        before = self.look(digest) if size is None else self.state(digest, size)
        try:
            yield
        except Damaged:
            self.forget(before)
            raise
        self.note(before)

    def look(self, digest: Digest) -> BlobState:
        """Return the state of a hot blob before it is opened."""
        _ = self._latest  # of before it is read
        return BlobState(digest.hex, (_version(self._store.blob_path(digest)),))

    def state(self, digest: Digest, size: int) -> BlobState:
        """Return the state of a blob before it is read, whether it is hot or cold."""
        hot = self.look(digest)
        if hot.versions[0] is None:
            with contextlib.suppress(BlobstoreError):  # reading the blob reports it
                return self.open_cold(digest, size)[1]
        return hot

    def open_cold(self, digest: Digest, size: int) -> tuple[ColdBlob, BlobState]:
        """Open a cold blob, and return its state, too.

        Raises:
            BlobMissing, BlobDamaged, StoreError: it cannot be opened.
        """
        _ = self._latest  # of before it is read
        return self._open_cold(digest, size)

    def _open_cold(self, digest: Digest, size: int) -> tuple[ColdBlob, BlobState]:
        begin = _version(self._store.cold_path(digest))
        blob = self._store.open_cold(digest, size)
        versions = cold_state(self._store, digest, blob.base)
        if versions[0] != begin:  # it may have been replaced after it was opened
            versions = (None, *versions[1:])
        # With other files of its base, it is another entry.
        bases = [version and tuple(version) for version in versions[1:]]
        return blob, BlobState(Digest.of(f"cold {digest} {bases}".encode()).hex, versions)

    def note(self, before: BlobState) -> None:
        """Record that a blob is intact, whose bytes were read after it had this state."""
        # If a file changes from then on, its state before will never match again.
        changes = [max(one.modified, one.changed) for one in before.versions if one is not None]
        if before.versions[0] is not None and max(changes) <= self._latest:
            self._new[before.key] = before.versions[0]

    def forget(self, before: BlobState) -> None:
        """Record that a blob is damaged."""
        self._new[before.key] = None

    def save(self) -> None:
        """Write the new entries, or do nothing if the store cannot be written."""
        was_created = False
        with contextlib.suppress(OSError):
            while self._new:
                with _opened(self._path, os.O_RDWR) as table:
                    self._new = table.put(self._new) if table else self._new
                    # Some file systems give new files another owner, or let everyone write to them.
                    is_useless = table.pages >= _MAX_PAGES if table else was_created
                    if not self._new or is_useless:
                        break
                    was_created = table is None
                    self._grow(table)

    def _grow(self, old: _Table | None) -> None:
        """Replace the file by one with twice as many pages, or more for many new entries, or create it.

        It is not synced: what a power cut leaves of it has wrong checksums, or is old.
        """
        pages = 2 * old.pages if old else 1
        pages = max(pages, 1 << (len(self._new) * 2 * _SLOT // _PAGE).bit_length())
        with replacing(self._path, mode=0o600, durable=False) as descriptor:
            write_all(descriptor, _HEADER)
            os.ftruncate(descriptor, (1 + pages) * _PAGE)
            new = _Table(descriptor, pages)
            for page in old.all() if old else ():
                new.put(dict(_records(page)))

    def _known(self, key: str, table: _Table | None = None) -> FileVersion | None:
        with contextlib.nullcontext(table) if table else _opened(self._path) as found:
            return found.get(key) if found else None

    @cached_property
    def _latest(self) -> int:
        """Files that changed after this time get no entry; 0 if the cache cannot be written."""
        folder = self._path.parent
        path = folder / f".{os.getpid()}-{secrets.token_hex(8)}.tmp"
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                # On a network, the time of a new file is that of the server's clock.
                return min(os.fstat(descriptor).st_mtime_ns, time.time_ns()) - _MARGIN_NS
            finally:
                os.close(descriptor)
                path.unlink(missing_ok=True)
        except OSError:
            return 0


def cold_state(
    store: BlobReader, digest: Digest, base: Digest | None
) -> tuple[FileVersion | None, ...]:
    """Return the versions of the files that a cold blob is decoded from; None for those that are not there."""
    paths = [store.cold_path(digest)]
    if base is not None:
        paths += [store.blob_path(base), store.base_path(base), store.cold_path(base)]
    return tuple(map(_version, paths))


def _version(path: str | Path) -> FileVersion | None:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return FileVersion.of_status(found) if stat.S_ISREG(found.st_mode) else None


class _Table:
    """The pages of an open cache file."""

    def __init__(self, descriptor: int, pages: int) -> None:
        self.descriptor = descriptor
        self.pages = pages

    def get(self, key: str) -> FileVersion | None:
        """Return the version under a key, or None."""
        page = self.page(self._number(key))
        return _record(page, _find(page, bytes.fromhex(key)))

    def put(self, entries: Mapping[str, FileVersion | None]) -> dict[str, FileVersion | None]:
        """Write entries, or remove those without a version; return those whose pages are full.

        Raises:
            OSError: the file cannot be written.
        """
        of_page = defaultdict[int, list[str]](list)
        for key in entries:
            of_page[self._number(key)].append(key)
        full: dict[str, FileVersion | None] = {}
        for number, keys in of_page.items():
            page = bytearray(self.page(number))
            for key in keys:
                version, begin = entries[key], _find(page, bytes.fromhex(key))
                if begin is None and version is not None:
                    begin = _find(page, _EMPTY)
                    if begin is None:
                        full[key] = version
                if begin is None:
                    continue
                slot = _EMPTY if version is None else _slot(key, version)
                # Only the record, so that others that are written to the page in the meantime are kept.
                if page[begin : begin + _SLOT] != slot:
                    page[begin : begin + _SLOT] = slot
                    os.pwrite(self.descriptor, slot, (1 + number) * _PAGE + begin)
        return full

    def all(self) -> Iterator[bytes]:
        """Yield the pages."""
        return map(self.page, range(self.pages))

    def page(self, number: int) -> bytes:
        """Return the bytes of a page; none after the end of a file that has become shorter."""
        return read_exactly(self.descriptor, _PAGE, (1 + number) * _PAGE)

    def _number(self, key: str) -> int:
        return int(key[:8], 16) * self.pages >> 32


@contextlib.contextmanager
def _opened(path: Path, access: int = os.O_RDONLY) -> Iterator[_Table | None]:
    """Open the table of a cache file if this user alone can write it; otherwise give None."""
    with open_own(path, access) as descriptor:
        size = 0 if descriptor is None else os.fstat(descriptor).st_size
        pages = size // _PAGE - 1
        is_whole = pages > 0 and pages & (pages - 1) == 0 and size == (1 + pages) * _PAGE
        if descriptor is None or not is_whole or read_exactly(descriptor, _PAGE, 0) != _HEADER:
            yield None
        else:
            yield _Table(descriptor, pages)


def _find(page: bytes | bytearray, start: bytes) -> int | None:
    """Return where the record of a page begins that starts so, or None."""
    begin = page.find(start)
    while begin % _SLOT and begin >= 0:
        begin = page.find(start, begin + 1)
    return begin if begin >= 0 else None


def _record(page: bytes | bytearray, begin: int | None) -> FileVersion | None:
    """Return the version in the record at a place of a page; None if its checksum is wrong."""
    slot = b"" if begin is None else bytes(page[begin : begin + _SLOT])
    data = slot[: _RECORD.size]
    if len(slot) < _SLOT or zlib.crc32(data).to_bytes(4, "little") != slot[_RECORD.size :]:
        return None
    return FileVersion(*_RECORD.unpack(data)[1:])


def _records(page: bytes) -> Iterator[tuple[str, FileVersion]]:
    """Yield the keys of a page with their versions."""
    for begin in range(0, len(page) - _SLOT + 1, _SLOT):
        version = _record(page, begin)
        if version is not None:
            yield page[begin : begin + 32].hex(), version


def _slot(key: str, version: FileVersion) -> bytes:
    data = _RECORD.pack(bytes.fromhex(key), *version)
    return data + zlib.crc32(data).to_bytes(4, "little")
