"""The layout ``oci``: an OCI image manifest as ModelPack describes it, one layer per blob.

Tools that know ModelPack write the layers as files and get a folder. One more layer has the bytes of the
local manifest, so that a pull gives the same model back. A model with more layers than registries accept
becomes an index, whose parts share the config and list the layers in order.

ModelPack's ``createdAt`` is optional, and is left out: a time would give equal models different digests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from blobstore.core import strict_json
from blobstore.core.digest import Digest
from blobstore.errors import UsageError
from blobstore.manifests import media_types
from blobstore.manifests.model import Manifest
from blobstore.registry.layouts.plan import (
    FILE_PATH,
    MODEL_ARTIFACT,
    MODEL_CONFIG,
    TITLE,
    RemotePlan,
    descriptor,
    folder_files,
    remote_manifest,
)
from blobstore.registry.manifest import OCI_INDEX, OCI_MANIFEST

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blobstore.registry.layouts.plan import ModelMetadata
    from blobstore.registry.layouts.tar import FolderFile
    from blobstore.registry.manifest import RemoteManifest

MAX_LAYERS: Final = 400
"""Layers per manifest. Amazon ECR refuses more than about 500."""
_SCALES = (("Q", 10**15), ("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3))


def plan_oci(
    data: bytes,
    metadata: ModelMetadata,
    *,
    manifest: Manifest | None = None,
    max_layers: int = MAX_LAYERS,
) -> RemotePlan:
    """Return the plan of the model with the local manifest ``data``: the manifests and blobs that a registry needs.

    ``manifest`` is the parsed ``data``, if the caller has it.

    Raises:
        InvalidManifest: the manifest breaks the format.
        RemoteRefused: a manifest is too large for registries.
        UsageError: ``max_layers`` is below 1.
    """
    if max_layers < 1:
        raise UsageError(f"the number of layers must be at least 1, got {max_layers}")
    manifest = manifest or Manifest.from_bytes(data)
    files = folder_files(data, manifest, metadata)
    config = model_config(metadata, files)
    described = descriptor(MODEL_CONFIG, config)
    annotations = {media_types.LOCAL_MANIFEST: str(Digest.of(data))}
    parts = [files[begin : begin + max_layers] for begin in range(0, len(files), max_layers)]
    manifests = [_part(described, part, annotations) for part in parts]
    if len(manifests) > 1:
        manifests.append(_index(manifests, annotations))
    return RemotePlan(
        manifests=tuple(manifests),
        blobs=manifest.blobs,
        made={
            Digest.of(content): content for content in (data, config, *metadata.generated.values())
        },
    )


def _part(
    config: dict[str, Any], files: Sequence[FolderFile], annotations: dict[str, str]
) -> RemoteManifest:
    layers = [
        {
            "mediaType": file.media_type,
            "digest": str(file.digest),
            "size": file.size,
            "annotations": {FILE_PATH: file.path, TITLE: file.path},
        }
        for file in files
    ]
    value = {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "artifactType": MODEL_ARTIFACT,
        "config": config,
        "layers": layers,
        "annotations": annotations,
    }
    return remote_manifest(OCI_MANIFEST, value)


def _index(parts: Sequence[RemoteManifest], annotations: dict[str, str]) -> RemoteManifest:
    # Without an artifactType, which skopeo 1.9 would drop: a copy would get another digest.
    value = {
        "schemaVersion": 2,
        "mediaType": OCI_INDEX,
        "manifests": [descriptor(OCI_MANIFEST, part.data) for part in parts],
        "annotations": annotations,
    }
    return remote_manifest(OCI_INDEX, value)


def model_config(metadata: ModelMetadata, files: Sequence[FolderFile]) -> bytes:
    """Return ModelPack's config of a model with these layers."""
    descriptor = {
        "family": metadata.family,
        "name": metadata.name,
        "sourceURL": metadata.source_url,
        "revision": metadata.revision,
        "licenses": list(metadata.licenses),
    }
    config = {
        "architecture": metadata.architecture,
        "format": metadata.format,
        "paramSize": parameter_size(metadata.parameters),
        "precision": ",".join(metadata.precision),
        "quantization": ",".join(metadata.quantization),
    }
    value = {
        "descriptor": {key: text for key, text in descriptor.items() if text},
        "modelfs": {"type": "layers", "diffIds": [str(file.digest) for file in files]},
        "config": {key: text for key, text in config.items() if text},
    }
    return strict_json.dumps(value).encode()


def parameter_size(parameters: int) -> str:
    """Return a number of parameters as ModelPack spells it, such as ``7.2B``; empty for none."""
    for letter, scale in _SCALES:
        tenths = (parameters * 10 + scale // 2) // scale
        if tenths >= 10:  # one whole
            return f"{tenths // 10}.{tenths % 10}{letter}".replace(".0", "")
    return f"{parameters / 1000:.1f}K" if parameters else ""
