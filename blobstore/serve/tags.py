"""The names in a store and the digests of each tag, which a server needs repeatedly: all are kept, and are small.

A folder is listed again when its version has changed, on a thread; a look at it costs one status. As long as a tag has
a manifest, the starts of the digests of all manifests and blobs that a registry has for it are kept. Only
:meth:`Tags.having` reads them, to find the tags that are worth a look.

A manifest names its blobs. The other digests are known only after blobs were read, which takes some milliseconds: then
the manifest is described. A digest that nothing known has makes :meth:`Tags.having` describe :data:`MANY` manifests of
those that the client may see. It is then asked again, so that others have their turn. :meth:`Tags.describe_all`
describes all of them before clients ask. The result is noted in the store for the next server.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from array import array
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from blobstore.core.digest import Digest
from blobstore.core.files import FileVersion
from blobstore.errors import BlobstoreError, InvalidReference
from blobstore.manifests.reference import Reference
from blobstore.serve.expiring import bounded
from blobstore.serve.made_digests import (
    MadeDigests,
    number_of,
    numbers_of,
    read_made,
    signed_at,
    write_made,
)
from blobstore.serve.unprepared import NotListed, prepared
from blobstore.store.catalog import read_some
from blobstore.store.scan import folders_and_files, is_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from blobstore.store.catalog import CatalogEntry
    from blobstore.store.local import LocalStore

    Seen = Callable[[Iterable[Reference]], Sequence[Reference]]
    """Returns those of some names that a client sees. Raises NotPrepared. Equal ones see the same."""

_SETTLED_NS: Final = 2 * 10**9
"""Clocks of file systems are coarse: after a change so lately, the next one may get the same time."""
_UNSETTLED_SECONDS: Final = 1.0
"""Seconds that a list is valid which may lack such a change."""
_MAX_FOLDERS: Final = 200_000
_MAX_SEARCHES: Final = 10_000
MANY: Final = 128
"""Manifests that are described in one go, and from which on they are noted."""
_REPOSITORY: Final = 3
"""Folders between the root of all manifests and a repository: host, namespace, model."""


def settled_until(version: FileVersion | None) -> float:
    """Return until when a folder without another version is unchanged, of which this version was just read."""
    is_settled = version is None or version.changed < time.time_ns() - _SETTLED_NS
    return math.inf if is_settled else time.monotonic() + _UNSETTLED_SECONDS


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


@dataclass(slots=True, eq=False)
class _Known:
    """The digests that a registry has for one manifest."""

    key: Digest
    blobs: array[int] = field(default_factory=lambda: array("Q"))
    """The digests that it names."""
    made: MadeDigests | None = None
    """The further digests, which depend on the name of the repository. None until it is described."""
    ending: str = ""
    derived: array[int] = field(default_factory=lambda: array("Q"))
    """The digests under a derived tag, which has this ending."""


@dataclass(slots=True, eq=False)
class _Manifests:
    """The manifests of a repository when its folder was listed."""

    folder: _Folder | None = None
    """None before it is listed. Manifests that clients were given may be known by then."""
    known: dict[Reference, _Known] = field(default_factory=dict)
    versions: dict[Reference, FileVersion | None] = field(default_factory=dict)
    keys: Mapping[Reference, Digest] = field(default_factory=dict)
    unknown: Sequence[Reference] = ()
    """Those that are not described."""
    unnoted: int = 0
    """How many were described since the note was written."""
    found: dict[tuple[Digest, Seen], Sequence[Reference]] = field(default_factory=dict)
    """The results of searches."""
    reading: threading.Lock = field(default_factory=threading.Lock)
    """Held while the manifests are read, so that none is read twice."""

    def look(self) -> None:
        """List those that are not described again, after others were."""
        self.unknown = [tag for tag, one in list(self.known.items()) if one.made is None]
        self.found.clear()


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
        self._manifests: dict[str, _Manifests] = {}
        """Those of repositories, by the paths of their folders."""
        self._describing = threading.Lock()
        """Held for one manifest, so that none is described twice."""
        self._changes = 0
        """How often a repository had to be listed again."""

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

    def now(self, repository: Reference) -> Sequence[Reference]:
        """Return the tags of a repository, sorted, after listing them here if they have changed. Raises StoreError."""
        return self._now(self._path(repository)).tags

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
        version = FileVersion.of(path)
        if version is None:
            return _Folder()
        known = self._folders.get(path)
        if known is None or known.version != version or time.monotonic() >= known.until:
            return None
        return known

    def _list(self, path: str) -> _Folder:
        # Before the folder is listed: a change in between makes another version.
        changes, version = self._changes, FileVersion.of(path)
        until = settled_until(version)
        folders, files = folders_and_files(path) if is_folder(path) else ([], [])
        _, *parts = path[len(self._root) :].split("/")
        tags = []
        if len(parts) == _REPOSITORY:
            for name in files:
                with contextlib.suppress(InvalidReference):
                    tags.append(Reference(parts[0], parts[1], parts[2], name))
        folded: dict[str, list[str]] = {}
        for name in folders:
            folded.setdefault(name.casefold(), []).append(name)
        found = _Folder(version, until, folders, folded, tuple(tags))
        bounded(self._folders, _MAX_FOLDERS)[path] = found
        if changes != self._changes:  # maybe since it was listed
            self._folders.pop(path, None)
        return found

    def list_again(self, repository: Reference) -> None:
        """List a repository again: it has other tags, or repaired ones, which its version need not show."""
        self._changes += 1  # first: who lists it now looks at that last
        self._folders.pop(self._path(repository), None)
        manifests = self._manifests.get(self._path(repository), _Manifests())
        for one in list(manifests.known.values()):
            if one.made is not None and not one.made.numbers:  # it was damaged
                one.made = None
        manifests.look()

    def tidy(self) -> None:
        """Forget tags that are gone, and note what was described. Call it from time to time, on a thread."""
        for path, manifests in list(self._manifests.items()):
            if FileVersion.of(path) is None:
                self._manifests.pop(path, None)
                self._folders.pop(path, None)
            elif manifests.folder is None:  # nobody has asked for it yet
                for tag in list(manifests.known):
                    if self._store.manifest_version(tag) is None:
                        manifests.known.pop(tag, None)
            else:
                self._write_note(manifests, least=MANY)

    # Manifests

    def keys(self, repository: Reference) -> Mapping[Reference, Digest]:
        """Return the digests of the manifests of a repository by their tags; without those that cannot be read.

        As long as nothing has changed, it is the same mapping.
        """
        return self._read(repository).keys

    def _read(self, repository: Reference) -> _Manifests:
        path = self._path(repository)
        folder, known = self._folder(path), self._manifests.get(path)
        if not folder.tags:
            return _Manifests()
        if known is None or known.folder is not folder:
            raise NotListed(self._read_all, repository)
        return known

    def _read_all(self, repository: Reference) -> None:
        path = self._path(repository)
        with self._manifests.setdefault(path, _Manifests()).reading:
            folder, former = self._now(path), self._manifests[path]
            if former.folder is folder:
                return
            manifests = _Manifests(folder, unnoted=former.unnoted, reading=former.reading)
            by_key = {one.key: one for one in list(former.known.values())}
            changed = []
            for tag in folder.tags:
                version = manifests.versions[tag] = self._store.manifest_version(tag)
                if (one := former.known.get(tag)) is not None:
                    manifests.known[tag] = one
                if one is None or version is None or former.versions.get(tag) != version:
                    changed.append(tag)
            catalog = read_some(self._store, changed)
            for tag in changed:
                manifests.known.pop(tag, None)
                if (one := self._read_one(catalog.get(tag), by_key)) is not None:
                    manifests.known[tag] = one
            catalog.references.save(keeps_others=True)
            keys = {tag: one.key for tag, one in manifests.known.items()}
            manifests.keys = former.keys if keys == former.keys else keys
            if former.folder is None:
                self._read_note(repository, manifests)
            manifests.look()
            self._manifests[path] = manifests

    def _read_one(self, entry: CatalogEntry | None, by_key: dict[Digest, _Known]) -> _Known | None:
        if entry is None:
            return None
        key = entry.digest
        if key is None:  # it breaks the format
            with contextlib.suppress(BlobstoreError):
                key = Digest.of(self._store.read_manifest(entry.reference))
        one = by_key.setdefault(key, _Known(key)) if key is not None else None
        if one is not None and not one.blobs:
            one.blobs = numbers_of(entry.blobs)
        return one

    def key(self, tag: Reference, version: FileVersion) -> Digest | None:
        """Return the digest of the manifest that a tag had when its file had this version; None if nobody has asked."""
        manifests = self._manifests.get(self._path(tag), _Manifests())
        one = manifests.known.get(tag)
        return one.key if one is not None and manifests.versions.get(tag) == version else None

    # Digests

    def note(
        self, tag: Reference, key: Digest, digests: Iterable[Digest], ending: str = ""
    ) -> None:
        """Remember all digests that a registry has for a manifest, under its tag or one with another ending."""
        manifests = self._manifests.setdefault(self._path(tag), _Manifests())
        one = manifests.known.get(tag)
        if one is None or one.key != key:
            one = manifests.known[tag] = _Known(key)
        if ending:
            one.ending, one.derived = ending, numbers_of(digests)
            return
        manifests.unnoted += one.made is None
        one.made = _made_of(one, digests, signed_at(self._store, key))
        manifests.found.clear()

    def having(
        self, repository: Reference, digest: Digest, seen: Seen = list
    ) -> Sequence[Reference]:
        """Return one tag for each manifest that seems to have a manifest or a blob with this digest, and a client sees."""
        manifests = self._read(repository)
        found = manifests.found.get((digest, seen)) if manifests.keys else ()
        if found is None:
            # With another number of these, it is other work, for which nobody has waited yet.
            raise NotListed(self._search, repository, digest, seen, len(manifests.unknown))
        return found

    def _search(self, repository: Reference, digest: Digest, seen: Seen, _: int) -> None:
        manifests = self._manifests.get(self._path(repository), _Manifests())
        having = _having(manifests, digest)
        tags = [one.tag for one in having]
        several = set(prepared(lambda: seen(tags)))
        # Names of one manifest have the same.
        kept = {(one.key, one.ending): one for one in having if one.tag in several}
        found = [
            Reference(*it.tag.parts[:_REPOSITORY], it.tag.tag + it.ending) for it in kept.values()
        ]
        if found or not self._describe_some(manifests, seen):
            bounded(manifests.found, _MAX_SEARCHES)[digest, seen] = found
            self._write_note(manifests, least=MANY)

    def describe_all(self, repository: Reference, seen: Seen) -> None:
        """Describe the manifests of a repository that a client sees, a few at a time, and note them."""
        manifests = prepared(lambda: self._read(repository))
        while self._describe_some(manifests, seen):
            manifests = prepared(lambda: self._read(repository))
        self._write_note(manifests, least=1)

    def _describe_some(self, manifests: _Manifests, seen: Seen) -> bool:
        """Describe some that a client sees; return False if all of them are described."""
        unknown = prepared(lambda: seen(manifests.unknown)) if manifests.unknown else ()
        for tag in unknown[:MANY]:
            one = manifests.known.get(tag)
            with self._describing:
                if one is None or one.made is not None:
                    continue
                signed = signed_at(self._store, one.key)
                made = MadeDigests(signed, array("Q"))  # a registry has nothing of a damaged one
                with contextlib.suppress(BlobstoreError):
                    made = _made_of(one, self._describe(tag), signed)
                one.made = made
                manifests.unnoted += 1
        if unknown:
            manifests.look()
        return bool(unknown)

    def _read_note(self, repository: Reference, manifests: _Manifests) -> None:
        noted = read_made(self._store, repository)
        signed = set(self._store.signed_manifests()) if noted else ()
        for one in manifests.known.values():
            found = noted.get(one.key)
            last = signed_at(self._store, one.key) if one.key in signed else 0
            if one.made is None and found is not None and found.signed == last:
                one.made = found

    def _write_note(self, manifests: _Manifests, least: int) -> None:
        if manifests.unnoted >= least and manifests.keys:
            manifests.unnoted = 0
            several = [(one.key, one.made) for one in list(manifests.known.values())]
            made = {key: made for key, made in several if made is not None and made.numbers}
            write_made(self._store, next(iter(manifests.keys)), made)


def _made_of(one: _Known, digests: Iterable[Digest], signed: int) -> MadeDigests:
    blobs = set(one.blobs)
    made = array("Q", (number for number in numbers_of(digests) if number not in blobs))
    return MadeDigests(signed, made)


class _Having(NamedTuple):
    """A tag that seems to have a digest: itself, or a name that its own and ``ending`` make."""

    tag: Reference
    key: Digest
    """Of its manifest."""
    ending: str = ""


def _having(manifests: _Manifests, digest: Digest) -> list[_Having]:
    number, found = number_of(digest), []
    for tag, one in list(manifests.known.items()):
        if _has(one.blobs, number) or (one.made and _has(one.made.numbers, number)):
            found.append(_Having(tag, one.key))
        if one.ending and _has(one.derived, number):
            found.append(_Having(tag, one.key, one.ending))
    return found


def _has(numbers: array[int], number: int) -> bool:
    place = bisect_left(numbers, number)
    return place < len(numbers) and numbers[place] == number
