"""The layout ``image``: tar layers that every container runtime mounts as a folder, below ``/models``.

The files are those of the layout ``oci``, each blob unchanged. The tensors of one transformer block share a
layer, so that models with equal blocks share layers. Nothing is compressed, and a tar holds no time or
user, so equal blobs give equal layers. The first layer is small: it has the local manifest and the place
of every blob, so that a pull reads blobs as byte ranges of layers.

Runtimes accept an image only for their own processor, so an index lists one manifest for each, with the
same layers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from blobstore.core import limits, strict_json
from blobstore.core.digest import Digest
from blobstore.errors import InvalidManifest
from blobstore.manifests import media_types
from blobstore.manifests.model import Manifest
from blobstore.registry.layouts.plan import (
    FOLDER,
    RemotePlan,
    descriptor,
    folder_files,
    remote_manifest,
)
from blobstore.registry.layouts.tar import ROOT, TAR_END, TarLayer, padding, tar_entries, tar_header
from blobstore.registry.manifest import OCI_INDEX, OCI_MANIFEST

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from blobstore.registry.layouts.plan import ModelMetadata
    from blobstore.registry.layouts.tar import FolderFile
    from blobstore.registry.manifest import RemoteManifest

IMAGE_CONFIG: Final = "application/vnd.oci.image.config.v1+json"
TAR_LAYER: Final = "application/vnd.oci.image.layer.v1.tar"
MAX_TARS: Final = 100
"""Layers of an image. Docker stops at 125."""
MAX_CATALOG: Final = limits.CATALOG.one
"""Bytes of the first layer; a larger one is refused before it is read."""
ARCHITECTURES: Final = ("amd64", "arm64")
_BLOCK = re.compile(r"(?:[^.]*\.)*?\d+(?=\.)")
"""The start of a tensor's name up to its first number, such as ``model.layers.12``."""
_MANIFEST: Final = f"{FOLDER}/manifest.json"
_PLACES: Final = f"{FOLDER}/places.json"


@dataclass(frozen=True, slots=True)
class ImageLayers:
    """The layers of an image, before the digests of the tars are known."""

    catalog: bytes
    """The first layer."""
    tars: tuple[TarLayer, ...]
    """The other layers."""


