"""Former manifests: what a name was before it was given to another model.

Each is a file of its own in one folder, with the bytes of the manifest. Its name has the time, and a hash of
the model's name, so that no name has to be parsed. The files keep no blob alive: :mod:`gc` removes them when
their blobs are gone. Nothing but ``restore`` reads them, and all of them may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import re
import time
from typing import TYPE_CHECKING, NamedTuple

from blobstore.core.digest import Digest
from blobstore.core.files import make_folders, read_regular, write_file
from blobstore.errors import BlobstoreError
from blobstore.manifests.model import MAX_MANIFEST_SIZE
from blobstore.store.scan import list_names

if TYPE_CHECKING:
    from collections.abc import Iterator
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
        """Keep the manifest of a name that is about to get another one, durably.

        Raises:
            OSError: the store cannot be written.
        """
        folder = self._layout.history
        for missing in (folder, self._layout.temporary):
            make_folders(missing, self._layout.root)
        # Later than the last one even if the clock was set back, or this one would be the oldest.
        last = max(self._names(reference), default="0").partition("-")[0]
        stamp = max(time.time_ns(), int(last) + 1)
        path = folder / f"{stamp:020d}-{_key(reference)}"
        write_file(path, [data], mode=0o644, temporary=self._layout.temporary)
        for old in self._names(reference)[:-_KEPT]:
            (folder / old).unlink(missing_ok=True)

    def of(self, reference: Reference) -> Iterator[FormerManifest]:
        """Yield the former manifests of a name that can be read, latest first."""
        for name in reversed(self._names(reference)):
            yield from self._read(name)

    def all(self) -> Iterator[FormerManifest]:
        """Yield the former manifests of all names."""
        for name in list_names(self._layout.history):
            yield from self._read(name)

    def _names(self, reference: Reference) -> list[str]:
        key = _key(reference)
        names = list_names(self._layout.history)
        return sorted(name for name in names if name.endswith(key) and _NAME.fullmatch(name))

    def _read(self, name: str) -> Iterator[FormerManifest]:
        stamp, path = name.partition("-")[0], self._layout.history / name
        with contextlib.suppress(OSError, BlobstoreError):  # removed since, or not a file of ours
            if _NAME.fullmatch(name):
                data = read_regular(path, MAX_MANIFEST_SIZE)
                yield FormerManifest(int(stamp) / _NANOSECONDS, data, path)


def _key(reference: Reference) -> str:
    """Return what the names of a model's files end with; models may have names of any length."""
    return Digest.of(reference.full.encode()).hex[:32]


def replacement_notices(reference: Reference, former: bytes | None) -> Iterator[str]:
    """Yield a notice of the model that had the name before."""
    if former is not None:
        yield (
            f"{reference} was the name of another model, {Digest.of(former).short}, until now; "
            f"'blobstore restore {reference}' brings that back until gc removes its blobs"
        )
