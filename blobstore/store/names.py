"""The names of a store: manifests get them and lose them here, atomically and durably."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from blobstore.core.escape import quote
from blobstore.core.files import make_folders, sync_folder, write_file
from blobstore.errors import (
    BlobstoreError,
    InvalidManifest,
    ModelNotFound,
    NameConflict,
    StoreError,
)
from blobstore.manifests.model import Manifest
from blobstore.manifests.reference import Reference
from blobstore.store.history import FormerManifest, History, WholeHistory
from blobstore.store.scan import list_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from blobstore.manifests.descriptor import Descriptor
    from blobstore.store.ingest import Ingest
    from blobstore.store.locks import Locks
    from blobstore.store.manifests import ManifestReader


class Names:
    """The names of a store, for writing. Methods take references as strings too."""

    def __init__(self, store: ManifestReader, locks: Locks) -> None:
        self._store = store
        self._layout = store._layout
        self._locks = locks
        self._history = History(store._layout)

    def check_name(self, reference: str | Reference) -> None:
        """Check that no other name in the store differs from ``reference`` only in case.

        Other tools ignore case in names, and on some file systems both would be one file.

        Raises:
            NameConflict: there is such a name.
        """
        reference = Reference.of(reference)
        folder = self._layout.manifests
        for part in reference.parts:
            with contextlib.suppress(StoreError):  # writing the manifest says what is wrong
                for found in list_names(folder):
                    if found != part and found.casefold() == part.casefold():
                        existing = (folder / found).relative_to(self._layout.manifests)
                        raise NameConflict(
                            f"{quote(reference)} differs only in case from the existing "
                            f"{quote(existing)}; use that spelling or another name"
                        )
            folder /= part

    def publish(
        self, reference: str | Reference, manifest: Manifest, ingest: Ingest | None = None
    ) -> bytes | None:
        """Make ``manifest`` the one of that name, atomically and durably; return what it replaces.

        Within :meth:`ingest`, pass the import, which waits longer for the lock.

        Raises:
            BlobMissing, BlobDamaged: a blob is missing or has another size; nothing changes.
            NameConflict: as :meth:`check_name`.
            StoreError: the store cannot be written.
        """
        lock = self._locks.exclusive if ingest is None else ingest.exclusive_lock
        # Exclusive: of two names that differ only in case, the second one must see the first.
        with self._store.writing(), lock():
            return self.place(reference, manifest.to_bytes(), manifest.blobs)

    def place(
        self, reference: str | Reference, data: bytes, blobs: Iterable[Descriptor]
    ) -> bytes | None:
        """Publish a manifest while the caller holds the exclusive lock; return the one it replaces.

        The replaced one is kept until gc removes its blobs. None means that the name was free, had this
        manifest already, or had one that cannot be read.

        Args:
            reference: the name.
            data: the bytes of the manifest, which are written unchanged.
            blobs: the blobs that it references.

        Raises:
            OSError: the store cannot be written. Otherwise as :meth:`publish`.
        """
        path = self._store.manifest_path(reference)
        # The caller's lock keeps blobs that are found here from being removed before the manifest
        # has its name.
        for blob in blobs:
            self._store.check_size(blob.digest, blob.size)
        self.check_name(reference)
        for folder in (path.parent, self._layout.temporary):
            make_folders(folder, self._store.root)
        former = None
        # An unreadable manifest cannot be kept, but it must be replaceable.
        with contextlib.suppress(ModelNotFound, InvalidManifest, StoreError):
            if (found := self._store.read_manifest(reference)) != data:
                Manifest.from_bytes(found)
                # Before the new one is written: a crash in between loses neither.
                self._history.keep(Reference.of(reference), found)
                former = found
        write_file(path, [data], mode=0o644, temporary=self._layout.temporary)
        return former

    def is_taken(self, reference: str | Reference, data: bytes) -> bool:
        """Return whether the name exists and its manifest differs from ``data``."""
        try:
            return self._store.read_manifest(reference) != data
        except ModelNotFound:
            return False
        except BlobstoreError:  # an unreadable manifest is another one
            return True

    def remove(self, *references: str | Reference) -> None:
        """Remove names durably. The caller holds the exclusive lock.

        Folders that become empty are removed too; blobs are not. Manifests are not read, so damaged
        ones can be removed.

        Raises:
            ModelNotFound: the store has no such model; names before it are removed.
            OSError: the store cannot be written.
        """
        folders: dict[Path, None] = {}
        try:
            for reference in references:
                path = self._store.manifest_path(reference)
                try:
                    path.unlink()
                except (FileNotFoundError, NotADirectoryError):
                    raise self._store.not_found(Reference.of(reference)) from None
                folders[path.parent] = None
        finally:
            for folder in folders:
                # Even if a later name does not exist: those before it must be removed durably.
                sync_folder(folder)
        for folder in folders:
            with contextlib.suppress(OSError):  # the folder has other names
                for empty in (folder, *folder.parents[:2]):  # model, namespace, host
                    empty.rmdir()

    # Former manifests, which may vanish at any time

    def keep_former(self, references: Iterable[Reference]) -> None:
        """Keep the manifests of names that are about to be removed. The caller holds the exclusive lock."""
        self._history.keep_all((name, self._store.read_manifest(name)) for name in references)

    def former(self, reference: str | Reference | None) -> Iterator[FormerManifest]:
        """Yield manifests that a name had before, latest first, or all names; a damaged one may be among them."""
        return self._history.of(None if reference is None else Reference.of(reference))

    def whole_history(self) -> WholeHistory:
        """Return the manifests that names had before, none of them read yet."""
        return WholeHistory(self._layout)
