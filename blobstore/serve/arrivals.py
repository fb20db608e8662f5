"""Fetches a model from an upstream, and imports it; its files can be served as soon as they are listed.

Files are fetched into a folder of the store and verified there, first those that clients wait for. If the
upstream goes away or the server is stopped, they stay there, and the next attempt continues them.
When the model is imported, the folder is removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from typing import TYPE_CHECKING, Final, Protocol

from blobstore.core import capacity
from blobstore.core.digest import Digest
from blobstore.core.escape import quote
from blobstore.core.files import make_folders
from blobstore.core.workers import WorkerPool
from blobstore.errors import (
    BlobstoreError,
    Damaged,
    DamagedSource,
    InvalidManifest,
    NameTaken,
    SourceError,
    StoreBusy,
)
from blobstore.manifests.file_names import check_paths, is_valid_name
from blobstore.operations.create.create import import_source
from blobstore.operations.maintenance.gc import remove_blobs
from blobstore.planning.import_options import ImportOptions
from blobstore.serve.arriving_file import ArrivingFile
from blobstore.serve.fetch import Fetch, lacks_files
from blobstore.serve.import_memory import ImportMemory
from blobstore.serve.library import ServedModel
from blobstore.serve.messages import Content, FilePart
from blobstore.serve.model_files import model_files
from blobstore.serve.peers import PeerFiles, read_content
from blobstore.serve.pulled import Origin
from blobstore.sources.base import DEFAULT_OPTIONS, SourceFile
from blobstore.sources.file_tree import FileTree
from blobstore.sources.huggingface import HuggingFaceFolder
from blobstore.sources.selection import select_files
from blobstore.sources.small_files import small_files
from blobstore.sources.versions import SourceVersions
from blobstore.store.fetched import mark_of
from blobstore.store.locks import try_lock
from blobstore.store.notes import NoteKind, read_own, write_own
from blobstore.store.scan import walk_files

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet
    from contextlib import AbstractContextManager
    from pathlib import Path

    from blobstore.manifests.model import Manifest
    from blobstore.manifests.reference import Reference
    from blobstore.operations.create.create import Created
    from blobstore.serve.arriving_file import Claim
    from blobstore.serve.find_upstream import FoundAt
    from blobstore.serve.peers import Peers
    from blobstore.sources.base import SourceOptions
    from blobstore.sources.hub_listing import Listing
    from blobstore.store.local import LocalStore
    from blobstore.store.names import NameUpdate

_DOWNLOADS: Final = capacity.DOWNLOADS.most
"""Files that are fetched at once, as many as a client of the Hub requests at once."""
_MAX_FILES: Final = 2000
"""Files of a model, each of which is open until the model is imported."""
_RESTORED: Final = (".safetensors", ".gguf", ".json")
"""Weight files and indexes that the store splits into tensors and restores. Others are stored as they are."""
_SERVER: Final = NoteKind("server 1")
"""Which process has fetched into a store: its ID."""


class ArrivalHost(Protocol):
    """Receives the reports of an arrival, on the arrival's thread."""

    @property
    def peers(self) -> Peers:
        """Other servers that may have blobs."""
        ...

    def peer_files(
        self, arrival: Arrival, size: int
    ) -> AbstractContextManager[Iterator[PeerFiles]]:
        """Return the answers of the servers that may have the files of a model, which have ``size`` bytes."""
        ...

    def starting(self, arrival: Arrival) -> object:
        """Check that the name may be given to the model. Raises BlobstoreError."""
        ...

    def files_selected(self, arrival: Arrival, origin: Origin) -> object:
        """Record durably which version is being fetched. Raises BlobstoreError."""
        ...

    def files_listed(self, arrival: Arrival) -> object:
        """Serve the files of ``arrival.model``."""
        ...

    def update_of(self, arrival: Arrival) -> NameUpdate:
        """Return the update of its name, which is free, or which a fetch has given. Raises NameTaken, or StoreError.

        It is recorded that a fetch is giving the name this commit.
        """
        ...

    def ended(self, arrival: Arrival) -> object:
        """Serve the model that has its name in the store, or ``arrival.error``."""
        ...


