"""The files that a model is served as, composed of parts of blobs. No weight is read.

They are the files of an export without options: those of the source byte for byte, or a folder for Hugging
Face libraries. Models that Ollama imported have their GGUF files instead.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from itertools import count
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from blobstore.core import strict_json
from blobstore.core.digest import Digest
from blobstore.folders.digests import folder_digests
from blobstore.folders.files import files_of
from blobstore.folders.writer import read_file
from blobstore.manifests import media_types
from blobstore.models.contents import ModelContents
from blobstore.serve.messages import BlobPart, Content
from blobstore.store.notes import NoteKind, parsed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from blobstore.folders.export_plan import FolderTensor
    from blobstore.folders.shards import WeightFile
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.manifests.model import Manifest
    from blobstore.registry.layouts.tar import FolderFile
    from blobstore.serve.messages import Part
    from blobstore.store.local import LocalStore

_GGUF_NAMES = {
    media_types.MODEL: "model",
    media_types.PROJECTOR: "mmproj",
    media_types.ADAPTER: "adapter",
}
_LAYOUT = "served files 1"
"""Changes with the bytes that a model is served as: commits and notes have it."""
_FILES = 2
"""Files that are hashed at once, each of which takes 20 MiB and two threads."""
_NOTE = NoteKind(_LAYOUT, ".files")


def commit_of(manifest: Digest) -> str:
    """Return the commit that the model with this manifest is served as, 40 hexadecimal digits."""
    return hashlib.sha1(f"{_LAYOUT} {manifest}".encode(), usedforsecurity=False).hexdigest()


def model_files(store: LocalStore, manifest: Manifest) -> dict[str, Content]:
    """Return the files of a model, by their names in order.

    Raises:
        BlobMissing, BlobDamaged, InvalidManifest: the model is damaged, or names files that must not
            be written.
        BlobstoreError: the model cannot be exported as files.
    """
    if manifest.layers_of(*media_types.GGUF):
        files = {name: whole_blob(layer) for name, layer in _gguf_layers(manifest).items()}
        return dict(sorted(files.items()))
    if _is_empty(manifest):
        return {}
    model = ModelContents(store, manifest)
    plan = files_of(model)
    tensors = {tensor.spec.name: tensor for tensor in plan.tensors}
    files = {name: whole_blob(layer) for name, layer in plan.files.items()}
    files |= {name: Content((data,)) for name, data in plan.written.items()}
    files |= {file.name: _weight_content(store, file, tensors) for file in plan.weights}
    return dict(sorted(files.items()))


def file_digests(store: LocalStore, manifest: Manifest, key: Digest) -> dict[str, Digest]:
    """Return the sha256 of each file of :func:`model_files`.

    They are in the manifest and the source record if the Hub has listed them. Otherwise all weights are
    read once, and the digests are noted in the store under the digest of the manifest, ``key``, until ``gc``
    removes the model. An import that hashed files as well as blobs would take twice as long.

    Raises as :func:`model_files`.
    """
    if manifest.layers_of(*media_types.GGUF):
        return {name: layer.digest for name, layer in _gguf_layers(manifest).items()}
    if _is_empty(manifest):
        return {}
    if (known := parsed(store.read_note(_NOTE, key), _noted)) is not None:
        return known
    found = folder_digests(store, manifest, "export", _FILES)
    if found.hashed:
        value = {name: str(digest) for name, digest in found.files.items()}
        store.write_note(_NOTE, key, strict_json.dumps(value).encode())
    return found.files


def _is_empty(manifest: Manifest) -> bool:
    """Return whether a fetched model has no files yet, because no client has asked for one."""
    return {layer.media_type for layer in manifest.layers} == {media_types.SOURCE}


def whole_blob(layer: Descriptor | FolderFile) -> Content:
    """Return a blob as the content of a file."""
    return Content((BlobPart(layer.digest, layer.size, 0, layer.size),))


def _gguf_layers(manifest: Manifest) -> dict[str, Descriptor]:
    """Return the layers of an Ollama model that are GGUF files, by the names of the files."""
    found: dict[str, Descriptor] = {}
    for kind, stem in _GGUF_NAMES.items():
        names = (f"{stem}{'' if number == 1 else f'-{number}'}.gguf" for number in count(1))
        found |= dict(zip(names, manifest.layers_of(kind), strict=False))
    return found


def _weight_content(
    store: LocalStore, file: WeightFile, tensors: Mapping[str, FolderTensor]
) -> Content:
    """Return the parts of a weight file."""
    placed: list[tuple[int, Part]] = [*file.constants]
    for name, offset in file.offsets.items():
        tensor = tensors[name]
        if tensor.is_reciprocal:  # one value, which no blob holds
            only = replace(file, header=b"", offsets={name: offset}, constants=())
            pieces = map(bytes, read_file(store, only, tensors, lambda *_: None))
            placed.append((offset, b"".join(pieces)))
        elif tensor.spec.nbytes:
            layer = tensor.layer
            part = BlobPart(layer.digest, layer.size, tensor.begin, tensor.spec.nbytes)
            placed.append((offset, part))
    placed.sort(key=itemgetter(0))
    return Content(_merged([file.header, *(part for _, part in placed)]))


def _merged(parts: Sequence[Part]) -> list[Part]:
    """Join parts that continue each other, such as the experts of a layer, which share a blob."""
    merged: list[Part] = []
    for part in parts:
        last = merged[-1] if merged else None
        if isinstance(last, bytes) and isinstance(part, bytes):
            merged[-1] = last + part
        elif (
            isinstance(last, BlobPart)
            and isinstance(part, BlobPart)
            and part[:3] == (last.digest, last.size, last.begin + last.length)
        ):
            merged[-1] = last._replace(length=last.length + part.length)
        else:
            merged.append(part)
    return merged


def _noted(value: Any) -> dict[str, Digest]:
    return {name: Digest.parse(spelled) for name, spelled in value.items()}
