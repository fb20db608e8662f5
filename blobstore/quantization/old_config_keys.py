"""The keys of ``config.json`` from before transformers 5, which mlx-lm and older servers read."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from blobstore.core import strict_json

if TYPE_CHECKING:
    from collections.abc import Mapping

_NESTED = "text_config"
_FULL, _SLIDING = "full_attention", "sliding_attention"


def with_old_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with the keys that mlx-lm reads added to those that transformers 5 writes.

    Without them, mlx-lm silently uses its own defaults for most models.
    """
    both = dict(config)
    if "num_local_experts" in both:
        both.setdefault("num_experts", both["num_local_experts"])
    rope, kinds, nested = both.get("rope_parameters"), both.get("layer_types"), both.get(_NESTED)
    if isinstance(rope, dict):
        both |= {key: value for key, value in _old_rope(rope).items() if key not in both}
    if isinstance(kinds, list) and _SLIDING in kinds and _FULL in kinds:
        period = kinds.index(_FULL) + 1
        is_full = [number % period == 0 for number in range(1, len(kinds) + 1)]
        if [kind == _FULL for kind in kinds] == is_full:
            both.setdefault("sliding_window_pattern", period)
    if isinstance(nested, dict):
        both[_NESTED] = with_old_keys(nested)
    return both


def file_with_old_keys(content: bytes) -> bytes:
    """Return a config file with the keys of :func:`with_old_keys`; other content is unchanged."""
    try:
        config = strict_json.loads_any(content)
    except ValueError:
        return content
    if not isinstance(config, dict) or (both := with_old_keys(config)) == config:
        return content
    return f"{json.dumps(both, indent=2)}\n".encode()


def _old_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return these settings under the keys of earlier versions, for all layers or each kind."""
    full, sliding = rope.get(_FULL), rope.get(_SLIDING)
    if isinstance(full, dict):
        # As in Gemma 3. Readers of the settings of each kind ignore these keys.
        local = sliding.get("rope_theta") if isinstance(sliding, dict) else None
        return _old_rope(full) | ({} if local is None else {"rope_local_base_freq": local})
    if "rope_theta" not in rope:
        return {}
    old = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    is_plain = rope.get("rope_type", "default") == "default"
    return {**old, "rope_scaling": None if is_plain else scaling}  # some models require the key