class Arrival(Fetch):
    """A model that is being fetched, on a thread of its own."""

    def __init__(
        self,
        store: LocalStore,
        reference: Reference,
        repository: str,
        found: FoundAt,
        claim: Claim,
        host: ArrivalHost,
        stored: Sequence[Manifest] = (),
    ) -> None:
        """Fetch nothing yet.

        Args:
            store: gets the model.
            reference: its name there.
            repository: its name at the upstream.
            found: the version, and the server that has it.
            claim: the folder of its files, and the space for them. It is released in the end.
            host: gets reports of the steps.
            stored: models of the store that seem to have its files.
        """
        super().__init__(store, repository, found, claim)
        self.reference, self.found, self.stored = reference, found, stored
        self.names = {reference}
        """All that the model will have."""
        self.begun = time.monotonic()
        self.model: ServedModel | None = None
        """The files, once they are listed."""
        self.created: Created | None = None
        self._host = host
        self._listing: Listing = {}
        self._waiting: dict[str, ArrivingFile] = {}
        """Files that are not being fetched yet."""
        self._wanted: list[str] = []
        self._lock = threading.Lock()

    def report(self) -> None:
        """See :class:`Fetch`."""
        self._host.ended(self)
        self.model = None

    def work(self) -> None:
        """See :class:`Fetch`."""
        # Before anything is fetched, so that a name that cannot be given fails at once.
        self._host.starting(self)
        self._listing = self._client.listing(self.repository, self.commit)
        self.make_folder()
        tree = _Tree(self._folder, self._listing, self._get)
        with tree.memory:
            names = self._selected(tree)
        if len(names) > _MAX_FILES:
            raise SourceError(f"{self.repository} has {len(names)} files, over {_MAX_FILES}")
        files = self._claimed(names)
        # Only now: files that the claim counts as found must stay.
        self._remove_others(names)
        listed = [self._listing[name] for name in names]
        plain = {one.name: one.digest for one in listed if one.algorithm == "sha1"}
        large = {one.name: one.digest for one in listed if one.algorithm == "sha256"}
        others = _others(self._listing, names)
        key = self.repository, self.commit
        origin = Origin(*key, plain, self.found.giver, others, is_of_peer=self.found.is_peer)
        # Before anything is served or named: the record hides a restricted model.
        self._host.files_selected(self, origin)
        contents = {file.name: Content((FilePart(file, 0, file.size),)) for file in files}
        self.model = ServedModel(
            Digest.of(f"{self.repository}@{self.commit}".encode()),
            None,
            dict(sorted(contents.items())),
            {name: Digest(digest) for name, digest in large.items()},
            origin,
            self.found.description,
        )
        # Before the event: clients that wait for it look for the model at once.
        self._host.files_listed(self)
        self.listed.set()
        size = sum(file.size for file in files)
        self._take(self._stored_files())
        # The blobs of peers stay only within the block, so the import is in it.
        with self._host.peer_files(self, size) as answers:
            self._take(answers)
            self._fetch_all()
            with tree.memory:
                self._import(tree, names, large)

    def _selected(self, tree: _Tree) -> list[str]:
        """Return the files that are fetched now, and imported.

        If ``create`` cannot split the weights into tensors, these are the small files; others come when clients ask.
        """
        try:
            selection = select_files(tree, DEFAULT_OPTIONS)
        except (SourceError, DamagedSource) as error:
            if lacks_files(error) or not all(file.is_complete for file in self.files.values()):
                raise  # this process cannot read it, or the upstream has not sent what it lists
            names = sorted(small_files(tree, tree.files_below(), []))
            tree.keep(names)
            return names
        weights = selection.weight_names()
        names = [*selection.files, *sorted(weights)]
        if not all(name.endswith(_RESTORED) for name in weights):
            tree.keep(names)
        return names

    def _import(self, tree: _Tree, names: Sequence[str], large: Mapping[str, str]) -> None:
        try:
            self._import_from(tree, large)
        except (SourceError, DamagedSource) as error:
            if tree.kept is not None or lacks_files(error):
                raise
            # All files are those that the upstream lists, so their faults concern only their readers.
            tree.keep([name for name in names if is_valid_name(name)])
            self._import_from(tree, large)

    def _import_from(self, tree: _Tree, large: Mapping[str, str]) -> None:
        try:
            self._import_as(self._host.update_of(self), tree, large)
        except NameTaken:
            # By another fetch in the meantime, such as one of a further file, or else it fails again.
            self._import_as(self._host.update_of(self), tree, large)

    def _import_as(self, update: NameUpdate, tree: _Tree, large: Mapping[str, str]) -> None:
        source = _Folder(self._folder, DEFAULT_OPTIONS, tree)
        try:
            source.repository, source.commit = self.repository, self.commit
            source.digests = large
            self.created = import_source(
                source,
                update,
                self._store,
                ImportOptions(),
                progress=self.check_stopped,
                planned=lambda plan: tree.memory.hold_blobs(len(plan.blobs)),
                mark=mark_of((self.repository, self.commit), is_of_peer=self.found.is_peer),
            )
        finally:
            source.close()

    def _stored_files(self) -> Iterator[PeerFiles]:
        for manifest in self.stored:
            with contextlib.suppress(Damaged):
                yield PeerFiles(model_files(self._store, manifest), ())

    def _take(self, answers: Iterable[PeerFiles]) -> None:
        """Assemble files from blobs of peers, or of the store. Those with another digest are fetched from the upstream."""
        for answer in answers if self._waiting else ():
            for name, file in list(self._waiting.items()):
                content = answer.files.get(name)
                if content is None or content.size != file.size:
                    continue
                self.check_stopped()
                try:
                    with self._store.writing():
                        is_right = file.take(read_content(self._store, content))
                except Damaged:
                    is_right = False
                if is_right:
                    del self._waiting[name]
                    self.fetch(file)
                else:
                    self._host.peers.file_differs(self, answer, name)
            if not self._waiting:
                return

    def _claimed(self, names: Sequence[str]) -> list[ArrivingFile]:
        """Return files, after claiming space for them. Raises as :meth:`Claim.extend`."""
        new = {
            name: ArrivingFile(self._listing[name], self._claim, self._want)
            for name in names
            if name not in self.files
        }
        if new:
            found = sum(file.find() for file in new.values())
            # Before the files can be fetched: nothing is written without space.
            self._claim.extend(sum(file.size for file in new.values()), found, len(new))
            self.files |= new
            self._waiting |= new
        return [self.files[name] for name in names]

    def _remove_others(self, names: Collection[str]) -> None:
        """Remove files that another attempt has left and this one does not claim."""
        claimed = {str(self._folder / name) for name in names}
        for entry in walk_files(self._folder):
            if entry.path not in claimed:
                os.unlink(entry.path)  # noqa: PTH108 - a string

    def _get(self, name: str) -> None:
        """Fetch a file now, because it decides which others are fetched, or because the import reads it."""
        (file,) = self._claimed([name])
        if not file.is_complete:
            self._take(self._stored_files())
        if not file.is_complete:
            del self._waiting[name]
            self.fetch(file)

    def _fetch_all(self) -> None:
        pool = WorkerPool(_DOWNLOADS, None, 0)
        pool.run(range(len(self._waiting)), lambda _: self.fetch(self._next()), self._client.abort)

    def _want(self, name: str) -> None:
        with self._lock:
            if name in self._waiting:
                self._wanted.append(name)

    def _next(self) -> ArrivingFile:
        with self._lock:
            wanted = (name for name in self._wanted if name in self._waiting)
            return self._waiting.pop(next(wanted, next(iter(self._waiting))))


