"""Adds a file to fetched models that are in a store. It is stored as it is, and nothing else of them changes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from blobstore.core import strict_json
from blobstore.errors import InvalidManifest, ModelNotFound, NameTaken, StoreError
from blobstore.manifests import media_types
from blobstore.manifests.descriptor import Descriptor
from blobstore.manifests.layers_digest import layers_digest
from blobstore.manifests.model import LAYERS_DIGEST, Manifest
from blobstore.operations.create.files import FileLayer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from blobstore.manifests.reference import Reference
    from blobstore.store.ingest import Ingest
    from blobstore.store.local import LocalStore
    from blobstore.store.names import NameUpdate

_MAX_ATTEMPTS: Final = 10
"""How often a name that others change is looked at."""


def add_file(
    store: LocalStore,
    references: Iterable[Reference],
    is_wanted: Callable[[Reference, Manifest], bool],
    name: str,
    path: Path,
) -> list[Reference]:
    """Add a file to fetched models, and return the names of those that have it then.

    If a name is given to another model in the meantime, such as one with one more file, that one gets the file.

    Args:
        store: the store.
        references: the names to look at.
        is_wanted: returns whether a name, with the model that it has now, is one that gets the file.
        name: the file's name in the models. One that has such a file keeps it.
        path: the file.

    Raises:
        DamagedSource: the file changes while it is read.
        BlobMissing, BlobDamaged: a model that gets the file is damaged.
        StoreError: the store cannot be written.
    """
    layer = FileLayer(media_types.FILE, name, path=path, file_size=path.stat().st_size)
    found: list[Reference] = []
    with store.ingest() as ingest:
        item = ingest.add(layer.size, layer.buffers)
        added = Descriptor(media_types.FILE, item.digest, item.size, name)
        for _ in range(_MAX_ATTEMPTS):
            made: list[tuple[NameUpdate, Manifest]] = []
            for update, manifest in _wanted(store, references, is_wanted):
                if added in manifest.layers:
                    found.append(update.reference)
                elif all(one.name != name for one in manifest.layers):
                    made.append((update, _with_layer(store, ingest, manifest, added)))
            ingest.publish()
            lost = []
            for update, manifest in made:
                try:
                    store.names.publish(update, manifest, ingest)
                except NameTaken:
                    lost.append(update.reference)
                else:
                    found.append(update.reference)
            if not lost:
                break
            references = lost
    return found


def _wanted(
    store: LocalStore,
    references: Iterable[Reference],
    is_wanted: Callable[[Reference, Manifest], bool],
) -> Iterator[tuple[NameUpdate, Manifest]]:
    for reference in references:
        # First: what changes after it is not replaced.
        update = replace(store.names.seen(reference), is_fetched=True)
        try:
            manifest = store.resolve(reference)
        except (ModelNotFound, InvalidManifest, StoreError):
            continue
        if is_wanted(reference, manifest):
            yield update, manifest


def _with_layer(
    store: LocalStore, ingest: Ingest, manifest: Manifest, added: Descriptor
) -> Manifest:
    layers = (*manifest.layers, added)
    config = manifest.config
    value = strict_json.loads(store.read_blob(config.digest, config.size))
    if LAYERS_DIGEST in value:
        data = strict_json.dumps(value | {LAYERS_DIGEST: str(layers_digest(layers))}).encode()
        item = ingest.add(len(data), lambda: [data])
        config = Descriptor(config.media_type, item.digest, item.size)
    return Manifest(config=config, layers=layers)
