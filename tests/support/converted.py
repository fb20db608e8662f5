"""Converts models to GGUF files as ``convert_hf_to_gguf.py`` of llama.cpp does, with the names of its package."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Array = np.ndarray[Any, Any]

ARCHITECTURES = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
_MERGED = {
    "mlp.experts": "model.layers.{}.mlp.experts.{}.weight",
    "block_sparse_moe.experts": "layers.{}.feed_forward.experts.{}.weight",
}


def permuted(array: Array, heads: int) -> Array:
    """Return the rows of queries or keys in the order of llama.cpp."""
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def write_converted(
    path: Path,
    tensors: Mapping[str, Array],
    architecture: str,
    *,
    heads: int = 2,
    heads_kv: int = 1,
    dtype: str = "F32",
    rows: int | None = None,
) -> Path:
    """Write a model; ``dtype`` is that of tensors with two dimensions or more, and ``rows`` that of its vocabulary."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads_kv)
    names = gguf.get_tensor_name_map(ARCHITECTURES[architecture], 8)
    merged: dict[str, dict[int, Array]] = defaultdict(dict)
    plain: dict[str, Array] = {}
    for full, array in tensors.items():
        name = full.replace("language_model.", "")
        wide = array if array.dtype == np.float16 else array.astype(np.float32)
        if architecture in ("llama", "mistral3") and (m := re.search("([qk])_proj.[wb]", name)):
            wide = permuted(wide, heads if m[1] == "q" else heads_kv)
        if architecture == "gemma3" and name.endswith("norm.weight"):
            wide = wide + 1
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            wide = wide[:rows]
        if m := re.fullmatch(r"model.layers.(\d+).(.*experts).(\d+).(\w+).weight", name):
            merged[_MERGED[m[2]].format(m[1], m[4])][int(m[3])] = wide
        else:
            plain[name] = wide
    plain |= {name: np.stack([parts[at] for at in sorted(parts)]) for name, parts in merged.items()}
    for name, array in plain.items():
        known = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert known is not None, name
        kind = gguf.GGMLQuantizationType["F32" if array.ndim == 1 else dtype]
        stored = gguf.quantize(array.astype(np.float32), kind)
        writer.add_tensor(known, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
