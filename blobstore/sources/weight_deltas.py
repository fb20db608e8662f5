"""The form in which trainers write the change of a tensor, read and written, with the checksum of the result.

slime defined the form, and SGLang and others read it. A change is of the tensor's bytes, whatever its type:
``xor`` is the exclusive or of all of them, ``overwrite`` a count, the positions of the bytes that differ and
their new values. Either is one frame of zstd. The checksum is that of the new bytes.
"""

from __future__ import annotations

import contextlib
import zlib
from bisect import bisect_left
from itertools import chain
from typing import IO, TYPE_CHECKING, Any, Final, Literal, Protocol, cast

import numpy as np

from blobstore.core.escape import quote
from blobstore.core.libraries import optional_libraries
from blobstore.errors import DamagedSource

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Buffer

Encoding = Literal["xor", "overwrite"]
ENCODINGS: Final = ("xor", "overwrite")
CHECKSUMS: Final = ("xxh3-128", "blake3", "adler32")
_LEVEL: Final = 1
MAX_WINDOW: Final = 2**27
"""Bytes that a decoder keeps at most, which the highest level of zstd needs."""
_MIN_WINDOW: Final = 2**10
"""The smallest limit that zstd takes."""
_PIECE: Final = 2**20
_COUNT: Final = 4
"""Bytes of a count, and of a position."""
_MOST_UNORDERED: Final = 2**20
"""The most positions that may be in any order. Ordered ones all differ, so a small frame cannot have many."""


class Checksum(Protocol):
    """A checksum that is being computed."""

    def update(self, data: Any, /) -> object:
        """Add bytes."""

    def hexdigest(self) -> str:
        """Return it as hexadecimal digits."""
        ...


class _Adler32:
    def __init__(self) -> None:
        self._value = 1

    def update(self, data: Any, /) -> None:
        self._value = zlib.adler32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


def new_checksum(kind: str) -> Checksum:
    """Begin a checksum, one of :data:`CHECKSUMS`. Raises MissingLibrary."""
    if kind == "adler32":
        return _Adler32()
    with optional_libraries():
        if kind == "blake3":
            import blake3

            begun: Checksum = blake3.blake3()
        else:
            import xxhash

            begun = xxhash.xxh3_128()
        return begun


