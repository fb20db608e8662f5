"""The names of a store: manifests get them and lose them here, atomically and durably.

A name is given by compare-and-set. The caller hands over what the name had when the command looked, and that is
compared under the exclusive lock. If two commands give one name at once, one wins, and the other fails and changes
nothing. A name that has become free, or that has the same manifest by now, is given nevertheless: nothing is lost.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

from blobstore.core.digest import Digest
from blobstore.core.escape import quote
from blobstore.core.files import is_there, make_folders, sync_folder, write_file
from blobstore.errors import (
    BlobDamaged,
    BlobstoreError,
    InvalidManifest,
    ModelNotFound,
    NameConflict,
    NameTaken,
    StoreError,
)
from blobstore.manifests.model import Manifest
from blobstore.manifests.reference import Reference
from blobstore.store.fetched import (
    Brought,
    brought_name,
    fetched_from,
    given_name,
    record_name,
)
from blobstore.store.history import FormerManifest, History, WholeHistory
from blobstore.store.published import Published, remove_empty
from blobstore.store.spellings import Spellings

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from blobstore.manifests.descriptor import Descriptor
    from blobstore.store.ingest import Ingest
    from blobstore.store.locks import Locks
    from blobstore.store.manifests import ManifestReader
    from blobstore.store.signatures import Signatures


class Old(Enum):
    """The former state of a name, if that is not a manifest with a digest."""

    ABSENT = "free"
    UNREADABLE = "unreadable"
    ANYTHING = "anything"


ABSENT: Final = Old.ABSENT
"""There is no such name."""
UNREADABLE: Final = Old.UNREADABLE
"""Its manifest cannot be read."""
ANYTHING: Final = Old.ANYTHING
"""The user said that the name is taken from whatever has it."""


@dataclass(frozen=True, slots=True)
class NameUpdate:
    """A name that is to be given, as ``git update-ref`` takes it: with the old value, and the new one if it is known."""

    reference: Reference
    old: Digest | Old
    """The digest of the manifest that the name had when the caller looked."""
    new: Digest | None = None
    """The digest of the manifest that the name must get, if the caller knows."""
    is_fetched: bool = False
    """Whether a server gives it to what it has fetched for clients, and notes that. Otherwise the name is the user's."""

    def to(self, new: Digest | None) -> NameUpdate:
        """Return the update with its new value, if that is known now.

        Raises:
            BlobDamaged: the name must get another manifest.
        """
        if new is None or self.new == new:
            return self
        if self.new is not None:
            raise BlobDamaged(
                f"the model for the name {quote(self.reference)} has the manifest {new.short} now, "
                f"and {self.new.short} was expected"
            )
        return replace(self, new=new)


Name = str | Reference | NameUpdate
"""A name, or the update of one."""


def replace_any(reference: str | Reference) -> NameUpdate:
    """Return the update of a name that the user allowed to be taken from whatever has it."""
    return NameUpdate(Reference.of(reference), ANYTHING)


class NewModel(NamedTuple):
    """A manifest that gets a name."""

    update: NameUpdate
    data: bytes
    """The bytes of the manifest, which are written unchanged."""
    blobs: Sequence[Descriptor]
    """The blobs that it references."""


class NewSignature(NamedTuple):
    """A signature that comes with a model."""

    manifest: Digest
    data: bytes
    is_verified: bool