def image_layers(data: bytes, metadata: ModelMetadata) -> ImageLayers:
    """Return the layers of the model with the local manifest ``data``.

    Raises:
        InvalidManifest: the manifest breaks the format.
    """
    manifest = Manifest.from_bytes(data)
    _, config, *files = folder_files(data, manifest, metadata)
    stored, generated = files[: len(manifest.layers)], files[len(manifest.layers) :]
    groups: dict[str, list[FolderFile]] = {"files": [config]}
    for layer, file in zip(manifest.layers, stored, strict=True):
        if layer.media_type in (media_types.JSON, media_types.FILE, media_types.SOURCE):
            group = "files"
        else:
            block = _BLOCK.match(layer.name)
            group = f"block {block[0]}" if block else f"{layer.media_type} {layer.name}"
        groups.setdefault(group, []).append(file)
    units = list(groups.values())
    merged = -(-len(units) // (MAX_TARS - 1))  # rounded up
    tars = tuple(
        TarLayer(tuple(file for unit in units[begin : begin + merged] for file in unit))
        for begin in range(0, len(units), merged)
    )
    places = {
        file.digest.hex: [number, offset]
        for number, tar in enumerate(tars, 1)
        for file, offset in zip(tar.files, tar.offsets, strict=True)
    }
    made = {_MANIFEST: data, _PLACES: strict_json.dumps(places).encode()}
    contents = dict(
        zip((file.path for file in generated), metadata.generated.values(), strict=True)
    )
    return ImageLayers(_catalog(made | contents, files), tars)


def plan_image(
    data: bytes, layers: ImageLayers, digests: Sequence[Digest], metadata: ModelMetadata
) -> RemotePlan:
    """Return the plan of an image: the manifests and blobs that a registry needs.

    Args:
        data: the local manifest.
        layers: what :func:`image_layers` returned for it.
        digests: the digests of the tars.
        metadata: what the labels of the image say.
    """
    listed = [(Digest.of(layers.catalog), len(layers.catalog))]
    listed += [(digest, tar.size) for digest, tar in zip(digests, layers.tars, strict=True)]
    annotations = {media_types.LOCAL_MANIFEST: str(Digest.of(data))}
    configs = [_config(name, [digest for digest, _ in listed], metadata) for name in ARCHITECTURES]
    images = [_image(config, listed, annotations) for config in configs]
    entries = [
        descriptor(OCI_MANIFEST, image.data) | {"platform": {"architecture": name, "os": "linux"}}
        for name, image in zip(ARCHITECTURES, images, strict=True)
    ]
    index = {
        "schemaVersion": 2,
        "mediaType": OCI_INDEX,
        "manifests": entries,
        "annotations": annotations,
    }
    made = [layers.catalog, *configs]
    return RemotePlan(
        manifests=(*images, remote_manifest(OCI_INDEX, index)),
        blobs=Manifest.from_bytes(data).blobs,
        made={Digest.of(content): content for content in made},
        tars=dict(zip(digests, layers.tars, strict=True)),
    )


def _config(architecture: str, layers: Sequence[Digest], metadata: ModelMetadata) -> bytes:
    labels = {
        "org.opencontainers.image.title": metadata.name,
        "org.opencontainers.image.source": metadata.source_url,
        "org.opencontainers.image.revision": metadata.revision,
        "org.opencontainers.image.licenses": " AND ".join(metadata.licenses),
    }
    value = {
        "architecture": architecture,
        "os": "linux",
        "config": {"Labels": {key: text for key, text in labels.items() if text}},
        "rootfs": {"type": "layers", "diff_ids": [str(digest) for digest in layers]},
    }
    return strict_json.dumps(value).encode()


def _image(
    config: bytes, layers: Iterable[tuple[Digest, int]], annotations: Mapping[str, str]
) -> RemoteManifest:
    value = {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "config": descriptor(IMAGE_CONFIG, config),
        "layers": [
            {"mediaType": TAR_LAYER, "digest": str(digest), "size": size} for digest, size in layers
        ],
        "annotations": dict(annotations),
    }
    return remote_manifest(OCI_MANIFEST, value)


# The first layer


def _catalog(made: Mapping[str, bytes], files: Iterable[FolderFile]) -> bytes:
    """Return the first layer: all folders, and the files that no blob holds."""
    folders = {""}
    for path in (*made, *(file.path for file in files)):
        parts = path.split("/")[:-1]
        folders |= {"/".join(parts[:depth]) for depth in range(1, len(parts) + 1)}
    headers = [tar_header(folder, 0, is_folder=True) for folder in sorted(folders)]
    contents = [
        tar_header(path, len(content)) + content + bytes(padding(len(content)))
        for path, content in made.items()
    ]
    return b"".join([*headers, *contents, TAR_END])


def read_catalog(catalog: bytes) -> tuple[bytes, Any]:
    """Return the local manifest and the decoded places of blobs from the first layer.

    Only the plain tars that :func:`_catalog` writes are read: ``tarfile`` follows links within a tar, and
    gives a sparse file of one block any number of zeros.

    Raises:
        InvalidManifest: it has neither, or an entry that such a tar does not have.
    """
    contents: dict[str, bytes] = {}
    try:
        for name, begin, size in tar_entries(catalog):
            if name in (f"{ROOT}/{_MANIFEST}", f"{ROOT}/{_PLACES}"):
                if name in contents:
                    raise _not_a_catalog(f"it has two files {name}")
                contents[name] = catalog[begin : begin + size]
    except ValueError as error:
        raise _not_a_catalog(str(error)) from None
    try:
        places = strict_json.loads(contents[f"{ROOT}/{_PLACES}"])
        return contents[f"{ROOT}/{_MANIFEST}"], places
    except KeyError as error:
        raise _not_a_catalog(f"it has no file {error.args[0]}") from None
    except ValueError as error:
        raise _not_a_catalog(f"its file {_PLACES}: {error}") from None


def _not_a_catalog(reason: str) -> InvalidManifest:
    return InvalidManifest(f"the first layer is not that of a model: {reason}")
