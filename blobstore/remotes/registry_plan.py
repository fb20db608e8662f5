"""Reads from the store the data that a layout needs to plan a push."""

from __future__ import annotations

import contextlib
import dataclasses
from functools import partial
from typing import TYPE_CHECKING, Final

from blobstore.core import strict_json
from blobstore.core.digest import Digest, Digester
from blobstore.core.escape import quote
from blobstore.errors import UsageError
from blobstore.folders.ollama import ollama_model
from blobstore.models.contents import ModelContents
from blobstore.models.small_files import ModelFiles
from blobstore.registry.layouts.image import image_layers, plan_image
from blobstore.registry.layouts.oci import plan_oci
from blobstore.registry.layouts.ollama import plan_ollama
from blobstore.remotes.checked_pieces import CheckedPieces, PushedBlob
from blobstore.remotes.model_metadata import model_metadata
from blobstore.store.notes import NoteKind, parsed

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from blobstore.core.workers import WorkerPool
    from blobstore.manifests.reference import Reference
    from blobstore.registry.layouts.plan import RemoteLayout, RemotePlan
    from blobstore.registry.layouts.tar import TarLayer
    from blobstore.store.local import LocalStore

    Hashing = Callable[[int, int], WorkerPool]
    """Returns workers that hash a number of bytes. The second number has the bytes of later steps."""

_TAR: Final = NoteKind("tar layer 1")
"""Of the digests of tar layers."""


def plan_for_registry(
    store: LocalStore, reference: Reference, layout: RemoteLayout, max_layers: int, hashing: Hashing
) -> RemotePlan:
    """Return the plan of a push to a registry, after checking the local manifest.

    Raises:
        ModelNotFound: the store has no such model.
        InvalidManifest, BlobMissing, BlobDamaged: the model is damaged.
        RemoteRefused: a manifest would be larger than registries accept.
        UsageError: there is no such layout, or ``max_layers`` is too small.
    """
    files = ModelFiles.of(reference, store)
    data, manifest = files.data, files.manifest
    if layout == "ollama":
        found = ollama_model(store, ModelContents(store, manifest))
        if found is None:
            return plan_ollama(data)
        return dataclasses.replace(plan_ollama(found.data), readers=found.readers)
    metadata = model_metadata(files)
    if layout == "oci":
        return plan_oci(data, metadata, manifest=manifest, max_layers=max_layers)
    if layout == "image":
        layers = image_layers(data, metadata)
        return plan_image(data, layers, _tar_digests(store, layers.tars, hashing), metadata)
    raise UsageError(f"layout must be 'oci', 'ollama' or 'image', got {quote(layout)}")


def pushed_blobs(plan: RemotePlan, store: LocalStore) -> list[PushedBlob]:
    """Return the blobs of a plan, each once."""
    made = [
        PushedBlob(digest, len(data), "config", partial(_one_piece, data))
        for digest, data in plan.made.items()
    ]
    if not plan.tars:
        return made + [
            PushedBlob(*blob.id, blob.media_type, plan.readers[blob.digest])
            if blob.digest in plan.readers
            else PushedBlob.of(blob, store)
            for blob in plan.blobs
            if blob.digest not in plan.made
        ]
    return made + [
        PushedBlob(digest, tar.size, tar.files[-1].path, partial(tar.pieces, store.read_pieces))
        for digest, tar in plan.tars.items()
    ]


def _tar_digests(store: LocalStore, tars: Sequence[TarLayer], hashing: Hashing) -> list[Digest]:
    """Return the digests of tars, which are noted in the store: computing them reads all blobs.

    Raises:
        BlobDamaged: a blob of a tar that was not hashed before is damaged.
    """
    digests: dict[TarLayer, Digest | None] = dict.fromkeys(tars)
    for tar in tars:
        # A wrong note is found when the tar is sent, because its bytes are hashed then.
        digests[tar] = parsed(store.read_note(_TAR, tar.key), Digest.parse)
    unknown = [tar for tar, digest in digests.items() if digest is None]
    workers = hashing(sum(tar.size for tar in unknown), sum(tar.size for tar in tars))

    def read(digest: Digest, size: int) -> Iterator[memoryview]:
        # Each blob is checked on the way, because the digest of the tar is noted for later pushes.
        blob = PushedBlob(digest, size, digest.short, partial(store.read_pieces, digest, size))
        with contextlib.closing(CheckedPieces(blob)) as pieces:
            yield from pieces(0)

    def hash_tar(tar: TarLayer) -> Digest:
        digester = Digester()
        for piece in tar.pieces(read):
            digester.update(piece)
            workers.report(len(piece), "hashing layers")
        return digester.digest()

    for tar, digest in zip(unknown, workers.run(unknown, hash_tar), strict=True):
        digests[tar] = digest
        store.write_note(_TAR, tar.key, strict_json.dumps(str(digest)).encode())
    return [digest for digest in digests.values() if digest is not None]


def _one_piece(data: bytes) -> Generator[bytes | memoryview, None, None]:
    yield data
