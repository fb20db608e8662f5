"""Places whose versions a name can follow: the version that is there now, and its way into the store.

A place is asked repeatedly. An error concerns one request only; the next one may succeed.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from blobstore.core.arguments import local_path
from blobstore.core.digest import Digest
from blobstore.core.escape import quote
from blobstore.errors import BlobstoreError, ModelNotFound, UsageError
from blobstore.models.source_layers import read_source_record
from blobstore.operations.create.create import create
from blobstore.operations.maintenance.copy_to_store import copy_to_store
from blobstore.operations.transfer.pull import pull_model
from blobstore.planning.import_options import ImportOptions
from blobstore.registry.reference import RemoteReference
from blobstore.remotes.addresses import is_address, is_in_objects
from blobstore.remotes.transfer_cache import PullRecord
from blobstore.sources import hub
from blobstore.store.local import LocalStore
from blobstore.store.names import ABSENT, NameUpdate

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import Self

    from blobstore.core.progress import Progress
    from blobstore.manifests.reference import Reference
    from blobstore.objects.client import ObjectTag
    from blobstore.objects.store import ObjectStore

_DIGITS: Final = 12
"""Of a commit, as of the short form of a digest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The name that follows, and how its versions are fetched."""

    store: LocalStore
    reference: Reference
    jobs: int | None
    progress: Progress | None
    transfer: Mapping[str, Any]
    """Options of :func:`pull_model`."""

    def seen(self) -> NameUpdate:
        """Return the update of the name from what it has now. Raises BlobstoreError if that cannot be read."""
        return NameUpdate(self.reference, self.manifest() or ABSENT)

    def manifest(self) -> Digest | None:
        """Return the digest of the manifest that the name has; None if there is no such model."""
        with contextlib.suppress(ModelNotFound):
            return Digest.of(self.store.read_manifest(self.reference))
        return None


class Look(NamedTuple):
    """The version that a place has."""

    version: str
    """Identifies the version: a digest, a commit or a number."""
    has_waited: bool = False
    """Whether the place has waited for a change, so that it can be asked again at once."""


class Installed(NamedTuple):
    """A version that was installed."""

    version: str
    bytes_fetched: int
    """Bytes that were read from the place, or written to the store if the place is of this machine."""
    notices: tuple[str, ...] = ()
    label: str = ""
    """The end of the tag of a version that is kept; empty for the ID of the model."""


class Place(Protocol):
    """Where versions come from. It is closed at the end of a ``with`` block."""

    def known(self) -> str | None:
        """Return the version that the name has; None if the store does not know it."""

    def look(self, known: str | None, wait: int) -> Look:
        """Return the version that is there now.

        Some places wait up to ``wait`` seconds for another version than ``known``.

        Raises:
            BlobstoreError: the place cannot be read.
        """

    def install(self, update: NameUpdate) -> Installed:
        """Give the name the version that is there now. If this fails, the name is unchanged.

        Raises:
            NameTaken: the name was given to another model after ``update`` was made.
            BlobstoreError: the version cannot be fetched or installed.
        """

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...


class ClosedPlace:
    """A place that holds nothing open."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close nothing."""


class RegistryTag(ClosedPlace):
    """A tag of a registry, or of a server of another store."""

    def __init__(self, target: Target, text: str) -> None:
        """Ask nothing yet. Raises InvalidReference, and UsageError for a digest."""
        self._target = target
        self._address = RemoteReference.parse(text)
        if self._address.digest is not None:
            raise UsageError(
                f"{quote(text)} names a digest, which never changes", advice="follow a tag"
            )
        from blobstore.registry.client import RegistryClient

        plain_http = self._address.uses_plain_http(target.transfer.get("plain_http"))
        self._client = RegistryClient(self._address.host, plain_http=plain_http)

    def known(self) -> str | None:
        """See :class:`Place`."""
        record = PullRecord.read(self._target.store, self._target.reference)
        return record.digest if record and record.remote == str(self._address) else None

    def look(self, known: str | None, wait: int) -> Look:
        """See :class:`Place`."""
        digest, has_waited = self._client.watch_manifest(
            self._address.repository,
            self._address.tag,
            None if known is None else Digest.parse(known),
            wait,
        )
        return Look(str(digest), has_waited)

    def install(self, update: NameUpdate) -> Installed:
        """See :class:`Place`."""
        return _pull(self._target, self._address, update)

    def __exit__(self, *_: object) -> None:
        self._client.close()


