"""The operation ``cat``: the bytes of a small file of a model, hashed while they are read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from blobstore.core.digest import Digester
from blobstore.core.escape import join_some, quote
from blobstore.errors import BlobDamaged, FileNotFound
from blobstore.models.small_files import ModelFiles, file_faults_located
from blobstore.remotes.addresses import is_address, reading_models
from blobstore.store.local import LocalStore, StoreLike

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from blobstore.core.digest import Digest
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.manifests.reference import Reference

_MAX_LISTED = 8


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A file of a model."""

    reference: Reference | str
    layer: Descriptor
    """Its name, digest and size."""
    read_pieces: Callable[[Digest, int], Iterable[memoryview]] = field(repr=False)
    """Yields the bytes of a blob."""

    def pieces(self) -> Iterator[memoryview]:
        """Yield the bytes in order; a piece is valid until the next one.

        Raises:
            BlobMissing: the blob is not in the store.
            BlobDamaged: it has another size, or, after its last byte, another digest.
        """
        digester = Digester()
        with file_faults_located(self.reference, self.layer.name):
            for piece in self.read_pieces(self.layer.digest, self.layer.size):
                digester.update(piece)
                yield piece
        if (found := digester.digest()) != self.layer.digest:
            raise BlobDamaged(
                f"file {quote(self.layer.name)} of model {self.reference} is damaged: it has digest "
                f"{found}, expected {self.layer.digest}"
            )

    def read(self) -> bytes:
        """Return all bytes. Raises as :meth:`pieces`."""
        data = bytearray()
        for piece in self.pieces():
            data += piece
        return bytes(data)


def open_file(
    reference: str | Reference,
    name: str,
    *,
    store: StoreLike = None,
    plain_http: bool | None = None,
) -> ModelFile:
    """Return a file of a model, other than its weights.

    Args:
        reference: the model's name, or the address of a remote one, of which the file is fetched at once.
        name: the name that the file had in the source.
        store: the store or its folder; by default ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        plain_http: whether to use HTTP without TLS for registries; by default only for this machine.

    Raises:
        ModelNotFound: the store has no such model.
        FileNotFound: the model has no such file.
        InvalidManifest: the manifest is damaged.
        RemoteError: the remote cannot be reached, refuses access or misbehaves.
    """
    store = LocalStore.to_read(store)
    if is_address(reference):
        with reading_models(store, reference, plain_http=plain_http) as (reader, (own,)):
            remote = ModelFiles(reference, reader.read_manifest(own), store)
            layer = _layer(remote, name)
            data = reader.read_blob(*layer.id)
        return ModelFile(reference, layer, lambda *_: (memoryview(data),))
    files = ModelFiles.of(reference, store)
    return ModelFile(files.reference, _layer(files, name), store.read_pieces)


def _layer(files: ModelFiles, name: str) -> Descriptor:
    layer = files.files.get(name)
    if layer is None:
        listed = join_some([quote(known) for known in files.files], _MAX_LISTED)
        raise FileNotFound(
            f"model {files.reference} has no file {quote(name)}",
            advice=f"its files are {listed}" if listed else "it has no small files",
        )
    return layer


def read_file(
    reference: str | Reference,
    name: str,
    *,
    store: StoreLike = None,
) -> bytes:
    """Return the bytes of a file of a model, other than its weights.

    Args:
        reference: the model.
        name: the name of the file, such as ``config.json``.
        store: the store or its folder; by default ``$BLOBSTORE_HOME`` or ``~/.blobstore``.

    Raises:
        ModelNotFound: the store has no such model.
        FileNotFound: the model has no such file.
        BlobMissing, BlobDamaged: the file is not intact.
        InvalidManifest: the manifest is damaged.
    """
    return open_file(reference, name, store=store).read()
