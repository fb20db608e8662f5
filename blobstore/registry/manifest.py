"""Manifests as registries return them: exact bytes, with their media type and digest.

OCI image manifests and indexes are read, and their Docker counterparts. Unknown fields are ignored, as the OCI
specification asks; the known ones are checked strictly.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from blobstore.core import limits, strict_json
from blobstore.core.digest import Digest
from blobstore.core.escape import escape, quote
from blobstore.errors import InvalidManifest
from blobstore.manifests.descriptor import Descriptor, text_field, wrong_type

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_SIZE: Final = limits.REGISTRY_MANIFEST.one
"""Bytes of one manifest: what registries accept."""
OCI_MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
OCI_INDEX: Final = "application/vnd.oci.image.index.v1+json"
DOCKER_MANIFEST: Final = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_LIST: Final = "application/vnd.docker.distribution.manifest.list.v2+json"
INDEXES: Final = frozenset({OCI_INDEX, DOCKER_LIST})
ACCEPTED: Final = (OCI_MANIFEST, DOCKER_MANIFEST, OCI_INDEX, DOCKER_LIST)
_SCHEMA_VERSION: Final = 2
_NOTHING: Mapping[str, str] = {}


class RemoteDescriptor(NamedTuple):
    """An entry of a manifest or index. Its ``urls`` are not read: blobs come from the registry alone."""

    media_type: str
    digest: Digest
    size: int
    annotations: Mapping[str, str] = _NOTHING
    artifact_type: str = ""

    def __repr__(self) -> str:
        return (
            f"<RemoteDescriptor {escape(self.media_type)}, {self.size} bytes, {self.digest.short}>"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the value as JSON types."""
        known = {"mediaType": self.media_type, "digest": str(self.digest), "size": self.size}
        optional = {"annotations": dict(self.annotations), "artifactType": self.artifact_type}
        return known | {key: value for key, value in optional.items() if value}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageManifest:
    """A config and layers."""

    config: RemoteDescriptor
    layers: tuple[RemoteDescriptor, ...] = field(repr=False)
    artifact_type: str = ""
    subject: RemoteDescriptor | None = None
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageIndex:
    """A list of manifests."""

    manifests: tuple[RemoteDescriptor, ...] = field(repr=False)
    artifact_type: str = ""
    subject: RemoteDescriptor | None = None
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RemoteManifest:
    """The bytes of a manifest, which decide its digest, and the media type that it is sent with."""

    media_type: str
    data: bytes = field(repr=False)
    digest: Digest
    foreign_type: str = field(default="", compare=False)
    """The ``Content-Type`` of a server that does not say what the manifest is."""

    @classmethod
    def of(cls, media_type: str, data: bytes) -> RemoteManifest:
        """Return a manifest with the digest of its bytes.

        Raises:
            InvalidManifest: it is over 4 MiB, or of a media type that no registry is asked for.
        """
        if len(data) > MAX_SIZE:
            raise InvalidManifest(f"manifest of {len(data)} bytes is over the limit of {MAX_SIZE}")
        if media_type not in ACCEPTED:
            raise InvalidManifest(f"manifest has the unknown media type {quote(media_type)}")
        return cls(media_type, data, Digest.of(data))

    @classmethod
    def received(cls, content_type: str, data: bytes) -> RemoteManifest:
        """Return a manifest that a server sent as ``content_type``.

        Servers of files send ``application/json`` or ``text/plain``. Then the manifest says itself what it
        is; the digest, which the caller knows or computes, covers that.

        Raises:
            InvalidManifest: as :meth:`of`, and it does not say either.
        """
        if content_type in ACCEPTED:
            return cls.of(content_type, data)
        try:
            declared = strict_json.loads(data)["mediaType"]
        except (ValueError, KeyError, TypeError):
            declared = None
        if declared not in ACCEPTED:
            raise InvalidManifest(
                f"the registry sends it as {quote(content_type)}, and its content names no known mediaType"
            )
        return replace(cls.of(declared, data), foreign_type=content_type)

    def parse(self) -> ImageManifest | ImageIndex:
        """Return the content, checked.

        Raises:
            InvalidManifest: it is not strict JSON, or a field is missing, of a wrong type or out of
                form. The message begins with the JSON path.
        """
        try:
            value = strict_json.loads(self.data)
        except ValueError as error:
            raise InvalidManifest(str(error)) from None
        if not isinstance(value, dict):
            raise wrong_type("$", "an object", value)
        version, declared = value.get("schemaVersion"), value.get("mediaType", self.media_type)
        if type(version) is not int or version != _SCHEMA_VERSION:
            raise wrong_type("$.schemaVersion", "2", version)
        # The same bytes must not mean two things, depending on the type they are sent with
        # (CVE-2021-41190).
        if declared != self.media_type:
            raise wrong_type("$.mediaType", f"{self.media_type} as it was sent", declared)
        subject = value.get("subject")
        common: dict[str, Any] = {
            "artifact_type": text_field(value, "artifactType", ""),
            "subject": None if subject is None else _descriptor(subject, "$.subject"),
            "annotations": _annotations(value, "$"),
        }
        if self.media_type in INDEXES:
            return ImageIndex(manifests=_descriptors(value, "manifests"), **common)
        config = _descriptor(value.get("config"), "$.config")
        return ImageManifest(config=config, layers=_descriptors(value, "layers"), **common)


def _descriptors(value: dict[str, Any], key: str) -> tuple[RemoteDescriptor, ...]:
    listed = value.get(key)
    if not isinstance(listed, list):
        raise wrong_type(f"$.{key}", "a list", listed)
    return tuple(_descriptor(item, f"$.{key}[{index}]") for index, item in enumerate(listed))


def _descriptor(value: Any, path: str) -> RemoteDescriptor:
    try:
        plain = Descriptor.from_json(value)
        artifact_type = text_field(value, "artifactType", "")
    except InvalidManifest as error:
        raise InvalidManifest(f"{path}{error.message}") from None
    annotations = _annotations(value, path)
    return RemoteDescriptor(plain.media_type, plain.digest, plain.size, annotations, artifact_type)


def _annotations(value: dict[str, Any], path: str) -> Mapping[str, str]:
    found = value.get("annotations")
    if found is None:
        return _NOTHING
    if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
        raise wrong_type(f"{path}.annotations", "an object of texts", found)
    return found
