"""Facts about a weight that follow from the model's config and the shapes of its tensors, not from its name.

Embeddings and output heads have one row per token of the vocabulary, and routers one row per expert. Most
weights in the layers of a language model have its hidden size as inputs; in a multimodal model, everything
else belongs to towers and projectors. A weight with as many rows as it has inputs is stored transposed.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from blobstore.core.tensor import TensorSpec

Role = Literal["embedding", "head", "router", "tower"]
"""The role of a weight. A tower is anything outside the layers of a multimodal model's language model."""
Orientation = Literal["upright", "transposed", "square", "unknown"]
"""How a weight is stored: ``[outputs, inputs]``, or ``[inputs, outputs]``. Squares are stored like others."""

_SECTION_DEPTH: Final = 3
_TEXT_SECTIONS: Final = ("thinker_config", "text_config", "llm_config", "language_config")
"""The sections of a multimodal model's config that describe its language model; they may be nested."""
_TOWER_SECTIONS: Final = ("vision_config", "audio_config", "speech_config", "sound_config")
_VOCABULARY: Final = re.compile(r"(?:\w+_)?vocab_size|n_vocab", re.ASCII)
_EXPERTS: Final = re.compile(r"(?:moe_)?n(?:um)?_(?:local_|routed_)?experts")
_WIDTHS: Final = ("hidden_size", "n_embd", "d_model", "embed_dim")
_LAYER: Final = re.compile(r"(?P<stack>(?:[^.]+\.)*?)\d+\.[^.]+\..", re.ASCII)
"""A tensor in a module of a numbered layer. The weights of a numbered list of modules are not layers."""
_ENDS: Final = re.compile(r"embed_|wte|.*head")
"""Names of the first and last modules of a language model, which are outside its layers."""
_EXPERT_PARENTS: Final = frozenset(
    {"mlp", "ffn", "feed_forward", "mixer", "moe", "block_sparse_moe", "moe_block"}
)
"""Modules that hold experts and their router."""
_CONV1D: Final = re.compile(r".*\.(?:c_attn|q_attn|c_fc|c_proj)\.weight")
"""The projections of GPT-2 and its relatives, some of which store them transposed."""
_DOWN: Final = re.compile(r".*(?:down|c_proj|w2|fc2)")
"""Projections back to the hidden size. All others of an expert or of GPT-2 start from it."""


class ModelFacts:
    """The sizes of a model, and the parts of it that they identify."""

    def __init__(self, config: Mapping[str, Any], specs: Iterable[TensorSpec] = ()) -> None:
        """Collect the facts.

        Args:
            config: the model's ``config.json``. Values of unexpected types are ignored.
            specs: all tensors of the model. Without them no towers are found.
        """
        sections = list(_sections(config))
        self._vocabularies = {n for _, part in sections for n in _sizes(part, _VOCABULARY)}
        self._experts = {n for _, part in sections for n in _sizes(part, _EXPERTS)}
        self._width = _language_width(config)
        orientations: defaultdict[str, set[Orientation]] = defaultdict(set)
        inputs: defaultdict[str, Counter[int]] = defaultdict(Counter)
        for spec in specs:
            if len(spec.shape) < 2:  # not a matrix
                continue
            layer = _LAYER.match(spec.name)
            if layer is not None:
                inputs[layer["stack"]][spec.shape[-1]] += 1
            orientations[_kind(spec)].add(self._orientation(spec))
        self._transposed_kinds = {
            kind
            for kind, found in orientations.items()
            if kind and "transposed" in found and "unknown" not in found
        }
        is_multimodal = any(key in {*_TEXT_SECTIONS, *_TOWER_SECTIONS} for key, _ in sections)
        self._language = tuple(
            stack
            for stack, widths in inputs.items()
            if is_multimodal and widths[self._width] == max(widths.values())
        )

    def role(self, spec: TensorSpec) -> Role | None:
        """Return the role of a matrix, or None if config and shapes do not determine it."""
        rows = spec.shape[0]
        *parents, _ = spec.name.split(".")
        module = parents[-1] if parents else ""
        if rows in self._vocabularies:
            if "head" in module:
                return "head"
            if _LAYER.match(spec.name) is None:
                return "head" if "out" in module or module == "decoder" else "embedding"
        if self._experts and not any("expert" in part for part in parents):
            has_row_per_expert = rows in self._experts and not module.endswith("_proj")
            if not {"gate", "router"}.isdisjoint(parents) or (
                has_row_per_expert and not _EXPERT_PARENTS.isdisjoint(parents)
            ):
                return "router"
        if not self._language or spec.name.startswith(self._language) or _ENDS.match(module):
            return None
        return "tower"

    def is_transposed(self, spec: TensorSpec) -> bool:
        """Return whether a weight is stored as ``[inputs, outputs]``."""
        return _kind(spec) in self._transposed_kinds and self._orientation(spec) != "upright"

    def _orientation(self, spec: TensorSpec) -> Orientation:
        """Return the orientation of a weight by its shape, if one side has the hidden size."""
        rows, columns = spec.shape[-2:]
        if self._width not in {rows, columns}:
            return "unknown"
        if rows == columns:
            return "square"
        is_down = _DOWN.match(spec.name.removesuffix(".weight").rpartition(".")[2])
        return "upright" if self._width == (rows if is_down else columns) else "transposed"


def _kind(spec: TensorSpec) -> str:
    """Return which kind of weight, of those that some models store transposed, a weight is."""
    if ".experts." in spec.name:
        # The matrices of single experts are never transposed. DBRX joins all of them to one matrix.
        is_joined = len(spec.shape) == 3 or ".experts.mlp." in spec.name
        return "experts" if is_joined else ""
    return "conv1d" if _CONV1D.fullmatch(spec.name) else ""


def _sections(
    section: Mapping[str, Any], key: str = "", depth: int = 0
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the objects of a config with their keys."""
    yield key, section
    if depth < _SECTION_DEPTH:
        for name, value in section.items():
            if isinstance(value, dict):
                yield from _sections(value, name, depth + 1)


def _sizes(section: Mapping[str, Any], keys: re.Pattern[str]) -> Iterator[int]:
    """Yield the numbers above 1 at keys of a section, which may be lists with one per layer."""
    for key, value in section.items():
        if keys.fullmatch(key):
            for item in value if isinstance(value, list) else (value,):
                if isinstance(item, int) and item > 1:
                    yield item


def _language_width(config: Mapping[str, Any]) -> int:
    """Return the hidden size of the language model, or 0."""
    width = 0
    section = config
    for _ in range(_SECTION_DEPTH):
        found = (section.get(key) for key in _WIDTHS)
        width = next((size for size in found if isinstance(size, int) and size > 0), width)
        nested = (section.get(key) for key in (*_TEXT_SECTIONS, "decoder"))
        section = next((item for item in nested if isinstance(item, dict)), {})
    return width
