"""The names in a store and the digests of each tag, which a server needs repeatedly: all are kept, and are small.

A folder is listed again when its version has changed, on a thread; a look at it costs one status. By the digest of
each manifest, the starts of the digests of all its manifests and blobs in a registry are kept. Only
:meth:`Tags.having` reads them, to find the tags that are worth a look. Digests that are computed from the content of
blobs are noted in the store, so that they are known after a restart.
"""

from __future__ import annotations

import contextlib
import threading
import time
from array import array
from bisect import bisect_left
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from blobstore.core.digest import Digest
from blobstore.core.files import FileVersion
from blobstore.errors import BlobstoreError, InvalidReference
from blobstore.manifests.model import Manifest
from blobstore.manifests.reference import Reference
from blobstore.serve.made_digests import (
    MadeDigests,
    number_of,
    numbers_of,
    read_made,
    signed_at,
    write_made,
)
from blobstore.serve.unprepared import NotListed
from blobstore.store.scan import is_folder, scan_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from blobstore.store.local import LocalStore

_SETTLED_NS: Final = 2 * 10**9
"""Clocks of file systems are coarse: after a change so lately, the next one may get the same time."""
_UNSETTLED_SECONDS: Final = 1.0
"""Seconds that a list is valid which may lack such a change."""
_MAX_FOLDERS: Final = 200_000
_MAX_SEARCHES: Final = 10_000
MANY_TAGS: Final = 32
"""Describing so many manifests takes too long for a client to wait."""
_REPOSITORY: Final = 3
"""Folders between the root of all manifests and a repository: host, namespace, model."""


class _Folder(NamedTuple):
    version: FileVersion | None = None
    until: float = 0.0
    """The time from which it is listed again even if the version is the same."""
    folders: Sequence[str] = ()
    folded: Mapping[str, Sequence[str]] = {}
    """The folders by their names without case."""
    tags: Sequence[Reference] = ()
    """Of a repository, sorted."""

    def alike(self, name: str) -> Sequence[str]:
        """Return the folders whose names differ from this one in case at most."""
        return self.folded.get(name.casefold(), ())


class _Manifests(NamedTuple):
    """The manifests of a repository when its folder was listed."""

    folder: _Folder
    keys: Mapping[Reference, Digest]
    versions: Mapping[Reference, FileVersion | None]


class _Found(NamedTuple):
    manifests: _Manifests
    is_complete: bool
    tags: Sequence[Reference]


