"""Exports a model of Ollama's that was imported to a folder of Ollama's, with the manifest that it had there."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from blobstore.core.digest import Digest
from blobstore.core.escape import quote
from blobstore.core.workers import WorkerPool
from blobstore.errors import BlobDamaged, UsageError
from blobstore.folders.ollama import ollama_model
from blobstore.manifests.reference import Reference
from blobstore.models.contents import ModelContents
from blobstore.operations.export.export import Exported
from blobstore.store.local import LocalStore, StoreLike
from blobstore.store.names import NewModel

if TYPE_CHECKING:
    import os

    from blobstore.core.progress import Progress


def export_to_ollama(
    reference: str | Reference,
    folder: str | os.PathLike[str],
    *,
    store: StoreLike = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Exported:
    """Add a model to a folder of Ollama's models, as it was in that from which it was imported.

    Args:
        reference: the name, which it has in the folder too.
        folder: Ollama's folder, such as ``~/.ollama/models``. A missing folder is made.
        store: the store or its folder; by default ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        force: replace another model that has the name there.
        progress: called with the layer, bytes done and total bytes.

    Raises:
        UsageError: the model was not imported from Ollama, or its import left out or converted files.
        NameTaken: another model has the name in the folder.
        BlobMissing, BlobDamaged, InvalidManifest: the model is damaged.
        StoreError: the folder cannot be written.
    """
    started = time.monotonic()
    reference, store = Reference.of(reference), LocalStore.to_read(store)
    model = ModelContents(store, store.resolve(reference))
    if (found := ollama_model(store, model)) is None:
        raise UsageError(
            f"model {reference} was not imported from Ollama with all of its files, unchanged",
            advice="'blobstore export' without --layout writes its files, and 'ollama create' reads them",
        )
    target = LocalStore(folder)
    update = target.names.claim(reference, Digest.of(found.data), force=force)
    blobs = found.manifest.blobs
    pool = WorkerPool(1, progress, sum(blob.size for blob in blobs))
    written = 0
    with (
        store.lease_if_writable(blob.digest for blob in model.manifest.blobs),
        target.ingest() as ingest,
    ):
        for blob in blobs:
            item = ingest.add(blob.size, found.readers[blob.digest])
            if item.digest != blob.digest:
                raise BlobDamaged(
                    f"model {reference}: Ollama's layer {quote(blob.media_type)} has digest "
                    f"{item.digest}, expected {blob.digest}"
                )
            written += item.size if item.written else 0
            pool.report(item.size, blob.media_type)
        ingest.publish()
        target.names.install([NewModel(update, found.data, blobs)], ingest=ingest)
    return Exported(
        folder=target.root,
        files=len(blobs) + 1,
        tensors=len(model.tensors.tensors),
        shards=len(model.record.files) if model.record else 0,
        is_original=True,
        bytes_written=written,
        seconds=time.monotonic() - started,
    )