class Names:
    """The names of a store, for writing. Methods take references as strings too."""

    def __init__(self, store: ManifestReader, locks: Locks, signatures: Signatures) -> None:
        self._store = store
        self._layout = store._layout
        self._locks = locks
        self._signatures = signatures
        self._history = History(store._layout)
        self._spellings = Spellings(self._layout.manifests, self._layout.given_names(os.geteuid()))
        self.published = Published(store)
        """The manifests of names once more, to know which were lost."""

    # What a name has

    def version(self, reference: str | Reference) -> Digest | Old:
        """Return the digest of the manifest that a name has, or that it has lost; ``ABSENT`` or ``UNREADABLE``."""
        try:
            return Digest.of(self._store.read_manifest(reference))
        except ModelNotFound:
            try:  # nobody gives away the name of a model that is lost
                lost = self.published.lost_manifest(Reference.of(reference))
            except BlobstoreError:
                return UNREADABLE
            return ABSENT if lost is None else Digest.of(lost)
        except BlobstoreError:
            return UNREADABLE

    def seen(self, name: Name) -> NameUpdate:
        """Return the update of a name from what it has now. An update is returned as it is."""
        if isinstance(name, NameUpdate):
            return name
        return NameUpdate(Reference.of(name), self.version(name))

    def claim(self, name: Name, new: Digest | None, *, force: bool) -> NameUpdate:
        """Return the update of a name that no other model has; with ``force``, or for an update, of any name.

        Raises:
            NameTaken: another model has it.
            NameConflict: as :meth:`check_name`.
            BlobDamaged: it must get another manifest than ``new``.
        """
        update = self.seen(name)
        self.check_name(update.reference)
        if not isinstance(name, NameUpdate):
            if force:
                update = replace_any(name)
            elif update.old not in (ABSENT, new):
                lost = ", and its manifest is lost" if self._store.is_gone(update.reference) else ""
                raise NameTaken(
                    f"another model has the name {quote(update.reference)}{lost}",
                    advice="replace it with force=True, or choose another name",
                )
        return update.to(new)

    def check_name(self, reference: str | Reference) -> None:
        """Check that no other name in the store differs from ``reference`` only in case.

        Other tools ignore case in names, and on some file systems both would be one file. A repository has one
        spelling, and so has a tag in it. Hosts and namespaces may have several: ``org/a`` and ``Org/b`` are two
        files everywhere.

        Raises:
            NameConflict: there is such a name, and ``reference`` does not exist yet.
        """
        reference = Reference.of(reference)
        repository = reference.parts[:3]
        if self._spellings.has_tags(repository):  # then only the tag can differ
            found = [one for one in self._spellings.of(reference.parts) if one[:3] == repository]
        else:  # another thread may give the first tag just now
            others = [one for one in self._spellings.of(repository) if one != repository]
            found = [(*one, tag) for one in others if (tag := self._spellings.first_tag(one))]
        if found and reference.parts not in found:
            host, namespace, model, other_tag = found[0]  # a tag that no name has may lie there
            existing = str(Reference(host, namespace, model, reference.tag)).rpartition(":")[0]
            raise NameConflict(
                f"{quote(reference)} differs only in case from the existing "
                f"{quote(f'{existing}:{other_tag}')}; use that spelling or another name"
            )

    # Giving names

    def publish(
        self, update: NameUpdate, manifest: Manifest, ingest: Ingest | None = None
    ) -> bytes | None:
        """Give a name to ``manifest``, atomically and durably; return what it replaces, as :meth:`place`.

        Raises as :meth:`install`.
        """
        new = NewModel(update, manifest.to_bytes(), manifest.blobs)
        return self.install([new], ingest=ingest, is_brought=False)[0]

    def install(
        self,
        models: Sequence[NewModel],
        signatures: Iterable[NewSignature] = (),
        *,
        ingest: Ingest | None = None,
        is_brought: bool = True,
    ) -> list[bytes | None]:
        """Give names to models, all of them or none, and return what each replaces, as :meth:`place`.

        Signatures are durable before the first name, so that no policy finds a model without them. Within an
        import, pass it: it waits longer for the lock. ``is_brought`` is whether a user brings the manifests from
        elsewhere, see :mod:`blobstore.store.fetched`.

        Raises:
            NameTaken: a name has changed since the caller looked; nothing changes.
            BlobMissing, BlobDamaged: a blob is missing or has another size, or a manifest is not the one that
                the name must get; nothing changes.
            NameConflict: as :meth:`check_name`.
            StoreError: the store cannot be written.
        """
        lock = self._locks.exclusive if ingest is None else ingest.exclusive_lock
        with self._store.writing():
            for one in signatures:
                self._signatures.keep(one.manifest, one.data, is_verified=one.is_verified)
            # Exclusive: of two names that differ only in case, the second one must see the first.
            with lock(), contextlib.ExitStack() as undo:
                # All checks before the first name, so that a model that fails changes nothing.
                for model in models:
                    self._check(model)
                self._make_folders(*(model.update.reference for model in models))
                former = []
                for model in models:
                    self._note_brought(model, is_brought=is_brought)
                    # Before the name is given: writing can also fail after the rename.
                    undo.callback(self._undo, model, self._data(model.update.reference))
                    former.append(self._give(model))
                undo.pop_all()
                self._note_givers(models)
        return former

    def place(self, *models: NewModel, is_brought: bool = False) -> list[bytes | None]:
        """Give names while the caller holds the exclusive lock; return the manifests that they replace.

        A replaced one is kept until gc removes its blobs. None means that the name was free, had this
        manifest already, or had one that cannot be read. ``is_brought`` is as for :meth:`install`; otherwise, the
        manifests are the store's.

        Raises:
            OSError: the store cannot be written. Otherwise as :meth:`install`.
        """
        for model in models:
            self._check(model)
        self._make_folders(*(model.update.reference for model in models))
        for model in models if is_brought else ():
            self._note_brought(model, is_brought=True)
        former = [self._give(model) for model in models]
        self._note_givers(models)
        return former

    def _make_folders(self, *references: Reference) -> None:
        """Make the folders of names durably; nothing that is temporary has to be."""
        make_folders(self._layout.temporary, self._store.root, durable=False)
        for folder in {self._layout.manifest(reference).parent for reference in references}:
            make_folders(folder, self._store.root)

    def _check(self, model: NewModel) -> None:
        """Check under the lock that a model may get its name. Raises as :meth:`install`."""
        digest = Digest.of(model.data)
        update = model.update.to(digest)
        # The lock keeps blobs that are found here from being removed before the manifest has its name.
        for blob in model.blobs:
            self._store.check_size(blob.digest, blob.size)
        self.check_name(update.reference)
        now = self.version(update.reference)
        is_taken = update.is_fetched and not is_there(self._given(update.reference))
        if is_taken or (update.old is not ANYTHING and now not in (update.old, digest, ABSENT)):
            raise NameTaken(
                f"the name {quote(update.reference)} was given to another model in the meantime: "
                f"it was {_shown(update.old)} and is {_shown(now)} now",
                advice="look at that model, and run the same command again to replace it",
            )

    def _give(self, model: NewModel) -> bytes | None:
        """Give a model its name, which was checked; return the manifest that it replaces, as :meth:`place`."""
        reference = model.update.reference
        path = self._layout.manifest(reference)
        former = None
        found = self._data(reference)
        if found == model.data:  # its writer may not have synced it
            with path.open("rb") as file:
                os.fsync(file.fileno())
            sync_folder(path.parent)
            self.published.add(reference)
            return None
        # An unreadable manifest cannot be kept, but it must be replaceable.
        with contextlib.suppress(InvalidManifest):
            found = found or self.published.lost_manifest(reference)
            if found not in (None, model.data):
                Manifest.from_bytes(found)
                # Before the new one is written: a crash in between loses neither.
                self._history.keep(reference, found)
                former = found
        self._write(reference, model.data)
        return former

    def _note_givers(self, models: Iterable[NewModel]) -> None:
        """Forget that a server has given names, or is giving them: they are the user's, unless the server gives this one.

        Only now, because a name that could not be given is still the server's.
        """
        for model in models:
            if not model.update.is_fetched:
                self._forget(model.update.reference)

    def _forget(self, reference: Reference) -> None:
        """Remove the note that a server has given a name, or is giving it."""
        with contextlib.suppress(OSError):  # the folder is another user's
            self._given(reference).unlink()

    def _given(self, reference: Reference) -> Path:
        return self._layout.pulled / given_name(reference)

    def _note_brought(self, model: NewModel, *, is_brought: bool) -> None:
        """Note whether a user brings a model that a server has fetched into another store, or this one's server does.

        A model that the store has already is what it was.
        """
        commit = fetched_from(Manifest.from_bytes(model.data))
        if commit is None:
            return
        key, folder = Digest.of(model.data), self._layout.pulled
        path = folder / brought_name(key)
        if is_brought:
            if key not in map(Digest.of, self.every_manifest()):
                is_known = is_there(folder / record_name(commit[0]))
                whose = Brought.READERS if is_known else Brought.EVERYONE
                make_folders(folder, self._store.root)
                write_file(path, [whose.value], temporary=self._layout.temporary)
        # The user's name may have been removed since: then the model is for whom the upstream lets read it.
        elif is_there(path) and key not in map(self.version, self._store.references()):
            path.unlink()

    def every_manifest(self) -> Iterator[bytes]:
        """Yield the manifests of names, those that can be restored, and those that were lost."""
        for reference in self._store.references():
            with contextlib.suppress(BlobstoreError):
                yield self._store.read_manifest(reference)
        for former in self.former(None):
            yield former.data
        for reference in self.published.gone():
            with contextlib.suppress(BlobstoreError):
                yield self.published.read_manifest(reference)

    def _data(self, reference: Reference) -> bytes | None:
        with contextlib.suppress(ModelNotFound, InvalidManifest, StoreError):
            return self._store.read_manifest(reference)
        return None

    def _write(self, reference: Reference, data: bytes) -> None:
        path = self._layout.manifest(reference)
        self.published.remove([reference], durable=False)  # it is of the former manifest
        write_file(path, [data], mode=0o644, temporary=self._layout.temporary)
        self._spellings.note(reference.parts)
        self.published.add(reference)

    def _undo(self, model: NewModel, before: bytes | None) -> None:
        """Give a name what it had before again, if it has the model and that is possible."""
        reference = model.update.reference
        if before == model.data or self._data(reference) != model.data:
            return
        with contextlib.suppress(BlobstoreError, OSError):
            if before is None:
                self.remove(reference)
            else:
                self._write(reference, before)

    # Taking names

    def remove(self, *references: str | Reference) -> None:
        """Remove names durably. The caller holds the exclusive lock.

        Folders that become empty are removed too; blobs are not. Manifests are not read, so damaged
        ones can be removed, and lost ones forgotten.

        Raises:
            ModelNotFound: the store has no such model; names before it are removed.
            OSError: the store cannot be written.
        """
        folders: dict[Path, None] = {}
        names = list(map(Reference.of, references))
        gone = set(filter(self._store.is_gone, names))
        self.published.remove(names)
        try:
            for reference in names:
                path = self._layout.manifest(reference)
                try:
                    path.unlink()
                except (FileNotFoundError, NotADirectoryError):
                    if reference in gone:
                        continue
                    raise self._store.not_found(reference) from None
                folders[path.parent] = None
                self._forget(reference)
        finally:
            for folder in folders:
                # Even if a later name does not exist: those before it must be removed durably.
                sync_folder(folder)
        remove_empty(folders)

    # Former manifests, which may vanish at any time

    def keep_former(self, references: Iterable[Reference]) -> None:
        """Keep the manifests of names that are about to be removed. The caller holds the exclusive lock."""
        self._history.keep_all(
            (
                name,
                (self.published if self._store.is_gone(name) else self._store).read_manifest(name),
            )
            for name in references
        )

    def former(self, reference: str | Reference | None) -> Iterator[FormerManifest]:
        """Yield manifests that a name had before, latest first, or all names; a damaged one may be among them."""
        return self._history.of(None if reference is None else Reference.of(reference))

    def former_files(self, references: Iterable[Reference]) -> Iterator[tuple[Reference, Path]]:
        """Yield the files of the same of some names, none of them read yet; see :func:`read_former`."""
        return self._history.files(references)

    def whole_history(self) -> WholeHistory:
        """Return the manifests that names had before, none of them read yet."""
        return WholeHistory(self._layout)


def _shown(version: Digest | Old) -> str:
    return version.short if isinstance(version, Digest) else version.value
