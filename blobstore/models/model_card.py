"""What the model card and license files of a stored model say."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from blobstore.errors import BlobstoreError
from blobstore.manifests import media_types

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from blobstore.manifests.model import Manifest
    from blobstore.store.protocols import BlobDescriber

_MAX_CARD = 1 << 20
"""Bytes; larger files are not read for a license or a base."""
# No two parts match the same line breaks: a file of nothing else would take hours.
_FRONT_MATTER = re.compile(r"\A---[ \t\r]*\n(.*?\n)---[ \t\r]*(?:\n|\Z)", re.DOTALL)
_CARD_FIELD = r"^{}:[ \t]*(?:\n[ \t]*-[ \t]*)?[\"']?([^\s\"'#]+)"
_LICENSE_FILES = ("license", "licence", "use_policy")


def small_texts(store: BlobDescriber, manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield the names and contents of the files that may name a license or a base."""
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


def card_field(texts: Mapping[str, str], key: str) -> list[str]:
    """Return the values of a field at the start of the model card."""
    front_matter = _FRONT_MATTER.match(texts.get("README.md", ""))
    pattern = re.compile(_CARD_FIELD.format(key), re.MULTILINE)
    return pattern.findall(front_matter[1]) if front_matter else []


def stated_license(texts: Mapping[str, str]) -> str | None:
    """Return the license as the model card or a license file names it; nobody has checked it."""
    for name in card_field(texts, "license_name") + card_field(texts, "license"):
        return name
    for name, text in texts.items():
        if name.lower().startswith(_LICENSE_FILES):
            return next((line.strip() for line in text.splitlines() if line.strip()), None)
    return None
