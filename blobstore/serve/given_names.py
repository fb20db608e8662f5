"""Which names a server's fetches have given, and which the operator has: notes next to the records of fetched models.

A note is written before a fetch first gives a name, and goes when the user gives or removes it, under the store's lock.
So a name with a note is that of fetches if its manifest says that it was fetched, or cannot be read any more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from blobstore.core.files import FileVersion, make_folders, status_of, write_file
from blobstore.errors import BlobstoreError, Damaged, StoreError
from blobstore.manifests.model import Manifest
from blobstore.serve.expiring import bounded
from blobstore.store.fetched import fetched_from, given_name

if TYPE_CHECKING:
    from blobstore.manifests.reference import Reference
    from blobstore.store.local import LocalStore


class GivenNames:
    """The names of a store that fetches have given. Threads may share it."""

    def __init__(self, store: LocalStore) -> None:
        """Look at nothing yet."""
        self._store = store
        self._folder = store.folder("pulled")
        self._fetched: dict[Reference, tuple[FileVersion, bool]] = {}
        """Whether names have fetched models, by the versions of their manifests."""

    def giving(self, reference: Reference) -> None:
        """Note durably that a fetch is about to give a name. Raises StoreError.

        The caller holds the exclusive lock, and has looked whether a fetch may give it.
        """
        with self._store.writing():
            make_folders(self._folder, self._store.root)
            write_file(self._folder / given_name(reference), [str(reference).encode()])

    def has_given(self, reference: Reference) -> bool:
        """Return whether a fetch has given a name what it has, or has lost, even if its bytes are damaged.

        Raises:
            StoreError: that cannot be known now.
        """
        note = status_of(self._folder / given_name(reference))
        path = self._store.manifest_path(reference)
        status = note and (
            status_of(path) or status_of(self._store.names.published.path(reference))
        )
        # What another user has given is his, although he could not remove the note.
        if note is None or status is None or note.st_uid != status.st_uid:
            return False
        version, known = FileVersion.of_status(status), self._fetched.get(reference)
        if known is None or known[0] != version:
            known = bounded(self._fetched)[reference] = version, self._is_fetched(reference)
        return known[1]

    def _is_fetched(self, reference: Reference) -> bool:
        """Return whether the manifest of a name says that it was fetched, or cannot be read."""
        try:
            if self._store.is_gone(reference):
                lost = self._store.names.published.read_manifest(reference)
                return fetched_from(Manifest.from_bytes(lost)) is not None
            return fetched_from(self._store.resolve(reference)) is not None
        except Damaged:
            return True
        except StoreError:
            raise
        except (OSError, BlobstoreError):
            return False
