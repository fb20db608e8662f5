"""How MLX's repositories hold quantized weights: the names of tensors, and ``config.json``.

Companions of ``X.weight`` are called ``X.scales`` and ``X.biases``. The experts of a projection are one
tensor, below ``switch_mlp``. In the config, ``quantization`` has bits, group size and mode of most
weights, and the modules that differ by name; mlx-lm writes the same under ``quantization_config``,
for the Hub's pages. Other keys are called there as transformers called them before version 5.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from blobstore.core.escape import quote
from blobstore.errors import BlobstoreError, UnsupportedSource
from blobstore.quantization.recipes import BIAS, GLOBAL_SCALE, SCALE
from blobstore.quantization.source_config import SourceQuantConfig

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from blobstore.core.tensor import TensorSpec
    from blobstore.quantization.formats import QuantFormat

_SUFFIXES = {SCALE: ".scales", BIAS: ".biases"}
_KEYS = ("quantization", "quantization_config", "compression_config")
_NESTED = "text_config"
_FULL, _SLIDING = "full_attention", "sliding_attention"
_EXPERT = re.compile(
    r"(?P<place>.*\.)experts\.(?P<expert>0|[1-9]\d{0,5})\.(?P<projection>[^.]+)"
    r"(?P<kind>\.weight|\.scales|\.biases)",
    re.ASCII | re.DOTALL,
)
_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def mlx_name(name: str, suffix: str) -> str:
    """Return what MLX calls a weight's companion, or for no suffix the weight.

    Raises:
        BlobstoreError: it is a global scale, which most of MLX's layers do not have.
    """
    if not suffix:
        return name
    if suffix == GLOBAL_SCALE:
        raise BlobstoreError(
            f"tensor {quote(name)} has a global scale beside its scales, which MLX's form of a "
            "model cannot hold; export it dequantized"
        )
    return f"{name.removesuffix('.weight')}{_SUFFIXES[suffix]}"


def joined_experts(specs: Iterable[TensorSpec], plain: Iterable[str] = ()) -> dict[str, list[str]]:
    """Return the tensors of experts that MLX holds as one, in order, by its name.

    ``specs`` are packed weights and companions under MLX's names, ``plain`` the names of the other
    tensors. Experts that are not numbered from 0 without a gap, or that differ in type or shape, be
    it of a companion, stay on their own, and so do those of which some are plain.
    """
    found: dict[str, dict[int, dict[str, TensorSpec]]] = defaultdict(lambda: defaultdict(dict))
    for spec in specs:
        match = _EXPERT.fullmatch(spec.name)
        if match is not None:
            found[_joined(match)][int(match["expert"])][match["kind"]] = spec
    for match in filter(None, map(_EXPERT.fullmatch, plain)):
        found.pop(_joined(match), None)
    return {
        module + kind: [experts[number][kind].name for number in range(len(experts))]
        for module, experts in found.items()
        if set(experts) == set(range(len(experts))) and len(set(map(_form, experts.values()))) == 1
        for kind in experts[0]
    }


def _form(kinds: Mapping[str, TensorSpec]) -> frozenset[tuple[Any, ...]]:
    return frozenset((kind, spec.dtype, spec.shape) for kind, spec in kinds.items())


def exported_config(
    config: Any, types: Mapping[str, tuple[QuantFormat, int]], name: str = "config.json"
) -> dict[str, Any] | None:
    """Return the config for weights as they are exported, None if it is right as it is.

    That for packed weights is for MLX alone, and says all that mlx-lm reads: see
    :func:`mlx_config`.

    Args:
        config: as the source had it, of whatever form. What it says of quantization is right for
            weights that are exported packed if its ``quantization``, which only MLX writes, says
            their types.
        types: type and group size of the weights that are exported packed, by their names in the
            folder: of experts that are joined, that of the whole.
        name: of the file, for the message.

    Raises:
        BlobstoreError: weights are exported packed, and the config is no object that could say so.
    """
    if not isinstance(config, dict):
        if not types:
            return None
        raise BlobstoreError(
            f"{quote(name)} is no JSON object, and cannot say how weights are quantized; export "
            "the model dequantized"
        )
    changed = _plain(config)
    if types:
        described = _described(types)
        changed |= {"quantization": described, "quantization_config": described}
        changed = mlx_config(config if _tells(config, types) else changed)
    return None if changed == config else changed


def mlx_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with the keys that mlx-lm reads beside those that transformers 5 writes.

    Without them it takes its own defaults for most models, and says nothing.
    """
    both = dict(config)
    if "num_local_experts" in both:
        both.setdefault("num_experts", both["num_local_experts"])
    rope, kinds, nested = both.get("rope_parameters"), both.get("layer_types"), both.get(_NESTED)
    if isinstance(rope, dict):
        both |= {key: value for key, value in _old_rope(rope).items() if key not in both}
    if isinstance(kinds, list) and (period := _period(kinds)):
        both.setdefault("sliding_window_pattern", period)
    if isinstance(nested, dict):
        both[_NESTED] = mlx_config(nested)
    return both


def _old_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that held these settings before: of all layers, or of each kind of them."""
    full, sliding = rope.get(_FULL), rope.get(_SLIDING)
    if isinstance(full, dict):
        # As Gemma 3 had them; who reads each kind's own settings does not ask for these.
        local = sliding.get("rope_theta") if isinstance(sliding, dict) else None
        return _old_rope(full) | ({} if local is None else {"rope_local_base_freq": local})
    if "rope_theta" not in rope:
        return {}
    old = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    is_plain = rope.get("rope_type", "default") == "default"
    return {**old, "rope_scaling": None if is_plain else scaling}  # some need the key


def _period(kinds: list[Any]) -> int:
    """Return how many layers it takes to the next of full attention, 0 if that varies."""
    if _SLIDING not in kinds or _FULL not in kinds:
        return 0
    period = kinds.index(_FULL) + 1
    is_full = [number % period == 0 for number in range(1, len(kinds) + 1)]
    return period if [kind == _FULL for kind in kinds] == is_full else 0


def _tells(config: Mapping[str, Any], types: Mapping[str, tuple[QuantFormat, int]]) -> bool:
    """Return whether a config says the types of all these weights where MLX looks for them."""
    section = config.get(_KEYS[0])
    if not isinstance(section, dict) or not section.get("bits"):
        return False
    stated = SourceQuantConfig({_KEYS[0]: section})
    try:
        return all(stated.mlx_type(name, _module(name)) == known for name, known in types.items())
    except UnsupportedSource:  # it says what cannot be
        return False


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config without a word about quantization."""
    plain = {key: value for key, value in config.items() if key not in _KEYS}
    nested = plain.get(_NESTED)
    if isinstance(nested, dict):
        plain[_NESTED] = {key: value for key, value in nested.items() if key not in _KEYS}
    return plain


def _described(types: Mapping[str, tuple[QuantFormat, int]]) -> dict[str, Any]:
    # The first of those that are equally many, so that the same model gives the same file.
    ((usual, _),) = Counter(types.values()).most_common(1)
    others = {_module(name): _entry(*known) for name, known in types.items() if known != usual}
    return {**_entry(*usual), **others}


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _joined(match: re.Match[str]) -> str:
    projection = _MIXTRAL.get(match["projection"], match["projection"])
    return f"{match['place']}switch_mlp.{projection}"


def _entry(item: QuantFormat, group_size: int) -> dict[str, Any]:
    return {"group_size": group_size, "bits": item.bits, "mode": item.mode}
