"""A GGUF file that is in no store, as a store of one model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blobstore.core.digest import Digest
from blobstore.core.escape import quote
from blobstore.errors import InvalidReference, SourceNotFound, UsageError
from blobstore.manifests import media_types
from blobstore.manifests.descriptor import Descriptor
from blobstore.manifests.model import Manifest
from blobstore.store.blobs import BlobReader
from blobstore.store.layout import Layout
from blobstore.store.verified_cache import VerifiedBlobs

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn, TypeGuard

    from blobstore.store.notes import NoteKind


class GgufFile(BlobReader):
    """A file as a store that has only its bytes: a :class:`~blobstore.store.protocols.BlobAccess`.

    They have no digest, as it would take a long time to compute it: that of the path stands for them.
    """

    def __init__(self, path: Path) -> None:
        """Take an absolute path without links."""
        super().__init__(_FileLayout(path))

    def __reduce__(self) -> Any:
        return GgufFile, (self.root,)

    def manifest(self) -> Manifest:
        """Return the manifest of the model that the file is.

        Raises:
            SourceNotFound: there is no such file.
        """
        path = self.root
        try:
            size = path.stat().st_size
        except OSError as error:
            raise SourceNotFound(f"{quote(path)} cannot be opened: {error.strerror}") from None
        digest = Digest.of(os.fsencode(path))
        layer = Descriptor(media_types.MODEL, digest, size)
        return Manifest(config=layer._replace(media_type=media_types.CONFIG), layers=(layer,))

    def check_manifest(self, data: bytes, manifest: Manifest) -> bool:
        """Return False: no config says what the manifest should be."""
        del data, manifest
        return False

    def verified_blobs(self) -> VerifiedBlobs:
        """Return a cache that is empty and stays so."""
        return VerifiedBlobs(self)

    def read_note(self, kind: NoteKind, key: Digest) -> None:
        """Return None: there is no place for notes."""

    def write_note(self, kind: NoteKind, key: Digest, data: bytes) -> None:
        """Do nothing, as there is no place for notes."""

    def check_digest(self, *_: object) -> NoReturn:
        """Raise UsageError, as the file has no digest."""
        raise UsageError(
            f"{quote(self.root)} is a file, which has no digest to compare; open it with "
            "verify='header', or create a model from it"
        )


class _FileLayout(Layout):
    """The paths of a store below a file, where nothing can be."""

    def blob(self, digest: Digest) -> str:
        del digest
        return str(self.root)


def is_gguf_path(reference: object, has_model: Callable[[str], bool]) -> TypeGuard[str]:
    """Return whether a reference is the path of a GGUF file, and not the name of a model.

    ``has_model`` says whether a name is that of a model, or raises InvalidReference.
    """
    if not isinstance(reference, str) or not reference.endswith(".gguf"):
        return False
    try:
        return not has_model(reference) and Path(reference).is_file()
    except InvalidReference:
        return True
