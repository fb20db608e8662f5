"""Tar layers, whose bytes follow from the paths, sizes and contents of their files."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from blobstore.core import strict_json
from blobstore.core.digest import Digest
from blobstore.core.fork import cached_property

ROOT: Final = "models"
"""The folder that all files of a layer are in."""
_BLOCK: Final = 512
_OCTAL: Final = re.compile(rb"[0-7]{11}")
TAR_END: Final = bytes(2 * _BLOCK)
"""The bytes after the last file."""
_FILE: Final = b"0"
_KINDS: Final = (_FILE, b"5", b"x")
"""Files, folders, and the long name of the entry that follows."""


class FolderFile(NamedTuple):
    """A file of the folder that other tools make of a model."""

    path: str
    media_type: str
    digest: Digest
    size: int


ReadPieces = Callable[[Digest, int], Iterable[bytes | memoryview]]
"""Returns the bytes of a blob, given its digest and size."""


@dataclass(frozen=True)
class TarLayer:
    """The files of a layer, in order. Its bytes follow from them."""

    files: tuple[FolderFile, ...]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where the content of each file begins."""
        offsets, end = [], 0
        for file in self.files:
            begin = end + len(tar_header(file.path, file.size))
            offsets.append(begin)
            end = begin + file.size + padding(file.size)
        return tuple(offsets)

    @property
    def size(self) -> int:
        """Bytes of the layer."""
        last = self.files[-1]
        return self.offsets[-1] + last.size + padding(last.size) + len(TAR_END)

    @property
    def key(self) -> Digest:
        """The digest of what the bytes follow from, which is known before the bytes are read."""
        listed = [(file.path, file.digest.hex, file.size) for file in self.files]
        return Digest.of(strict_json.dumps(["tar layer 1", listed]).encode())

    def pieces(self, read: ReadPieces) -> Generator[bytes | memoryview, None, None]:
        """Yield the bytes of the layer in order."""
        for file in self.files:
            yield tar_header(file.path, file.size)
            yield from read(file.digest, file.size)
            yield bytes(padding(file.size))
        yield TAR_END


def tar_header(path: str, size: int, *, is_folder: bool = False) -> bytes:
    """Return the blocks before the content of a file or folder, whose path is below :data:`ROOT`."""
    import tarfile

    info = tarfile.TarInfo(f"{ROOT}/{path}" if path else ROOT)
    # Nothing of this machine enters the bytes, so equal models have equal layers.
    info.size, info.mode, info.mtime = size, 0o644, 0
    if is_folder:
        info.type, info.mode = tarfile.DIRTYPE, 0o755
    return info.tobuf(tarfile.PAX_FORMAT)


def padding(size: int) -> int:
    """Return the bytes between a content of ``size`` bytes and the next block."""
    return -size % _BLOCK


def tar_entries(tar: bytes) -> Iterator[tuple[str, int, int]]:
    """Yield the name of each file of a tar, where its content begins, and its bytes.

    Raises:
        ValueError: an entry is not one of a :class:`TarLayer`: a link, for example.
    """
    begin = 0
    # A block of zeros ends a tar.
    while block := tar[begin : begin + _BLOCK].rstrip(b"\0"):
        name, octal, kind = block[:100].rstrip(b"\0"), block[124:135], block[156:157]
        if _OCTAL.fullmatch(octal) is None:
            raise ValueError(f"no entry starts at byte {begin}")
        size = int(octal, 8)
        begin += _BLOCK
        if kind not in _KINDS or begin + size > len(tar):
            raise ValueError(f"the entry before byte {begin} is cut off, or of an unusual kind")
        if kind == _FILE:
            yield name.decode("ascii", "replace"), begin, size
        begin += size + padding(size)
