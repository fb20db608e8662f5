"""The layout of MLX repositories: tensor names and ``config.json`` of quantized models.

The quantization parameters of ``X.weight`` are ``X.scales`` and ``X.biases``. The experts of a projection
are one tensor below ``switch_mlp``. ``quantization`` in the config has bits, group size and mode of most
weights, and entries for modules that differ. mlx-lm repeats it as ``quantization_config`` for the Hub's
pages.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from blobstore.core.escape import quote
from blobstore.errors import BlobstoreError, UnsupportedSource
from blobstore.quantization.old_config_keys import with_old_keys
from blobstore.quantization.recipes import BIAS, GLOBAL_SCALE, SCALE
from blobstore.quantization.source_config import SourceQuantConfig

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from blobstore.core.tensor import TensorSpec
    from blobstore.quantization.formats import QuantFormat

_SUFFIXES = {SCALE: ".scales", BIAS: ".biases"}
_NESTED = "text_config"
_KEYS = ("quantization", "quantization_config", "compression_config")
_EXPERT_TYPES = (("expert_dtype", "fp4"), ("expert_dtype", "fp8"))
"""Further names of DeepSeek V4, for experts."""
_EXPERT = re.compile(
    r"(?P<place>.*\.)experts\.(?P<expert>0|[1-9]\d{0,5})\.(?P<projection>[^.]+)"
    r"(?P<kind>\.weight|\.scales|\.biases)",
    re.ASCII | re.DOTALL,
)
_PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
"""MLX's names of the projections of Mixtral's experts."""
_MIXER_PROJECTIONS = {"up_proj": "fc1", "down_proj": "fc2"}
"""MLX's names of the projections of Nemotron-H's experts, which have no gates."""


def mlx_name(name: str, suffix: str) -> str:
    """Return MLX's name of a weight's quantization parameter, or without a suffix that of the weight.

    Raises:
        BlobstoreError: it is a global scale, which most of MLX's layers do not have.
    """
    if not suffix:
        return name
    if suffix == GLOBAL_SCALE:
        raise BlobstoreError(
            f"tensor {quote(name)} has a global scale in addition to its scales, which MLX's layout of a "
            "model cannot hold; export it dequantized"
        )
    return f"{name.removesuffix('.weight')}{_SUFFIXES[suffix]}"


def joined_experts(specs: Iterable[TensorSpec], plain: Iterable[str] = ()) -> dict[str, list[str]]:
    """Return the tensors of experts that MLX holds as one, in order, by its name.

    ``specs`` are packed weights and quantization parameters under MLX's names, ``plain`` the names of the other
    tensors. Experts are not joined if their numbers from 0 have a gap, if the
    types or shapes of their weights or quantization parameters differ, or if some of them are plain.
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
        if set(experts) == set(range(len(experts)))
        and all(
            {kind: spec[1:] for kind, spec in expert.items()}
            == {kind: spec[1:] for kind, spec in experts[0].items()}
            for expert in experts.values()
        )
        for kind in experts[0]
    }


def exported_config(
    config: Any, types: Mapping[str, tuple[QuantFormat, int]], name: str = "config.json"
) -> dict[str, Any] | None:
    """Return the config for exported weights, or None if it needs no change.

    The config for packed weights is only for MLX, and has all keys that mlx-lm reads: see
    :func:`~blobstore.quantization.old_config_keys.with_old_keys`.

    Args:
        config: the config of the source; any JSON value. Its quantization settings are kept if
            ``quantization``, which only MLX writes, has the types of all packed weights.
        types: type and group size of the weights that are exported packed, by their names in the
            folder (the joined name, for experts).
        name: file name for error messages.

    Raises:
        BlobstoreError: weights are exported packed, but the config is not a JSON object.
    """
    if not isinstance(config, dict):
        if not types:
            return None
        raise BlobstoreError(
            f"{quote(name)} is not a JSON object, and cannot describe quantized weights; export "
            "the model dequantized"
        )
    changed = _without_settings(config)
    nested = changed.get(_NESTED)
    if isinstance(nested, dict):
        changed[_NESTED] = _without_settings(nested)
    if types:
        # Ties go to the first, so that the same model always gives the same file.
        ((usual, _),) = Counter(types.values()).most_common(1)
        entries = {
            (item, size): {"group_size": size, "bits": item.bits, "mode": item.mode}
            for item, size in types.values()
        }
        quantization: dict[str, Any] = {**entries[usual]}
        for weight, known in types.items():
            if known != usual:
                quantization[weight.removesuffix(".weight")] = entries[known]
        changed |= {"quantization": quantization, "quantization_config": quantization}
        changed = with_old_keys(config if _has_types(config, types) else changed)
    return None if changed == config else changed


def _without_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config without its quantization settings."""
    return {
        key: value
        for key, value in config.items()
        if key not in _KEYS and (key, value) not in _EXPERT_TYPES
    }


def _has_types(config: Mapping[str, Any], types: Mapping[str, tuple[QuantFormat, int]]) -> bool:
    """Return whether the config has the types of all these weights where MLX reads them."""
    section = config.get(_KEYS[0])
    if not isinstance(section, dict) or not section.get("bits"):
        return False
    quant_config = SourceQuantConfig({_KEYS[0]: section})
    try:
        return all(
            quant_config.mlx_type(name, name.removesuffix(".weight")) == known
            for name, known in types.items()
        )
    except UnsupportedSource:  # the settings are invalid
        return False


def _joined(match: re.Match[str]) -> str:
    place, projection = match["place"], match["projection"]
    renamed = _MIXER_PROJECTIONS if place.endswith(".mixer.") else _PROJECTIONS
    return f"{place}switch_mlp.{renamed.get(projection, projection)}"
