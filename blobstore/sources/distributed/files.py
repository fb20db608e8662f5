"""The files that have the pieces, opened whenever they are read."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from blobstore.core.escape import quote
from blobstore.core.files import FileVersion, open_regular
from blobstore.errors import DamagedSource
from blobstore.sources.file_shard import open_part

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from blobstore.core.files import Opener


class DataFile:
    """A file with pieces of tensors.

    It is not kept open for long, because a checkpoint of many processes can have more files than a process may
    open. Whenever it is opened, it must be the file that it was at first.
    """

    def __init__(self, path: Path, opener: Opener = open_regular) -> None:
        """Look at the file.

        Raises:
            DamagedSource: it is missing.
            SourceError: it cannot be opened, or is not a regular file.
        """
        self.path = path
        self._opener = opener
        descriptor = open_part(self.path, "data file", opener)[0]
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
            descriptor = own = open_part(self.path, "data file", self._opener)[0]
        try:
            if self.version != FileVersion.of_status(os.fstat(descriptor)):
                raise DamagedSource(f"{quote(self.path)} changed while it was read")
            yield descriptor
        except OSError as error:
            raise DamagedSource(f"cannot read {quote(self.path)}: {error.strerror}") from error
        finally:
            if own is not None:
                os.close(own)
