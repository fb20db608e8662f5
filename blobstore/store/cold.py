"""Cold blobs: compressed blobs, below ``.blobstore/cold/``.

A cold blob is named by the digest of the decoded bytes. So manifests do not mention it, a blob may be hot,
cold or both, and better codecs can replace it. Some are deltas against another blob, their base, which is
hot, or cold without a base of its own: chains have one link. If the base has several files and one is
damaged, the others are tried. Nothing here writes: freezing and thawing are workflows.

Decoded bytes have been checked chunk by chunk. A caller that must know the digest hashes them.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
from threading import Lock
from typing import TYPE_CHECKING

from blobstore.core.digest import BlobId, Digest
from blobstore.core.escape import quote
from blobstore.core.files import FileState, is_there
from blobstore.core.fork import renew_lock_in_children
from blobstore.errors import BlobDamaged, BlobMissing, ColdDamaged, StoreError
from blobstore.safetensors.header import PREFIX_SIZE, header_size, parse_header
from blobstore.store.blob_header import read_blob_header
from blobstore.store.cold_file import ColdFile
from blobstore.store.hot import ADVICE
from blobstore.store.scan import digest_of, scan_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from typing_extensions import Buffer

    from blobstore.compression.base import BaseBlob
    from blobstore.compression.decoder import ChunkRange, ColdBlobDecoder
    from blobstore.compression.file_view import FileBytes
    from blobstore.safetensors.header import Header
    from blobstore.store.hot import HotShelf
    from blobstore.store.layout import Layout

    BaseFiles = Callable[[Digest, int], Iterator[BaseBlob]]
    """Yields a base, given its digest and size, from each of its files. Each is opened when it is asked for."""

    Read = Callable[[ColdFile], FileBytes | None]
    """Returns the bytes of a file whose ends it has read, or None if the mapped bytes will do."""

_IMPORTING = Lock()
"""Threads that import numpy at the same time may see half of it."""
# A forked process would wait forever for a thread that it does not have.
os.register_at_fork(
    before=_IMPORTING.acquire, after_in_parent=_IMPORTING.release, after_in_child=_IMPORTING.release
)
_PIECE = 1 << 20
"""As large as the largest chunk, and still in the processor's cache when it is hashed or written."""
LOOKS = 3
"""How often a file is looked for: a blob may be frozen or thawed between two looks."""


def load_decoder() -> type[ColdBlobDecoder]:
    """Return the decoder, whose import takes a while, and in this process fails for good if it ever does."""
    with _IMPORTING:
        from blobstore.compression.decoder import ColdBlobDecoder as Decoder  # imports numpy
    return Decoder


