"""Models as Ollama itself leaves them in a store."""

from __future__ import annotations

from blobstore.core.digest import Digest
from blobstore.manifests import media_types
from blobstore.manifests.descriptor import Descriptor
from blobstore.manifests.model import Manifest
from blobstore.manifests.reference import Reference
from blobstore.store.local import LocalStore

_CONFIG = (
    b'{"model_format":"gguf","model_family":"llama","model_families":["llama"],'
    b'"model_type":"8.0B","file_type":"Q4_0"}'
)


def add_gguf_model(store: LocalStore, name: str) -> Manifest:
    """Write a model of Ollama's own: one GGUF layer and layers without names."""
    layers = [
        _add_blob(store, media_types.MODEL, b"GGUF" + bytes(1000)),
        _add_blob(store, media_types.TEMPLATE, b"{{ .Prompt }}"),
        _add_blob(store, media_types.LICENSE, b"first license"),
        _add_blob(store, media_types.LICENSE, b"second license"),
        _add_blob(store, media_types.PARAMS, b'{"stop":["<|end|>"]}\n'),
    ]
    manifest = Manifest(config=_add_blob(store, media_types.CONFIG, _CONFIG), layers=tuple(layers))
    path = store.manifest_path(Reference.parse(name))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(manifest.to_bytes())
    return manifest


def _add_blob(store: LocalStore, media_type: str, data: bytes) -> Descriptor:
    digest = Digest.of(data)
    store.folder("blobs").mkdir(parents=True, exist_ok=True)
    (store.folder("blobs") / digest.file_name).write_bytes(data)
    return Descriptor(media_type=media_type, digest=digest, size=len(data))