class Patch:
    """Changes the bytes of a tensor, from front to back, to those of the next version."""

    def __init__(
        self,
        frame: Iterator[memoryview],
        encoding: Encoding,
        nbytes: int,
        kind: str,
        checksum: str,
        where: str,
    ) -> None:
        """Read nothing yet.

        Args:
            frame: the bytes of the zstd frame, in pieces; each is valid until the next one.
            encoding: what is in it.
            nbytes: the bytes of the tensor.
            kind: that of the checksum.
            checksum: of the new bytes, in hexadecimal digits.
            where: the start of errors.

        Raises:
            DamagedSource: the frame is malformed.
        """
        import zstandard

        self._error = zstandard.ZstdError
        start = bytes(next(frame, b""))
        if not start.startswith(zstandard.FRAME_HEADER):
            raise DamagedSource(f"{where}: not a frame of zstd")
        self.memory = MAX_WINDOW
        """The bytes that it holds at most until it is applied."""
        with contextlib.suppress(zstandard.ZstdError):
            self.memory = min(MAX_WINDOW, zstandard.get_frame_parameters(start).window_size)
        pieces = _Pieces(chain([start], frame))
        # A later frame, for the reader does not stop at one that is empty, has no larger window than was counted.
        decompressor = zstandard.ZstdDecompressor(max_window_size=max(self.memory, _MIN_WINDOW))
        self._reader = decompressor.stream_reader(cast("IO[bytes]", pieces))
        self._nbytes = nbytes
        self._done = 0
        self._digester = new_checksum(kind)
        self._checksum = checksum
        self._where = where
        self._changes: tuple[Any, Any] | None = None
        if encoding == "overwrite":
            self._changes = self._positions()
            self.memory += (_COUNT + 1) * len(self._changes[0])

    def apply(self, piece: memoryview) -> None:
        """Change the next bytes of the tensor in place; the last ones are checked.

        Raises:
            DamagedSource: the frame is malformed, of another size, or the checksum differs. What was changed
                before must then be discarded too.
        """
        begin, self._done = self._done, self._done + len(piece)
        data = np.frombuffer(piece, np.uint8)
        if self._changes is None:
            np.bitwise_xor(data, np.frombuffer(self._read(len(piece)), np.uint8), out=data)
        else:
            positions, values = self._changes
            first, last = (bisect_left(positions, place) for place in (begin, self._done))
            data[positions[first:last].astype(np.int64) - begin] = values[first:last]
        self._digester.update(piece)
        if self._done == self._nbytes:
            self.finish()

    def finish(self) -> None:
        """Check the end, which :meth:`apply` does unless the tensor is empty. Raises as that."""
        if self._next(1):
            raise DamagedSource(f"{self._where}: the change is larger than the tensor")
        found = self._digester.hexdigest()
        if found != self._checksum:
            raise DamagedSource(
                f"{self._where}: the new bytes have the checksum {found}, and the file says "
                f"{quote(self._checksum)}"
            )

    def _positions(self) -> tuple[Any, Any]:
        """Return the positions of the bytes that change, in order, and their new values."""
        count = int.from_bytes(self._read(_COUNT), "little")
        if count > self._nbytes:
            raise DamagedSource(
                f"{self._where}: {count} bytes change of a tensor of {self._nbytes} bytes"
            )
        found, before, is_ordered = bytearray(), -1, True
        while len(found) < _COUNT * count:
            piece = np.frombuffer(self._read(min(_COUNT * count - len(found), _PIECE)), "<u4")
            is_ordered &= int(piece[0]) > before and bool((piece[1:] > piece[:-1]).all())
            before = int(piece[-1])
            if not is_ordered and count > _MOST_UNORDERED:
                raise DamagedSource(f"{self._where}: the bytes that change are not in order")
            found += piece.data
        positions = np.frombuffer(found, "<u4")
        values = np.frombuffer(self._read(count), np.uint8)
        if count and int(positions.max()) >= self._nbytes:
            raise DamagedSource(
                f"{self._where}: byte {int(positions.max())} changes of a tensor of {self._nbytes} bytes"
            )
        if is_ordered:
            return positions, values
        # Of a byte that is listed twice, the last value counts, as for readers that go from front to back.
        order = np.argsort(positions, kind="stable")
        return positions[order], values[order]

    def _read(self, count: int) -> bytes:
        """Return that many bytes. Memory grows as they arrive, because the count is not trusted."""
        found = bytearray()
        while len(found) < count:
            data = self._next(min(count - len(found), _PIECE))
            if not data:
                raise DamagedSource(f"{self._where}: the change ends too early")
            found += data
        return bytes(found)

    def _next(self, count: int) -> bytes:
        try:
            data: bytes = self._reader.read(count)
        except self._error as error:
            raise DamagedSource(f"{self._where}: not a frame of zstd: {error}") from None
        return data


class _Pieces:
    """Bytes in pieces, as zstandard reads them."""

    def __init__(self, pieces: Iterator[Buffer]) -> None:
        self._pieces = pieces

    def read(self, _: int = -1) -> bytes:
        return bytes(next(self._pieces, b""))


def encode_change(old: memoryview, new: memoryview, encoding: Encoding) -> bytes | None:
    """Return the frame that changes ``old`` to ``new``, which has the same size; None if they are equal.

    Raises:
        UnsupportedSource: ``overwrite`` cannot say where bytes change in a tensor of 4 GiB.
    """
    import zstandard

    before, after = np.frombuffer(old, np.uint8), np.frombuffer(new, np.uint8)
    changed = before ^ after
    if not changed.any():
        return None
    compressor = zstandard.ZstdCompressor(level=_LEVEL)
    if encoding == "xor":
        return compressor.compress(changed.data)
    at = np.flatnonzero(changed).astype("<u4")
    parts = (np.array([at.size], "<u4"), at, after[at])
    return compressor.compress(b"".join(part.tobytes() for part in parts))
