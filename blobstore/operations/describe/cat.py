"""The operation ``cat``: the bytes of a small file of a model, hashed while they are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from blobstore.core.digest import Digester
from blobstore.core.escape import join_some, quote
from blobstore.errors import BlobDamaged, FileNotFound
from blobstore.models.files import ModelFiles, file_faults_located
from blobstore.store.local import LocalStore, StoreLike

if TYPE_CHECKING:
    from collections.abc import Iterator

    from blobstore.manifests.descriptor import Descriptor
    from blobstore.manifests.reference import Reference

_MAX_LISTED = 8


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A file of a model."""

    reference: Reference | str
    layer: Descriptor
    """Its name, digest and size."""
    store: LocalStore

    def pieces(self) -> Iterator[memoryview]:
        """Yield the bytes in order; a piece is valid until the next one.

        Raises:
            BlobMissing: the blob is not in the store.
            BlobDamaged: it has another size, or, after its last byte, another digest.
        """
        digester = Digester()
        with file_faults_located(self.reference, self.layer.name):
            for piece in self.store.read_pieces(self.layer.digest, self.layer.size):
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
) -> ModelFile:
    """Return a file of a model, other than its weights.

    Args:
        reference: the model's name.
        name: the name that the file had in the source.
        store: the store or its folder; by default ``$BLOBSTORE_HOME`` or ``~/.blobstore``.

    Raises:
        ModelNotFound: the store has no such model.
        FileNotFound: the model has no such file.
        InvalidManifest: the manifest is damaged.
    """
    store = LocalStore.of(store)
    files = ModelFiles.of(reference, store)
    layer = files.files.get(name)
    if layer is None:
        listed = join_some([quote(known) for known in files.files], _MAX_LISTED) or "none"
        raise FileNotFound(
            f"model {files.reference} has no file {quote(name)}; its files are {listed}"
        )
    return ModelFile(files.reference, layer, store)


def read_file(
    reference: str | Reference,
    name: str,
    *,
    store: StoreLike = None,
) -> bytes:
    """Return the bytes of a file of a model, other than its weights. Args as :func:`open_file`.

    Raises:
        ModelNotFound: the store has no such model.
        FileNotFound: the model has no such file.
        BlobMissing, BlobDamaged: the file is not intact.
        InvalidManifest: the manifest is damaged.
    """
    return open_file(reference, name, store=store).read()
