"""A store of many models that is made in seconds: files are written without the care of an import."""

from __future__ import annotations

from blobstore.core.digest import Digest
from blobstore.manifests import media_types
from blobstore.manifests.descriptor import Descriptor
from blobstore.manifests.model import Manifest
from blobstore.manifests.reference import Reference
from blobstore.store.local import LocalStore
from tests.support.models import blob

FAMILY = 10
"""Models that share nine of ten layers."""


def write_models(store: LocalStore, models: int, layers: int) -> None:
    """Write models of that many tensors each, in families."""
    config = b'{"model_format": "safetensors"}'
    made = {config: _write(store, config)}
    described = Descriptor(media_types.CONFIG, made[config], len(config))
    for model in range(models):
        family = model // FAMILY
        listed = []
        for layer in range(layers):
            name = f"model.layers.{layer // 10}.part{layer % 10}.weight"
            seed = family * layers + layer if layer % 10 else (model + models) * layers + layer
            data = blob((name, "F32", (2,), seed.to_bytes(8, "little")))
            if data not in made:
                made[data] = _write(store, data)
            listed.append(Descriptor(media_types.TENSOR, made[data], len(data), name))
        path = store.manifest_path(Reference.parse(f"team{family}/model{model}"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(Manifest(config=described, layers=tuple(listed)).to_bytes())


def _write(store: LocalStore, data: bytes) -> Digest:
    digest = Digest.of(data)
    folder = store.folder("blobs")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / digest.file_name).write_bytes(data)
    return digest
