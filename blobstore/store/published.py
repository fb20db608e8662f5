"""The names that were given and not removed, each with a second hard link to its manifest: what is lost is known.

The link tells a name that was lost from one that was removed, and restores it. It is made after the manifest has its
name, and removed before. So a crash leaves a name without a link, which is only not protected, and never a link of a
name that was not given. Links are not synced. The callers hold the exclusive lock.

Ollama, on a store that both use, removes a model's blobs with its manifest. Without its config, a model is not lost.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from blobstore.core.files import FileState, make_folders, read_regular, sync_folder, write_file
from blobstore.errors import BlobstoreError
from blobstore.manifests.model import MAX_MANIFEST_SIZE, Manifest
from blobstore.store.scan import walk_files

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from blobstore.core.digest import Digest
    from blobstore.manifests.reference import Reference
    from blobstore.store.manifests import ManifestReader


class Published:
    """The second links of the manifests of a store."""

    def __init__(self, store: ManifestReader) -> None:
        self._store = store
        self._folder = store._layout.published
        self._temporary = store._layout.temporary

    def path(self, reference: Reference) -> Path:
        """Return the path of the link of a name."""
        return self._folder.joinpath(*reference.parts)

    def add(self, reference: Reference) -> None:
        """Link the manifest of a name, unless it has a link, or the store cannot be written."""
        manifest, link = self._store.manifest_path(reference), self.path(reference)
        with contextlib.suppress(OSError, BlobstoreError):
            if os.path.lexists(link):
                return
            make_folders(link.parent, self._store.root, durable=False)
            try:
                os.link(manifest, link, follow_symlinks=False)
            except OSError:  # a file system without hard links; or it is full
                data = read_regular(manifest, MAX_MANIFEST_SIZE)
                write_file(link, [data], mode=0o644, temporary=self._temporary, durable=False)

    def remove(self, references: Iterable[Reference], *, durable: bool = True) -> None:
        """Remove the links of names, and folders that become empty. Raises OSError."""
        folders: dict[Path, None] = {}
        for reference in references:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                self.path(reference).unlink()
                folders[self.path(reference).parent] = None
        for folder in folders if durable else ():
            sync_folder(folder)
        remove_empty(folders)

    def read_manifest(self, reference: Reference) -> bytes:
        """Return the manifest that a name was given. Raises OSError or BlobstoreError."""
        return read_regular(self.path(reference), MAX_MANIFEST_SIZE)

    def read_blob(self, digest: Digest, size: int) -> bytes:
        """Return a small blob of the store. Raises as :meth:`BlobReader.read_blob`."""
        return self._store.read_blob(digest, size)

    def references(self) -> Iterator[Reference]:
        """Yield the names that have a link. Raises StoreError."""
        for path in self._manifests():
            reference = self._store.reference_of(Path(path))
            if reference is not None:  # otherwise it is a file of something else
                yield reference

    def _manifests(self) -> Iterator[str]:
        """Yield for each link where the manifest is, or was; strings, because there may be thousands."""
        folder, below = str(self._store.folder("manifests")), len(str(self._folder))
        return (folder + entry.path[below:] for entry in walk_files(self._folder))

    def without_manifest(self) -> Iterator[tuple[Reference, bytes]]:
        """Yield the names whose manifest is gone for any reason, with that manifest. Raises StoreError."""
        for path in self._manifests():
            reference = None if os.path.lexists(path) else self._store.reference_of(Path(path))
            if reference is not None:
                with contextlib.suppress(OSError, BlobstoreError):
                    # Read after the look, because a removal takes the link first.
                    data = self.read_manifest(reference)
                    if not self._store.has_model(reference):  # given since
                        yield reference, data

    def lost(self) -> dict[Reference, bytes]:
        """Return the names that are lost, and their manifests. Raises StoreError.

        Their configs are in the store, and no other name has the very file, as after ``mv`` by hand.
        """
        found = {}
        for reference, data in self.without_manifest():
            with contextlib.suppress(BlobstoreError):
                if self._store.has_blobs([Manifest.from_bytes(data).config]):
                    found[reference] = data
        names = self._store.references() if found else ()
        there = {FileState.of(self._store.manifest_path(name)) for name in names}
        return {
            name: it for name, it in found.items() if FileState.of(self.path(name)) not in there
        }

    def forget_gone(self, *, and_lost: bool) -> None:
        """Remove the links of names that other programs have removed, and those of lost names if asked."""
        lost = {} if and_lost else self.lost()
        gone = [name for name, _ in self.without_manifest() if name not in lost]
        self.remove(gone, durable=False)


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove folders of tags that are empty, and then those above them: of the model, the namespace and the host."""
    for folder in folders:
        with contextlib.suppress(OSError):  # the folder has other names
            for empty in (folder, *folder.parents[:2]):
                empty.rmdir()
