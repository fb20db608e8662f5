"""Every exception that blobstore raises on purpose, under one root.

A message is one line, complete in itself: what is wrong, where, and what to do. Text that comes
from a file passes through :func:`blobstore.core.escape.quoted` before it enters a message. The classes
carry the exit code of the command line, so that scripts and library users see the same distinction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from typing import Self


class BlobstoreError(Exception):
    """The operation failed."""

    exit_code: ClassVar[int] = 1

    def at(self, where: str) -> Self:
        """Return the same error with the place it was found in front of its message."""
        return type(self)(f"{where}: {self}")


class UsageError(BlobstoreError, ValueError):
    """An argument cannot mean anything: a malformed name, pattern, option or number."""

    exit_code = 2


class InvalidDigest(UsageError):
    """A text is not ``sha256:`` followed by 64 lower-case hexadecimal digits."""


class InvalidReference(UsageError):
    """A text is not ``[host/][namespace/]model[:tag]`` within the grammar and its lengths."""


class NotFound(BlobstoreError):
    """What was named does not exist."""

    exit_code = 3


class ModelNotFound(NotFound):
    """No manifest of that name is in the store."""


class SourceNotFound(NotFound):
    """The folder, file or Hub repository to import does not exist."""


class TensorNotFound(NotFound, KeyError):
    """The model has no tensor of that name."""

    __str__ = Exception.__str__  # KeyError would show the repr of the message


class SourceError(BlobstoreError):
    """A source cannot be imported, though nothing says that it is damaged."""


class UnsupportedSource(SourceError):
    """The source is of a kind that blobstore does not read."""


class NameConflict(BlobstoreError):
    """Another name of the store differs from the wanted one in case only."""


class NameTaken(BlobstoreError):
    """Another model of the store has the wanted name."""


class UnsupportedDType(BlobstoreError, TypeError):
    """The framework has no type for a tensor's elements, or cannot hold its shape."""


class StoreError(BlobstoreError):
    """The store's folder cannot be used: not a folder, read-only, full, or failing."""


class StoreBusy(StoreError):
    """Other processes have kept the store's lock for longer than was to be waited."""


class Damaged(BlobstoreError):
    """Bytes are not what their name, header or listing promises."""

    exit_code = 4


class InvalidHeader(Damaged):
    """A safetensors header breaks the format."""


class InvalidManifest(Damaged):
    """A manifest breaks the format."""


class DamagedSource(Damaged):
    """A source is incomplete, cut short, or contradicts itself."""


class CheckpointRefused(DamagedSource):
    """A PyTorch checkpoint is damaged, asks for code to be run, or is of a kind that is not read."""


class BlobMissing(Damaged):
    """A blob that a manifest names is not in the store."""


class BlobDamaged(Damaged):
    """A blob does not have the size, digest or content that its manifest promises."""

    digest: str = ""
    """The blob's expected digest, if an import found it damaged."""


class ColdDamaged(Damaged):
    """A cold blob is cut short, altered, hostile, or was given another base than it was made from."""


class ArchiveDamaged(Damaged):
    """An archive of models is cut short, altered or hostile, or does not hold what it says."""
