"""The header of a GGUF file on disk, read without the data."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from blobstore.core.escape import quote
from blobstore.core.files import open_regular, read_exactly
from blobstore.errors import BlobstoreError, SourceError, SourceNotFound
from blobstore.gguf.header import MAGIC, GgufHeader, InvalidGguf, read_header

if TYPE_CHECKING:
    from pathlib import Path

    from blobstore.core.files import Opener


def is_gguf(path: Path, opener: Opener = open_regular) -> bool:
    """Return whether a regular file begins as GGUF files do, whatever its name is."""
    try:
        descriptor, _ = opener(path)
    except (OSError, BlobstoreError):
        return False
    try:
        return os.pread(descriptor, len(MAGIC), 0) == MAGIC
    finally:
        os.close(descriptor)


def read_file_header(path: Path, opener: Opener = open_regular) -> GgufHeader:
    """Read and check the header of a file, which ``opener`` opens.

    Raises:
        InvalidGguf: the file breaks the format, or ends too early.
        SourceNotFound: there is no such file.
        SourceError: it cannot be read.
    """
    try:
        descriptor, size = opener(path)
        try:
            return read_header(
                lambda begin, end: read_exactly(descriptor, end - begin, begin), size
            )
        finally:
            os.close(descriptor)
    except InvalidGguf as error:
        raise error.at(quote(path)) from None
    except FileNotFoundError:
        raise SourceNotFound(f"{quote(path)} does not exist") from None
    except OSError as error:
        raise SourceError(f"cannot read {quote(path)}: {error.strerror}") from error
    except BlobstoreError as error:
        raise SourceError(str(error)) from None
