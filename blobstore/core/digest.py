"""Digests, which name blobs, and their computation from a stream."""

from __future__ import annotations

import contextlib
import hashlib
import re
import threading
from typing import TYPE_CHECKING, NamedTuple

from blobstore.core import interrupts
from blobstore.core.escape import quote
from blobstore.errors import InvalidDigest

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from typing_extensions import Buffer

_PATTERN = re.compile(r"sha256:([0-9a-f]{64})", re.ASCII)
SHORT_HEX = 12


class Digest(NamedTuple):
    """The SHA-256 of a blob's bytes. A tuple, because models have thousands of them.

    A value of this type was validated and can be used in a file name, unlike a string.
    """

    hex: str

    @classmethod
    def parse(cls, text: str) -> Digest:
        """Parse ``sha256:`` and 64 lower-case hex digits.

        Raises:
            InvalidDigest: ``text`` has another form, such as another algorithm or upper case.
        """
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise InvalidDigest(
                f"not a digest: {quote(text)}; expected sha256: and 64 lower-case hex digits"
            )
        return cls(match[1])

    @classmethod
    def of(cls, data: Buffer) -> Digest:
        """Return the digest of ``data``."""
        return cls(hashlib.sha256(data).hexdigest())

    @classmethod
    def of_pieces(
        cls,
        pieces: Generator[memoryview, None, None],
        progress: Callable[[int], None] | None = None,
    ) -> Digest:
        """Return the digest of the bytes that ``pieces`` yields, and close it.

        ``progress`` receives the bytes of each piece.
        """
        digester = Digester()
        with contextlib.closing(pieces):
            for piece in pieces:
                digester.update(piece)
                if progress is not None:
                    progress(len(piece))
        return digester.digest()

    @property
    def short(self) -> str:
        """The first hex digits, for display."""
        return self.hex[:SHORT_HEX]

    @property
    def file_name(self) -> str:
        """The name of the blob's file."""
        return f"sha256-{self.hex}"

    def __str__(self) -> str:
        return f"sha256:{self.hex}"


class BlobId(NamedTuple):
    """Digest and size of a blob: manifests may disagree about the size for one digest."""

    digest: Digest
    size: int


class Digester:
    """A digest computed from a stream of buffers."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self.size = 0

    def update(self, data: Buffer) -> None:
        """Add the next bytes; large buffers are hashed without the GIL."""
        interrupts.check()
        interrupts.take_turns()
        self._hash.update(data)
        self.size += memoryview(data).nbytes

    def digest(self) -> Digest:
        """Return the digest of all bytes added so far."""
        return Digest(self._hash.hexdigest())


class PieceDigester:
    """A digest of bytes in memory that threads provide in any order, each piece once.

    A thread hashes what has arrived in order, unless another thread is doing so.
    """

    def __init__(self) -> None:
        self._digester = Digester()
        self._arrived: dict[int, memoryview] = {}
        self._is_busy = False
        self._lock = threading.Lock()

    def add(self, begin: int, piece: memoryview) -> None:
        """Add the bytes from ``begin`` on."""
        with self._lock:
            self._arrived[begin] = piece
            if self._is_busy:
                return
            self._is_busy = True
        while True:
            with self._lock:
                following = self._arrived.pop(self._digester.size, None)
                if following is None:
                    self._is_busy = False
                    return
            self._digester.update(following)

    @property
    def size(self) -> int:
        """The bytes that are hashed."""
        return self._digester.size

    def digest(self) -> Digest:
        """Return the digest, after all pieces were added."""
        return self._digester.digest()


def git_digester(size: int) -> hashlib._Hash:
    """Return a hasher that digests a file as git does: its size is hashed before its bytes."""
    return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
