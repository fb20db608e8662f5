"""A store with GGUF files of other folders as models: what is read of both comes from one place."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from blobstore.core.escape import quote
from blobstore.gguf.file import is_gguf
from blobstore.gguf.header import InvalidGguf
from blobstore.manifests.reference import Reference
from blobstore.store.blobs import BlobReader
from blobstore.store.layout import Layout
from blobstore.store.local import LocalStore
from blobstore.store.outside_gguf import GgufFile, is_gguf_path

if TYPE_CHECKING:
    from blobstore.core.digest import Digest
    from blobstore.manifests.model import Manifest

ModelOrFile = Reference | str
"""The name of a model, or the path of a GGUF file."""


def name_or_file(reference: str | Reference, store: LocalStore) -> ModelOrFile:
    """Return the path of a GGUF file unchanged, and a name otherwise.

    Raises:
        InvalidReference: the text is neither.
    """
    return reference if is_gguf_path(reference, store.has_model) else Reference.of(reference)


class StoreWithFiles(LocalStore):
    """A store that has GGUF files as models too, by their paths. Only for reading."""

    def __init__(self, store: LocalStore, models: tuple[ModelOrFile, ...]) -> None:
        """Take the files among some models.

        Raises:
            SourceNotFound: a file cannot be opened.
            InvalidGguf: a file is of another format.
        """
        super().__init__(store.root)
        self._store = store
        self._files: dict[ModelOrFile, Manifest] = {}
        paths: dict[Digest, str] = {}
        for model in models:
            if isinstance(model, str):
                path = Path(model).resolve()
                self._files[model] = manifest = GgufFile(path).manifest()
                if not is_gguf(path):
                    raise InvalidGguf(
                        f"{quote(path)} is not a GGUF file: it does not begin with 'GGUF'"
                    )
                paths[manifest.config.digest] = str(path)
        BlobReader.__init__(
            self, _LayoutWithFiles(store.root, paths), store.shared
        )  # reads the files too

    def resolve(self, reference: ModelOrFile) -> Manifest:
        """Return the manifest of a model or file."""
        found = self._files.get(reference)
        return self._store.resolve(reference) if found is None else found


class _LayoutWithFiles(Layout):
    def __init__(self, root: Path, files: dict[Digest, str]) -> None:
        super().__init__(root)
        self._files = files

    def blob(self, digest: Digest) -> str:
        return self._files.get(digest) or super().blob(digest)
