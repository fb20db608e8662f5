"""The values that all layouts share: what a push transfers, and the files that a model consists of.

The bytes of every plan follow from the model alone: they hold no time, host, path or version of a tool.
Equal models therefore have equal remote digests.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import accumulate, count
from typing import TYPE_CHECKING, Final, Literal

from blobstore.core import strict_json
from blobstore.core.digest import Digest
from blobstore.errors import RemoteRefused
from blobstore.manifests import media_types
from blobstore.manifests.file_names import is_valid_name
from blobstore.registry.layouts.tar import FolderFile
from blobstore.registry.manifest import MAX_SIZE, RemoteManifest

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping
    from typing import Any

    from blobstore.manifests.descriptor import Descriptor
    from blobstore.manifests.model import Manifest
    from blobstore.registry.layouts.tar import TarLayer

    Pieces = Generator[bytes | memoryview, None, None]

RemoteLayout = Literal["oci", "ollama", "image"]

MODEL_ARTIFACT: Final = "application/vnd.cncf.model.manifest.v1+json"
MODEL_CONFIG: Final = "application/vnd.cncf.model.config.v1+json"
WEIGHT: Final = "application/vnd.cncf.model.weight.v1.raw"
WEIGHT_CONFIG: Final = "application/vnd.cncf.model.weight.config.v1.raw"
DOC: Final = "application/vnd.cncf.model.doc.v1.raw"

FILE_PATH: Final = "org.cncf.model.filepath"
TITLE: Final = "org.opencontainers.image.title"

FOLDER: Final = "blobstore"
"""Of files that only blobstore reads."""
_TENSORS: Final = "tensors"
"""Of weight files that other tools cannot load as they are."""
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")
_MAX_STEM: Final = 200

_FILES: Mapping[str, tuple[str, str]] = {
    media_types.SOURCE: (DOC, f"{FOLDER}/source.json"),
    media_types.STACKS: (DOC, f"{FOLDER}/stacks.json"),
    media_types.TEMPLATE: (WEIGHT_CONFIG, f"{FOLDER}/template"),
    media_types.SYSTEM: (WEIGHT_CONFIG, f"{FOLDER}/system"),
    media_types.PARAMS: (WEIGHT_CONFIG, f"{FOLDER}/params.json"),
    media_types.LICENSE: (DOC, "LICENSE"),
    media_types.MODEL: (WEIGHT, "model.gguf"),
    media_types.PROJECTOR: (WEIGHT, "mmproj.gguf"),
    media_types.ADAPTER: (WEIGHT, "adapter.gguf"),
}
"""ModelPack's media type and the path of layers that have no name of a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMetadata:
    """Facts about a model from its blobs. Empty values are left out of remote configs."""

    name: str = ""
    family: str = ""
    architecture: str = ""
    format: str = "safetensors"
    parameters: int = 0
    precision: tuple[str, ...] = ()
    quantization: tuple[str, ...] = ()
    licenses: tuple[str, ...] = ()
    """SPDX expressions."""
    source_url: str = ""
    revision: str = ""
    weight_files: Mapping[str, str] = field(default_factory=dict)
    """The paths of tensor layers, by name, in a folder that other libraries load; empty if none can."""
    generated: Mapping[str, bytes] = field(default_factory=dict)
    """Files that this folder needs and no blob holds, such as an index of weight files, by path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotePlan:
    """The manifests and blobs that a registry must have for a model."""

    manifests: tuple[RemoteManifest, ...] = field(repr=False)
    """In the order of the push: the last one gets the tag, and lists the others if there are any."""
    blobs: tuple[Descriptor, ...] = field(repr=False)
    """Blobs of the store, each once."""
    made: Mapping[Digest, bytes] = field(default_factory=dict, repr=False)
    """Blobs that only the registry has: configs, the local manifest, generated files."""
    readers: Mapping[Digest, Callable[[], Pieces]] = field(default_factory=dict, repr=False)
    """Return the bytes of blobs that are put together from those of the store."""
    tars: Mapping[Digest, TarLayer] = field(default_factory=dict, repr=False)
    """Tar layers, which have the blobs of the store as files; if there are any, blobs are not pushed."""

    @property
    def root(self) -> RemoteManifest:
        """The manifest that gets the tag."""
        return self.manifests[-1]


def folder_files(data: bytes, manifest: Manifest, metadata: ModelMetadata) -> list[FolderFile]:
    """Return the files of a model in the order of its layers, after the manifest and the config.

    Paths are safe, and unique even where case is ignored. ``data`` has the bytes of ``manifest``.
    """
    paths = _Paths()
    described = FolderFile(paths.take(f"{FOLDER}/manifest.json"), DOC, Digest.of(data), len(data))
    config = manifest.config
    files = [
        described,
        FolderFile(paths.take(f"{FOLDER}/config.json"), DOC, config.digest, config.size),
    ]
    generated = [
        FolderFile(paths.take(path), WEIGHT_CONFIG, Digest.of(content), len(content))
        for path, content in metadata.generated.items()
    ]
    for layer in manifest.layers:
        media_type, path = _described(layer, metadata)
        files.append(FolderFile(paths.take(path), media_type, layer.digest, layer.size))
    return files + generated


def _described(layer: Descriptor, metadata: ModelMetadata) -> tuple[str, str]:
    """Return ModelPack's media type of a layer, and the path that it should have."""
    if layer.media_type == media_types.TENSOR:
        stem = _UNSAFE.sub("_", layer.name)[:_MAX_STEM]
        path = metadata.weight_files.get(layer.name, f"{_TENSORS}/{stem}.safetensors")
        return WEIGHT, path
    if layer.media_type in (media_types.JSON, media_types.FILE) and is_valid_name(layer.name):
        is_doc = layer.name.upper().startswith(("README", "LICENSE", "NOTICE"))
        return (DOC if is_doc else WEIGHT_CONFIG), layer.name
    return _FILES.get(layer.media_type, (DOC, f"{FOLDER}/{layer.digest.hex}"))


class _Paths:
    """Gives files paths that can be in one folder together."""

    def __init__(self) -> None:
        self._files: set[str] = set()
        self._folders: set[str] = set()

    def take(self, path: str) -> str:
        """Return ``path``, or a similar one if a file or a folder has it already."""
        name = path.rpartition("/")[2]
        for number in count(2):
            key = path.casefold()
            folders = set(accumulate(key.split("/")[:-1], "{}/{}".format))
            is_taken = key in self._files or key in self._folders
            if not is_taken and folders.isdisjoint(self._files):
                self._files.add(key)
                self._folders |= folders
                return path
            path = f"{FOLDER}/{number}-{name}"
        raise AssertionError


def descriptor(media_type: str, content: bytes) -> dict[str, Any]:
    """Return what a manifest says of a document."""
    return {"mediaType": media_type, "digest": str(Digest.of(content)), "size": len(content)}


def remote_manifest(media_type: str, value: Mapping[str, Any]) -> RemoteManifest:
    """Return a manifest with its canonical bytes.

    Raises:
        RemoteRefused: registries refuse a manifest of this size.
    """
    return checked_manifest(media_type, strict_json.dumps(value).encode())


def checked_manifest(media_type: str, data: bytes) -> RemoteManifest:
    """Return a manifest of these bytes. Raises as :func:`remote_manifest`."""
    if len(data) > MAX_SIZE:
        raise RemoteRefused(
            f"the manifest has {len(data)} bytes, and registries refuse more than {MAX_SIZE}",
            advice="import the model again with its experts packed, or push it with '--layout oci', "
            "which divides it into parts",
        )
    return RemoteManifest.of(media_type, data)
