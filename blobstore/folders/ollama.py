"""Restores a model of Ollama's that was imported: its manifest, its GGUF files and its other layers."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from blobstore.folders.original import plan_original
from blobstore.folders.writer import read_file
from blobstore.manifests.model import Manifest
from blobstore.manifests.ollama_files import MANIFEST, ollama_files

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from blobstore.core.digest import Digest
    from blobstore.folders.export_plan import FolderTensor
    from blobstore.folders.shards import WeightFile
    from blobstore.models.contents import ModelContents
    from blobstore.store.local import LocalStore

    Pieces = Generator[bytes | memoryview, None, None]


class OllamaModel(NamedTuple):
    """A model as Ollama had it."""

    data: bytes
    """Its manifest, byte for byte."""
    manifest: Manifest
    readers: Mapping[Digest, Callable[[], Pieces]]
    """What yields the bytes of each of its blobs, unchecked."""


def ollama_model(store: LocalStore, model: ModelContents) -> OllamaModel | None:
    """Return the model of Ollama's that a model was imported from.

    Returns None if there was none, or the import converted it or left files of it out.

    Raises:
        BlobMissing, BlobDamaged, InvalidManifest: the model is damaged.
    """
    kept = model.files.get(MANIFEST)
    plan = plan_original(model) if kept is not None else None
    if kept is None or plan is None:
        return None
    data = bytes(store.read_blob(kept.digest, kept.size))
    manifest = Manifest.from_bytes(data)
    tensors = {tensor.spec.name: tensor for tensor in plan.tensors}
    readers: dict[str, Callable[[], Pieces]] = {
        file.name: partial(_read_weights, store, file, tensors) for file in plan.weights
    }
    for name, file in plan.files.items():
        readers[name] = partial(store.read_pieces, *file.id)
    files = {name: layer.digest for name, layer in ollama_files(manifest)}
    if not files.keys() <= readers.keys():
        return None
    return OllamaModel(data, manifest, {digest: readers[name] for name, digest in files.items()})


def _read_weights(
    store: LocalStore, file: WeightFile, tensors: Mapping[str, FolderTensor]
) -> Pieces:
    for piece in read_file(store, file, tensors, lambda *_: None):
        yield memoryview(piece)