class ColdBlob:
    """A cold blob whose file is mapped. Threads may share it."""

    def __init__(
        self, path: str, digest: Digest, base_files: BaseFiles, read: Read | None = None
    ) -> None:
        """Open the cold blob of ``digest`` at ``path``.

        With ``read`` its file stays open for :meth:`fetch`, until this object is deleted or ``read`` closes
        the file.

        Raises:
            BlobMissing: it does not exist.
            BlobDamaged: it is not a cold blob, or another one.
            StoreError: it cannot be read.
        """
        file = ColdFile(path)
        # A map needs no descriptor, and a model may have more cold blobs than a process may have
        # open files.
        if read is None:
            file.close()
        decoder = load_decoder()
        self.digest = digest
        self.base: Digest | None = None
        """The blob that is needed to decode it."""
        self.base_size = 0
        """Bytes of the base."""
        self._path = path
        self._file = file
        self._base_files = base_files
        self.stored = file.size
        """Bytes of its file."""
        with self._explained():
            self.container: ColdBlobDecoder = decoder(file.data, read and read(file), file.touch)
            table = self.container.table
            # The name of a file proves nothing: it may have been copied or renamed.
            if table.digest != digest:
                raise ColdDamaged(f"it is that of {table.digest}")
        self.size = table.size
        """Bytes of the decoded blob."""
        if table.base is not None:
            self.base, self.base_size = table.base.digest, table.base.size
        self._decoders = [] if self.base else [self.container]
        """A decoder for each file of the base that was asked for so far."""
        self._bases: Iterator[BaseBlob] | None = None if self.base else iter(())
        """The base from its other files; None before the first is asked for."""
        # Several threads may ask for the next file of the base; one opens it.
        self._lock = Lock()
        renew_lock_in_children(self)

    def fetch(self, chunks: ChunkRange, memory: memoryview) -> FileBytes:
        """Read the stored bytes that some chunks are decoded from; see :meth:`ColdFile.read`.

        Raises:
            BlobDamaged: the file has become shorter, or the disk has lost it.
            StoreError: it cannot be read.
        """
        with self._explained():
            return self._file.read(chunks.stored_begin, chunks.stored_end, memory)

    def read_into(self, begin: int, buffer: memoryview, source: FileBytes | None = None) -> None:
        """Fill ``buffer`` with bytes of the blob from ``begin`` on.

        They are decoded from ``source``, if that has the file's bytes in memory already.

        Raises:
            BlobDamaged: it cannot be decoded, is too short, or its base is damaged.
            StoreError: a file cannot be read.
        """
        if begin + len(buffer) > self.size:
            raise self._damaged(f"it ends at byte {self.size}, before byte {begin + len(buffer)}")
        failure: ColdDamaged | OSError | None = None
        with self._explained():
            # Each chunk is checked, so decoding against a damaged base does not succeed.
            for decoder in self._all_decoders():
                try:
                    decoder.read_into(buffer, begin, source=source)
                except (ColdDamaged, OSError) as error:
                    failure = failure or error
                else:
                    return
            if failure is not None:
                raise failure

    def pieces(self) -> Generator[memoryview, None, None]:
        """Yield the bytes of the blob. A piece is valid until the next one.

        Raises as :meth:`read_into`.
        """
        buffer = memoryview(bytearray(min(_PIECE, self.size)))
        for begin, end, *_ in self.container.chunk_ranges(_PIECE, self.size):
            piece = buffer[: end - begin]  # of complete chunks, so that each is decoded once
            self.read_into(begin, piece)
            yield piece

    def check(self, progress: Callable[[int], None] | None = None) -> None:
        """Decode all of it and compare the digest; ``progress`` receives the bytes of each piece.

        Raises:
            BlobDamaged: it cannot be decoded, or the digest differs. Otherwise as :meth:`read_into`.
        """
        found = Digest.of_pieces(self.pieces(), progress)
        if found != self.digest:
            raise self._damaged(f"it decodes to a blob with digest {found}")

    def read_header(self) -> Header:
        """Return the checked header of a blob that holds tensors.

        Raises:
            InvalidHeader: it breaks the format. Otherwise as :meth:`read_into`.
        """

        def read(begin: int, end: int) -> memoryview:
            buffer = memoryview(bytearray(min(end, self.size) - begin))
            self.read_into(begin, buffer)
            return buffer

        def read_safetensors() -> Header:
            prefix = read(0, min(PREFIX_SIZE, self.size))
            return parse_header(
                read(PREFIX_SIZE, PREFIX_SIZE + header_size(prefix, self.size)), self.size
            )

        return read_blob_header(read_safetensors, read, self.size)

    def _all_decoders(self) -> Iterator[ColdBlobDecoder]:
        """Yield a decoder for each file of the base; the next file is opened only if it is needed."""
        for number in itertools.count():
            if self.base is not None and number == len(self._decoders):
                with self._lock:
                    if number == len(self._decoders):  # no other thread has opened it
                        self._bases = self._bases or self._base_files(self.base, self.base_size)
                        try:
                            base = next(self._bases, None)
                        except BaseException:
                            self._bases = None  # look again next time: the base may be restored
                            raise
                        if base is not None:
                            # Other threads may be decoding with an earlier file, so keep its decoder.
                            is_first = number == 0
                            data, touch = self._file.data, self._file.touch
                            decoder = (
                                self.container
                                if is_first
                                else type(self.container)(data, touch=touch)
                            )
                            decoder.give_base(base)
                            self._decoders.append(decoder)
            if number == len(self._decoders):
                return
            yield self._decoders[number]

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Name the blob in errors."""
        try:
            yield
        except ColdDamaged as error:
            raise self._damaged(str(error)) from None
        except OSError as error:
            # A disk that has lost the bytes is no better than wrong ones.
            if error.errno == errno.EIO:
                raise self._damaged(f"it, or its base, cannot be read: {error.strerror}") from error
            raise StoreError(
                f"cold blob {quote(self._path)} cannot be read: {error.strerror}"
            ) from error

    def _damaged(self, what: str) -> BlobDamaged:
        base = f"; its base is {self.base}" if self.base else ""
        return BlobDamaged(f"cold blob {quote(self._path)} is damaged: {what}{base}", advice=ADVICE)


class ColdShelf:
    """The cold blobs of a store, for reading."""

    def __init__(self, layout: Layout, hot: HotShelf, pinned: HotShelf) -> None:
        """Read cold blobs, with bases that are ``hot``, cold, or ``pinned`` by a second hard link."""
        self._layout = layout
        self._hot = hot
        self._pinned = pinned

    def has(self, digest: Digest) -> bool:
        """Return whether the blob has a cold file, whatever its content. Raises StoreError."""
        try:
            return is_there(self._layout.cold_blob(digest))
        except StoreError as error:
            # Another user's folder: hot blobs are for all.
            if isinstance(error.__cause__, PermissionError):
                return False
            raise

    def open(self, digest: Digest, size: int | None = None, read: Read | None = None) -> ColdBlob:
        """Open the cold file of a blob, which has ``size`` bytes when decoded, if that is given.

        See :class:`ColdBlob` for ``read``.

        Raises:
            BlobMissing: there is no cold file.
            BlobDamaged: it is not a cold blob, or that of another blob.
            StoreError: it cannot be read.
        """
        path = self._layout.cold_blob(digest)
        blob = ColdBlob(path, digest, self.base_files, read)
        if size is not None and blob.size != size:
            raise BlobDamaged(
                f"cold blob {quote(path)} is damaged: it decodes to {blob.size} bytes, expected {size}",
                advice=ADVICE,
            )
        return blob

    def check_size(self, digest: Digest, size: int) -> None:
        """Check that the blob has ``size`` bytes, and that its base is here. Raises as :meth:`open`."""
        base = self.open(digest, size).base
        if base is not None and not any(
            shelf.has(base) for _ in range(LOOKS) for shelf in (self._hot, self, self._pinned)
        ):
            path = quote(self._layout.cold_blob(digest))
            raise BlobDamaged(
                f"cold blob {path} cannot be decoded: its base {base} is missing", advice=ADVICE
            )

    def files(self) -> dict[Digest, os.stat_result]:
        """Return the status of every file that is named like a cold blob.

        Raises:
            StoreError: they cannot be listed.
        """
        found: dict[Digest, os.stat_result] = {}
        for entry in scan_folder(self._layout.cold):
            digest = digest_of(entry.name)
            if digest is not None:
                with contextlib.suppress(FileNotFoundError):  # removed since it was listed
                    found[digest] = entry.stat(follow_symlinks=False)
        return found

    def base_files(
        self, digest: Digest, size: int, *, in_chain: bool = False
    ) -> Iterator[BaseBlob]:
        """Yield a base of ``size`` bytes from each of its files that can be opened, the cheapest first.

        Nothing is hashed: the bytes that are decoded against a base are checked afterwards. One file may
        be intact where another is damaged. Only ``in_chain`` may it be a delta itself: what is decoded then
        comes from elsewhere, or goes there.

        Raises:
            BlobDamaged: it has no file, or none has that size.
            ColdDamaged: it is a delta itself.
            StoreError: it cannot be read.
        """
        open_cold = self._open_delta_base if in_chain else self._open_cold_base
        left = [self._open_hot_base, open_cold, self._open_pinned_base]
        faults: list[BlobDamaged | ColdDamaged | StoreError] = []
        is_here = False
        # A base that is frozen or thawed between two looks has moved to a file that the next round
        # finds.
        for _ in range(LOOKS):
            for open_file in list(left):
                try:
                    base = open_file(digest, size)
                except BlobMissing:
                    continue
                except (BlobDamaged, ColdDamaged, StoreError) as error:
                    faults.append(error)
                else:
                    yield base
                    is_here = True
                # Files that were opened or are faulty are done; only missing ones are looked for
                # again.
                left.remove(open_file)
        if faults and not is_here:
            raise faults[0]
        if not is_here:
            path = quote(self._layout.blob(digest))
            raise BlobDamaged(f"blob {path}, the base of cold blobs, is missing", advice=ADVICE)

    def _open_hot_base(self, digest: Digest, size: int) -> BaseBlob:
        return _hot_base(self._hot, digest, size)

    def _open_cold_base(self, digest: Digest, size: int) -> BaseBlob:
        """Return a cold blob as a base whose errors name it."""
        base = self.open(digest, size).container.as_base()

        def read_into(out: Buffer, begin: int) -> None:
            try:
                base.read_into(out, begin)
            except ColdDamaged as error:
                raise ColdDamaged(f"so is its base, cold blob {digest}: {error}") from None

        return base._replace(read_into=read_into)

    def _open_delta_base(self, digest: Digest, size: int) -> BaseBlob:
        """Return a cold blob as a base, even if it is a delta."""
        from blobstore.compression.base import BaseBlob  # imports numpy

        blob = self.open(digest, size)
        if blob.base is None:
            return self._open_cold_base(digest, size)

        def read_into(out: Buffer, begin: int) -> None:
            blob.read_into(begin, memoryview(out).cast("B"))

        return BaseBlob(BlobId(digest, size), read_into, None, blob.container.table, 1)

    def _open_pinned_base(self, digest: Digest, size: int) -> BaseBlob:
        state = FileState.of(self._layout.blob(digest))
        if state is not None and state == FileState.of(self._layout.base_blob(digest)):
            raise BlobMissing(f"blob {digest} has no second file")  # it is the hot file
        return _hot_base(self._pinned, digest, size)


def _hot_base(shelf: HotShelf, digest: Digest, size: int) -> BaseBlob:
    from blobstore.compression.base import BaseBlob  # imports numpy

    data, touch = shelf.mmap(digest, size)
    return BaseBlob.hot(data, digest, touch)
