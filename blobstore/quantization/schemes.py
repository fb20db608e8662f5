"""Names the quantization schemes of sources that are kept as published, because no type holds their values."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from blobstore.quantization.comfy import MARKER
from blobstore.quantization.source_config import SourceQuantConfig

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from typing import Any

UNKNOWN: Final = "unknown"
_SUFFIXES: Final = {
    ".qweight": "gptq or awq",
    ".q_weight": "exl2",
    ".trellis": "exl3",
    ".W_q": "hqq",
    ".SCB": "bitsandbytes",
    ".weight.absmax": "bitsandbytes",
    ".weight.quant_map": "bitsandbytes",
    ".quant_state.bitsandbytes__nf4": "bitsandbytes",
    ".quant_state.bitsandbytes__fp4": "bitsandbytes",
    ".weight._data": "quanto",
    "_weight_qdata": "torchao",
    ":qdata": "torchao",
}
"""Suffixes of tensor names that only these schemes use."""
SCHEME_ENDS: Final = tuple(_SUFFIXES)
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._+-]{0,39}", re.ASCII)
"""What a config may call its scheme. The name is stored and shown."""
_HEADER_KEY: Final = re.compile(r"quant|scale", re.IGNORECASE)


def scheme_of_tensor(name: str) -> str:
    """Return the scheme that alone uses tensors of such a name; empty if there is none."""
    if not name.endswith(SCHEME_ENDS):
        return ""
    return next(scheme for end, scheme in _SUFFIXES.items() if name.endswith(end))


def scheme_name(names: Collection[str], config: Mapping[str, Any]) -> str:
    """Return what to call the quantization of a source; empty if nothing says that it is quantized.

    Args:
        names: the names of its tensors.
        config: the decoded ``config.json``, or an empty mapping.
    """
    section = SourceQuantConfig(config)
    if section.is_mlx:
        return "mlx"
    if section.method is not None:
        return section.method.lower() if _NAME.fullmatch(section.method) else UNKNOWN
    found = next(filter(None, map(scheme_of_tensor, names)), "")
    if not found and any(name.endswith(MARKER) for name in names):
        found = "comfyui"
    return found or (UNKNOWN if section.is_quantized else "")


def quantization_key(keys: Collection[str]) -> str:
    """Return the first key of safetensors headers that may say how weights are quantized; empty if none does."""
    return min(filter(_HEADER_KEY.search, keys), default="")
