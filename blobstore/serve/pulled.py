"""The record of what was fetched from an upstream: a small file for each commit of a repository.

It is written before the model gets its name, so no crash leaves a fetched model that looks like one of the
store's own. Its time is that of the last use.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Self

from blobstore.core import strict_json
from blobstore.core.digest import Digest
from blobstore.core.escape import quote
from blobstore.core.files import FileVersion, make_folders, read_regular, write_file
from blobstore.errors import BlobstoreError, StoreError
from blobstore.models.source_layers import read_source_record
from blobstore.sources.hub_listing import COMMIT
from blobstore.store.scan import list_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from blobstore.manifests.model import Manifest
    from blobstore.store.local import LocalStore

Commit = tuple[str, str]
"""A repository of an upstream, and the name of a commit."""
_MAX_RECORD: Final = 64 << 20
_SETTLED_NS: Final = 2 * 10**9
"""Nanoseconds after which a change of a folder cannot have the same time as another one."""
_TOUCH_SECONDS: Final = 30.0
"""How exactly the time of the last use is noted."""


@dataclass(frozen=True, slots=True)
class Origin:
    """A commit of a repository at an upstream."""

    repository: str
    commit: str
    plain: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The files that the upstream does not list as large ones, and their names in git: 40 hexadecimal digits."""
    is_public: bool = False
    """Whether the upstream gives the files to everyone."""

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return what :meth:`to_bytes` has written. Raises ValueError if it is malformed."""
        value = strict_json.loads(data)
        try:
            made = cls(
                value["repository"], value["commit"], dict(value["plain"]), value["public"] is True
            )
        except (AttributeError, LookupError, TypeError) as error:
            raise ValueError("malformed record") from error
        names = (made.commit, *made.plain.values())
        if not isinstance(made.repository, str) or not all(
            isinstance(name, str) and COMMIT.fullmatch(name) for name in names
        ):
            raise ValueError("malformed record")
        return made

    def to_bytes(self) -> bytes:
        """Return the record as JSON."""
        value = {
            "repository": self.repository,
            "commit": self.commit,
            "plain": dict(self.plain),
            "public": self.is_public,
        }
        return strict_json.dumps(value).encode()


class PulledModels:
    """The records of a store. Threads may share it.

    Until :meth:`own`, each question finds what another process has written by then, and raises StoreError if a
    record is damaged: without it, a model would be served to everyone.
    """

    def __init__(self, store: LocalStore) -> None:
        """Read the records. Raises StoreError."""
        self._store = store
        self._folder = store.folder("pulled")
        self._lock = threading.Lock()
        self._is_own = False
        self._version: FileVersion | None = None
        """Of the folder, when the records were read, if a later change is another version."""
        self._files: dict[str, tuple[FileVersion | None, Origin]] = {}
        self._records: dict[Commit, Origin] = {}
        """They are replaced, and never changed, so that no reader needs the lock."""
        self._restricted: frozenset[str] = frozenset()
        self._used: dict[Commit, float] = {}
        """When models were last used by this process, and when that was noted."""
        self._noted: dict[Commit, float] = {}
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
            version = FileVersion.of(self._folder)
            if version is not None and version == self._version:
                return
            now = time.time_ns()
            files = {}
            for name in list_names(self._folder):
                path = self._folder / name
                # A file with a dot is one of a process that writes it, or was killed while it did.
                if name.startswith("."):
                    continue
                found, known = FileVersion.of(path), self._files.get(name)
                with contextlib.suppress(FileNotFoundError):  # removed since it was listed
                    if known is None or found is None or known[0] != found:
                        known = found, _read_record(path)
                    files[name] = known
            self._files = files
            origins = [origin for _, origin in files.values()]
            self._set({(one.repository, one.commit): one for one in origins})
            # Clocks of file systems are coarse: the next change may get the same time.
            is_settled = version is not None and version.changed < now - _SETTLED_NS
            self._version = version if is_settled else None

    def _set(self, records: dict[Commit, Origin]) -> None:
        self._records = records
        self._restricted = frozenset(
            one.repository for one in records.values() if not one.is_public
        )

    def keep(self, origin: Origin) -> None:
        """Note durably that a commit is being fetched, or what is known about it now.

        Raises:
            StoreError: the store cannot be written.
        """
        path = self._path(origin)
        with self._store.writing():
            make_folders(self._folder, self._store.root)
            write_file(path, [origin.to_bytes()])
        with self._lock:
            self._set(self._records | {(origin.repository, origin.commit): origin})

    def forget(self, origin: Origin) -> None:
        """Remove the record of a commit that the store has no model of any more. Raises OSError."""
        self._path(origin).unlink(missing_ok=True)
        with self._lock:
            key = (origin.repository, origin.commit)
            self._set({one: found for one, found in self._records.items() if one != key})

    def all(self) -> list[Origin]:
        """Return what was fetched, or is being fetched."""
        self._look()
        return list(self._records.values())

    def of_repository(self, repository: str) -> Iterable[Origin]:
        """Return the commits of a repository."""
        return [origin for origin in self.all() if origin.repository == repository]

    def is_public(self, repository: str) -> bool:
        """Return whether everyone may read all that was fetched of a repository."""
        return repository not in self.restricted()

    def restricted(self) -> frozenset[str]:
        """Return the repositories that not everyone may read."""
        self._look()
        return self._restricted

    def is_empty(self) -> bool:
        """Return whether nothing was fetched."""
        self._look()
        return not self._records

    def note_public(self, repository: str, *, is_public: bool) -> None:
        """Note whether everyone may read a repository now. Raises as :meth:`keep`."""
        for origin in self.of_repository(repository):
            if origin.is_public != is_public:
                self.keep(replace(origin, is_public=is_public))

    def origin(self, manifest: Manifest) -> Origin | None:
        """Return the commit that a model was fetched from; None if it is one of the store's own.

        Raises:
            BlobMissing, BlobDamaged: its source layer cannot be read.
        """
        return None if self.is_empty() else self.get(source_of(self._store, manifest))

    def get(self, commit: Commit | None) -> Origin | None:
        """Return the record of a commit; None if it was not fetched."""
        self._look()
        return None if commit is None else self._records.get(commit)

    def touch(self, origin: Origin) -> None:
        """Note that a model is used. The note survives the process, to half a minute."""
        key, now = (origin.repository, origin.commit), time.time()
        self._used[key] = now
        if now - self._noted.get(key, 0.0) >= _TOUCH_SECONDS:
            self._noted[key] = now
            with contextlib.suppress(OSError):
                os.utime(self._path(origin))

    def last_use(self, origin: Origin) -> float:
        """Return when a model was last used, in seconds since the epoch; 0 if nobody knows."""
        noted = 0.0
        with contextlib.suppress(OSError):
            noted = self._path(origin).stat().st_mtime
        return max(noted, self._used.get((origin.repository, origin.commit), 0.0))

    def _path(self, origin: Origin) -> Path:
        return self._folder / Digest.of(f"{origin.repository}@{origin.commit}".encode()).hex


def source_of(store: LocalStore, manifest: Manifest) -> Commit | None:
    """Return the commit that a model was imported from, if its source has one. Raises BlobMissing or BlobDamaged."""
    record = read_source_record(store, manifest)
    return (record.repository, record.commit) if record and record.commit else None


def _read_record(path: Path) -> Origin:
    """Return a record. Raises StoreError if it is damaged, and FileNotFoundError if it is gone."""
    try:
        return Origin.from_bytes(read_regular(path, _MAX_RECORD))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, BlobstoreError) as error:
        raise StoreError(
            f"{quote(path)}, the record of a fetched model, cannot be read: {error}",
            advice="remove the model, and then the file",
        ) from error
