"""Former manifests: what a name was before it was given to another model.

Each is a file of its own in one folder, with the bytes of the manifest. Its name has the time, and a hash of
the model's name, so that no name has to be parsed. The files keep no blob alive: :mod:`gc` removes them when
their blobs are gone. Nothing but ``restore`` reads them, and all of them may be deleted at any time.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from blobstore.core.digest import Digest
from blobstore.core.escape import cli_command, quote
from blobstore.core.files import is_absence, make_folders, read_regular, write_file
from blobstore.errors import BlobstoreError, InvalidManifest, StoreError
from blobstore.manifests.descriptor import PlainDescriptors
from blobstore.manifests.model import MAX_MANIFEST_SIZE, Manifest
from blobstore.store.scan import list_names

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator
    from pathlib import Path

    from blobstore.manifests.reference import Reference
    from blobstore.store.layout import Layout

_KEPT = 20
"""Former manifests of one name; older ones are removed."""
_NANOSECONDS = 10**9
_NAME = re.compile(r"[0-9]{20}-[0-9a-f]{32}")


class FormerManifest(NamedTuple):
    """A manifest that a name had."""

    until: float
    """When it was replaced, in seconds since the epoch."""
    data: bytes
    """The bytes of the manifest."""
    path: Path


class History:
    """The former manifests of a store."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def keep(self, reference: Reference, data: bytes) -> None:
        """Keep the manifest of a name that is about to get another one. Raises as :meth:`keep_all`."""
        self.keep_all([(reference, data)])

    def keep_all(self, models: Iterable[tuple[Reference, bytes]]) -> None:
        """Keep manifests of names that are about to get other ones, or to be removed, durably.

        Raises:
            OSError: the store cannot be written.
        """
        folder = self._layout.history
        for missing in (folder, self._layout.temporary):
            make_folders(missing, self._layout.root)
        kept = self._names()  # listed once, as there may be thousands
        for reference, data in models:
            names = kept[_key(reference)]
            # Later than the last one even if the clock was set back, or this one would be the oldest.
            last = max(names, default="0").partition("-")[0]
            stamp = max(time.time_ns(), int(last) + 1)
            # 20 digits hold any number of nanoseconds of 64 bits, so names sort by time.
            names.append(f"{stamp:020d}-{_key(reference)}")
            write_file(folder / names[-1], [data], mode=0o644, temporary=self._layout.temporary)
            # Only after the new file is durable, so a crash leaves too many files and never too few.
            for old in names[:-_KEPT]:
                (folder / old).unlink(missing_ok=True)

    def of(self, reference: Reference | None) -> Iterator[FormerManifest]:
        """Yield the former manifests of a name that can be read, latest first; without a name, those of all."""
        if reference is not None:
            for _, path in self.files([reference]):
                yield from read_former(path)
        else:
            for name in chain(*self._names().values()):
                yield from read_former(self._layout.history / name)

    def files(self, references: Iterable[Reference]) -> Iterator[tuple[Reference, Path]]:
        """Yield the files of the former manifests of names, for each the latest first. What one says never changes."""
        found = self._names()
        for reference in references if found else ():
            for name in reversed(found.get(_key(reference), ())):
                yield reference, self._layout.history / name

    def _names(self) -> defaultdict[str, list[str]]:
        """Return the names of the files of each model, by :func:`_key`, oldest first."""
        found = defaultdict[str, list[str]](list)
        for name in sorted(filter(_NAME.fullmatch, list_names(self._layout.history))):
            found[name.rpartition("-")[2]].append(name)
        return found


class _Former(NamedTuple):
    """The content of a file with a former manifest, which never changes."""

    manifest: Digest
    blobs: frozenset[str] | None
    """Hex digests; None if the file is damaged."""


class WholeHistory:
    """The former manifests of all names. Each is read once, however often the folder is."""

    def __init__(self, layout: Layout) -> None:
        """Read nothing yet."""
        self._folder = layout.history
        self._former: dict[str, _Former | None] = {}
        self._known = PlainDescriptors()

    def update(self) -> None:
        """Read the files that are new. Raises StoreError."""
        former = self._former
        self._former = {
            name: former[name] if name in former else self._read(name)
            for name in list_names(self._folder)
        }

    def manifests(self) -> set[Digest]:
        """Return the digests of the manifests."""
        return {one.manifest for one in self._former.values() if one is not None}

    def blobs(self) -> set[str]:
        """Return the hex digests of the blobs that they reference."""
        return {blob for one in self._former.values() if one for blob in one.blobs or ()}

    def lost(self, there: Container[str]) -> Iterator[Path]:
        """Yield the files of those that cannot be restored: damaged ones, or without a blob that is ``there``."""
        for name, one in self._former.items():
            if one and (one.blobs is None or not all(blob in there for blob in one.blobs)):
                yield self._folder / name

    def _read(self, name: str) -> _Former | None:
        for former in read_former(self._folder / name):
            digest = Digest.of(former.data)
            try:
                manifest = Manifest.from_bytes(former.data, self._known)
            except InvalidManifest:
                return _Former(digest, None)
            return _Former(digest, frozenset(blob.digest.hex for blob in manifest.blobs))
        return None


def read_former(path: Path) -> Iterator[FormerManifest]:
    """Yield the manifest in a file of the history, if it is one and still there. Raises StoreError."""
    if not _NAME.fullmatch(path.name):
        return
    try:
        data = read_regular(path, MAX_MANIFEST_SIZE)
    except BlobstoreError:  # it is not a file of ours
        return
    except OSError as error:
        if not is_absence(error):  # it has blobs that gc must keep
            raise StoreError(f"cannot read {quote(path)}: {error.strerror}") from error
        return
    yield FormerManifest(int(path.name.partition("-")[0]) / _NANOSECONDS, data, path)


def _key(reference: Reference) -> str:
    """Return the end of the names of a model's files; models may have names of any length."""
    return Digest.of(reference.full.encode()).hex[:32]


def replacement_notices(reference: Reference, former: bytes | None) -> Iterator[str]:
    """Yield a notice of the model that had the name before."""
    if former is not None:
        yield (
            f"{reference} was the name of another model, {Digest.of(former).short}, until now; "
            f"{cli_command('restore', reference)} brings that back until gc removes its blobs"
        )
