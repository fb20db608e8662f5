"""The blobs that each manifest of a store references, kept in one file, so that manifests are not parsed again.

The manifests remain the truth. What is kept of one is used while its file has the version that it had when it was
read. Nothing is deleted by it alone: see :meth:`.ReachableBlobs.prove`. The file is a cache: it may be absent, old or
damaged, and each user has one that nobody else may write. A process that has read manifests that are not in it
replaces it.

Blobs have numbers, in the order in which they were met. After a line with a checksum come three counts, the digests
and the sizes of all blobs by number, a record for each manifest, and the numbers that the manifests reference.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import sys
import time
import zlib
from array import array
from typing import TYPE_CHECKING, Final, NamedTuple

from blobstore.core.digest import Digest
from blobstore.core.files import FileVersion, open_own, read_exactly, write_file
from blobstore.manifests import media_types
from blobstore.manifests.model import PUBLISHED_SCHEME

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from blobstore.manifests.descriptor import Descriptor
    from blobstore.manifests.model import Manifest

_MAGIC: Final = f"references 4 {sys.byteorder} ".encode()
_COUNTS: Final = struct.Struct("=3Q")
_MANIFEST: Final = struct.Struct("=3Q2q32s8sII??")
_KEY: Final = PUBLISHED_SCHEME.encode()
_MAX_BYTES: Final = 1 << 32
_MARGIN_NS: Final = 3 * 10**9
"""A manifest that was written so short a time ago may change again without a new version; see ``verified_cache``."""


class KnownManifest(NamedTuple):
    """What is known of a manifest."""

    digest: Digest
    """The digest of its bytes."""
    blobs: array[int]
    """The numbers of its blobs, each once: that of the config, of other blobs that are not only tensors, of tensors."""
    others: int = 1
    """How many of the first of these are not tensors, or not only tensors."""
    is_checked: bool = False
    """Whether the manifest was the one that its config promises."""
    is_unpublished: bool = False
    """Whether its config names no quantization of a model that is kept as published."""
    layout: bytes = b""
    """A short digest of the names and sizes of its tensor layers, which models of one architecture have in common."""
    other_sizes: Mapping[int, int] = {}
    """Bytes of blobs of which an earlier manifest says otherwise."""


class References:
    """The blobs of a store by number, and which of them the manifests reference."""

    def __init__(self, path: Path | None = None) -> None:
        """Read the file at ``path``, or begin without one."""
        self._path = path
        self._digests = bytearray()
        self.sizes = array("Q")
        """Bytes of each blob, as the first manifest says that references it."""
        self._manifests: dict[FileVersion, KnownManifest] = {}
        self._by_digest: dict[Digest, KnownManifest] = {}
        self._numbers: dict[bytes, int] | None = {}
        """By digests; None before a number is asked for."""
        self._is_new = False
        if path is not None:
            self._read(path)

    def __len__(self) -> int:
        return len(self.sizes)

    def digest(self, number: int) -> Digest:
        """Return the digest of a blob."""
        return Digest(self._digests[32 * number : 32 * number + 32].hex())

    def sizes_in(self, manifest: KnownManifest) -> list[int]:
        """Return the bytes of the blobs of a manifest, as it states them."""
        sizes, others = self.sizes, manifest.other_sizes
        found = list(map(sizes.__getitem__, manifest.blobs))
        if others:
            found = [others.get(n, size) for n, size in zip(manifest.blobs, found, strict=True)]
        return found

    def digests(self, numbers: Iterable[int]) -> set[str]:
        """Return the hex digests of blobs."""
        text = self._digests.hex()
        return {text[64 * number : 64 * number + 64] for number in numbers}

    def by_file_name(self) -> dict[str, int]:
        """Return the numbers of the blobs so far by the names of their files: quicker, if most are looked up."""
        text = self._digests.hex()
        return {f"sha256-{text[64 * n : 64 * n + 64]}": n for n in range(len(self))}

    def number(self, digest: Digest, size: int = 0) -> int:
        """Return the number of a blob, a new one if it was not met before."""
        return self._number(bytes.fromhex(digest.hex), size)

    def known(self, version: FileVersion) -> KnownManifest | None:
        """Return what is kept of the manifest whose file has that version."""
        return self._manifests.get(version)

    def copied(self, version: FileVersion | None, digest: Digest) -> KnownManifest | None:
        """Return what is kept of a manifest with that digest, from now on for the file with this version too."""
        known = self._by_digest.get(digest)
        if known is not None:
            self._keep(version, known)
        return known

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
        blobs = {one.digest: one.size for one in layers if one.media_type != tensor}
        blobs = {manifest.config.digest: manifest.config.size} | blobs
        others = len(blobs)
        blobs |= {one.digest: one.size for one in layers}
        numbers = array("I", [self.number(blob, size) for blob, size in blobs.items()])
        stated = zip(numbers, blobs.values(), strict=True)
        sizes = {number: size for number, size in stated if size != self.sizes[number]}
        is_checked = config is not None
        is_unpublished = config is not None and _KEY not in config and b"\\" not in config
        known = KnownManifest(
            digest, numbers, others, is_checked, is_unpublished, _layout(layers), sizes
        )
        if not sizes:
            self._keep(version, known)
        return known

    def _keep(self, version: FileVersion | None, known: KnownManifest) -> None:
        self._by_digest[known.digest] = known
        if version is not None and _is_settled(version):
            self._manifests[version] = known
            self._is_new = True

    def save(self, versions: Iterable[FileVersion]) -> None:
        """Keep what is known of the manifests whose files have these versions, if any of it is new."""
        if not self._is_new or self._path is None:
            return
        self._is_new = False
        kept = {one: self._manifests[one] for one in versions if one in self._manifests}
        lists = [known.blobs for known in kept.values()]
        total = sum(map(len, lists))
        digests: bytes | bytearray = self._digests
        sizes = self.sizes
        if len(self) > total:  # most blobs are those of manifests that are gone
            order: dict[int, int] = {}
            lists = [
                array("I", [order.setdefault(n, len(order)) for n in found]) for found in lists
            ]
            digests = b"".join(self._digests[32 * n : 32 * n + 32] for n in order)
            sizes = array("Q", [self.sizes[n] for n in order])
        parts = [
            _COUNTS.pack(len(sizes), len(kept), total),
            digests,
            sizes.tobytes(),
            *(
                _MANIFEST.pack(
                    *version,
                    bytes.fromhex(known.digest.hex),
                    known.layout,
                    len(known.blobs),
                    known.others,
                    known.is_checked,
                    known.is_unpublished,
                )
                for version, known in kept.items()
            ),
            *(found.tobytes() for found in lists),
        ]
        checksum = 0
        for part in parts:
            checksum = zlib.crc32(part, checksum)
        with contextlib.suppress(OSError):  # the store cannot be written
            head = _MAGIC + b"%08x\n" % checksum
            write_file(self._path, [head, b"".join(parts)], mode=0o600, durable=False)

    def _number(self, digest: bytes, size: int) -> int:
        if self._numbers is None:
            parts = struct.iter_unpack("32s", self._digests)
            self._numbers = {part: number for number, (part,) in enumerate(parts)}
        number = self._numbers.setdefault(digest, len(self.sizes))
        if number == len(self.sizes):
            self._digests += digest
            self.sizes.append(size)
        return number

    def _read(self, path: Path) -> None:
        with open_own(path) as descriptor:
            size = 0 if descriptor is None else os.fstat(descriptor).st_size
            if descriptor is None or not 0 < size <= _MAX_BYTES:
                return
            data = memoryview(read_exactly(descriptor, size, 0))
        begin = len(_MAGIC) + 9
        head = bytes(data[:begin])
        data = data[begin:]
        if head != _MAGIC + b"%08x\n" % zlib.crc32(data) or len(data) < _COUNTS.size:
            return
        blobs, manifests, references = _COUNTS.unpack_from(data)
        widths = (_COUNTS.size, 32 * blobs, 8 * blobs, _MANIFEST.size * manifests, 4 * references)
        if len(data) != sum(widths):
            return
        parts = []
        for width in widths:
            parts.append(data[:width])
            data = data[width:]
        numbers = array("I", bytes(parts[4]))
        records = list(_MANIFEST.iter_unpack(parts[3]))
        counts = [count for *_, count, _, _, _ in records]
        if sum(counts) != references or max(numbers, default=0) >= max(blobs, 1):
            return
        if not all(0 < others <= count for *_, count, others, _, _ in records):
            return  # a manifest has a config at least
        self._digests, self._numbers = bytearray(parts[1]), None
        self.sizes = array("Q", bytes(parts[2]))
        end = 0
        for *version, spelled, layout, count, others, is_checked, is_unpublished in records:
            begin, end = end, end + count
            digest, found = Digest(spelled.hex()), numbers[begin:end]
            known = KnownManifest(digest, found, others, is_checked, is_unpublished, layout)
            self._manifests[FileVersion(*version)] = self._by_digest[known.digest] = known


def _is_settled(version: FileVersion) -> bool:
    return max(version.modified, version.changed) < time.time_ns() - _MARGIN_NS


def _layout(layers: Iterable[Descriptor]) -> bytes:
    tensors = (f"{one.size} {one.name}" for one in layers if one.media_type == media_types.TENSOR)
    return hashlib.blake2b("\n".join(tensors).encode(), digest_size=8).digest()
