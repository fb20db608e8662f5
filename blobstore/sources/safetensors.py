"""Reads one safetensors file as a shard."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from blobstore.core.escape import quote
from blobstore.core.files import FileVersion, open_regular, read_exactly
from blobstore.errors import BlobstoreError, DamagedSource, InvalidHeader, SourceError
from blobstore.safetensors.file import read_header

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from blobstore.core.tensor import TensorSpec


class SafetensorsShard:
    """An open file. The descriptor stays open, so that a rename cannot change the content."""

    notices: Sequence[str] = ()

    def __init__(self, path: Path) -> None:
        """Open a file and check its header and size.

        Raises:
            DamagedSource: the file is malformed, missing, or cannot be read.
        """
        self.path = path
        try:
            self._descriptor, size = open_regular(path)
        except FileNotFoundError:
            raise DamagedSource(f"weight file {quote(path)} is missing") from None
        except OSError as error:
            raise SourceError(f"cannot open {quote(path)}: {error.strerror}") from error
        except BlobstoreError as error:
            raise SourceError(str(error)) from None
        try:
            self._header = read_header(self._descriptor, size)
        except InvalidHeader as error:
            self.close()
            raise DamagedSource(f"{quote(path)}: {error}") from None
        except OSError as error:
            self.close()
            raise SourceError(f"cannot read {quote(path)}: {error.strerror}") from error
        except BaseException:
            self.close()
            raise

    @property
    def metadata(self) -> Mapping[str, str]:
        """The ``__metadata__`` of the header."""
        return self._header.metadata

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """See :class:`Shard`."""
        return {name: entry.spec for name, entry in self._header.tensors.items()}

    def read(self, name: str, buffer: memoryview) -> Iterator[memoryview]:
        """See :class:`Shard`."""
        entry = self._header.tensors[name]
        offset = self._header.data_start + entry.begin
        left = entry.end - entry.begin
        while left:
            try:
                count = os.preadv(self._descriptor, [buffer[:left]], offset)
            except OSError as error:
                raise DamagedSource(
                    f"cannot read {quote(self.path)} at byte {offset}, in tensor "
                    f"{quote(name)}: {error.strerror}"
                ) from error
            if not count:
                raise DamagedSource(
                    f"{quote(self.path)} ended at byte {offset}, in tensor {quote(name)} with "
                    f"{left} bytes missing: the file was truncated while it was read"
                )
            yield buffer[:count]
            offset += count
            left -= count

    def version(self) -> FileVersion:
        """See :class:`Shard`."""
        return FileVersion.of_status(os.fstat(self._descriptor))

    def header(self) -> bytes:
        """See :class:`Shard`."""
        size = self._header.data_start
        try:
            data = read_exactly(self._descriptor, size, 0)
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
