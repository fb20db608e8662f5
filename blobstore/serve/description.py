"""The description of a model: the fields of the Hub's info that clients decide by.

The Hub reads them from the card, the config and the names of the files, and so does this module. Without a task,
``transformers.pipeline`` does not load a model, and without a library, accelerate does not measure one. While a model
arrives, the fields are those of the upstream.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Self

from blobstore.core import strict_json
from blobstore.errors import BlobstoreError
from blobstore.manifests import media_types
from blobstore.models.front_matter import front_matter
from blobstore.models.model_card import CONFIG, decoded_config, small_texts
from blobstore.models.source_layers import gguf_roles, read_source_record

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from blobstore.manifests.model import Manifest
    from blobstore.models.front_matter import Fields
    from blobstore.serve.messages import Content
    from blobstore.store.local import LocalStore

_CARD: Final = "README.md"
_TASKS: Final = {
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForImageClassification": "image-classification",
}
"""Tasks of models whose card names none, by the ends of the names of their classes."""
_LIBRARIES: Final = {
    "model_index.json": "diffusers",
    "modules.json": "sentence-transformers",
    "adapter_config.json": "peft",
}
"""Libraries of models whose card names none, by files that only these write."""
_FORMATS: Final = {
    ".safetensors": "safetensors",
    ".gguf": "gguf",
    ".onnx": "onnx",
    ".bin": "pytorch",
}
_PREFIXES: Final = {
    "license": "license:",
    "base_model": "base_model:",
    "datasets": "dataset:",
    "language": "",
}
"""Fields of a card whose values are tags."""
_CONFIG: Final = ("architectures", "model_type", "auto_map", "quantization_config")
_MAX_TEXT: Final = 500
_MAX_PART: Final = 16 << 10
"""Bytes of the tags of a description, of its parameters, and of the fields of its card and config: lists have thousands."""


@dataclass(frozen=True, slots=True)
class Description:
    """The task, the library and the tags of a model, with their sources."""

    task: str = ""
    library: str = ""
    tags: tuple[str, ...] = ()
    card: Fields = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    parameters: Mapping[str, int] = field(default_factory=dict)
    """Values in safetensors files, by their types."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """The roles of GGUF files, by name."""

    @classmethod
    def of(
        cls,
        card: Fields,
        config: Mapping[str, Any],
        names: Iterable[str],
        parameters: Mapping[str, int],
    ) -> Self:
        """Return the description of a model with a card, a config and files."""
        files = set(names)
        classes = [one for one in _listed(config.get("architectures")) if isinstance(one, str)]
        tasks = (task for end, task in _TASKS.items() for one in classes if one.endswith(end))
        libraries = (library for name, library in _LIBRARIES.items() if name in files)
        kind = config.get("model_type")
        task = _text(card.get("pipeline_tag")) or next(tasks, "")
        library = _text(card.get("library_name")) or next(libraries, "transformers" if kind else "")
        formats = [
            one for end, one in _FORMATS.items() if any(name.endswith(end) for name in files)
        ]
        stated = [
            start + one for name, start in _PREFIXES.items() for one in _listed(card.get(name))
        ]
        tags = [library, *formats, kind, task, *_listed(card.get("tags")), *stated]
        return cls(task, library, _kept_tags(tags), _within(card), _chosen(config), parameters)

    @classmethod
    def from_info(cls, info: Mapping[str, Any]) -> Self:
        """Return the description by an upstream, of which only texts of limited length are used."""
        config, parameters = info.get("config"), info.get("safetensors")
        counts = parameters.get("parameters") if isinstance(parameters, dict) else None
        return cls(
            _text(info.get("pipeline_tag")),
            _text(info.get("library_name")),
            _kept_tags(_listed(info.get("tags"))),
            {},
            _chosen(config if isinstance(config, dict) else {}),
            _within(
                {
                    name: count
                    for name, count in (counts.items() if isinstance(counts, dict) else ())
                    if _text(name) and type(count) is int and 0 <= count < 2**53
                }
            ),
        )

    def fields(self) -> dict[str, Any]:
        """Return the fields of the Hub's info. Those without a value are left out."""
        total = sum(self.parameters.values())
        found = {
            "pipeline_tag": self.task,
            "library_name": self.library,
            "cardData": self.card,
            "config": dict(self.config),
            "safetensors": {"parameters": dict(self.parameters), "total": total} if total else None,
        }
        return {"tags": list(self.tags), **{name: value for name, value in found.items() if value}}


NOTHING: Final = Description()


def describe(
    store: LocalStore, manifest: Manifest, files: Mapping[str, Content] | None = None
) -> Description:
    """Return the description of a stored model; with the files that it is served as, their parameters are counted.

    Fields that cannot be read are left out: another response reports them.
    """
    texts = dict(small_texts(store, manifest))
    names = {layer.name for layer in manifest.layers if layer.name}
    is_gguf = manifest.layers_of(*media_types.GGUF) or (CONFIG in texts and CONFIG not in names)
    names.add("weights.gguf" if is_gguf else "weights.safetensors")
    found = Description.of(
        front_matter(texts.get(_CARD, "")),
        decoded_config(texts, CONFIG),
        names,
        _parameters(files or {}),
    )
    if any(name.lower().endswith(".gguf") for name in files or ()):
        with contextlib.suppress(BlobstoreError):
            return replace(found, roles=gguf_roles(read_source_record(store, manifest)))
    return found


def _parameters(files: Mapping[str, Content]) -> Counter[str]:
    """Return the number of values of each type in safetensors files, by the headers of the exported files."""
    counts: Counter[str] = Counter()
    for name, content in files.items():
        first = content.parts[0] if content.parts else b""
        if name.endswith(".safetensors") and isinstance(first, bytes):
            try:
                header = strict_json.loads(first[8 : 8 + int.from_bytes(first[:8], "little")])
            except ValueError:  # it would take too much memory
                return Counter()
            for tensor in header.values():
                if "dtype" in tensor:  # not the metadata
                    counts[tensor["dtype"]] += math.prod(tensor["shape"])
    return counts


def _text(value: object) -> str:
    is_text = isinstance(value, str) and value.isprintable() and len(value) <= _MAX_TEXT
    return str(value) if is_text else ""


def _listed(value: object) -> list[Any]:
    if isinstance(value, list):
        return value
    return [] if value is None else [value]


def _kept_tags(tags: Iterable[Any]) -> tuple[str, ...]:
    return tuple(_within(dict.fromkeys(filter(_text, tags))))


def _chosen(config: Mapping[str, Any]) -> dict[str, Any]:
    return _within({name: config[name] for name in _CONFIG if name in config})


def _within(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that fit into a part of a description, and have a JSON form."""
    found, left = {}, _MAX_PART
    for name, value in fields.items():
        try:
            size = len(strict_json.dumps([name, value]).encode())
        except ValueError:  # not a number, or half a character
            continue
        if size <= left:
            found[name], left = value, left - size
    return found
