"""An archive of models that is open: its names and manifests, held against its members.

The table is checked first, then the manifests that are wanted; no blob is looked at before these agree.
A member is read from the file and hashed as it is stored, and only then decoded: so a disk that fails is
an error like any other, and no codec sees altered bytes.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING, NamedTuple

from blobstore.core.digest import Digester
from blobstore.core.escape import quote
from blobstore.core.files import open_regular
from blobstore.core.mmap import mapped
from blobstore.errors import (
    ArchiveDamaged,
    BlobstoreError,
    InvalidManifest,
    InvalidReference,
    ModelNotFound,
    NameConflict,
    NotFound,
)
from blobstore.manifests.check import MAX_CONFIG_SIZE, check_layers
from blobstore.manifests.model import Manifest
from blobstore.manifests.reference import Reference
from blobstore.operations.archive.bundle import Bundle
from blobstore.operations.archive.format import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

_READ_SIZE = 1 << 20


class ArchivedModel(NamedTuple):
    """A model in an archive, whose manifest has been checked."""

    reference: Reference
    data: bytes
    """Of the manifest."""
    manifest: Manifest


class ArchiveReader:
    """An open archive; threads may share it."""

    def __init__(self, descriptor: int, size: int, path: str) -> None:
        """Read and check the table.

        Raises:
            ArchiveDamaged: the archive is cut short, altered, or breaks the format.
            OSError: it cannot be mapped.
        """
        self._descriptor = descriptor
        self._path = path
        self.bundle = Bundle(mapped(descriptor, size))
        self._manifests = {_parsed(name): number for name, number in self.bundle.names}
        self.references = tuple(self._manifests)
        """The names of the models."""
        self._models: dict[int, tuple[bytes, Manifest]] = {}
        folded = {reference.full.casefold() for reference in self.references}
        if len(folded) != len(self.references):
            raise ArchiveDamaged("two names differ in case only")
        self._checking = threading.Lock()
        self._checks: dict[int, threading.Lock] = {}
        self._checked: set[int] = set()

    def models(self, references: Sequence[Reference] = ()) -> list[ArchivedModel]:
        """Return some models, or all.

        Raises:
            ModelNotFound: the archive has no such name.
            ArchiveDamaged: a manifest is not what was packed, or a blob of it is not there.
        """
        for reference in references:
            if reference not in self._manifests:
                raise ModelNotFound(
                    f"no model {quote(reference)} in the archive {quote(self._path)}"
                )
        found = [self._model(reference) for reference in references or self.references]
        if len({model.reference for model in found}) == len(self.references):
            self._check_needed(found)
        return found

    def needed(self, models: Iterable[ArchivedModel]) -> list[int]:
        """Return the numbers of the blobs that the models' manifests list, as they lie."""
        blobs = self.bundle.blobs
        return sorted({blobs[blob.digest] for model in models for blob in model.manifest.blobs})

    def pieces(
        self, number: int, going: Callable[[], object] = lambda: None
    ) -> Iterator[memoryview]:
        """Yield the bytes of a member; see :meth:`Bundle.pieces`. What is stored is checked first.

        ``going`` is called now and then meanwhile, and may raise.

        Raises:
            ArchiveDamaged: it is altered, or what it is coded by.
            BlobstoreError: the file cannot be read.
        """
        base = self.bundle.members[number].base
        if base is not None:
            self._check_once(base, going)
        self._check_once(number, going)
        yield from self.bundle.pieces(number)

    def read(self, number: int) -> bytes:
        """Return the bytes of a small member. Raises as :meth:`pieces`."""
        return b"".join(map(bytes, self.pieces(number)))

    def _model(self, reference: Reference) -> ArchivedModel:
        # Thousands of names may have one manifest, which is kept once.
        number = self._manifests[reference]
        if number not in self._models:
            try:
                self._models[number] = self._manifest(self.read(number))
            except (InvalidManifest, ArchiveDamaged) as error:
                raise ArchiveDamaged(f"model {quote(reference)}: {error}") from None
        return ArchivedModel(reference, *self._models[number])

    def _manifest(self, data: bytes) -> tuple[bytes, Manifest]:
        manifest = Manifest.from_bytes(data)
        self._check_blobs(manifest)
        self._check_config(data, manifest)
        return data, manifest

    def _check_blobs(self, manifest: Manifest) -> None:
        """Check that all blobs of a manifest are there."""
        for blob in (manifest.config, *manifest.layers):
            number = self.bundle.blobs.get(blob.digest)
            what = f"layer {quote(blob.name)}" if blob.name else f"{quote(blob.media_type)}"
            if number is None:
                raise ArchiveDamaged(f"{what}: blob {blob.digest} is not in the archive")
            size = self.bundle.members[number].size
            if size != blob.size:
                raise ArchiveDamaged(
                    f"{what}: blob {blob.digest} has {size} bytes, expected {blob.size}"
                )

    def _check_config(self, data: bytes, manifest: Manifest) -> None:
        """Check by its config that a manifest is the one that was written."""
        if manifest.config.size <= MAX_CONFIG_SIZE:
            check_layers(data, self.read(self.bundle.blobs[manifest.config.digest]))

    def _check_needed(self, models: Iterable[ArchivedModel]) -> None:
        """Check that there is no blob that no model needs."""
        needed = set(self.needed(models))
        members = self.bundle.members
        bases = {members[number].base for number in needed}
        for number, member in enumerate(members):
            if member.kind != Kind.MANIFEST and number not in needed and number not in bases:
                raise ArchiveDamaged(f"no model needs {self.bundle.named(number)}")

    def _check_once(self, number: int, going: Callable[[], object]) -> None:
        """Hash the stored bytes of a member, unless that was done."""
        with self._checking:
            lock = self._checks.setdefault(number, threading.Lock())
        with lock:
            if number not in self._checked:
                self._check(number, going)
                self._checked.add(number)

    def _check(self, number: int, going: Callable[[], object]) -> None:
        digester = Digester()
        at, end = self.bundle.place(number)
        buffer = memoryview(bytearray(min(_READ_SIZE, end - at)))
        while at < end:
            try:
                count = os.preadv(self._descriptor, [buffer[: end - at]], at)
            except OSError as error:
                raise BlobstoreError(
                    f"cannot read {quote(self._path)} at byte {at}: {error.strerror}"
                ) from error
            if not count:
                raise ArchiveDamaged(f"it was cut short at byte {at} while it was read")
            digester.update(buffer[:count])
            at += count
            going()
        self.bundle.judge_stored(number, digester.digest())


