"""One open weight file in which each tensor lies as a blob has it; a format says where."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from blobstore.core.escape import quote
from blobstore.core.file_kinds import HEAD, kind_of
from blobstore.core.files import FileVersion, open_regular, read_exactly
from blobstore.errors import BlobstoreError, DamagedSource, SourceError, UnsupportedSource
from blobstore.sources.holes import check_written

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from blobstore.core.files import Opener
    from blobstore.core.tensor import FileLayout, TensorSpec
    from blobstore.manifests.source_record import Format, Gap


def open_part(path: Path, what: str, opener: Opener = open_regular) -> tuple[int, int]:
    """Open one of the files of a source, and return its descriptor and its size in bytes.

    Args:
        path: the file.
        what: what it is, for errors.
        opener: opens it.

    Raises:
        DamagedSource: it is missing.
        SourceError: it cannot be read, or is no regular file.
    """
    try:
        return opener(path)
    except FileNotFoundError:
        raise DamagedSource(f"{what} {quote(path)} is missing") from None
    except OSError as error:
        raise SourceError(f"cannot open {quote(path)}: {error.strerror}") from error
    except DamagedSource:
        raise
    except BlobstoreError as error:
        raise SourceError(str(error)) from None


class FileShard(ABC):
    """An open file. The descriptor stays open, so that a rename cannot change the content.

    A format is a subclass with the three attributes and three methods below.
    """

    ending: ClassVar[str]
    """The end of the names of the files."""
    format: ClassVar[Format]
    """The name of the format in the source layer."""
    invalid: ClassVar[type[Exception]]
    """The exception of :meth:`parse` and :meth:`layout_of` for a file that breaks the format."""
    notices: Sequence[str] = ()
    gaps: tuple[Gap, ...] = ()
    """Bytes that are neither in the header nor in tensors; short zeros between tensors are left out."""
    role: str = ""
    """What the file is for, if the format says it."""

    def __init__(self, path: Path, opener: Opener = open_regular) -> None:
        """Open a file and check its header and size.

        Raises:
            DamagedSource: the file is malformed, missing, or ends too early, or something else is in its place.
            SourceError: it cannot be read.
            UnsupportedSource: it is of another format, or has more than can be kept.
        """
        self.path = path
        self._descriptor, size = open_part(path, "weight file", opener)
        try:
            self._layout = self.parse(size)
            self.notices = [*check_written(path, self._descriptor, self._layout)]
        except BaseException as error:
            head = self.read_range(0, HEAD) if isinstance(error, self.invalid) else b""
            self.close()
            if isinstance(error, self.invalid):
                raise self._fault(head, error) from None
            if isinstance(error, OSError):
                raise SourceError(f"cannot read {quote(path)}: {error.strerror}") from error
            raise

    def _fault(self, head: bytes, error: Exception) -> BlobstoreError:
        """Return the error of a file that breaks the format: it may be of another one."""
        where = quote(self.path)
        if self.begins(head):
            return DamagedSource(f"{where}: {error}")
        if kind := kind_of(head):
            return kind.error(where)
        return UnsupportedSource(
            f"{where}: this is not a {self.format} file, nor any other format that blobstore knows"
        )

    @staticmethod
    @abstractmethod
    def begins(head: bytes) -> bool:
        """Return whether a file of the format, whole, cut or damaged, can begin with ``head``."""

    @abstractmethod
    def parse(self, size: int) -> FileLayout:
        """Read the header of a file of ``size`` bytes with :meth:`read_range`, and check it against the size.

        Raises:
            Exception: ``invalid``, if the file breaks the format.
            OSError: it cannot be read.
        """

    @staticmethod
    @abstractmethod
    def layout_of(start: bytes, size: int) -> FileLayout:
        """Return the layout of a file of ``size`` bytes from its first bytes, which are not trusted.

        Exports write the file again with it.

        Raises:
            Exception: ``invalid``, if the file breaks the format.
        """

    def read_range(self, begin: int, end: int) -> bytes:
        """Return bytes of the file, fewer if it ends before. Raises OSError."""
        return read_exactly(self._descriptor, end - begin, begin)

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """See :class:`Shard`."""
        return {name: spec for name, (spec, _, _) in self._layout.tensors.items()}

    def block_types(self) -> Iterable[tuple[str, str]]:
        """Return the names of tensors that are blocks of llama.cpp, and of their types."""
        return ()

    def read(self, name: str, buffer: memoryview) -> Iterator[memoryview]:
        """See :class:`Shard`."""
        _, offset, end = self._layout.tensors[name]
        while left := end - offset:
            try:
                count = os.preadv(self._descriptor, [buffer[:left]], offset)
            except OSError as error:
                raise DamagedSource(
                    f"cannot read {quote(self.path)} at byte {offset}, in tensor {quote(name)}: "
                    f"{error.strerror}"
                ) from error
            if not count:
                raise DamagedSource(
                    f"{quote(self.path)} ended at byte {offset}, in tensor {quote(name)} with {left} "
                    "bytes missing: the file was truncated while it was read"
                )
            yield buffer[:count]
            offset += count

    def version(self) -> FileVersion:
        """See :class:`Shard`."""
        return FileVersion.of_status(os.fstat(self._descriptor))

    def header(self) -> bytes:
        """Return the bytes before the data, padding included. Raises DamagedSource."""
        size = self._layout.data_start
        try:
            data = self.read_range(0, size)
        except OSError as error:
            raise DamagedSource(
                f"cannot read the header of {quote(self.path)}: {error.strerror}"
            ) from error
        if len(data) != size:
            raise DamagedSource(
                f"{quote(self.path)} ended at byte {len(data)}, in its header of {size} bytes: the file "
                "was truncated while it was read"
            )
        return data

    def close(self) -> None:
        """See :class:`Shard`."""
        os.close(self._descriptor)
