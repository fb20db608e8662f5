"""Descriptors: a manifest's entry for one blob."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from blobstore.core.digest import BlobId, Digest
from blobstore.core.escape import escape, quote
from blobstore.errors import InvalidDigest, InvalidManifest

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_SIZE = 2**63 - 1
_FIELDS = frozenset({"mediaType", "digest", "size", "from", "name"})
_TEXT = r'"([^"\\\x00-\x1f]*)"'
_PLAIN = re.compile(
    r'"mediaType":' + _TEXT + r',"digest":"sha256:([0-9a-f]{64})",'
    r'"size":(0|[1-9][0-9]{0,17})(?:,"name":' + _TEXT + r")?"
)

_MAX_DESCRIPTORS = 50_000
"""Descriptors that are kept while manifests are read, because the next one may have them in common."""
_NOTHING: Mapping[str, Any] = {}


class Descriptor(NamedTuple):
    """Media type, digest, size in bytes and name of a blob. A tuple, because models have thousands."""

    media_type: str
    digest: Digest
    size: int
    name: str = ""
    from_: str = ""
    """Where Ollama says that the layer came from; we only carry it."""
    extra: Mapping[str, Any] = _NOTHING
    """Fields that we do not know, kept as they were."""

    def __repr__(self) -> str:
        name = f"{quote(self.name)}: " if self.name else ""
        return (
            f"<Descriptor {name}{escape(self.media_type)}, {self.size} bytes, {self.digest.short}>"
        )

    @property
    def id(self) -> BlobId:
        """The blob by digest and size."""
        return BlobId(self.digest, self.size)

    @classmethod
    def from_json(cls, value: Any) -> Descriptor:
        """Return the descriptor that a decoded JSON ``value`` holds.

        Raises:
            InvalidManifest: a field is missing, of a wrong type or out of form. The message begins
                with the rest of the JSON path, such as ``.size``.
        """
        if not isinstance(value, dict):
            raise wrong_type("", "an object", value)
        media_type: Any = value.get("mediaType")
        spelled: Any = value.get("digest")
        name, from_ = value.get("name", ""), value.get("from", "")
        # One test for all fields, because a model has thousands of descriptors. The loop finds the wrong field.
        if not type(media_type) is type(spelled) is type(name) is type(from_) is str:
            for key, default in (("mediaType", None), ("digest", None), ("name", ""), ("from", "")):
                text_field(value, key, default)
        try:
            digest = Digest.parse(spelled)
        except InvalidDigest as error:
            raise InvalidManifest(f".digest: {error}") from None
        size = value.get("size")
        if type(size) is not int or not 0 <= size <= MAX_SIZE:
            raise wrong_type(".size", "a number of bytes from 0 to 2^63-1", size)
        extra = _NOTHING
        if not value.keys() <= _FIELDS:
            extra = {key: item for key, item in value.items() if key not in _FIELDS}
        return cls(media_type, digest, size, name, from_, extra)

    def to_json(self) -> dict[str, Any]:
        """Return the value as JSON types, its keys in the order of Ollama's files."""
        known = {"mediaType": self.media_type, "digest": str(self.digest), "size": self.size}
        optional = {"from": self.from_, "name": self.name}
        return known | {key: text for key, text in optional.items() if text} | dict(self.extra)


class PlainDescriptors(dict[str, Descriptor]):
    """Descriptors of the plain form, by the text between their braces. Each text is parsed once.

    That is the form of :meth:`Descriptor.to_json` written without spaces, except with an origin,
    unknown fields, escapes, or sizes near the limit. Other texts raise ValueError.
    """

    def __missing__(self, text: str) -> Descriptor:
        found = _PLAIN.fullmatch(text)
        if found is None:
            raise ValueError("not a plain descriptor")
        media_type, spelled, size, name = found.groups()
        kind = sys.intern(media_type)  # thousands have the same one
        self[text] = made = Descriptor(kind, Digest(spelled), int(size), name or "")
        return made

    def forget(self) -> None:
        """Forget all of them if there are very many. Call it between the manifests of a store."""
        if len(self) > _MAX_DESCRIPTORS:
            self.clear()


def text_field(value: dict[str, Any], key: str, default: str | None = None) -> str:
    """Return the text under ``key``, or ``default`` where the key is absent.

    Raises:
        InvalidManifest: it is not a text, or absent without a default.
    """
    text = value.get(key, default)
    if not isinstance(text, str):
        raise wrong_type("." + key, "a text", text)
    return text


def wrong_type(path: str, expected: str, value: Any) -> InvalidManifest:
    """Return the error that says what was expected at a JSON path and what was found."""
    found = repr(value) if isinstance(value, str) else value
    return InvalidManifest(f"{path}: expected {expected}, got {quote(found)}")
