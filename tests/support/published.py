"""Tiny folders of models whose quantization is not understood."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Tensors = Mapping[str, tuple[str, list[int], bytes]]
"""Element type, shape and bytes by name."""
LAYER = "model.layers.0.self_attn.q_proj"


def _tensor(dtype: str, *shape: int, bytes_each: int) -> tuple[str, list[int], bytes]:
    size = bytes_each
    for length in shape:
        size *= length
    return dtype, list(shape), bytes(number % 251 for number in range(size))


SCHEMES: Mapping[str, Tensors] = {
    "awq": {
        "qweight": _tensor("I32", 64, 8, bytes_each=4),
        "qzeros": _tensor("I32", 2, 8, bytes_each=4),
        "scales": _tensor("F16", 2, 64, bytes_each=2),
    },
    "gptq": {
        "qweight": _tensor("I32", 8, 64, bytes_each=4),
        "qzeros": _tensor("I32", 2, 8, bytes_each=4),
        "g_idx": _tensor("I32", 64, bytes_each=4),
        "scales": _tensor("F16", 2, 64, bytes_each=2),
    },
    "bitsandbytes": {
        "weight": _tensor("U8", 2048, 1, bytes_each=1),
        "weight.absmax": _tensor("U8", 64, bytes_each=1),
        "weight.quant_map": _tensor("F32", 16, bytes_each=4),
        "weight.quant_state.bitsandbytes__nf4": _tensor("U8", 90, bytes_each=1),
    },
    "llm_int8": {
        "weight": _tensor("I8", 64, 64, bytes_each=1),
        "SCB": _tensor("F32", 64, bytes_each=4),
        "weight_format": _tensor("U8", bytes_each=1),
    },
    "torchao": {
        "weight:qdata": _tensor("F8_E4M3", 64, 64, bytes_each=1),
        "weight:scale": _tensor("F32", 64, 1, bytes_each=4),
    },
    "compressed-tensors": {
        "weight_packed": _tensor("I32", 64, 8, bytes_each=4),
        "weight_scale": _tensor("BF16", 64, 2, bytes_each=2),
        "weight_zero_point": _tensor("I32", 8, 2, bytes_each=4),
        "weight_shape": _tensor("I64", 2, bytes_each=8),
    },
    "eetq": {
        "weight": _tensor("I8", 64, 64, bytes_each=1),
        "weight_scales": _tensor("F16", 64, bytes_each=2),
    },
    "hqq": {"W_q": _tensor("U8", 32, 64, bytes_each=1), "zero": _tensor("F16", 64, bytes_each=2)},
}
"""The tensors of a linear layer, by the ``quant_method`` of each scheme."""


def published_tensors(scheme: str, *, experts: int = 0) -> Tensors:
    """Return the tensors of a model of one quantized layer and some experts."""
    modules = [LAYER, *(f"model.layers.0.mlp.experts.{n}.up_proj" for n in range(experts))]
    quantized = {
        f"{module}.{end}": known for module in modules for end, known in SCHEMES[scheme].items()
    }
    return {"model.norm.weight": _tensor("BF16", 64, bytes_each=2), **quantized}


def file_of(tensors: Tensors, metadata: Mapping[str, str] | None = None) -> bytes:
    """Return a safetensors file with the tensors in the order given, and a header with odd padding."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    offset = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {
            "shape": shape,
            "dtype": dtype,
            "data_offsets": [offset, offset + len(data)],
        }
        offset += len(data)
    text = json.dumps(header).encode() + b"   "
    return len(text).to_bytes(8, "little") + text + b"".join(data for *_, data in tensors.values())


def write_published(folder: Path, scheme: str, *, experts: int = 0) -> Path:
    """Write a folder of such a model with a config, and return it."""
    config = {"quantization_config": {"quant_method": scheme, "bits": 4}}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = published_tensors(scheme, experts=experts)
    (folder / "model.safetensors").write_bytes(file_of(tensors, {"format": "pt"}))
    return folder
