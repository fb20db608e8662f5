"""Every exception that blobstore raises on purpose, under one root.

A message is one line, complete in itself: what is wrong, where, and what to do. Text that comes from a file
passes through :func:`blobstore.core.escape.quote` before it enters a message. The classes carry the exit
codes of the command line, so that scripts and library users can tell the same cases apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self


class BlobstoreError(Exception):
    """The operation failed."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str = "", *, advice: str | Callable[[], str] = "") -> None:
        super().__init__(message)
        self.message = message
        """What is wrong and where, without the advice."""
        self._advice = advice

    @property
    def advice(self) -> str:
        """What the user can do, or nothing; the text of the error ends with it."""
        return self._advice if isinstance(self._advice, str) else self._advice()

    def __str__(self) -> str:
        advice = self.advice
        return f"{self.message}; {advice}" if advice else self.message

    def copy(self) -> Self:
        """Return the same error, to be raised once more or changed.

        The module ``copy`` asks what libraries register for exceptions. The copies of tblib, which Dask imports,
        share their attributes.
        """
        error = type(self).__new__(type(self), *self.args)
        error.__dict__.update(self.__dict__)
        return error

    def at(self, where: str) -> Self:
        """Return the same error with ``where`` it was found, such as a file, before its message."""
        error = self.copy()
        error.message = f"{where}: {self.message}"
        error.args = (error.message,)
        return error


class UsageError(BlobstoreError, ValueError):
    """An argument is not valid: a malformed name, pattern, option or number."""

    exit_code = 2


class InvalidDigest(UsageError):
    """A text is not ``sha256:`` followed by 64 lower-case hexadecimal digits."""


class InvalidReference(UsageError):
    """A text does not match ``[host/][namespace/]model[:tag]``, or a part of it is too long."""


class InvalidCall(UsageError, TypeError):
    """A function was called without an argument that it needs, or with one that it does not have."""


class NotFound(BlobstoreError):
    """The requested object does not exist."""

    exit_code = 3


class ModelNotFound(NotFound):
    """The store has no manifest of that name."""


class SourceNotFound(NotFound):
    """The folder, file or Hub repository to import does not exist."""


class TensorNotFound(NotFound, KeyError):
    """The model has no tensor of that name."""


class FileNotFound(NotFound, KeyError):
    """The model has no small file of that name."""


class SourceError(BlobstoreError):
    """A source cannot be imported, although it may not be damaged."""


class UnsupportedSource(SourceError):
    """The source is of a kind that blobstore does not read."""


class NameConflict(BlobstoreError):
    """Another name in the store differs from the requested one only in case."""


class NameTaken(BlobstoreError):
    """The requested name belongs to another model."""


class ImplausibleGarbage(BlobstoreError):
    """A garbage collection would remove almost every blob, as if manifests were missing."""


class UnsupportedDType(BlobstoreError, TypeError):
    """The framework has no type for a tensor's elements, or cannot represent its shape."""


class MissingLibrary(BlobstoreError, ImportError):
    """A library that the framework or integration needs is not installed."""


class RemoteError(BlobstoreError):
    """A registry or object storage cannot be reached, or does not behave as its protocol says."""

    def __init__(
        self,
        message: str = "",
        *,
        advice: str | Callable[[], str] = "",
        status: int = 0,
        code: str = "",
        digests: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(message, advice=advice)
        self.status = status
        """The status of the HTTP response; 0 if there was none, or it is not known."""
        self.code = code
        """The code of a registry or S3, such as ``MANIFEST_BLOB_UNKNOWN``; empty if it sent no known one."""
        self.digests = digests
        """Digests that the registry's explanation names."""


class RemoteRefused(RemoteError):
    """A registry or object storage denies access, or refuses what was sent to it."""


class Conflict(RemoteError):
    """Another process has written an object since it was read."""


class StoreError(BlobstoreError):
    """The store's folder cannot be used: it is not a folder, read-only, full, or failing."""


class InvalidPolicy(BlobstoreError):
    """The policy file cannot be read or breaks the format, so no model is trusted."""


class NotTrusted(BlobstoreError):
    """The policy refuses a model: it is not signed by a required key, or is not a pinned one."""


class TooManyMaps(StoreError):
    """The system does not let this process map any more files."""


class StoreBusy(StoreError):
    """Waiting for the store's lock, which other processes hold, timed out."""


class Damaged(BlobstoreError):
    """Bytes do not match their name, header or listing."""

    exit_code = 4


class SafetensorError(BlobstoreError):
    """A safetensors file, or an argument of :mod:`blobstore.safetensors`, is not valid."""


class InvalidHeader(Damaged, SafetensorError):
    """A safetensors header breaks the format."""

    def __init__(
        self, message: str = "", *, rule: str = "", advice: str | Callable[[], str] = ""
    ) -> None:
        super().__init__(message, advice=advice)
        self.rule = rule
        """The broken rule, in the words of the reference library."""


class InvalidManifest(Damaged):
    """A manifest breaks the format."""


class DamagedSource(Damaged):
    """A source is incomplete, truncated, or contradicts itself."""


class CheckpointRefused(SourceError):
    """A PyTorch checkpoint is not read: it is damaged, or of a kind that is not supported."""


class CheckpointDamaged(CheckpointRefused, DamagedSource):
    """A PyTorch checkpoint is truncated, altered, or contradicts itself."""


class CheckpointUnsupported(CheckpointRefused, UnsupportedSource):
    """A PyTorch checkpoint is not supported: it needs its own code, for example. It may be intact."""


class BlobMissing(Damaged):
    """A blob that a manifest references is not in the store."""


class BlobDamaged(Damaged):
    """A blob does not have the size, digest or content that its manifest states."""


class ColdDamaged(Damaged):
    """A cold blob is truncated, altered, hostile, or was given the wrong base."""


class InvalidSignature(Damaged):
    """A signature is malformed, does not match its key, or signs something else."""


class ArchiveDamaged(Damaged):
    """An archive of models is truncated, altered or hostile, or does not match its table."""
