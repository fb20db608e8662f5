"""A reader of archives: the table first, then manifests, then single members.

Opening an archive checks its table, :meth:`ArchiveReader.models` the manifests, and reading a member its
digest. Reading a member costs that member and its bases; no other member is touched. The stored bytes of
a cold member are read from the file and hashed before a codec sees them. So a failing disk is an error
like any other, and no codec decodes altered bytes.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import defaultdict
from typing import TYPE_CHECKING

from blobstore.archives.table import ArchivedModel, ArchiveTable, Kind
from blobstore.compression.base import BaseBlob
from blobstore.compression.decoder import ColdBlobDecoder
from blobstore.core.arguments import local_path
from blobstore.core.digest import Digester
from blobstore.core.escape import quote
from blobstore.core.files import open_regular
from blobstore.core.mmap import mapped
from blobstore.errors import (
    ArchiveDamaged,
    BlobDamaged,
    BlobMissing,
    BlobstoreError,
    ColdDamaged,
    InvalidManifest,
    InvalidReference,
    ModelNotFound,
    NotFound,
)
from blobstore.manifests.layers_digest import MAX_CONFIG_SIZE, check_layers
from blobstore.manifests.model import Manifest
from blobstore.manifests.reference import Reference, similar_names
from blobstore.store.name_patterns import named_models

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator

    from blobstore.core.digest import Digest
    from blobstore.manifests.reference import Names

_READ_SIZE = 1 << 20
_INTERNAL = frozenset(("bases_of", "forget_decoded", "keep_decoded", "signatures"))
"""Names that other modules use and docs/reference/python.md does not describe, so :func:`dir` omits them."""


class ArchiveReader:
    """An open archive. Threads may share it.

    Members are known by their numbers, from 0, in the order of the table. Blobs and manifests can also be
    read by digest and name, as from any :class:`~blobstore.store.protocols.ModelReader`.
    """

    def __init__(self, descriptor: int, size: int, path: str) -> None:
        """Read and check the table.

        Raises:
            ArchiveDamaged: the archive is truncated or altered, or breaks the format.
            OSError: it cannot be mapped.
        """
        self._descriptor = descriptor
        self._path = path
        self._data = mapped(descriptor, size)
        table = ArchiveTable.parse(self._data)
        self.members = table.members
        """The manifests, blobs and signatures."""
        self.offsets = table.offsets()
        """Where in the archive each member begins, and where the last one ends."""
        self.blobs: dict[Digest, int] = {
            member.digest: number
            for number, member in enumerate(self.members)
            if member.kind not in {Kind.MANIFEST, Kind.SIGNATURE}
        }
        """The number of each blob, by its digest."""
        self._signatures: dict[Digest, list[int]] = defaultdict(list)
        for number, member in enumerate(self.members):
            if member.kind == Kind.SIGNATURE and member.base is not None:
                self._signatures[self.members[member.base].digest].append(number)
        self._manifests: dict[Reference, int] = {}
        for name, number in table.names:
            reference = None
            with contextlib.suppress(InvalidReference):
                reference = Reference.parse(name)
            if reference is None or reference.full != name:
                raise ArchiveDamaged(f"{quote(name)} is not the full name of a model")
            self._manifests[reference] = number
        if len({reference.full.casefold() for reference in self._manifests}) < len(table.names):
            raise ArchiveDamaged("two names differ in case only")
        self._lock = threading.RLock()
        self._models: dict[int, tuple[bytes, Manifest]] = {}
        self._bases: dict[int, BaseBlob] = {}
        self._checked: set[int] = set()
        """Members whose stored digest was right."""
        self._checking: dict[int, threading.Lock] = {}

    def __dir__(self) -> Iterable[str]:
        return [name for name in super().__dir__() if name not in _INTERNAL]

    def references(self) -> tuple[Reference, ...]:
        """Return the names of the models."""
        return tuple(self._manifests)

    def models(self, references: Names = ()) -> list[ArchivedModel]:
        """Return the models of these ``references``, by default all.

        If these are all models of the archive, it must hold no blob that none of them needs.

        Raises:
            ModelNotFound: the archive has no such name.
            ArchiveDamaged: a manifest was altered, or one of its blobs is missing.
        """
        names = named_models(self, references) or self._manifests
        found = [self.resolve(name) for name in names]
        if len({model.reference for model in found}) == len(self._manifests):
            needed = set(self.needed(found))
            needed |= {base for number in needed for base in self.bases_of(number)}
            for number in self.blobs.values():
                if number not in needed:
                    raise ArchiveDamaged(f"no model needs {self._label(number)}")
        return found

    def read_manifest(self, reference: str | Reference) -> bytes:
        """Return the bytes of the manifest of a ``reference``, as they were packed.

        Raises:
            InvalidReference: it is malformed.
            ModelNotFound: the archive has no such name.
            ArchiveDamaged: the manifest was altered.
        """
        return self.read(self._manifest_of(Reference.of(reference)))

    def resolve(self, reference: Reference) -> ArchivedModel:
        """Return the model of a ``reference``: its name, the bytes of its manifest, and the manifest parsed.

        Raises as :meth:`models`.
        """
        number = self._manifest_of(reference)
        # Thousands of names may share one manifest, which is kept once.
        if number not in self._models:
            try:
                data = self.read(number)
                manifest = Manifest.from_bytes(data)
                for blob in (manifest.config, *manifest.layers):
                    member = self.blobs.get(blob.digest)
                    size = None if member is None else self.members[member].size
                    if size != blob.size:
                        what = f"layer {quote(blob.name)}" if blob.name else quote(blob.media_type)
                        found = f"has {size} bytes, expected {blob.size}"
                        if size is None:
                            found = "is not in the archive"
                        raise ArchiveDamaged(  # noqa: TRY301 - the handler names the model
                            f"{what}: blob {blob.digest} {found}"
                        )
                if manifest.config.size <= MAX_CONFIG_SIZE:
                    check_layers(data, self.read(self.blobs[manifest.config.digest]))
            except (InvalidManifest, ArchiveDamaged) as error:
                raise ArchiveDamaged(f"model {quote(reference)}: {error}") from None
            self._models[number] = data, manifest
        return ArchivedModel(reference, *self._models[number])

    def needed(self, models: Iterable[ArchivedModel]) -> list[int]:
        """Return the numbers of the blobs that the manifests of ``models`` list, in archive order.

        Raises:
            KeyError: a model is not from this archive.
        """
        return sorted({self.blobs[blob.digest] for item in models for blob in item.manifest.blobs})

    def bases_of(self, number: int) -> Iterator[int]:
        """Yield the numbers of a member's base, of the base of that, and so on."""
        base = self.members[number].base
        while base is not None:
            yield base
            base = self.members[base].base

    def signatures(self, manifest: Digest) -> Iterator[bytes]:
        """Yield the signatures that were packed with a manifest. None of them is verified.

        Raises:
            ArchiveDamaged: one was altered.
        """
        yield from map(self.read, self._signatures.get(manifest, ()))

    def exists(self, digest: Digest, size: int) -> bool:
        """Return whether the blob of a ``digest``, of ``size`` bytes, is in the archive.

        Raises:
            BlobDamaged: it is, with another size.
        """
        number = self.blobs.get(digest)
        if number is None:
            return False
        found = self.members[number].size
        if found != size:
            raise BlobDamaged(
                f"blob {digest} has {found} bytes in the archive {quote(self._path)}, expected {size}"
            )
        return True

    def read_pieces(self, digest: Digest, size: int) -> Generator[memoryview, None, None]:
        """Yield the bytes of the blob of a ``digest``, of ``size`` bytes, as :meth:`pieces` does.

        Raises:
            BlobMissing: it is not in the archive.
            BlobDamaged: it has another size.
            ArchiveDamaged, BlobstoreError: as :meth:`pieces`.
        """
        yield from self.pieces(self._blob_of(digest, size))

    def read_into(self, digest: Digest, size: int, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with bytes of a blob, from byte ``offset`` on; only its stored digest is checked.

        ``digest`` and ``size`` are as for :meth:`read_pieces`.

        Raises as :meth:`read_pieces`; BlobDamaged also if the blob ends before the buffer does.
        """
        number = self._blob_of(digest, size)
        if offset + len(buffer) > size:
            raise BlobDamaged(
                f"blob {digest} has {size} bytes: {len(buffer)} from byte {offset} on are too many"
            )
        self._check_stored(number)
        with self._naming(number):
            if self.members[number].base is None:
                self._open_base(number).read_into(buffer, offset)
            else:
                self._open_cold(number).read_into(buffer, offset)

    def pieces(
        self, number: int, report: Callable[[], object] = lambda: None
    ) -> Iterator[memoryview]:
        """Yield the bytes of a member; each piece is valid until the next one is asked for.

        The digest is checked when the last piece has been used: callers must run to the end.

        Args:
            number: the member; that of a blob is ``archive.blobs[digest]``.
            report: called between reads of the file; may raise to stop.

        Raises:
            ArchiveDamaged: the member or one of its bases is altered, or cannot be decoded.
            BlobstoreError: the file cannot be read.
        """
        member = self.members[number]
        if member.kind not in {Kind.COLD, Kind.DELTA}:
            yield from self._read_stored(number, report)
            return
        self._check_stored(number, report)
        with self._naming(number):
            yield from self._open_cold(number).pieces()

    def read(self, number: int) -> bytes:
        """Return the bytes of a small member by its ``number``. Raises as :meth:`pieces`."""
        return b"".join(map(bytes, self.pieces(number)))

    def _manifest_of(self, reference: Reference) -> int:
        """Return the number of a model's manifest."""
        number = self._manifests.get(reference)
        if number is None:
            raise ModelNotFound(
                f"no model {quote(reference)} in the archive {quote(self._path)}",
                advice=similar_names(reference, self._manifests),
            )
        return number

    def _blob_of(self, digest: Digest, size: int) -> int:
        """Return the number of a blob."""
        if not self.exists(digest, size):
            raise BlobMissing(f"blob {digest} is not in the archive {quote(self._path)}")
        return self.blobs[digest]

    def _read_stored(self, number: int, report: Callable[[], object]) -> Iterator[memoryview]:
        """Yield the stored bytes of a member in a buffer, and check their digest at the end."""
        digester = Digester()
        at, end = self.offsets[number : number + 2]
        # A copy, so that callers use the bytes that are hashed even if the file is written to.
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
            yield buffer[:count]
            at += count
            report()
        found, expected = digester.digest(), self.members[number].stored_digest
        if found != expected:
            raise ArchiveDamaged(
                f"{self._label(number)} is altered: its stored bytes have digest {found}, expected "
                f"{expected}"
            )
        self._checked.add(number)

    def _check_stored(self, number: int, report: Callable[[], object] = lambda: None) -> None:
        """Hash the stored bytes of a member and of its bases, unless that was done."""
        for base in self.bases_of(number):
            self._check_one(base, report)
        self._check_one(number, report)

    def _check_one(self, number: int, report: Callable[[], object]) -> None:
        with self._lock:
            checking = self._checking.setdefault(number, threading.Lock())
        with checking:
            if number not in self._checked:
                for _ in self._read_stored(number, report):
                    pass

    def _open_cold(self, number: int) -> ColdBlobDecoder:
        """Open a cold member whose stored bytes, and those of its bases, were checked."""
        member = self.members[number]
        cold = ColdBlobDecoder(self._stored(number))
        table = cold.table
        if (table.digest, table.size) != (member.digest, member.size):
            raise ColdDamaged(f"it holds {table.digest} of {table.size} bytes")
        if member.base is not None:
            cold.give_base(self._open_base(member.base))
        elif table.base is not None:
            raise ColdDamaged(f"it is a delta against {table.base.digest}, but no base is stated")
        return cold

    def _open_base(self, number: int) -> BaseBlob:
        """Open a blob once for all its deltas."""
        with self._lock:
            if number not in self._bases:
                member = self.members[number]
                with self._naming(number):
                    self._bases[number] = (
                        BaseBlob.hot(self._stored(number), member.digest)
                        if member.kind == Kind.RAW
                        else self._open_cold(number).as_base()
                    )
            return self._bases[number]

    def keep_decoded(self, number: int, data: memoryview) -> None:
        """Read a member from memory where it is a base; ``data`` has its bytes, which were checked."""
        decoded = BaseBlob.hot(data, self.members[number].digest)
        # The table remains, because a delta against a delta is checked against it.
        base = self._open_base(number)._replace(read_into=decoded.read_into, data=data)
        with self._lock:
            self._bases[number] = base

    def forget_decoded(self, numbers: Iterable[int]) -> None:
        """Decode these members again where they are bases."""
        with self._lock:
            for number in numbers:
                self._bases.pop(number, None)

    def _stored(self, number: int) -> memoryview:
        return self._data[slice(*self.offsets[number : number + 2])]

    def _label(self, number: int) -> str:
        member = self.members[number]
        names = {Kind.MANIFEST: "manifest", Kind.SIGNATURE: "signature"}
        return f"{names.get(member.kind, 'blob')} {member.digest} (member {number})"

    @contextlib.contextmanager
    def _naming(self, number: int) -> Iterator[None]:
        """Name the member in errors of the codec."""
        try:
            yield
        except ColdDamaged as error:
            raise ArchiveDamaged(f"{self._label(number)}: {error}") from None


@contextlib.contextmanager
def open_archive(path: str | os.PathLike[str]) -> Iterator[ArchiveReader]:
    """Open an archive. Errors in the block name its path.

    Returns:
        a context with the archive, which is closed at its end.

    Raises:
        NotFound: there is no such file.
        BlobstoreError: it cannot be read.
        ArchiveDamaged: it is truncated or altered, or breaks the format; also in the block.
    """
    text = str(local_path(path, "source"))
    try:
        descriptor, size = open_regular(text)
    except FileNotFoundError:
        raise NotFound(f"there is no archive {quote(text)}") from None
    except OSError as error:
        raise BlobstoreError(f"cannot read {quote(text)}: {error.strerror}") from error
    try:
        yield ArchiveReader(descriptor, size, text)
    except ArchiveDamaged as error:
        advice = "copy it again from where it was packed"
        if not text.endswith(".bsar"):
            advice = "archives end in .bsar; 'blobstore create' imports other files"
        raise ArchiveDamaged(f"archive {quote(text)}: {error}; {advice}") from None
    finally:
        os.close(descriptor)


def label_blobs(models: Iterable[ArchivedModel], archive: ArchiveReader) -> dict[int, str]:
    """Return the model and layer of each blob that the models need, for messages, and of each base."""
    labels: dict[int, str] = {}
    for model in models:
        for blob in (model.manifest.config, *model.manifest.layers):
            labels.setdefault(archive.blobs[blob.digest], model.label(blob))
    for number in list(labels):
        for base in archive.bases_of(number):
            labels.setdefault(base, f"the base of {labels[number]}")
    return labels
