"""Cold blobs: the coded form of blobs that nobody maps, below ``.blobstore/cold/``.

A cold blob has the name of what it decodes to: the digest of the blob as it was. So manifests say
nothing of it, a blob may be there hot, cold or both, and what a codec makes can change. Some are coded
against another blob, their base, which may itself be hot, or cold without a base of its own: edges are
one deep. Where a base is here in several forms and one is damaged, the others are tried. Nothing here
writes: freezing and thawing are workflows.

What is decoded has been checked chunk by chunk; who must know that it is the very blob hashes it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
from threading import Lock
from typing import TYPE_CHECKING

from blobstore.core.digest import Digest, Digester
from blobstore.core.escape import quote
from blobstore.errors import (
    BlobDamaged,
    BlobMissing,
    ColdDamaged,
    InvalidDigest,
    StoreError,
)
from blobstore.safetensors.header import PREFIX_SIZE, header_size, parse_header
from blobstore.store.cold_file import ColdFile
from blobstore.store.hot import ADVICE

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping

    from blobstore.compression.base import BaseBlob
    from blobstore.compression.decoder import ChunkRange
    from blobstore.compression.decoder import ColdBlobDecoder as Container
    from blobstore.compression.file_view import FileBytes
    from blobstore.safetensors.header import Header
    from blobstore.store.layout import Layout

    Given = Callable[[Digest, int], Iterator[BaseBlob]]
    """Gives the forms of the base of a digest and a size, each when it is wanted."""

    Read = Callable[[ColdFile], FileBytes | None]
    """Gives the bytes of a file, of which its ends were read if they are not in memory yet."""

_IMPORTING = Lock()
"""Threads that import numpy at once may find half of it."""
# A process that is forked from among such threads would wait for them, and has none.
os.register_at_fork(
    before=_IMPORTING.acquire,
    after_in_parent=_IMPORTING.release,
    after_in_child=_IMPORTING.release,
)
_PIECE = 1 << 22

State = tuple[int, ...]
"""What tells a file from another, or from itself after a change of its bytes."""


class ColdBlob:
    """A cold blob whose file is mapped. Threads may share it."""

    def __init__(self, path: str, digest: Digest, given: Given, read: Read | None = None) -> None:
        """Open the cold blob of ``digest`` at ``path``; ``given`` gives the forms of its base.

        With ``read`` its file stays open for :meth:`fetch`, until nobody holds this or ``read`` closes it.

        Raises:
            BlobMissing: there is none.
            BlobDamaged: it is no cold blob, or not that one.
            StoreError: it cannot be read.
        """
        file = ColdFile(path)
        if read is None:
            file.close()
        with _IMPORTING:
            from blobstore.compression.decoder import ColdBlobDecoder as Opened  # brings numpy

        self.digest = digest
        self.base: Digest | None = None
        """The blob without which it cannot be decoded."""
        self.base_size = 0
        """Bytes of that."""
        self._path = path
        self._file = file
        self._given = given
        self.stored = file.size
        """Bytes of its file."""
        with self._explained():
            self.container: Container = Opened(file.data, read and read(file))
            table = self.container.table
            if table.digest != digest:
                raise ColdDamaged(f"it is that of {table.digest}")
        self.size = table.size
        """Bytes of what it decodes to."""
        if table.base is not None:
            self.base, self.base_size = table.base.digest, table.base.size
        self._ways = [] if self.base else [self.container]
        """The container with each form of its base that was wanted so far."""
        self._forms: Iterator[BaseBlob] | None = None if self.base else iter(())
        """What other forms there are; None if nobody has asked yet."""
        self._lock = Lock()

    def fetch(self, chunks: ChunkRange, memory: memoryview) -> FileBytes:
        """Read what a cut of the container is decoded from; see :meth:`ColdFile.read`.

        Raises:
            BlobDamaged: the file has become shorter.
            StoreError: it cannot be read.
        """
        with self._explained():
            return self._file.read(chunks.stored_begin, chunks.stored_end, memory)

    def read_into(self, begin: int, buffer: memoryview, source: FileBytes | None = None) -> None:
        """Fill ``buffer`` with bytes of the blob from ``begin`` on.

        They are decoded from ``source``, if that has the file's bytes in memory already.

        Raises:
            BlobDamaged: it cannot be decoded, ends before, or its base is not whole.
            StoreError: a file cannot be read.
        """
        if begin + len(buffer) > self.size:
            raise self._damaged(f"byte {begin + len(buffer)} is wanted of {self.size}")
        failure: ColdDamaged | None = None
        with self._explained():
            # Each chunk is checked: what is decoded by other bytes than the base's is no success.
            for container in self._all_ways():
                try:
                    container.read_into(buffer, begin, source=source)
                except ColdDamaged as error:
                    failure = failure or error
                else:
                    return
            if failure is not None:
                raise failure

    def pieces(self) -> Generator[memoryview, None, None]:
        """Yield the bytes of the blob, in pieces that are good until the next one.

        Raises as :meth:`read_into`.
        """
        buffer = memoryview(bytearray(min(_PIECE, self.size)))
        for begin in range(0, self.size, _PIECE):
            piece = buffer[: min(_PIECE, self.size - begin)]
            self.read_into(begin, piece)
            yield piece

    def check(self, progress: Callable[[int], None] | None = None) -> None:
        """Decode all of it and compare the digest; ``progress`` gets the bytes of each piece.

        Raises:
            BlobDamaged: it cannot be decoded, or gives other bytes. Otherwise as :meth:`read_into`.
        """
        digester = Digester()
        for piece in self.pieces():
            digester.update(piece)
            if progress is not None:
                progress(len(piece))
        if digester.digest() != self.digest:
            raise self._damaged(f"it decodes to a blob with digest {digester.digest()}")

    def read_header(self) -> Header:
        """Return the checked safetensors header of a tensor blob.

        Raises:
            InvalidHeader: it breaks the format. Otherwise as :meth:`read_into`.
        """
        prefix = self._bytes(0, min(PREFIX_SIZE, self.size))
        length = header_size(prefix, self.size)
        return parse_header(self._bytes(PREFIX_SIZE, length), self.size)

    def _bytes(self, begin: int, count: int) -> bytes:
        buffer = bytearray(count)
        self.read_into(begin, memoryview(buffer))
        return bytes(buffer)

    def _all_ways(self) -> Iterator[Container]:
        """Yield the container with each form of its base; the next only if there is need of it."""
        for number in itertools.count():
            if number == len(self._ways):
                self._add_way(number)
            if number == len(self._ways):
                return
            yield self._ways[number]

    def _add_way(self, number: int) -> None:
        """Ask for the next form of the base, unless another thread has it by now."""
        with self._lock:
            if self.base is None or number < len(self._ways):
                return
            if self._forms is None:
                self._forms = self._given(self.base, self.base_size)
            try:
                form = next(self._forms, None)
            except BaseException:
                self._forms = None  # there is none; it may be put back
                raise
            if form is not None:
                # One that is in use keeps its base: other threads decode by that.
                container = type(self.container)(self._file.data) if number else self.container
                container.give_base(form)
                self._ways.append(container)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Say in errors which blob it is."""
        try:
            yield
        except ColdDamaged as error:
            raise self._damaged(str(error)) from None
        except OSError as error:
            raise StoreError(
                f"cold blob {quote(self._path)} cannot be read: {error.strerror}"
            ) from error

    def _damaged(self, what: str) -> BlobDamaged:
        base = f"; its base is {self.base}" if self.base else ""
        return BlobDamaged(f"cold blob {quote(self._path)} is damaged: {what}{base}{ADVICE}")


