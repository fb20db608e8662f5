"""The blobs that each manifest of a store references, kept in one file, so that manifests are not parsed again.

The manifests remain the truth. What is kept of one is used while its file has the version that it had when it was
read. Nothing is deleted by it alone: see :meth:`.ReachableBlobs.prove`. The file is a cache: it may be absent, old or
damaged, and each user has one that nobody else may write. A process that has read manifests that are not in it
replaces it.

Blobs have numbers, in the order in which they were met. After a line with a checksum come five counts and the tables.
They have, for all blobs by number, their digests, their sizes and how many of the manifests reference them. A record
for each manifest, the numbers that the manifests reference, and the listings of folders follow. The memory has the
same tables.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import sys
import zlib
from array import array
from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

from blobstore.core.digest import Digest
from blobstore.core.files import FileVersion, open_own, read_exactly, write_file
from blobstore.manifests import media_types
from blobstore.manifests.descriptor import PlainDescriptors
from blobstore.manifests.model import PUBLISHED_SCHEME, Manifest
from blobstore.store.listings import MARGIN_NS, VERSION, Listings, is_settled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from typing_extensions import Buffer

    from blobstore.manifests.descriptor import Descriptor

_MAGIC: Final = f"references 7 {sys.byteorder} ".encode()
_COUNTS: Final = struct.Struct("=5Q")
_RECORD: Final = struct.Struct("=40x32s8sQII??")
"""After the version of the file."""
_START: Final = struct.Struct(f"=40s{_RECORD.size - 40}x")
"""That version."""
_KEY: Final = PUBLISHED_SCHEME.encode()
_MAX_BYTES: Final = 1 << 30
_MARGIN_NS = MARGIN_NS
_BATCH: Final = 32 << 10
"""Bytes of digests that become text at once."""
_FEW: Final = 64
"""So many blobs are searched for among all others; then these are put into a dict."""


class _Record(NamedTuple):
    """What the table has of a manifest."""

    digest: bytes
    """Of its bytes."""
    layout: bytes
    """A short digest of the names and sizes of its tensor layers, which models of one architecture have in common."""
    begin: int
    """The place of its first number."""
    length: int
    """How many blobs it references."""
    others: int
    """How many of the first of these are not tensors, or not only tensors."""
    is_checked: bool
    """Whether it was the one that its config promises."""
    is_unpublished: bool
    """Whether its config names no quantization of a model that is kept as published."""

    def packed(self, version: bytes, begin: int) -> bytes:
        """Return the bytes of the same for a file of this version, with its numbers from ``begin`` on."""
        return version + _RECORD.pack(*self._replace(begin=begin))[40:]


class KnownManifest(NamedTuple):
    """What is known of a manifest: a row of the tables."""

    references: References
    row: int

    @property
    def record(self) -> _Record:
        """That row."""
        return self.references.record(self.row)

    @property
    def digest(self) -> Digest:
        """The digest of its bytes."""
        return Digest(self.record.digest.hex())

    @property
    def blobs(self) -> array[int]:
        """The numbers of its blobs, each once: that of the config, of other blobs that are not only tensors, of tensors."""
        return self.references.numbers_of(self.row)

    @property
    def sizes(self) -> list[int]:
        """The bytes of its blobs, as it states them."""
        numbers = self.blobs
        found = list(map(self.references.sizes.__getitem__, numbers))
        if others := self.references.other_sizes.get(self.row):
            found = [others.get(n, size) for n, size in zip(numbers, found, strict=True)]
        return found


class References:
    """The blobs of a store by number, and which of them the manifests reference."""

    def __init__(self, path: Path | None = None) -> None:
        """Read the file at ``path``, or begin without one."""
        self._path = path
        self._digests = bytearray()
        self.sizes = array("Q")
        """Bytes of each blob, as the first manifest says that references it."""
        self._uses = array("i")
        self._records = bytearray()
        self._lists = array("I")
        self._rows: dict[bytes, int] = {}
        """By the versions of files, as bytes: they take a third of the memory."""
        self._asked = bytearray()
        """Whether each row was asked for, or is new."""
        self.other_sizes: dict[int, dict[int, int]] = {}
        """Bytes of blobs by row and number of which an earlier manifest says otherwise."""
        self._by_digest: dict[bytes, int] | None = None
        self._numbers: dict[bytes, int] = {}
        """By digests: those that were asked for, and all once many were."""
        self._searches = 0
        self._descriptors = PlainDescriptors()
        self.listings = Listings()
        self._is_new = False
        if path is not None:
            self._read(path)

    def __len__(self) -> int:
        return len(self.sizes)

    def record(self, row: int) -> _Record:
        """Return a row of the table."""
        return _Record._make(_RECORD.unpack_from(self._records, _RECORD.size * row))

    def numbers_of(self, row: int) -> array[int]:
        """Return the numbers that a manifest references."""
        *_, begin, count, _, _, _ = _RECORD.unpack_from(self._records, _RECORD.size * row)
        found = self._lists[begin : begin + count]
        # Here, because a command seldom asks for all. Only a forged file has such a number.
        return found if max(found, default=0) < len(self.sizes) else array("I")

    def digest(self, number: int) -> Digest:
        """Return the digest of a blob."""
        return Digest(self._digests[32 * number : 32 * number + 32].hex())

    def starting_with(self, start: str, begin: int = 0) -> set[int]:
        """Return the numbers, from ``begin`` on, of the blobs whose hex digests begin with a text."""
        digests = enumerate(self.hex_digests(begin), begin)
        return {number for number, one in digests if one.startswith(start)}

    def hex_digests(self, begin: int = 0) -> Iterator[str]:
        """Yield the hex digests of all blobs so far, by number."""
        for place in range(32 * begin, len(self._digests), _BATCH):
            yield from self._digests[place : place + _BATCH].hex("/", 32).split("/")

    def file_names(self) -> Iterator[str]:
        """Yield the names of the files of the blobs so far, by number."""
        return map("sha256-".__add__, self.hex_digests())

    def number(self, digest: Digest) -> int:
        """Return the number of a blob, a new one if it was not met before."""
        return self.numbers([digest])[digest]

    def numbers(self, digests: Iterable[Digest]) -> dict[Digest, int]:
        """Return the numbers of blobs, new ones for those that were not met before."""
        keys = {digest: bytes.fromhex(digest.hex) for digest in digests}
        numbers = self._add(dict.fromkeys(keys.values(), 0)) if keys else {}
        return {digest: numbers[key] for digest, key in keys.items()}

    def uses(self, rows: Iterable[int]) -> array[int]:
        """Return how many of these manifests reference each blob, by number. A manifest with two names has two."""
        times = Counter(rows)
        every = range(len(self._asked))
        has_most = 2 * len(times) > len(every)  # then the kept counts are corrected
        uses = array("i", self._uses) if has_most else array("i", bytes(4 * len(self)))
        for row in every if has_most else times:
            change = times[row] - has_most
            for number in self.numbers_of(row) if change else ():
                uses[number] += change
        return uses

    def known(self, version: FileVersion) -> KnownManifest | None:
        """Return what is kept of the manifest whose file has that version."""
        row = self._rows.get(VERSION.pack(*version))
        if row is None:
            return None
        self._asked[row] = True
        return KnownManifest(self, row)

    def read(
        self,
        version: FileVersion | None,
        data: bytes,
        config_of: Callable[[bytes, Manifest], bytes | None],
        *,
        is_believed: bool = True,
    ) -> tuple[KnownManifest, Manifest | None]:
        """Return what is known of a manifest, and the manifest unless one with its digest was read before.

        It is parsed unless that is ``is_believed``. ``config_of`` returns its config, if it can be read. Raises
        InvalidManifest, and what ``config_of`` raises.
        """
        digest = Digest.of(data)
        if is_believed and (known := self.copied(version, digest)):
            return known, None
        self._descriptors.forget()
        manifest = Manifest.from_bytes(data, self._descriptors)
        return self.add(version, digest, manifest, config=config_of(data, manifest)), manifest

    def rows_of(self, digest: Digest) -> set[int]:
        """Return the rows of the manifests with that digest."""
        key, records = bytes.fromhex(digest.hex), _RECORD.iter_unpack(self._records)
        return {row for row, (found, *_) in enumerate(records) if found == key}

    def copied(self, version: FileVersion | None, digest: Digest) -> KnownManifest | None:
        """Return what is kept of a checked manifest with that digest, from now on for the file with this version too."""
        if self._by_digest is None:
            records = map(_Record._make, _RECORD.iter_unpack(self._records))
            rows = enumerate(records)
            self._by_digest = {one.digest: row for row, one in rows if one.is_checked}
        row = self._by_digest.get(bytes.fromhex(digest.hex))
        if row is None:
            return None
        record, numbers = self.record(row), self.numbers_of(row)
        return self._keep(version, record, numbers, self.other_sizes.get(row))

    def add(
        self,
        version: FileVersion | None,
        digest: Digest,
        manifest: Manifest,
        *,
        config: bytes | None = None,
    ) -> KnownManifest:
        """Return the blobs of a manifest by their numbers; keep them for its file, unless that is too young.

        ``config`` is the content of its config, if the manifest was checked against that. A manifest that states
        other sizes than those before is not kept.
        """
        layers, tensor = manifest.layers, media_types.TENSOR
        blobs = {manifest.config.digest.hex: manifest.config.size}
        blobs |= {one.digest.hex: one.size for one in layers if one.media_type != tensor}
        others = len(blobs)
        blobs |= {one.digest.hex: one.size for one in layers}
        stated = dict(zip(map(bytes.fromhex, blobs), blobs.values(), strict=True))
        found = self._add(stated)
        numbers = array("I", map(found.__getitem__, stated))
        sizes = {}
        if list(map(self.sizes.__getitem__, numbers)) != list(stated.values()):
            pairs = zip(numbers, stated.values(), strict=True)
            sizes = {number: size for number, size in pairs if size != self.sizes[number]}
        record = _Record(
            digest=bytes.fromhex(digest.hex),
            layout=_layout(layers),
            begin=0,
            length=len(numbers),
            others=others,
            is_checked=config is not None,
            is_unpublished=config is not None and _KEY not in config and b"\\" not in config,
        )
        return self._keep(version, record, numbers, sizes)

    def _keep(
        self,
        version: FileVersion | None,
        record: _Record,
        numbers: array[int],
        other_sizes: dict[int, int] | None,
    ) -> KnownManifest:
        """Add a row."""
        row = len(self._asked)
        start = VERSION.pack(*version or (0,) * 5)
        self._records += record.packed(start, len(self._lists))
        self._asked.append(True)
        self._lists += numbers
        for number in numbers:
            self._uses[number] += 1
        if other_sizes:
            self.other_sizes[row] = other_sizes
        if self._by_digest is not None and record.is_checked:
            self._by_digest[record.digest] = row
        if version is not None and not other_sizes and is_settled(version, _MARGIN_NS):
            self._rows[start] = row
            self._is_new = True
        return KnownManifest(self, row)

    def _add(self, blobs: Mapping[bytes, int]) -> Mapping[bytes, int]:
        """Return the numbers of blobs by their digests, among others; new ones get these sizes."""
        found = self._numbers
        if len(found) < len(self) and not blobs.keys() <= found.keys():
            wanted = blobs.keys() - found.keys()
            is_first = not self._searches
            self._searches += len(wanted)
            if self._searches > _FEW:
                # A dict of all takes as much memory as all else, and most commands ask once.
                every = ((digest, number) for number, digest in self._every())
                found.update(one for one in every if not is_first or one[0] in wanted)
            else:
                for digest in wanted:
                    if (number := self._find(digest)) is not None:
                        found[digest] = number
        for digest, size in blobs.items():
            if digest not in found:
                found[digest] = len(self.sizes)
                self._digests += digest
                self.sizes.append(size)
                self._uses.append(0)
        return found

    def _find(self, digest: bytes) -> int | None:
        """Return the number of a blob, searching all digests."""
        place = self._digests.find(digest)
        while place % 32 and place >= 0:  # the end of one digest and the start of the next
            place = self._digests.find(digest, place + 1)
        return place // 32 if place >= 0 else None

    def _every(self) -> Iterator[tuple[int, bytes]]:
        # Of a copy, because bytes that an iterator looks at cannot grow.
        found = struct.iter_unpack("32s", bytes(self._digests))
        return enumerate(digest for (digest,) in found)

    def save(self, *, keeps_others: bool = False) -> None:
        """Keep what is known of the manifests that were asked for, or of all, if any of it is new."""
        if not (self._is_new or self.listings.is_new) or self._path is None:
            return
        self._is_new = self.listings.is_new = False
        rows = {key: row for key, row in self._rows.items() if keeps_others or self._asked[row]}
        lists, digests, sizes = array("I"), self._digests, array("Q", self.sizes)
        uses = self.uses(rows.values())
        parts = [self.numbers_of(row) for row in rows.values()]
        records = []
        for (version, row), part in zip(rows.items(), parts, strict=True):
            records.append(self.record(row).packed(version, len(lists)))
            lists += part
        if len(sizes) > len(lists):  # most blobs are those of manifests that are gone
            order = {number: place for place, number in enumerate(dict.fromkeys(lists))}
            lists = array("I", map(order.__getitem__, lists))
            digests = bytearray().join(self._digests[32 * n : 32 * n + 32] for n in order)
            sizes = array("Q", map(sizes.__getitem__, order))
            uses = array("i", map(uses.__getitem__, order))
        listings = self.listings.tables()
        counts = _COUNTS.pack(len(sizes), len(rows), len(lists), *map(len, listings))
        tables: list[Buffer] = [counts, digests, sizes, uses, b"".join(records), lists, *listings]
        checksum = 0
        for table in tables:
            checksum = zlib.crc32(table, checksum)
        with contextlib.suppress(OSError):  # the store cannot be written
            head = _MAGIC + b"%08x\n" % checksum
            write_file(self._path, [head, *tables], mode=0o600, durable=False)

    def _read(self, path: Path) -> None:
        with open_own(path) as descriptor:
            start = len(_MAGIC) + 9 + _COUNTS.size
            size = 0 if descriptor is None else os.fstat(descriptor).st_size
            if descriptor is None or not start <= size <= _MAX_BYTES:
                return
            head = read_exactly(descriptor, start, 0)
            counts = _COUNTS.unpack_from(head, start - _COUNTS.size)
            blobs, manifests, references, *listings = counts
            widths = 32 * blobs, _RECORD.size * manifests, *listings, 8 * blobs, 4 * blobs
            if size != start + sum(widths) + 4 * references:
                return
            # Each table is read into its place: the file is as large as the rest of the program.
            digests, records, folders, names = map(bytearray, widths[:4])
            sizes, uses = array("Q", [0]) * blobs, array("i", [0]) * blobs
            lists = array("I", [0]) * references
            tables = (digests, sizes, uses, records, lists, folders, names)
            filled = [table for table in tables if len(table)]
            if os.preadv(descriptor, filled, start) != size - start:
                return
        checksum = zlib.crc32(head[-_COUNTS.size :])
        for table in tables:
            checksum = zlib.crc32(table, checksum)
        if head[: -_COUNTS.size] != _MAGIC + b"%08x\n" % checksum:
            return
        if not 0 <= min(uses, default=0) <= max(uses, default=0) <= manifests:
            return
        for *_, begin, count, others, _, _ in _RECORD.iter_unpack(records):
            if not 0 < others <= count <= references - begin:  # a manifest has a config at least
                return
        self._digests, self._records, self._lists = digests, records, lists
        self.sizes, self._uses = sizes, uses
        self._asked = bytearray(manifests)
        self._rows = {version: row for row, (version,) in enumerate(_START.iter_unpack(records))}
        self.listings = Listings(folders, names)


def _layout(layers: Iterable[Descriptor]) -> bytes:
    tensor = media_types.TENSOR
    tensors = [f"{size} {name}" for kind, _, size, name, *_ in layers if kind == tensor]
    return hashlib.blake2b("\n".join(tensors).encode(), digest_size=8).digest()
