"""What a store remembers of its transfers: unfinished uploads, blobs of repositories, and origins of names.

All of it is a cache that may vanish or be wrong at any time. Without an entry, an upload begins at its first
byte, a blob is uploaded that the registry could have mounted from another repository, and a pull needs
``--force`` to replace what an earlier one fetched. ``gc`` removes the entries of uploads after a week,
when registries have forgotten them too.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from blobstore.core.digest import Digest
from blobstore.core.files import make_folders
from blobstore.errors import BlobstoreError
from blobstore.registry.reference import RemoteReference
from blobstore.registry.upload import UploadSession
from blobstore.remotes.addresses import is_in_objects
from blobstore.store.notes import NoteKind, read_own, write_own

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path
    from typing import Self

    from blobstore.manifests.reference import Reference
    from blobstore.objects.source import ObjectSource
    from blobstore.registry.store import RemoteSource
    from blobstore.store.local import LocalStore

_MAX_REPOSITORIES: Final = 32
"""Per registry; the oldest are forgotten first."""
_NOTE: Final = NoteKind("transfers 1")
_UPLOAD: Final = "upload-"


class PushCache:
    """The entries about one repository.

    Two processes that went on with one upload would damage it. So the first one locks the uploads of the
    repository, and others neither read nor write them.
    """

    def __init__(self, store: LocalStore, remote: RemoteReference) -> None:
        self._root = store.root
        self._folder = store.folder("remotes")
        self._host, self._repository = remote.host, remote.repository
        self._lock: int | None = None

    def __enter__(self) -> Self:
        """Lock the uploads, if the store can be written and no other process has locked them."""
        path = self._folder / f"lock-{self._key('')}"
        with contextlib.suppress(OSError):
            make_folders(path.parent, self._root, durable=False)
            self._lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.utime(self._lock)  # gc removes old ones
            return self
        # Another process has the lock, or nothing can be locked: go on without uploads to resume.
        self.__exit__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # Unfinished uploads

    def session(self, digest: Digest) -> UploadSession | None:
        """Return the unfinished upload of a blob, if there is one."""
        if self._lock is None:
            return None
        match read_own(self._upload(digest), _NOTE):
            case {"url": str(url), "offset": int(offset)}:
                return UploadSession(url, offset)
        return None

    def keep_session(self, digest: Digest, session: UploadSession) -> None:
        """Remember an unfinished upload."""
        if self._lock is not None:
            value = {"url": session.url, "offset": session.offset}
            write_own(self._upload(digest), self._root, _NOTE, value)

    def forget_session(self, digest: Digest) -> None:
        """Forget an upload."""
        if self._lock is not None:
            with contextlib.suppress(OSError):
                self._upload(digest).unlink(missing_ok=True)

    def _upload(self, digest: Digest) -> Path:
        return self._folder / f"{_UPLOAD}{self._key(f'@{digest}')}"

    def _key(self, rest: str) -> str:
        return Digest.of(f"{self._host}/{self._repository}{rest}".encode()).hex

    # Blobs of repositories

    def sources(self) -> Mapping[str, str]:
        """Return another repository of the registry for each blob that one has, by hex digest."""
        return {
            blob: other
            for other, blobs in self._pushed().items()
            if other != self._repository
            for blob in blobs
        }

    def add(self, digests: Iterable[Digest]) -> None:
        """Remember blobs that the repository has now."""
        # Without a lock: another process may undo this entry, which costs uploads only.
        known = self._pushed()
        # The repository moves to the end, so that the oldest are forgotten first.
        blobs = dict.fromkeys((*known.pop(self._repository, ()), *(one.hex for one in digests)))
        known[self._repository] = list(blobs)
        write_own(self._registry, self._root, _NOTE, dict(list(known.items())[-_MAX_REPOSITORIES:]))

    @property
    def _registry(self) -> Path:
        return self._folder / f"registry-{Digest.of(self._host.encode()).hex}"

    def _pushed(self) -> dict[str, list[str]]:
        value: Any = read_own(self._registry, _NOTE)
        is_sound = isinstance(value, dict) and all(
            isinstance(blobs, list) and all(isinstance(blob, str) for blob in blobs)
            for blobs in value.values()
        )
        return value if is_sound else {}


class PullRecord(NamedTuple):
    """Where the model of a name was pulled from, and its manifests."""

    remote: str
    """The address."""
    digest: str
    """Of the manifest in the registry."""
    manifest: str
    """Digest of the manifest in the store, which differs from that if files were imported."""

    @classmethod
    def of(cls, source: RemoteSource | ObjectSource, manifest: Digest) -> PullRecord:
        """Describe a model that was pulled, and has this manifest in the store."""
        return cls(str(source.address), str(source.root.digest), str(manifest))

    @classmethod
    def read(cls, store: LocalStore, reference: Reference) -> PullRecord | None:
        """Return the entry about a name; None if there is no entry, or if the name has another model by now."""
        match read_own(_pulled(store, reference), _NOTE):
            case {"remote": str(remote), "digest": str(digest), "manifest": str(manifest)}:
                with contextlib.suppress(BlobstoreError):
                    if manifest == str(Digest.of(store.read_manifest(reference))):
                        if not is_in_objects(remote):  # as addresses are written now
                            remote = str(RemoteReference.parse(remote))
                        return cls(remote, digest, manifest)
        return None

    def keep(self, store: LocalStore, reference: Reference) -> None:
        """Remember it for a name."""
        write_own(_pulled(store, reference), store.root, _NOTE, self._asdict())


def _pulled(store: LocalStore, reference: Reference) -> Path:
    return store.folder("remotes") / f"pulled-{Digest.of(str(reference).encode()).hex}"
