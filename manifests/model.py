"""Manifests and model configs: frozen values with one canonical JSON form."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from blobstore.core import limits, strict_json
from blobstore.core.escape import quote
from blobstore.errors import InvalidManifest
from blobstore.manifests import media_types
from blobstore.manifests.descriptor import Descriptor, PlainDescriptors, text_field, wrong_type

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from blobstore.core.digest import Digest

SCHEMA_VERSION: Final = 2
MAX_MANIFEST_SIZE: Final = limits.MANIFEST.one
"""Bytes; a larger manifest is refused before it is parsed."""
REQUIRES: Final = "0.19.0"
"""The oldest Ollama that understands tensor models; what its own importer writes."""
LAYERS_DIGEST: Final = "layers_digest"
"""The key of a config that holds the digest of the layers; Ollama reads past it."""
PUBLISHED_SCHEME: Final = "published_scheme"
"""The key of a config that says how a model is quantized whose tensors are kept as published."""
_FIELDS = ("schemaVersion", "mediaType", "config", "layers")
_PLAIN_START = (
    f'{{"schemaVersion":{SCHEMA_VERSION},"mediaType":"{media_types.MANIFEST}","config":{{'
)
_PLAIN_END = "}]}\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The layers of a model, in order, and its config."""

    config: Descriptor
    layers: tuple[Descriptor, ...] = field(repr=False)
    media_type: str = media_types.MANIFEST
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Fields that we do not know, kept as they were."""

    @classmethod
    def from_bytes(cls, data: bytes, known: PlainDescriptors | None = None) -> Manifest:
        """Parse a manifest file strictly.

        ``known`` are descriptors of other manifests, which may have some in common with this one.

        Raises:
            InvalidManifest: it is over 64 MiB, not strict JSON, a field is missing, of a wrong
                type or out of form, or two layers of one media type have the same name. The
                message begins with the JSON path.
        """
        if len(data) > MAX_MANIFEST_SIZE:
            raise InvalidManifest(
                f"manifest of {len(data)} bytes is over the limit of {MAX_MANIFEST_SIZE}"
            )
        manifest = cls._plain(data, known) or cls._parse(data)
        # Several licenses without a name are normal.
        names = [(layer.media_type, layer.name) for layer in manifest.layers if layer.name]
        if len(set(names)) != len(names):
            raise _name_occurs_twice(manifest.layers)
        return manifest

    @classmethod
    def _plain(cls, data: bytes, known: PlainDescriptors | None) -> Manifest | None:
        """Return the manifest if it is of the plain form: as written by us, and nothing unusual.

        It takes less than half the time of :meth:`_parse`, which remains the judge of all else.
        """
        known = PlainDescriptors() if known is None else known
        try:
            text = str(data, "utf-8")
            if not (text.startswith(_PLAIN_START) and text.endswith(_PLAIN_END)):
                return None
            inner = text[len(_PLAIN_START) : -len(_PLAIN_END)]
            config, _, layers = inner.partition('},"layers":[{')
            return cls(
                config=known[config], layers=tuple(map(known.__getitem__, layers.split("},{")))
            )
        except ValueError:  # not UTF-8, or not a plain descriptor
            return None

    @classmethod
    def _parse(cls, data: bytes) -> Manifest:
        try:
            value = strict_json.loads(data)
        except ValueError as error:
            raise InvalidManifest(f"manifest is not readable as JSON: {error}") from None
        place = "$"
        try:
            if not isinstance(value, dict):
                raise wrong_type("", "an object", value)
            version = value.get("schemaVersion")
            if type(version) is not int or version != SCHEMA_VERSION:
                raise wrong_type(".schemaVersion", str(SCHEMA_VERSION), version)
            media_type = text_field(value, "mediaType")
            listed = value.get("layers")
            if not isinstance(listed, list):
                raise wrong_type(".layers", "a list", listed)
            place = "$.config"
            config = Descriptor.from_json(value.get("config"))
            layers = []
            for index, layer in enumerate(listed):
                place = f"$.layers[{index}]"
                layers.append(Descriptor.from_json(layer))
        except InvalidManifest as error:
            raise InvalidManifest(f"{place}{error}") from None
        extra = {key: item for key, item in value.items() if key not in _FIELDS}
        return cls(config=config, layers=tuple(layers), media_type=media_type, extra=extra)

    def to_bytes(self) -> bytes:
        """Return the canonical JSON: one line, Ollama's field order, a line feed at the end."""
        value = {
            "schemaVersion": SCHEMA_VERSION,
            "mediaType": self.media_type,
            "config": self.config.to_json(),
            "layers": [layer.to_json() for layer in self.layers],
        }
        return f"{strict_json.dumps(value | dict(self.extra))}\n".encode()

    def layers_of(self, *kinds: str) -> tuple[Descriptor, ...]:
        """Return the layers of some media types, in order."""
        return tuple(layer for layer in self.layers if layer.media_type in kinds)

    @property
    def blobs(self) -> tuple[Descriptor, ...]:
        """Return the config and the layers, each digest once."""
        return tuple({item.digest: item for item in (self.config, *self.layers)}.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The config blob of a tensor model, with the keys that Ollama's importer writes and one of ours."""

    file_type: str = ""
    """The quantization type of the model, empty for none."""
    capabilities: tuple[str, ...] = ("completion",)
    layers_digest: Digest | None = None
    """The :func:`~blobstore.manifests.layers_digest.layers_digest` of the model's layers; None in older stores."""
    published_scheme: str = ""
    """The name of the quantization of a model that is kept as published; otherwise empty."""

    def to_bytes(self) -> bytes:
        """Return the canonical JSON, without a line feed."""
        value: dict[str, Any] = {
            "model_format": "safetensors",
            "model_family": "",
            "model_families": None,
            "model_type": "",
            "file_type": self.file_type,
            "requires": REQUIRES,
            "capabilities": list(self.capabilities),
            "architecture": "",
            "os": "",
        }
        if self.layers_digest is not None:
            value[LAYERS_DIGEST] = str(self.layers_digest)
        if self.published_scheme:
            value[PUBLISHED_SCHEME] = self.published_scheme
        return strict_json.dumps(value).encode()


def _name_occurs_twice(layers: Iterable[Descriptor]) -> InvalidManifest:
    seen: dict[tuple[str, str], int] = {}
    for index, layer in enumerate(layers):
        first = seen.setdefault((layer.media_type, layer.name), index) if layer.name else index
        if first != index:
            return InvalidManifest(
                f"$.layers[{index}].name: {quote(layer.name)} is already the name of "
                f"$.layers[{first}], of the same media type"
            )
    raise AssertionError
