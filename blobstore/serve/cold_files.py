"""The compressed forms of a model's blobs, for clients that have the bases of the deltas.

They are the files of cold blobs, byte for byte, listed as ``push --cold`` lists them. A file is hashed once, and
its digest is noted with the version of the file, so that a blob that was frozen again is hashed again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from blobstore.core import strict_json
from blobstore.core.digest import BlobId, Digest
from blobstore.core.files import FileVersion, open_regular
from blobstore.core.workers import WorkerPool
from blobstore.errors import BlobstoreError
from blobstore.manifests.reference import Reference
from blobstore.remotes.cold_layers import ColdLayer, base_of
from blobstore.remotes.send_cold import ColdFile
from blobstore.serve.messages import Content, StoredPart
from blobstore.store.catalog import read_catalog
from blobstore.store.notes import NoteKind, parsed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from blobstore.manifests.descriptor import Descriptor
    from blobstore.serve.messages import Part
    from blobstore.serve.pulled import Origin
    from blobstore.store.local import LocalStore

_NOTE = NoteKind("served cold files 1", ".cold")
_Notes = dict[str, tuple[FileVersion, Digest]]
"""Versions and digests of cold files, by the hex digests of their blobs."""


Owners = Mapping[Reference, "Origin | None"]
"""Names that have a blob, and the commits that their models were fetched from."""


class ColdFiles(NamedTuple):
    """The cold files of a model."""

    version: FileVersion | None
    """Of the folder of cold blobs before they were listed; see :func:`cold_version`."""
    layers: tuple[ColdLayer, ...] = ()
    contents: tuple[Content, ...] = ()
    """The file of each layer."""


def cold_version(store: LocalStore) -> FileVersion | None:
    """Return a version that changes when blobs are frozen or thawed; None if the store never had a cold blob."""
    return FileVersion.of(store.folder("cold"))


def is_current(part: Part) -> bool:
    """Return whether a cold file, if it is one, is the one that was hashed."""
    return not isinstance(part, StoredPart) or FileVersion.of(part.path) == part.version


def find_cold_files(store: LocalStore, blobs: Iterable[Descriptor], key: Digest) -> ColdFiles:
    """Return the cold files of a model's blobs; damaged ones are left out. ``key`` stands for the model."""
    # Before the blobs are listed: one that is frozen in between changes the version again.
    version = cold_version(store)
    cold = [blob.id for blob in blobs if store.has_cold(blob.digest)]
    known = parsed(store.read_note(_NOTE, key), _noted) or {}
    found: _Notes = {}
    layers, contents = [], []
    pool = WorkerPool(None, None, 0)

    def pause(size: int) -> None:
        pool.report(size, "")  # ends the work if nobody waits for it

    for listed in pool.run(cold, lambda blob: _listed(store, blob, known, pause)):
        if listed is not None:
            layer, part = listed
            layers.append(layer)
            contents.append(Content((part,)))
            found[layer.blob.digest.hex] = part.version, layer.stored.digest
    if found != known:
        value = {name: [list(one), str(digest)] for name, (one, digest) in found.items()}
        store.write_note(_NOTE, key, strict_json.dumps(value).encode())
    return ColdFiles(version, tuple(layers), tuple(contents))


def owners_of(store: LocalStore, blobs: Collection[Digest]) -> dict[Digest, list[Reference]]:
    """Return the names whose models have each of some blobs. Raises StoreError."""
    catalog = read_catalog(store, on_error=lambda _: None)
    numbers = catalog.references.numbers(blobs)
    wanted = set(numbers.values())
    found: dict[Digest, list[Reference]] = {blob: [] for blob in blobs}
    for entry in catalog:
        has = wanted.intersection(entry.known.blobs if entry.known else ())
        for blob, number in numbers.items() if has else ():
            if number in has:
                found[blob].append(entry.reference)
    return found


def _listed(
    store: LocalStore, blob: BlobId, known: _Notes, pause: Callable[[int], None]
) -> tuple[ColdLayer, StoredPart] | None:
    """Return the entry of a cold blob and its file; None if it cannot be read."""
    try:
        base, path = base_of(store.open_cold(*blob)), store.cold_path(blob.digest)
        descriptor, size = open_regular(path)
    except (BlobstoreError, OSError):
        return None
    try:
        # Of the open file, which is the one that is hashed.
        version = FileVersion.of_status(os.fstat(descriptor))
        noted, digest = known.get(blob.digest.hex, (None, blob.digest))
        layer = ColdLayer(blob, BlobId(digest, size), base)
        if noted != version:
            digest = Digest.of_pieces(ColdFile(layer, descriptor).pieces(), pause)
            layer = layer._replace(stored=BlobId(digest, size))
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return layer, StoredPart(path, size, 0, size, version)


def _noted(value: Any) -> _Notes:
    return {
        name: (FileVersion(*map(int, version)), Digest.parse(digest))
        for name, (version, digest) in value.items()
    }