class ObjectName(ClosedPlace):
    """A name in object storage, or in a folder that is used as if it were there."""

    def __init__(self, target: Target, text: str) -> None:
        """Ask nothing yet."""
        self._target = target
        self._text = text
        self._place: tuple[ObjectStore, Reference] | None = None
        self._seen: tuple[ObjectTag, Look] | None = None

    def known(self) -> str | None:
        """See :class:`Place`."""
        return _text(self._target.manifest())

    def look(self, known: str | None, wait: int) -> Look:
        """See :class:`Place`."""
        del known, wait
        if self._place is not None and self._seen is not None:
            store, reference = self._place
            if store.tag_of(reference) == self._seen[0]:
                return self._seen[1]
        if self._place is None:
            from blobstore.objects.source import ObjectSource

            found, address, _ = ObjectSource.locate(self._text)
            self._place = found, address.reference
        store, reference = self._place
        data, tag = store.read_version(reference)
        seen = Look(str(Digest.of(data)))
        self._seen = None if tag is None else (tag, seen)
        return seen

    def install(self, update: NameUpdate) -> Installed:
        """See :class:`Place`."""
        return _pull(self._target, self._text, update)


class HubRevision(ClosedPlace):
    """A revision of a repository of the Hub."""

    def __init__(self, target: Target, text: str) -> None:
        """Ask nothing yet. Raises UsageError."""
        self._target = target
        self._text = text
        self._repository, _ = hub.parse_hub_id(text)

    def known(self) -> str | None:
        """See :class:`Place`."""
        return self._record()[0]

    def _record(self) -> tuple[str | None, Mapping[str, Any]]:
        """Return the commit and the import options of the name's model, if it is from this repository."""
        store = self._target.store
        with contextlib.suppress(ModelNotFound):
            record = read_source_record(store, store.resolve(self._target.reference))
            if record is not None and record.repository == self._repository:
                return record.commit, record.options
        return None, {}

    def look(self, known: str | None, wait: int) -> Look:
        """See :class:`Place`."""
        del known, wait
        return Look(hub.commit_of(self._text))

    def install(self, update: NameUpdate) -> Installed:
        """See :class:`Place`."""
        target = self._target
        # The next version is imported like the last one: quantized, for example.
        _, options = self._record()
        created = create(
            self._text,
            update,
            store=target.store,
            jobs=target.jobs,
            progress=target.progress,
            **ImportOptions.from_json(options).arguments,
        )
        commit = created.commit or ""
        return Installed(commit, created.bytes_written, created.notices, commit[:_DIGITS])


class StoreName(ClosedPlace):
    """The same name in another store of this machine."""

    def __init__(self, target: Target, folder: Path) -> None:
        self._target = target
        self._store = LocalStore(folder)

    def known(self) -> str | None:
        """See :class:`Place`."""
        return _text(self._target.manifest())

    def look(self, known: str | None, wait: int) -> Look:
        """See :class:`Place`."""
        del known, wait
        return Look(str(Digest.of(self._store.read_manifest(self._target.reference))))

    def install(self, update: NameUpdate) -> Installed:
        """See :class:`Place`."""
        target = self._target
        copied = copy_to_store(
            target.reference,
            target.store,
            update,
            store=self._store,
            jobs=target.jobs,
            progress=target.progress,
        )
        return Installed(str(copied.digest), copied.bytes_written)


def _pull(target: Target, remote: str | RemoteReference, update: NameUpdate) -> Installed:
    pulled = pull_model(
        remote,
        update,
        store=target.store,
        jobs=target.jobs,
        progress=target.progress,
        **target.transfer,
    )
    return Installed(str(pulled.digest), pulled.bytes_fetched, pulled.notices)


def _text(digest: Digest | None) -> str | None:
    return None if digest is None else str(digest)


def find_place(target: Target, source: str) -> Place:
    """Return the place that a text names: an address, or the folder of another store.

    Raises:
        UsageError: it names none, or a place whose versions never change.
    """
    if source.startswith(hub.SCHEME):
        return HubRevision(target, source)
    if is_in_objects(source):
        return ObjectName(target, source)
    if not is_address(source):
        with contextlib.suppress(OSError, BlobstoreError):
            folder = local_path(source, "source")
            if folder.is_dir():
                return StoreName(target, folder)
    return RegistryTag(target, source)
