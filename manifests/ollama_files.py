"""The files that the layers of a model of Ollama's become in a folder."""

from __future__ import annotations

import re
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
_KIND: Final = re.compile(r".*[./]", re.DOTALL)
_ENDINGS: Final = {"params": ".json", "messages": ".json"}


def ollama_files(manifest: Manifest) -> Iterator[tuple[str, Descriptor]]:
    """Yield the name of the file of each layer and of the config. A model in parts has numbers as llama.cpp's."""
    yield CONFIG, manifest.config
    parts = len(manifest.layers_of(media_types.MODEL))
    counts: Counter[str] = Counter()
    taken: set[str] = set()
    for layer in manifest.layers:
        counts[layer.media_type] += 1
        # Kinds such as "a" and "a-2" can have the same names.
        while (name := _file_name(layer.media_type, counts[layer.media_type], parts)) in taken:
            counts[layer.media_type] += 1
        taken.add(name)
        yield name, layer


def _file_name(media_type: str, number: int, parts: int) -> str:
    if media_type == media_types.MODEL and parts > 1:
        return f"model-{number:05}-of-{parts:05}.gguf"
    suffix = f"-{number}" if number > 1 else ""
    if stem := _GGUF.get(media_type):
        return f"{stem}{suffix}.gguf"
    if media_type == media_types.LICENSE:
        return f"LICENSE{suffix}"
    kind = _KIND.sub("", media_type)
    return f"ollama/{kind}{suffix}{_ENDINGS.get(kind, '')}"
