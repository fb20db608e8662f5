"""The records of fetched models: a small file for each commit, and one for each repository.

The record of a commit is written before the model gets its name. Its time is that of the last use. The record of a
repository is written before those of its commits, and says whether the upstream gives it to everyone, or by which
name it knows the repository now: then that one's record says it.

The model itself says that it was fetched, see :mod:`blobstore.store.fetched`. Without a record, it is for nobody until
the upstream has been asked again.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from blobstore.core import strict_json
from blobstore.core.digest import Digest
from blobstore.core.escape import quote
from blobstore.core.files import (
    FileVersion,
    is_absence,
    is_there,
    make_folders,
    read_regular,
    write_file,
)
from blobstore.errors import BlobstoreError, StoreError
from blobstore.serve.given_names import GivenNames
from blobstore.sources.hub_listing import COMMIT, DIGESTS, ListedFile
from blobstore.store.fetched import (
    Brought,
    brought_name,
    fetched_from,
    is_of_peer,
    record_name,
)
from blobstore.store.scan import list_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from blobstore.manifests.model import Manifest
    from blobstore.sources.hub_listing import Listing
    from blobstore.store.fetched import Commit
    from blobstore.store.local import LocalStore

_MAX_RECORD: Final = 64 << 20
_SETTLED_NS: Final = 2 * 10**9
"""Nanoseconds after which another change of a folder cannot have the same time."""
_TOUCH_SECONDS: Final = 30.0
"""Seconds by which the noted time of the last use may be late."""


@dataclass(frozen=True, slots=True)
class Origin:
    """A commit of a repository at an upstream."""

    repository: str
    commit: str
    plain: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The files that the upstream does not list as large ones, and their names in git: 40 hexadecimal digits."""
    peer: str = ""
    """The peer that said what the commit is; empty if the upstream did."""
    others: Listing = field(default_factory=dict, repr=False)
    """The files that were not fetched with the model, and are fetched when a client asks for them."""
    brought: Brought | None = None
    """For whom the model is if the user has brought it from elsewhere; None if he has not."""
    manifest: Digest | None = None
    """That of a model that the user has brought: see :meth:`PulledModels.now`."""
    is_of_peer: bool = False
    """Whether the model itself says that it came from a peer. The record of another giver is about another model."""

    @property
    def all_plain(self) -> Mapping[str, str]:
        """Like :attr:`plain`, for all files of the commit."""
        found = {one.name: one.digest for one in self.others.values() if one.algorithm == "sha1"}
        return {**found, **self.plain}

    def short(self) -> Origin:
        """Return the origin without other files, of which there may be many."""
        return replace(self, others={})

    def to_bytes(self) -> bytes:
        """Return the record as JSON."""
        value = {
            "repository": self.repository,
            "commit": self.commit,
            "plain": dict(self.plain),
            "peer": self.peer,
            "others": list(self.others.values()),
        }
        return strict_json.dumps(value).encode()


class _Record(NamedTuple):
    """The content of a file."""

    repository: str
    origin: Origin | None
    """None in the record of a repository."""
    is_public: bool | None
    """None in the record of a commit."""
    name: str = ""
    """The present name of a repository that was renamed."""

    @classmethod
    def from_bytes(cls, data: bytes) -> _Record:
        """Return a record. Raises ValueError if it is malformed."""
        value = strict_json.loads(data)
        try:
            repository, public = value["repository"], value.get("public")
            name = value.get("name", "")
            origin = _origin_of(value) if "commit" in value else None
        except (AttributeError, LookupError, TypeError) as error:
            raise ValueError("malformed record") from error
        is_typed = isinstance(repository, str) and isinstance(name, str)
        if not is_typed or (origin is None and not isinstance(public, bool)):
            raise ValueError("malformed record")
        return cls(repository, origin, None if public is None else public is True, name)

    def short(self) -> _Record:
        """See :meth:`Origin.short`."""
        return self if self.origin is None else self._replace(origin=self.origin.short())


def _origin_of(value: dict[str, Any]) -> Origin:
    others = {name: ListedFile(name, *rest) for name, *rest in value.get("others", ())}
    plain, peer = dict(value["plain"]), value.get("peer", "")
    made = Origin(value["repository"], value["commit"], plain, peer, others)
    names = (made.commit, *made.plain.values())
    if (
        not isinstance(made.peer, str)
        or not all(isinstance(name, str) and COMMIT.fullmatch(name) for name in names)
        or not all(map(_is_sound, others.values()))
    ):
        raise ValueError("malformed record")
    return made


