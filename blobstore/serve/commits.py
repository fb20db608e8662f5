"""The commits that the names of a store were fetched from, and those that versions of a repository are served as.

A repository's are found at once, on a thread: also those of versions that had a name before. They hold until its
names, the history of names or the records of what was fetched change. Until then a commit that no version has needs
no work, and after that the work for what is new alone.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple

from blobstore.core.digest import Digest
from blobstore.core.files import FileVersion
from blobstore.errors import BlobstoreError
from blobstore.manifests.model import Manifest
from blobstore.serve.expiring import bounded
from blobstore.serve.model_files import commit_of
from blobstore.serve.names import any_tag, name_of
from blobstore.serve.tags import settled_until
from blobstore.serve.unprepared import NotListed, prepared
from blobstore.store.fetched import fetched_from, is_of_peer
from blobstore.store.history import read_former

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from blobstore.manifests.reference import Reference
    from blobstore.serve.pulled import Origin, PulledModels
    from blobstore.serve.tags import Tags
    from blobstore.store.fetched import Commit
    from blobstore.store.local import LocalStore

_DAMAGED_SECONDS: Final = 5.0
"""Seconds before the origin of a damaged model is looked up again."""


def served_commit(origin: Origin | None, key: Digest) -> str:
    """Return the commit that a model is served as: that of the upstream only if this store has fetched it there."""
    return commit_of(key) if origin is None or origin.brought else origin.commit


class Version(NamedTuple):
    """A version of a repository, before it is prepared."""

    reference: Reference
    """A name that has it, or had it."""
    key: Digest
    """The digest of its manifest."""
    origin: Origin | None

    @property
    def commit(self) -> str:
        """The commit that it is served as."""
        return served_commit(self.origin, self.key)


class _Source(NamedTuple):
    """What a manifest was fetched from."""

    commit: Commit | None
    manifest: Digest | None = None
    """The digest of the manifest if a user has brought it from elsewhere; None for others, which stay what they are."""
    is_of_peer: bool = False
    until: float = math.inf
    """Until when that holds."""


class _Former(NamedTuple):
    """What a file of the history has."""

    key: Digest
    source: _Source


class _State(NamedTuple):
    """What the commits of a repository depend on."""

    keys: Mapping[Reference, Digest]
    history: FileVersion | None
    records: Mapping[Commit, Origin]

    def is_same(self, other: _State) -> bool:
        # Records that are read again are new, and equal.
        return self.keys is other.keys and self[1:] == other[1:]


class _Commits(NamedTuple):
    """The versions of a repository by their commits."""

    state: _State
    until: float
    versions: Mapping[str, list[Version]]
    former: Mapping[Path, _Former]


class Commits:
    """What is known of a store's commits. Threads may share it."""

    def __init__(self, store: LocalStore, pulled: PulledModels, tags: Tags) -> None:
        """Know none yet."""
        self._store, self._pulled, self._tags = store, pulled, tags
        self._sources: dict[Reference, tuple[FileVersion, _Source]] = {}
        """Of names, by the versions of their manifests."""
        self._commits: dict[Reference, _Commits] = {}

    def forget_absent(self) -> None:
        """Forget names and repositories that are gone."""
        for reference in list(self._sources):
            if self._store.manifest_version(reference) is None:
                self._sources.pop(reference, None)
        for repository in list(self._commits):
            if not self._tags.now(repository):
                self._commits.pop(repository, None)

    # Names

    def origins(self, references: Iterable[Reference]) -> Mapping[Reference, Origin | None]:
        """Return what names in the store were fetched from: None for the store's own, nothing for absent ones.

        Raises NotListed.
        """
        found: dict[Reference, Origin | None] = {}
        changed = []
        now = time.monotonic()
        self._pulled.records()  # looks at them, once for all names
        for reference in references:
            version = self._store.manifest_version(reference)
            known = self._sources.get(reference)
            if version is None:
                continue
            if known is None or known[0] != version or now >= known[1].until:
                changed.append(reference)
            else:
                found[reference] = self._origin(known[1])
        if changed:
            raise NotListed(self._find_sources, tuple(changed))
        return found

    def _find_sources(self, references: Iterable[Reference]) -> None:
        by_key: dict[Digest, _Source] = {}
        for reference in references:
            version = self._store.manifest_version(reference)
            if version is None:
                continue
            key = self._tags.key(reference, version)
            source = (by_key.get(key) if key else None) or self._source(reference)
            if self._store.manifest_version(reference) != version:
                continue  # what was read may be another model, and is looked at again
            if key is not None and source.until == math.inf:
                by_key[key] = source
            self._sources[reference] = version, source

    def _source(self, reference: Reference, data: bytes | None = None) -> _Source:
        """Return what a name was fetched from, or what it was when it had the manifest ``data``."""
        try:
            # No blob is read: that would take long for many names, and it is checked before it is served.
            data = self._store.read_manifest(reference) if data is None else data
            manifest = Manifest.from_bytes(data)
            commit = fetched_from(manifest)
            # Most were not fetched, and hashing all would take as long as reading them.
            key = Digest.of(data) if commit else None
            is_brought = key is not None and self._pulled.brought(key)
            return _Source(commit, key if is_brought else None, is_of_peer(manifest))
        except BlobstoreError:
            # It is damaged, or cannot be read now. If it may have been fetched, or be a copy of a restricted
            # model, only clients that may read the repository get it.
            several = [*self._pulled.of_repository(name_of(reference))] or [
                one for one in self._pulled.all() if not self._pulled.is_public(one.repository)
            ]
            commit = (several[0].repository, several[0].commit) if several else None
            peer = bool(several and several[0].peer)
            return _Source(commit, None, peer, time.monotonic() + _DAMAGED_SECONDS)

    def _origin(self, source: _Source) -> Origin | None:
        commit, manifest, is_of_peer, _ = source
        return commit and self._pulled.get(commit, manifest, is_of_peer=is_of_peer)

    # Versions

    def having(self, repository: Reference, commit: str) -> Sequence[Version]:
        """Return the versions of a repository that are served as a commit, also former ones. Raises NotListed."""
        if not self._tags.of(repository):
            return ()
        known, state = self._commits.get(repository), self._state(repository)
        if known is None or not known.state.is_same(state) or time.monotonic() >= known.until:
            raise NotListed(self._find, repository)
        return known.versions.get(commit, ())

    def _state(self, repository: Reference) -> _State:
        history = FileVersion.of(self._store.folder("history"))
        return _State(self._tags.keys(repository), history, self._pulled.records())

    def _find(self, repository: Reference) -> None:
        state = prepared(lambda: self._state(repository))
        origins = prepared(lambda: self.origins(state.keys))
        versions = defaultdict[str, list[Version]](list)
        until = settled_until(state.history)
        for reference, origin in origins.items():
            version = Version(reference, state.keys[reference], origin)
            versions[version.commit].append(version)
            if reference in self._sources:
                until = min(until, self._sources[reference][1].until)
        known = self._commits.get(repository)
        former: dict[Path, _Former] = {}
        for reference, path in self._store.names.former_files(self._tags.now(repository)):
            one = known.former.get(path) if known else None
            if one is None or time.monotonic() >= one.source.until:
                one = self._former(reference, path)
            if one is not None:
                former[path] = one
                version = Version(reference, one.key, self._origin(one.source))
                versions[version.commit].append(version)
                until = min(until, one.source.until)
        bounded(self._commits)[repository] = _Commits(state, until, dict(versions), former)

    def _former(self, reference: Reference, path: Path) -> _Former | None:
        for one in read_former(path):
            return _Former(Digest.of(one.data), self._source(reference, one.data))
        return None

    def read(self, reference: Reference, key: Digest, commit: str) -> bytes | None:
        """Return the manifest of a version; None, and forget the version, if it was removed, or lacks a blob."""
        for data in self._manifests(reference):
            if Digest.of(data) == key:
                return data
        known = self._commits.get(any_tag(reference))
        several = known.versions.get(commit, []) if known else []
        several[:] = [one for one in several if one.key != key]
        return None

    def _manifests(self, reference: Reference) -> Iterator[bytes]:
        """Yield the manifest of a name, and those that it had before."""
        with contextlib.suppress(BlobstoreError):
            yield self._store.read_manifest(reference)
        with contextlib.suppress(BlobstoreError):
            for former in self._store.names.former(reference):
                if self._store.has_blobs(Manifest.from_bytes(former.data).blobs):
                    yield former.data
