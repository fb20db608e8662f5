"""Models that other tools have pushed file by file: ModelPack artifacts and those of Docker Model Runner.

Each layer is a file, or a tar of files. modctl and KitOps name the files in annotations. Docker's older
artifacts name none: their weight files are in order, and their other files in one tar.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from blobstore.core.escape import quote
from blobstore.errors import InvalidManifest, UnsupportedSource
from blobstore.manifests.file_names import check_paths, is_safe_name
from blobstore.registry.layouts.plan import FILE_PATH, TITLE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blobstore.core.digest import Digest
    from blobstore.registry.manifest import RemoteDescriptor

_MODEL_PACK: Final = re.compile(
    r"application/vnd\.cncf\.model\."
    r"(?P<kind>weight|weight\.config|doc|code|dataset)\.v1\."
    r"(?P<form>raw|safetensors|gguf|tar|tar\+gzip|tar\+zstd)"
)
_DOCKER: Final = {
    "application/vnd.docker.ai.safetensors": ("weight", "safetensors"),
    "application/vnd.docker.ai.gguf.v3": ("weight", "gguf"),
    "application/vnd.docker.ai.mmproj": ("weight", "gguf"),
    "application/vnd.docker.ai.vllm.config.tar": ("weight.config", "tar"),
    "application/vnd.docker.ai.dir.tar": ("weight.config", "tar"),
    "application/vnd.docker.ai.chat.template.jinja": ("weight.config", "raw"),
    "application/vnd.docker.ai.license": ("doc", "raw"),
    "application/vnd.docker.ai.model.file": ("weight.config", "raw"),
}
_NAMES: Final = {
    "application/vnd.docker.ai.chat.template.jinja": "chat_template.jinja",
    "application/vnd.docker.ai.license": "LICENSE",
    "application/vnd.docker.ai.mmproj": "mmproj-model.gguf",
}
"""Files that Docker's older artifacts do not name."""
_TAR_FORMS: Final = {"tar": "", "tar+gzip": "gzip", "tar+zstd": "zstd"}


class RemoteFile(NamedTuple):
    """A layer that is a file of a model's folder, or a tar of files."""

    path: str
    """Its path in the folder; empty for a tar."""
    digest: Digest
    size: int
    is_tar: bool = False
    compression: str = ""
    """Of a tar: ``gzip``, ``zstd`` or none."""


def folder_of(layers: Sequence[RemoteDescriptor]) -> tuple[RemoteFile, ...]:
    """Return the files that the layers of a model are.

    Raises:
        InvalidManifest: a path is missing, is that of two files, or leads out of the folder.
        UnsupportedSource: a layer is of an unknown type.
    """
    unnamed = _unnamed_weights(layers)
    files = []
    for layer in layers:
        kind, form = _kind(layer)
        path = _path(layer) or unnamed.get(layer.digest) or _NAMES.get(layer.media_type, "")
        if kind == "dataset":  # not part of the model
            continue
        if form in _TAR_FORMS:
            files.append(RemoteFile("", layer.digest, layer.size, True, _TAR_FORMS[form]))
            continue
        if form == "gguf" and path and not path.lower().endswith(".gguf"):
            path += ".gguf"  # by which create knows the format
        if not is_safe_name(path):
            raise InvalidManifest(
                f"layer {layer.digest} must not be written as the file {quote(path)}"
            )
        files.append(RemoteFile(path, layer.digest, layer.size))
    check_paths([file.path.casefold() for file in files if file.path])
    return tuple(files)


def _unnamed_weights(layers: Sequence[RemoteDescriptor]) -> dict[Digest, str]:
    """Return the names of weight files that have none: numbered in order if there are several."""
    names: dict[Digest, str] = {}
    for form in ("safetensors", "gguf"):
        found = dict.fromkeys(
            layer.digest
            for layer in layers
            if _kind(layer)[1] == form and not _path(layer) and layer.media_type not in _NAMES
        )
        for number, digest in enumerate(found, 1):
            part = f"-{number:05}-of-{len(found):05}" if len(found) > 1 else ""
            names[digest] = f"model{part}.{form}"
    return names


def _kind(layer: RemoteDescriptor) -> tuple[str, str]:
    """Return the purpose of a layer, and its form."""
    match = _MODEL_PACK.fullmatch(layer.media_type)
    if match:
        return match["kind"], match["form"]
    try:
        return _DOCKER[layer.media_type]
    except KeyError:
        raise UnsupportedSource(
            f"layers of type {quote(layer.media_type)} are not supported"
        ) from None


def _path(layer: RemoteDescriptor) -> str:
    return layer.annotations.get(FILE_PATH) or layer.annotations.get(TITLE) or ""