def _is_sound(file: ListedFile) -> bool:
    is_typed = isinstance(file.name, str) and type(file.size) is int and file.size >= 0
    form = DIGESTS.get(file.algorithm)
    return is_typed and form is not None and form.fullmatch(file.digest) is not None


class PulledModels:
    """The records of a store. Threads may share it.

    Until :meth:`own`, each look finds the records that other processes have written by then.
    """

    def __init__(self, store: LocalStore, note: Callable[..., object] | None = None) -> None:
        """Read the records.

        If they cannot be read, raise StoreError; with ``note``, call it with the fields of a line for the log instead:
        no model that was fetched is for anybody then.
        """
        self._store, self._note = store, note
        self._fault = ""
        """Why the records could not be read."""
        self._folder = store.folder("pulled")
        self.names = GivenNames(store)
        """Which names have models of fetches."""
        self._lock = threading.Lock()
        self._is_own = False
        self._version: FileVersion | None = None
        """Of the folder, when the records were read, if a later change is another version."""
        self._is_absent = False
        """Whether there was no such folder."""
        self._files: dict[str, tuple[FileVersion | None, _Record]] = {}
        self._records: dict[Commit, Origin] = {}
        """The records. The mapping is replaced and never changed, so that readers need no lock."""
        self._public: dict[str, bool] = {}
        """Whether the upstream gives a repository to everyone. A peer does not know."""
        self._renamed: dict[str, str] = {}
        """The present names of repositories that the upstream has renamed."""
        self._known: frozenset[str] = frozenset()
        self._spellings: dict[str, str] = {}
        """Names of repositories by their forms without case."""
        self._open: frozenset[str] = frozenset()
        self.incomplete: set[Commit] = set()
        """Commits of models without a record, which only a fetch writes again."""
        self._used: dict[Commit, float] = {}
        """When models were last used by this process; below, when that was noted."""
        self._noted: dict[Commit, float] = {}
        self._held: Counter[Commit] = Counter()
        self._look()

    def own(self) -> None:
        """Look at the folder for the last time: from now on, no other process may write records."""
        self._look()
        self._is_own = True

    def _look(self) -> None:
        """Read the records that have changed."""
        with self._lock:
            if self._is_own:
                return
            now = time.time_ns()
            try:
                # Before the folder is listed: a change in between makes another version.
                version = FileVersion.of(self._folder)
                if version == self._version and (version is not None or self._is_absent):
                    return
                self._files, fault = self._read_all(), ""
            except StoreError as error:
                if self._note is None:
                    raise
                version, self._files, fault = None, {}, str(error)
            if fault and fault != self._fault and self._note is not None:
                self._note(error=fault)
            self._fault = fault
            records = [record for _, record in self._files.values()]
            origins = [one.origin for one in records if one.origin is not None]
            self._set(
                {(one.repository, one.commit): one for one in origins},
                {one.repository: one.is_public for one in records if one.is_public is not None},
                {one.repository: one.name for one in records if one.name},
            )
            # Clocks of file systems are coarse: the next change may get the same time.
            is_settled = version is not None and version.changed < now - _SETTLED_NS
            self._version = version if is_settled else None
            self._is_absent = version is None and not fault

    def _read_all(self) -> dict[str, tuple[FileVersion | None, _Record]]:
        files: dict[str, tuple[FileVersion | None, _Record]] = {}
        for name in list_names(self._folder):
            path = self._folder / name
            # A name that begins with a dot is that of a temporary file, or of a note.
            if name.startswith("."):
                continue
            # Before the file is read: a change in between makes another version.
            found, known = FileVersion.of(path), self._files.get(name)
            try:
                if known is None or known[0] != found:
                    record = _Record.from_bytes(read_regular(path, _MAX_RECORD))
                    known = found, record.short()
                files[name] = known
            except (OSError, ValueError, BlobstoreError):  # as if it were lost
                continue
        return files

    def _set(
        self, records: dict[Commit, Origin], public: dict[str, bool], renamed: dict[str, str]
    ) -> None:
        self._records, self._public, self._renamed = records, public, renamed
        # A repository about which no upstream was asked has only commits from peers.
        asked = public.keys() | {one.repository for one in records.values() if not one.peer}
        by_peers = {one.repository for one in records.values()} - asked
        # What it was fetched by other names for says something about the present one, too.
        self._known = frozenset(asked | by_peers | set(map(self.present, asked)))
        self._spellings = {one.casefold(): one for one in self._known}
        is_open = by_peers | {one for one, is_public in public.items() if is_public}
        self._open = frozenset(is_open | {one for one in renamed if self.present(one) in is_open})

    def spelled(self, repository: str) -> str:
        """Return the name of a repository as it was fetched, which differs from this one in case at most."""
        known = repository in self._known
        return repository if known else self._spellings.get(repository.casefold(), repository)

    def present(self, repository: str) -> str:
        """Return the present name of a repository, as far as the upstream has said it."""
        seen = {repository}
        while (name := self._renamed.get(repository, "")) and name not in seen:
            seen.add(name)
            repository = name
        return repository

    def keep(self, origin: Origin, *, is_public: bool | None) -> None:
        """Record durably that a commit is being fetched, and whether everyone may read its repository.

        ``is_public`` is None if the commit comes from a peer, which does not know it.

        Raises:
            StoreError: the store cannot be written.
        """
        key = (origin.repository, origin.commit)
        if is_public is not None:
            self._write_public(origin.repository, is_public=is_public)
        self._write(self._path(*key), origin.to_bytes())
        with self._lock:
            self._set(self._records | {key: origin.short()}, self._public, self._renamed)
            self.incomplete.discard(key)

    def note_public(self, repository: str, *, is_public: bool) -> None:
        """Note whether everyone may read a repository now, if anything of it was fetched. Raises as :meth:`keep`."""
        if self.of_repository(repository):
            self._write_public(repository, is_public=is_public)

    def note_called(self, repository: str, name: str) -> bool:
        """Note by which name the upstream calls a repository now, if anything of it was fetched. Raises as :meth:`keep`.

        If it had another name, and has this one again, it may be another repository: what was fetched is not public.
        A restricted one restricts the present name, too, until the upstream has shown both; return whether it does.
        """
        new = name if name != repository else ""
        is_new = new and new != self._renamed.get(repository) and self.of_repository(repository)
        if is_restricted := bool(is_new) and not self.is_public(repository):
            # First, so that at no time everyone may read what was fetched by the former name.
            self.note_public(self.present(new), is_public=False)
        if is_new or repository in self._renamed:
            self._write_public(repository, is_public=False, name=new)
        return is_restricted

    def _write_public(self, repository: str, *, is_public: bool, name: str = "") -> None:
        path = self._path(repository)
        now = self._public.get(repository), self._renamed.get(repository, "")
        if now != (is_public, name) or not is_there(path):
            value = {"repository": repository, "public": is_public}
            value |= {"name": name} if name else {}
            self._write(path, strict_json.dumps(value).encode())
            with self._lock:
                renamed = {one: it for one, it in self._renamed.items() if one != repository}
                renamed |= {repository: name} if name else {}
                self._set(self._records, self._public | {repository: is_public}, renamed)

    def _write(self, path: Path, data: bytes) -> None:
        with self._store.writing():
            make_folders(self._folder, self._store.root)
            write_file(path, [data])

    def hold(self, commit: Commit) -> None:
        """Keep the record of a commit, once there is one, until :meth:`release`: a fetch gives a name to it."""
        with self._lock:
            self._held[commit] += 1

    def release(self, commit: Commit) -> None:
        """Allow the record of a commit to be forgotten, unless there is another hold."""
        with self._lock:
            self._held -= Counter([commit])

    @contextlib.contextmanager
    def held(self, commit: Commit) -> Iterator[bool]:
        """Hold the record of a commit within the block. Yield whether there is one."""
        self.hold(commit)
        try:
            yield commit in self.records()
        finally:
            self.release(commit)

    def forget(self, origin: Origin) -> None:
        """Remove the record of a commit without a model in the store, unless it is held. Raises OSError."""
        key = (origin.repository, origin.commit)
        with self._lock:
            if self._held[key]:  # a fetch gives a name to it
                return
            self._path(*key).unlink(missing_ok=True)
            records = {one: found for one, found in self._records.items() if one != key}
            public = self._public
            is_last = all(one != origin.repository for one, _ in (*records, *self._held))
            # A restricted repository stays one: if the user brings an archive of it back, that opens nothing.
            if is_last and public.get(origin.repository):
                # Last: commits without it count as restricted.
                self._path(origin.repository).unlink(missing_ok=True)
                public = {one: it for one, it in public.items() if one != origin.repository}
            self._set(records, public, self._renamed)

    def records(self) -> Mapping[Commit, Origin]:
        """Return the records of commits that were fetched or are being fetched, as of now."""
        self._look()
        return self._records

    def all(self) -> list[Origin]:
        """Return the same as a list."""
        return list(self.records().values())

    def of_repository(self, repository: str) -> Sequence[Origin]:
        """Return the commits of a repository."""
        return [origin for origin in self.all() if origin.repository == repository]

    def called(self, repository: str) -> Sequence[Origin]:
        """Return the commits of a repository, also those that were fetched by its former names."""
        return [origin for origin in self.all() if self.present(origin.repository) == repository]

    def is_recorded(self, origin: Origin) -> bool:
        """Return whether the record of a commit is about a model of this origin, and not about that of another giver."""
        found = self.records().get((origin.repository, origin.commit))
        return found is not None and bool(found.peer) == origin.is_of_peer

    def is_public(self, repository: str) -> bool:
        """Return whether everyone may read all that was fetched of a repository, if there is anything."""
        return repository in self.open() or repository not in self._known

    def open(self) -> frozenset[str]:
        """Return the repositories that everyone may read. No other one is for everyone."""
        self._look()
        return self._open

    def brought(self, manifest: Digest) -> Brought | None:
        """Return for whom a model is that the user has brought from elsewhere; None for others. Raises StoreError."""
        noted = b"" if self._fault else _read(self._folder / brought_name(manifest))
        if not noted:
            return None
        return Brought.EVERYONE if noted == Brought.EVERYONE.value else Brought.READERS

    def origin(self, manifest: Manifest) -> Origin | None:
        """Return the commit that a model was fetched from; None for the store's own models. Raises StoreError."""
        commit = fetched_from(manifest)
        key = Digest.of(manifest.to_bytes())
        return commit and self.get(commit, key, is_of_peer=is_of_peer(manifest))

    def now(self, origin: Origin) -> Origin:
        """Return an origin that was read before: a model that was brought may be one of a fetch by now. Raises StoreError."""
        return replace(origin, brought=self.brought(origin.manifest)) if origin.manifest else origin

    def get(
        self, commit: Commit, manifest: Digest | None = None, *, is_of_peer: bool = False
    ) -> Origin:
        """Return the record of a commit that was fetched. If it is lost, note that, and return what the model says."""
        known, brought = self.records().get(commit), self.brought(manifest) if manifest else None
        if known is None and brought is None:
            self.incomplete.add(commit)
        found, key = known or Origin(*commit), manifest if brought else None
        return replace(found, brought=brought, manifest=key, is_of_peer=is_of_peer)

    def with_others(self, origin: Origin) -> Origin:
        """Return a record with its other files, which are read for that. Raises StoreError."""
        with contextlib.suppress(ValueError):  # it is damaged
            path = self._path(origin.repository, origin.commit)
            found = _Record.from_bytes(_read(path)).origin
            plain = replace(origin, brought=None, manifest=None, is_of_peer=False)
            if found is not None and found.short() == plain:
                return replace(origin, others=found.others)
        return origin

    def has_of_peer(self, commit: Commit) -> bool:
        """Return whether only a peer has given what the store has of a commit, which the upstream may have otherwise."""
        origin = self.records().get(commit)
        return origin is not None and origin.peer != ""

    def touch(self, origin: Origin) -> None:
        """Note that a model is used. The note survives the process, with an error of half a minute."""
        key, now = (origin.repository, origin.commit), time.time()
        self._used[key] = now
        if now - self._noted.get(key, 0.0) >= _TOUCH_SECONDS:
            self._noted[key] = now
            with contextlib.suppress(OSError):
                os.utime(self._path(*key))

    def last_use(self, origin: Origin) -> float:
        """Return when a model was last used, in seconds since the epoch; 0 if that is unknown."""
        key, noted = (origin.repository, origin.commit), 0.0
        with contextlib.suppress(OSError):
            noted = self._path(*key).stat().st_mtime
        return max(noted, self._used.get(key, 0.0))

    def _path(self, repository: str, commit: str = "") -> Path:
        """Return the path of the record of a commit, or of a repository."""
        return self._folder / record_name(repository, commit)


def _read(path: Path) -> bytes:
    """Return the bytes of a record or a note, none if it is not there. Raises StoreError."""
    try:
        return read_regular(path, _MAX_RECORD)
    except BlobstoreError:  # it is not a file of ours
        return b""
    except OSError as error:
        if is_absence(error):
            return b""
        raise StoreError(f"cannot read {quote(path)}: {error.strerror}") from error