class ColdShelf:
    """The cold blobs of a store, for reading."""

    def __init__(self, layout: Layout, given: Given) -> None:
        """Take the layout of the store, and what gives a blob by which others are coded."""
        self._layout = layout
        self._given = given

    def has(self, digest: Digest) -> bool:
        """Tell whether there is a file in the place of a cold blob."""
        return os.path.lexists(self._layout.cold_blob(digest))

    def open(self, digest: Digest, size: int | None = None, read: Read | None = None) -> ColdBlob:
        """Open the cold form of a blob, of ``size`` bytes if that is given.

        ``read`` is that of :class:`ColdBlob`.

        Raises:
            BlobMissing: there is none.
            BlobDamaged: it is none, or that of another blob.
            StoreError: it cannot be read.
        """
        path = self._layout.cold_blob(digest)
        blob = ColdBlob(path, digest, self._given, read)
        if size is not None and blob.size != size:
            raise BlobDamaged(
                f"cold blob {quote(path)} is damaged: it is of a blob of {blob.size} bytes, expected "
                f"{size}{ADVICE}"
            )
        return blob

    def files(self) -> dict[Digest, os.stat_result]:
        """Return all files that have the name of a cold blob.

        Raises:
            StoreError: they cannot be listed.
        """
        found: dict[Digest, os.stat_result] = {}
        try:
            with os.scandir(self._layout.cold) as entries:
                for entry in entries:
                    with contextlib.suppress(InvalidDigest, FileNotFoundError):
                        digest = Digest.parse(entry.name.replace("-", ":", 1))
                        found[digest] = entry.stat(follow_symlinks=False)
        except OSError as error:
            # A link to nothing is one to a disk that is not mounted, perhaps.
            if isinstance(error, FileNotFoundError) and not self._layout.cold.is_symlink():
                return {}
            raise StoreError(f"cannot list {quote(self._layout.cold)}: {error.strerror}") from error
        return found


class BaseCache:
    """The bases of a store's cold blobs, each file read again only when it has changed."""

    def __init__(self, shelf: ColdShelf) -> None:
        self._shelf = shelf
        self._known: dict[Digest, tuple[State, Digest | None]] = {}

    def of(
        self, digest: Digest, status: os.stat_result, *, must_be_known: bool = True
    ) -> Digest | None:
        """Return the base of a cold blob whose file has a status; None if it has none.

        Raises:
            BlobDamaged: the file is no such cold blob, so that nobody knows; but None unless that
                ``must_be_known``.
            StoreError: it cannot be read.
        """
        state = state_of(status)
        known = self._known.get(digest)
        if known is None or known[0] != state:
            try:
                known = (state, self._shelf.open(digest).base)
            except BlobMissing:  # thawed since it was listed
                return None
            except BlobDamaged:
                if must_be_known:
                    raise
                return None
            self._known[digest] = known
        return known[1]

    def known(self, cold: Mapping[Digest, os.stat_result]) -> dict[Digest, Digest]:
        """Return the bases of those cold blobs that have one, as far as they can be told."""
        bases = {
            digest: self.of(digest, status, must_be_known=False) for digest, status in cold.items()
        }
        return {digest: base for digest, base in bases.items() if base is not None}


def state_of(status: os.stat_result) -> State:
    """Return what tells a file from another, or from itself after a change of its bytes."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def file_state(path: str) -> State | None:
    """Return the state of a regular file; None if there is none."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return state_of(status) if stat.S_ISREG(status.st_mode) else None