def lock_arrivals(store: LocalStore) -> int:
    """Lock the folder of arriving files, and return its descriptor; closing it unlocks. Raises StoreError."""
    folder = store.folder("arrivals")
    with store.writing():
        make_folders(folder, store.root)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        if try_lock(descriptor, fcntl.LOCK_EX, store.root):
            store.hold_folders()
            _remove_left(store)
            return descriptor
        os.close(descriptor)
    raise StoreBusy(
        f"another server fetches models into the store {quote(store.root)}",
        advice="stop it, or let this one ask it: --upstream with the address of that server",
    )


def _remove_left(store: LocalStore) -> None:
    """Remove blobs without a name and temporary files of a server that was killed. Files of arrivals stay: these count."""
    note = store.folder("remotes") / "server"
    former = read_own(note, _SERVER, lambda value: int(value["process"]))
    with contextlib.suppress(BlobstoreError):  # the store is damaged: gc reports it
        if dead := store.read_leases().dead:
            leased = (found for path, found in dead.items() if path.name.startswith(f"{former}-"))
            remove_blobs(store, {digest.hex for digest in set().union(*leased)})
    write_own(note, store.root, _SERVER, {"process": os.getpid()})


class _Tree(FileTree):
    """The files that an upstream lists. One is fetched before it is read, and parsed only if there is memory for that."""

    def __init__(self, root: Path, listing: Listing, fetch: Callable[[str], object]) -> None:
        super().__init__(
            root, listed={file.name: file.size for file in listing.values()}, label="the model"
        )
        self.kept: Sequence[str] | None = None
        """The files to store as they are, weights too; None to choose as usual."""
        self.memory = ImportMemory()
        self._fetch = fetch

    def keep(self, names: Sequence[str]) -> None:
        """Store these files as they are. What was read to choose them may be removed."""
        self.kept, self.versions = names, SourceVersions()

    def path(self, name: str) -> Path:
        """Return the path of a file, which is fetched and verified first."""
        self._fetch(name)
        return super().path(name)

    def document(self, name: str, most: int) -> Path:
        """See :class:`FileTree`. Raises as :meth:`ImportMemory.hold`."""
        path = super().document(name, most)
        self.memory.hold(path)
        return path


class _Folder(HuggingFaceFolder):
    """The fetched files as a source."""

    def add(self, path: Path, *, prefix: str = "", names: AbstractSet[str] | None = None) -> None:
        """See :class:`ShardSet`. Raises as :meth:`ImportMemory.hold`."""
        if isinstance(self._tree, _Tree):
            self._tree.memory.hold(path)
        super().add(path, prefix=prefix, names=names)

    def _open_folder(self, tree: FileTree, options: SourceOptions) -> None:
        if isinstance(tree, _Tree) and tree.kept is not None:
            tree.versions.takes_anything = True  # what is wrong with them is for their readers
            self.files = [SourceFile(name, tree.path(name)) for name in tree.kept]
        else:
            super()._open_folder(tree, options)


def _others(listing: Listing, names: Sequence[str]) -> Listing:
    """Return the files that clients may ask for besides ``names``; none if they are too many or exclude each other."""
    found = {name: file for name, file in listing.items() if is_valid_name(name)}
    try:
        check_paths({*found, *names})
    except InvalidManifest:
        return {}
    others = {name: found[name] for name in found.keys() - set(names)}
    return others if len(others) + len(names) <= _MAX_FILES else {}
