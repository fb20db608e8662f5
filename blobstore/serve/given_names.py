"""Which names a server's fetches have given, and which the operator has: notes next to the records of fetched models.

A second link to the manifest of a name says that a fetch has given it. While a fetch gives a name its next model, a note
has the commit: the next process settles by it what a killed one has left. A name that the user gives loses both.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Final

from blobstore.core import strict_json
from blobstore.core.escape import quote
from blobstore.core.files import is_absence, make_folders, read_regular, status_of, write_file
from blobstore.errors import BlobstoreError, InvalidManifest, NameTaken, StoreError
from blobstore.manifests.model import Manifest
from blobstore.manifests.reference import Reference
from blobstore.store.fetched import giving_name, link_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from blobstore.store.fetched import Commit
    from blobstore.store.local import LocalStore

MAX_RECORD: Final = 64 << 20
"""Bytes of a record or a note at most."""


class GivenNames:
    """The names of a store that fetches have given. Threads may share it."""

    def __init__(self, store: LocalStore, commit_of: Callable[[Manifest], Commit | None]) -> None:
        """Look at nothing yet. ``commit_of`` returns the commit that a model was fetched from."""
        self._store, self._commit_of = store, commit_of
        self._folder = store.folder("pulled")

    def settle(self) -> None:
        """Complete the work of a killed process, if no other one gives names now."""
        with contextlib.suppress(OSError):
            self._link_again()
            for path in self._folder.glob(".name-*"):
                if path.lstat().st_nlink == 1:  # the name was removed, or has another model
                    path.unlink()
            for path in self._folder.glob(".giving-*"):
                self._settle(path)

    def _link_again(self) -> None:
        """Give names their second links again if the store was copied by a program that copies no hard links."""
        links = self._folder.glob(".name-*")
        alone = {link.name for link in links if link.lstat().st_nlink == 1}
        for reference in self._store.references() if alone else ():
            if link_name(reference) in alone:
                with contextlib.suppress(BlobstoreError), self._store.exclusive_lock():
                    self._link_to(reference, read_regular(self._link(reference), MAX_RECORD))

    def _settle(self, note: Path) -> None:
        """Link the manifest if the name has got a commit of the note."""
        try:
            reference = Reference.parse(strict_json.loads(read_regular(note, MAX_RECORD))[0])
            if self.has_given(reference):
                self.give(reference, self._store.resolve(reference))
                status = status_of(self._link(reference))
                if status is None or status.st_nlink == 1:  # there are no hard links
                    return
        except (LookupError, TypeError, ValueError, BlobstoreError):
            pass
        note.unlink(missing_ok=True)

    def give(self, reference: Reference, manifest: Manifest) -> None:
        """Note that a fetch has given a name this manifest, if it still has it, and the user has not given it since.

        The note is a second link to the manifest's file: even if its bytes are damaged, the name has this file until it
        is given another model. On file systems without hard links, the note of :meth:`giving` stays.
        """
        with contextlib.suppress(OSError, BlobstoreError), self._store.exclusive_lock():
            is_linked = self._noted(reference) and self._link_to(reference, manifest.to_bytes())
            # Only after the link, so that at each moment one of both says whose the name is.
            if is_linked and (commit := self._commit_of(manifest)) is not None:
                self._not_given(reference, commit)

    def _link_to(self, reference: Reference, data: bytes) -> bool:
        """Link the manifest of a name if it has these bytes; return whether it has. Raises OSError."""
        link = self._link(reference)
        new = link.with_name(f"{link.name}.new")
        new.unlink(missing_ok=True)
        os.link(self._store.manifest_path(reference), new, follow_symlinks=False)
        if is_same := read_regular(new, MAX_RECORD) == data:
            new.replace(link)
        new.unlink(missing_ok=True)  # also if both are one file, which rename leaves alone
        return is_same

    def giving(self, reference: Reference, commit: Commit) -> None:
        """Note durably that a fetch is about to give a name a commit, until :meth:`give`. Raises StoreError.

        The caller holds the exclusive lock, and has looked whether a fetch may give it: names that the user gives from
        then on remove the note. Others may be giving the name other commits.
        """
        self._note(reference, self._noted(reference) | {commit})

    def not_given(self, reference: Reference, commit: Commit) -> None:
        """Remove what :meth:`giving` has noted."""
        with contextlib.suppress(OSError, BlobstoreError), self._store.exclusive_lock():
            self._not_given(reference, commit)

    def _not_given(self, reference: Reference, commit: Commit) -> None:
        if left := self._noted(reference) - {commit}:
            self._note(reference, left)
        else:
            self._path(reference).unlink(missing_ok=True)

    @contextlib.contextmanager
    def changing(self, reference: Reference, commit: Commit, manifest: Manifest) -> Iterator[None]:
        """Keep a name that a fetch has given, while the block gives it another manifest of the same commit.

        Raises:
            NameTaken: it is the user's by now.
            StoreError: the store cannot be written.
        """
        with self._store.writing(), self._store.exclusive_lock():
            if not self.has_given(reference):
                raise NameTaken(f"{reference} is a model of the store's own by now")
            # Such a note is of another fetch, or there are no hard links, and it alone says whose the name is.
            is_noted = commit in self._noted(reference)
            self.giving(reference, commit)
        try:
            yield
        except BlobstoreError:
            if not is_noted:
                self.not_given(reference, commit)
            raise
        self.give(reference, manifest)

    def has_given(self, reference: Reference) -> bool:
        """Return whether a name has the file that a fetch gave it, even if its bytes are damaged.

        Damaged bytes in another file are nobody's: if a fetch gave the name, it may do so again.

        Raises:
            StoreError: that cannot be known now.
        """
        path = status_of(self._store.manifest_path(reference))
        link = status_of(self._link(reference))
        path = path or status_of(self._store.names.published.path(reference))  # it is lost
        if path and link and os.path.samestat(path, link):
            return True
        try:
            manifest = self._manifest(reference) if path and link else None
            noted = self._noted(reference)
            return bool(noted) and self._commit_of(manifest or self._manifest(reference)) in noted
        except InvalidManifest:
            return link is not None
        except StoreError:
            raise
        except (OSError, BlobstoreError):
            return False

    def _manifest(self, reference: Reference) -> Manifest:
        """Return the manifest that a name has, or has lost. Raises OSError and BlobstoreError."""
        if self._store.is_gone(reference):
            return Manifest.from_bytes(self._store.names.published.read_manifest(reference))
        return self._store.resolve(reference)

    def _noted(self, reference: Reference) -> set[Commit]:
        """Return the commits that fetches are giving a name; none if the note is damaged. Raises StoreError."""
        try:
            name, *commits = strict_json.loads(read_record(self._path(reference)) or b"[0]")
            several = (
                [commits] if isinstance(commits[0], str) else commits
            )  # a former version noted one
            return {(one[0], one[1]) for one in several} if name == str(reference) else set()
        except (LookupError, TypeError, ValueError):
            return set()

    def _note(self, reference: Reference, commits: set[Commit]) -> None:
        value = [str(reference), *map(list, sorted(commits))]
        with self._store.writing():
            make_folders(self._folder, self._store.root)
            write_file(self._path(reference), [strict_json.dumps(value).encode()])

    def _path(self, reference: Reference) -> Path:
        return self._folder / giving_name(reference)

    def _link(self, reference: Reference) -> Path:
        return self._folder / link_name(reference)


def read_record(path: Path) -> bytes:
    """Return the bytes of a record, none if it is not there. Raises StoreError."""
    try:
        return read_regular(path, MAX_RECORD)
    except BlobstoreError:  # it is not a file of ours
        return b""
    except OSError as error:
        if is_absence(error):
            return b""
        raise StoreError(f"cannot read {quote(path)}: {error.strerror}") from error