@contextlib.contextmanager
def open_archive(path: str | os.PathLike[str]) -> Iterator[ArchiveReader]:
    """Open an archive; what is wrong with it is said with its path.

    Raises:
        NotFound: there is no such file.
        BlobstoreError: it cannot be read.
        ArchiveDamaged: it is cut short, altered, or breaks the format; also in the block.
    """
    text = os.fspath(path)
    with _explained(text):
        try:
            descriptor, size = open_regular(text)
        except FileNotFoundError:
            raise NotFound(f"there is no archive {quote(text)}") from None
        except OSError as error:
            raise BlobstoreError(f"cannot read {quote(text)}: {error.strerror}") from error
        try:
            yield ArchiveReader(descriptor, size, text)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def _explained(path: str) -> Iterator[None]:
    try:
        yield
    except ArchiveDamaged as error:
        raise ArchiveDamaged(
            f"archive {quote(path)}: {error}; copy it again from where it was packed"
        ) from None


def check_case(references: Iterable[Reference]) -> None:
    """Check that no names, nor what they begin with, differ in case only: no store takes them all.

    Raises:
        NameConflict: two do.
    """
    spellings: dict[tuple[str, ...], tuple[str, ...]] = {}
    for reference in references:
        for count in range(1, len(reference.parts) + 1):
            parts = reference.parts[:count]
            folded = tuple(part.casefold() for part in parts)
            first = spellings.setdefault(folded, parts)
            if first != parts:
                raise NameConflict(
                    f"{quote(reference)} and another of the names begin with "
                    f"{quote('/'.join(parts))} and {quote('/'.join(first))}, which differ in case "
                    "only: no store has both"
                )


def _parsed(name: str) -> Reference:
    """Return the reference that a name in an archive spells, in full."""
    with contextlib.suppress(InvalidReference):
        reference = Reference.parse(name)
        if reference.full == name:
            return reference
    raise ArchiveDamaged(f"{quote(name)} is not the full name of a model")


def layers_by_blob(models: Iterable[ArchivedModel], bundle: Bundle) -> Callable[[int], str]:
    """Return what gives, for the number of a blob, the model and layer that it is, for messages."""
    names: dict[int, str] = {}
    for model in models:
        for blob in (model.manifest.config, *model.manifest.layers):
            what = f"layer {quote(blob.name)}" if blob.name else quote(blob.media_type)
            names.setdefault(bundle.blobs[blob.digest], f"{model.reference}: {what}")
    return lambda number: names.get(number, "a blob that others are coded by")
