"""The digests of the files of a model's folder, mostly without reading a weight.

A small file is a blob, and so is each weight file of a folder of links. The source record may have the
digests of the files that a model was imported from. All other weight files are put together and hashed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from blobstore.core.digest import Digest, Digester
from blobstore.core.escape import quote
from blobstore.core.workers import WorkerPool
from blobstore.errors import BlobstoreError
from blobstore.manifests import media_types
from blobstore.manifests.file_names import check_paths
from blobstore.models.contents import ModelContents
from blobstore.operations.export.folder import (
    check_no_gguf,
    plan_export,
)
from blobstore.operations.export.link_plan import plan_links
from blobstore.operations.export.original import plan_original
from blobstore.operations.export.shards import SHARD_SIZE
from blobstore.operations.export.writer import read_file
from blobstore.store.verified_cache import VerifiedBlobs
from blobstore.store.verify_blobs import damaged_blobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blobstore.core.progress import Progress
    from blobstore.manifests.model import Manifest
    from blobstore.operations.export.folder import FolderTensor
    from blobstore.operations.export.shards import WeightFile
    from blobstore.store.local import LocalStore

Layout = Literal["export", "link"]
"""The folder that ``export`` writes without options, or that of ``link``."""


class FolderDigests(NamedTuple):
    """The files of a folder."""

    files: dict[str, Digest]
    """By their names, relative to the folder."""
    hashed: int
    """Weight files that had to be put together and hashed."""
    bytes_hashed: int


def folder_digests(
    store: LocalStore,
    manifest: Manifest,
    layout: Layout,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> FolderDigests:
    """Return the digests of the files that ``export`` or ``link`` would write.

    Raises:
        BlobMissing, BlobDamaged, InvalidManifest: the model is damaged.
        BlobstoreError: the model has no such folder.
    """
    model = ModelContents(store, manifest)
    if layout == "export" and (known := _recorded(model)) is not None:
        return FolderDigests(known, 0, 0)
    files: dict[str, Digest] = {}
    if layout == "export":
        plan = plan_original(model) or plan_export(model, SHARD_SIZE)
        weights, tensors = plan.weights, list(plan.tensors)
        contents, written = plan.files, plan.written
    else:
        links = plan_links(model)
        files |= {name: layer.digest for name, layer in links.links}
        weights = [*(item.file for item in links.relabelled), *links.gathered]
        tensors = [it for item in links.relabelled for it in item.tensors]
        tensors += links.gathered_tensors
        contents, written = links.files, links.written
    files |= {name: layer.digest for name, layer in contents.items()}
    files |= {name: Digest.of(content) for name, content in written.items()}
    files |= {file.name: file.sha256 for file in weights if file.sha256 is not None}
    unknown = [file for file in weights if file.sha256 is None]
    digests, size = _hash_files(store, unknown, tensors, jobs, progress)
    return FolderDigests(files | digests, len(unknown), size)


def has_folder(manifest: Manifest) -> bool:
    """Return whether ``export`` and ``link`` can write a folder of a model; they write no GGUF files."""
    try:
        check_no_gguf(manifest)
    except BlobstoreError:
        return False
    return bool(manifest.layers_of(media_types.TENSOR) or manifest.layers_of(media_types.FILE))


def _recorded(model: ModelContents) -> dict[str, Digest] | None:
    """Return the digests of the original files if the source record has all of them."""
    record, manifest = model.record, model.manifest
    if record is None or record.is_converted or not manifest.layers_of(media_types.TENSOR):
        return None
    found: dict[str, Digest] = {}
    for file in record.files:
        digest = Digest.of(file.start) if file.format == "index" else file.sha256
        if digest is None or file.format == "pytorch":
            return None
        found[file.name] = digest
    check_paths([*model.files, *found])
    return found | {name: layer.digest for name, layer in model.files.items()}


def _hash_files(
    store: LocalStore,
    files: Sequence[WeightFile],
    tensors: Sequence[FolderTensor],
    jobs: int | None,
    progress: Progress | None,
) -> tuple[dict[str, Digest], int]:
    """Return the digests of weight files, and the bytes of all of them together.

    Raises:
        BlobMissing, BlobDamaged: a blob is missing or damaged; blobs that were verified before, and
            have not changed since, are not hashed again.
    """
    by_name = {tensor.spec.name: tensor for tensor in tensors}
    needed = {
        by_name[name].layer.id: by_name[name].layer for file in files for name in file.offsets
    }
    verified = VerifiedBlobs(store)
    unknown = [layer for key, layer in needed.items() if not verified.has(*key)]
    checked = damaged_blobs(store, unknown, jobs=jobs, progress=progress, verified=verified)
    for layer, error in checked:
        raise error.at(f"layer {quote(layer.name)}")
    total = sum(by_name[name].spec.nbytes for file in files for name in file.offsets)
    pool = WorkerPool(jobs, progress, total)

    def hash_file(file: WeightFile) -> tuple[Digest, int]:
        digester = Digester()
        for piece in read_file(store, file, by_name, pool.report):
            digester.update(piece)
        return digester.digest(), digester.size

    found = pool.run(files, hash_file)
    digests = {file.name: digest for file, (digest, _) in zip(files, found, strict=True)}
    return digests, sum(size for _, size in found)
