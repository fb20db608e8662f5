"""The files that the layers of a model of Ollama's become in a folder."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from blobstore.manifests import media_types

if TYPE_CHECKING:
    from collections.abc import Iterator

    from blobstore.manifests.descriptor import Descriptor
    from blobstore.manifests.model import Manifest

MANIFEST: Final = "ollama/manifest.json"
"""The manifest itself, byte for byte."""
CONFIG: Final = "ollama/config.json"
_GGUF: Final = {
    media_types.MODEL: "model",
    media_types.PROJECTOR: "mmproj-model",
    media_types.ADAPTER: "adapter",
    media_types.DRAFT: "mtp-draft",
}
_ENDINGS: Final = {"params": ".json", "messages": ".json"}


def ollama_files(manifest: Manifest) -> Iterator[tuple[str, Descriptor]]:
    """Yield the name of the file of each layer and of the config. A model in parts has numbers as llama.cpp's."""
    yield CONFIG, manifest.config
    parts = len(manifest.layers_of(media_types.MODEL))
    counts: Counter[str] = Counter()
    for layer in manifest.layers:
        kind = layer.media_type.rpartition(".")[2]
        counts[kind] += 1
        suffix = f"-{counts[kind]}" if counts[kind] > 1 else ""
        if layer.media_type == media_types.MODEL and parts > 1:
            yield f"model-{counts[kind]:05}-of-{parts:05}.gguf", layer
        elif stem := _GGUF.get(layer.media_type):
            yield f"{stem}{suffix}.gguf", layer
        elif layer.media_type == media_types.LICENSE:
            yield f"LICENSE{suffix}", layer
        else:
            yield f"ollama/{kind}{suffix}{_ENDINGS.get(kind, '')}", layer
