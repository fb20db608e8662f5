"""Names the quantization schemes of sources that are kept as published, because no type holds their values."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from blobstore.core.tensor import DType
from blobstore.quantization.comfy import MARKER
from blobstore.quantization.source_config import SourceQuantConfig

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from typing import Any

    from blobstore.core.tensor import TensorSpec

UNKNOWN: Final = "unknown"
_SUFFIXES: Final = {
    ".qweight": "",
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
"""Suffixes of the names of their tensors. For an empty scheme, the next table decides."""
_SCALES: Final = {".scales": "gptq or awq", ".wscales": "svdquant"}
"""Suffixes of scales next to a weight whose name several schemes use."""
_ENDS: Final = tuple(_SUFFIXES)
_OF_INTEGERS: Final = (".q_weight", ".trellis", ".W_q")
"""Suffixes that plain weights have too. Those of a scheme are integers."""
_OF_INTEGER_WEIGHT: Final = ".SCB"
"""A suffix of scales, next to a weight of integers."""
_INTEGERS: Final = frozenset(
    (DType.U8, DType.I8, DType.U16, DType.I16, DType.U32, DType.I32, DType.U64, DType.I64)
)
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._+-]{0,39}", re.ASCII)
"""What a config may call its scheme. The name is stored and shown."""
_HEADER_KEY: Final = re.compile(r"quant|scale", re.IGNORECASE)
_DESCRIPTIVE: Final = ("ss_", "modelspec.")
"""Prefixes of the keys that describe the training of a model, and the model for people."""


def scheme_of_tensor(spec: TensorSpec, specs: Mapping[str, TensorSpec]) -> str:
    """Return the only scheme that has such a tensor, or an empty text.

    ``specs`` are all tensors of the source.
    """
    name = spec.name
    if not name.endswith(_ENDS):
        return ""
    end, scheme = next(item for item in _SUFFIXES.items() if name.endswith(item[0]))
    if not scheme:
        module = name.removesuffix(end)
        found = (scheme for scales, scheme in _SCALES.items() if module + scales in specs)
        return next(found, UNKNOWN)
    values: TensorSpec | None = spec
    if end == _OF_INTEGER_WEIGHT:
        values = specs.get(f"{name.removesuffix(end)}.weight")
    elif end not in _OF_INTEGERS:
        return scheme
    return scheme if values is not None and values.dtype in _INTEGERS else ""


def scheme_name(specs: Mapping[str, TensorSpec], config: Mapping[str, Any]) -> str:
    """Return what to call the quantization of a source; empty if nothing says that it is quantized.

    Args:
        specs: its tensors by name.
        config: the decoded ``config.json``, or an empty mapping.
    """
    section = SourceQuantConfig(config)
    if section.is_mlx:
        return "mlx"
    if section.method is not None:
        return section.method.lower() if _NAME.fullmatch(section.method) else UNKNOWN
    found = next(filter(None, (scheme_of_tensor(spec, specs) for spec in specs.values())), "")
    if not found and any(name.endswith(MARKER) for name in specs):
        found = "comfyui"
    return found or (UNKNOWN if section.is_quantized else "")


def quantization_key(keys: Collection[str]) -> str:
    """Return the first key of safetensors headers that may say how weights are quantized; empty if none does."""
    found = (key for key in keys if not key.startswith(_DESCRIPTIVE))
    return min(filter(_HEADER_KEY.search, found), default="")
