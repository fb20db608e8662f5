"""Facts from the model card and the license files of a stored model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from blobstore.core import strict_json
from blobstore.errors import BlobstoreError
from blobstore.manifests import media_types
from blobstore.models.front_matter import front_matter
from blobstore.models.small_files import first_text
from blobstore.models.source_layers import gguf_config, read_source_record

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from blobstore.manifests.model import Manifest
    from blobstore.store.protocols import BlobDescriber

CONFIG = "config.json"
_MAX_CARD = 1 << 20
"""Bytes; larger files are not read for a license or a base."""
_LICENSE_FILES = ("license", "licence", "use_policy")


def small_texts(store: BlobDescriber, manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield the names and contents of the files that may name a license or a base.

    The headers of GGUF files count as a ``config.json``.
    """
    if config := config_of_source(store, manifest):
        yield CONFIG, json.dumps(config)
    for layer in manifest.layers:
        if layer.media_type == media_types.TENSOR:  # most are
            continue
        name = "license" if layer.media_type == media_types.LICENSE else layer.name
        is_config = name in ("README.md", "config.json", "adapter_config.json")
        if layer.size <= _MAX_CARD and (is_config or name.lower().startswith(_LICENSE_FILES)):
            try:
                yield name, store.read_blob(layer.digest, layer.size).decode(errors="replace")
            except BlobstoreError:
                continue  # show and verify report it


def config_of_source(store: BlobDescriber, manifest: Manifest) -> dict[str, Any]:
    """Return the facts in the headers of GGUF files about a model without ``config.json``.

    It is empty for other models.
    """
    if any(layer.name == CONFIG for layer in manifest.layers_of(media_types.JSON)):
        return {}
    try:
        return gguf_config(read_source_record(store, manifest))
    except BlobstoreError:
        return {}  # show and verify report it


def card_field(texts: Mapping[str, str], key: str) -> list[str]:
    """Return the values of a field at the start of the model card."""
    value = front_matter(texts.get("README.md", "")).get(key, [])
    return [value] if isinstance(value, str) else value


def stated_license(texts: Mapping[str, str]) -> str | None:
    """Return the license as the model card, a license file or a config names it; nobody has checked it."""
    for name in card_field(texts, "license_name") + card_field(texts, "license"):
        return name
    for name, text in texts.items():
        if name.lower().startswith(_LICENSE_FILES):
            return next((line.strip() for line in text.splitlines() if line.strip()), None)
    return first_text(decoded_config(texts, CONFIG), "license") or None


def decoded_config(texts: Mapping[str, str], name: str) -> dict[str, Any]:
    """Return the JSON object that a file contains; an empty one if it has none."""
    try:
        value = strict_json.loads_any(texts.get(name, "{}"))
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