class Tags:
    """The names in a store. Threads may share it. All methods that return names but :meth:`all` raise NotListed."""

    def __init__(
        self, store: LocalStore, describe: Callable[[Reference], Iterable[Digest]]
    ) -> None:
        """List nothing yet.

        ``describe`` returns the digests of all manifests and blobs of a tag, and is slow.
        """
        self._store, self._describe = store, describe
        self._root = str(store.manifest_path(Reference.parse("model")).parents[3])
        self._folders: dict[str, _Folder] = {}
        self._manifests: dict[Reference, _Manifests] = {}
        self._blobs: dict[Digest, array[int]] = {}
        """The starts of the digests that manifests name, by the digests of the manifests."""
        self._made: dict[tuple[str, Digest], MadeDigests] = {}
        """The further digests that a registry has, by repository too, because some contents have its name."""
        self._derived: dict[tuple[str, Digest], tuple[str, array[int]]] = {}
        """The digests under a derived tag, with the end of that tag."""
        self._describing = threading.Lock()
        """Held for one manifest, so that none is described twice."""
        self._complete: dict[Reference, _Manifests] = {}
        """The repositories whose manifests are all described."""
        self._found: dict[tuple[Reference, Digest], _Found] = {}

    # Names

    def of(self, repository: Reference) -> Sequence[Reference]:
        """Return the tags of a repository, sorted."""
        return self._folder(self._path(repository)).tags

    def spelled(self, repository: Reference) -> Reference | None:
        """Return the repository with tags whose name differs from this one in case at most; None if there is none."""
        if self._folder(self._path(repository)).tags:
            return repository
        host = f"{self._root}/{repository.host}"
        for namespace in self._folder(host).alike(repository.namespace):
            for model in self._folder(f"{host}/{namespace}").alike(repository.model):
                with contextlib.suppress(InvalidReference):
                    found = Reference(repository.host, namespace, model, repository.tag)
                    if self._folder(self._path(found)).tags:
                        return found
        return None

    def all(self) -> Iterator[Reference]:
        """Yield the names of all models, sorted, after listing here what has changed. Raises StoreError."""
        self._store.check_root()
        paths = [self._root]
        for _ in range(_REPOSITORY):
            paths = [f"{path}/{name}" for path in paths for name in self._now(path).folders]
        for path in paths:
            yield from self._now(path).tags

    def _path(self, repository: Reference) -> str:
        return "/".join((self._root, *repository.parts[:_REPOSITORY]))

    def _folder(self, path: str) -> _Folder:
        found = self._known(path)
        if found is None:
            raise NotListed(self._list, path)
        return found

    def _now(self, path: str) -> _Folder:
        return self._known(path) or self._list(path)

    def _known(self, path: str) -> _Folder | None:
        """Return the content of a folder, empty if it is absent; None if it has to be listed."""
        version = FileVersion.of(Path(path))
        if version is None:
            return _Folder()
        known = self._folders.get(path)
        if known is None or known.version != version or time.monotonic() >= known.until:
            return None
        return known

    def _list(self, path: str) -> _Folder:
        # Before the folder is listed: a change in between makes another version.
        version, now = FileVersion.of(Path(path)), time.time_ns()
        is_settled = version is not None and version.changed < now - _SETTLED_NS
        until = float("inf") if is_settled else time.monotonic() + _UNSETTLED_SECONDS
        folders: list[str] = []
        files: list[str] = []
        for entry in scan_folder(path) if is_folder(path) else ():
            (folders if is_folder(entry.path) else files).append(entry.name)
        _, *parts = path[len(self._root) :].split("/")
        tags = []
        if len(parts) == _REPOSITORY:
            for name in files:
                with contextlib.suppress(InvalidReference):
                    tags.append(Reference(parts[0], parts[1], parts[2], name))
        folded: dict[str, list[str]] = {}
        for name in folders:
            folded.setdefault(name.casefold(), []).append(name)
        if len(self._folders) >= _MAX_FOLDERS:
            self._folders.clear()
        found = self._folders[path] = _Folder(version, until, folders, folded, tuple(tags))
        return found

    # Manifests

    def keys(self, repository: Reference) -> Mapping[Reference, Digest]:
        """Return the digests of the manifests of a repository by their tags; without those that cannot be read."""
        return self._read(repository).keys

    def _read(self, repository: Reference) -> _Manifests:
        folder, known = self._folder(self._path(repository)), self._manifests.get(repository)
        if not folder.tags:
            return _Manifests(folder, {}, {})
        if known is None or known.folder is not folder:
            raise NotListed(self._read_all, repository)
        return known

    def _read_all(self, repository: Reference) -> None:
        folder, former = self._now(self._path(repository)), self._manifests.get(repository)
        keys, versions = {}, {}
        for tag in folder.tags:
            # Before the manifest is read: a change in between makes another version.
            version = versions[tag] = self._store.manifest_version(tag)
            if former is not None and version is not None and former.versions.get(tag) == version:
                key = former.keys.get(tag)
            else:
                key = self._read_one(tag)
            if key is not None:
                keys[tag] = key
        self._manifests[repository] = _Manifests(folder, keys, versions)

    def _read_one(self, tag: Reference) -> Digest | None:
        try:
            data = self._store.read_manifest(tag)
        except BlobstoreError:
            return None
        key = Digest.of(data)
        if key not in self._blobs:
            self._blobs[key] = array("Q")
            with contextlib.suppress(BlobstoreError):
                self._blobs[key] = numbers_of(
                    blob.digest for blob in Manifest.from_bytes(data).blobs
                )
        return key

    # Digests

    def note(
        self, repository: Reference, key: Digest, digests: Iterable[Digest], ending: str = ""
    ) -> None:
        """Remember all digests that a registry has for a manifest, under its tag or one with another ending."""
        place = self._path(repository), key
        if ending:
            self._derived[place] = ending, numbers_of(digests)
        else:
            self._made[place] = self._made_of(key, digests, signed_at(self._store, key))

    def _made_of(self, key: Digest, digests: Iterable[Digest], signed: int) -> MadeDigests:
        known = set(self._blobs.get(key, ()))
        made = array("Q", (one for one in numbers_of(digests) if one not in known))
        return MadeDigests(signed, made)

    def having(self, repository: Reference, digest: Digest) -> Sequence[Reference]:
        """Return the tags that seem to have a manifest or a blob with this digest."""
        manifests, found = self._read(repository), self._found.get((repository, digest))
        is_complete = self._complete.get(repository) is manifests or not manifests.keys
        if found is not None and found.manifests is manifests:
            if found.tags or found.is_complete:
                return found.tags
            if not is_complete:
                raise NotListed(self._describe_all, repository)
        if not manifests.keys:
            return ()
        raise NotListed(self._search, repository, digest)

    def _search(self, repository: Reference, digest: Digest) -> None:
        manifests = self._manifests[repository]
        # Before the search, which may miss manifests that are described in between.
        is_complete = self._complete.get(repository) is manifests
        path, number, nothing = self._path(repository), number_of(digest), array("Q")
        found = []
        for tag, key in manifests.keys.items():
            made = self._made.get((path, key))
            if _has(self._blobs.get(key, nothing), number) or (made and _has(made.numbers, number)):
                found.append(tag)
            ending, numbers = self._derived.get((path, key), ("", nothing))
            if _has(numbers, number):
                found.append(Reference(*tag.parts[:_REPOSITORY], tag.tag + ending))
        if len(self._found) >= _MAX_SEARCHES:
            self._found.clear()
        self._found[repository, digest] = _Found(manifests, is_complete, found)

    def _describe_all(self, repository: Reference) -> None:
        manifests, path = self._manifests[repository], self._path(repository)
        noted, signed = read_made(self._store, repository), set(self._store.signed_manifests())
        described = 0
        for tag, key in manifests.keys.items():
            with self._describing:
                if (path, key) in self._made:
                    continue
                last = signed_at(self._store, key) if key in signed else 0
                found = noted.get(key)
                if found is None or found.signed != last:
                    found = MadeDigests(last, array("Q"))  # a registry has nothing of a damaged one
                    with contextlib.suppress(BlobstoreError):
                        found = self._made_of(key, self._describe(tag), last)
                        described += 1
                self._made[path, key] = found
        if described >= MANY_TAGS:
            self._write_note(repository, manifests)
        self._complete[repository] = manifests

    def _write_note(self, repository: Reference, manifests: _Manifests) -> None:
        path = self._path(repository)
        made = {key: self._made[path, key] for key in manifests.keys.values()}
        write_made(self._store, repository, {key: one for key, one in made.items() if one.numbers})


def _has(numbers: array[int], number: int) -> bool:
    place = bisect_left(numbers, number)
    return place < len(numbers) and numbers[place] == number
