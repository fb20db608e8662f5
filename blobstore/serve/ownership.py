"""Whose the names of a repository are: the operator's, or those that fetches have given for clients.

Finding out takes some system calls a name. If there are many, it is done on a thread, and kept until the repository or
the notes of fetches change.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from blobstore.core.files import FileVersion
from blobstore.serve.expiring import bounded
from blobstore.serve.names import any_tag
from blobstore.serve.tags import MANY, settled_until
from blobstore.serve.unprepared import NotListed, prepared

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from blobstore.manifests.reference import Reference
    from blobstore.serve.pulled import Origin, PulledModels
    from blobstore.serve.tags import Tags
    from blobstore.store.local import LocalStore


class Ownership(NamedTuple):
    """Whose the names of a repository are."""

    tags: Sequence[Reference]
    """All of them."""
    fetched: Sequence[Reference]
    """Those that fetches have given. The others are the operator's."""
    copies: Mapping[Reference, Origin]
    """What names were fetched, or copied, from."""

    @property
    def has_own(self) -> bool:
        """Whether a name is the operator's."""
        return len(self.tags) > len(self.fetched)


class _Kept(NamedTuple):
    ownership: Ownership
    version: FileVersion | None
    """Of the notes of fetches."""
    until: float


class Ownerships:
    """The ownerships of repositories. Threads may share it."""

    def __init__(
        self,
        store: LocalStore,
        tags: Tags,
        pulled: PulledModels,
        origins: Callable[[Iterable[Reference]], Mapping[Reference, Origin | None]],
    ) -> None:
        """Know none yet. ``origins`` returns what names were fetched from, or raises NotPrepared."""
        self._store, self._tags, self._pulled, self._origins = store, tags, pulled, origins
        self._notes = store.folder("pulled")
        self._kept: dict[Reference, _Kept] = {}

    def of(self, repository: Reference) -> Ownership:
        """Return whose the names of a repository are. Raises NotPrepared."""
        tags = self._tags.of(repository)
        if len(tags) < MANY:
            return self._found(tags)
        known = self._kept.get(any_tag(repository))
        if (
            known is None
            or known.ownership.tags is not tags
            or known.version != FileVersion.of(self._notes)
            or time.monotonic() >= known.until
        ):
            raise NotListed(self._find, any_tag(repository))
        return known.ownership

    def of_name(self, name: Reference) -> Ownership:
        """Return whose a name is, which need not exist. Raises NotPrepared."""
        is_taken = self._store.manifest_version(name) or self._store.is_gone(name)
        return self._found([name] if is_taken else [])

    def _find(self, repository: Reference) -> None:
        version = FileVersion.of(self._notes)  # first: a change in between makes another version
        until = settled_until(version)
        found = prepared(lambda: self._found(self._tags.of(repository)))
        bounded(self._kept)[repository] = _Kept(found, version, until)

    def _found(self, tags: Sequence[Reference]) -> Ownership:
        fetched = tuple(filter(self._pulled.names.has_given, tags))
        copies = {name: origin for name, origin in self._origins(tags).items() if origin}
        return Ownership(tags, fetched, copies)
