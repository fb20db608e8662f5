"""The files that have the pieces, opened whenever they are read."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from blobstore.core.escape import quote
from blobstore.core.files import FileVersion, open_regular
from blobstore.errors import BlobstoreError, DamagedSource, SourceError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class DataFile:
    """A file with pieces of tensors.

    It is not kept open for long, because a checkpoint of many processes can have more files than a process may
    open. Whenever it is opened, it must be the file that it was at first.
    """

    def __init__(self, path: Path) -> None:
        """Look at the file.

        Raises:
            DamagedSource: it is missing.
            SourceError: it cannot be opened, or is not a regular file.
        """
        self.path = path
        descriptor = self._open()
        try:
            self.version = FileVersion.of_status(os.fstat(descriptor))
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def opened(self, descriptor: int | None = None) -> Iterator[int]:
        """Open the file for a moment, or take ``descriptor``, which stays open; check that it is unchanged.

        Raises:
            DamagedSource: it is missing or has changed, or cannot be read.
            SourceError: it cannot be opened, or is not a regular file.
        """
        own = None
        if descriptor is None:
            descriptor = own = self._open()
        try:
            if self.version != FileVersion.of_status(os.fstat(descriptor)):
                raise DamagedSource(f"{quote(self.path)} changed while it was read")
            yield descriptor
        except OSError as error:
            raise DamagedSource(f"cannot read {quote(self.path)}: {error.strerror}") from error
        finally:
            if own is not None:
                os.close(own)

    def _open(self) -> int:
        try:
            return open_regular(self.path)[0]
        except FileNotFoundError:
            raise DamagedSource(f"data file {quote(self.path)} is missing") from None
        except OSError as error:
            raise SourceError(f"cannot open {quote(self.path)}: {error.strerror}") from error
        except BlobstoreError as error:
            raise SourceError(str(error)) from None
