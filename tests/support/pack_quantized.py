"""Weights in the format ``pack-quantized`` of compressed-tensors, and their values, one element at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from tests.support.published import Tensors, file_of

Array = np.ndarray[Any, Any]
_TYPES = {"BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype("f2"), "F32": np.dtype("f4")}


class Packed(NamedTuple):
    """A weight as its source has it, and its values."""

    tensors: Tensors
    values: Array


def packed_weight(
    module: str,
    *,
    bits: int = 4,
    group: int = 32,
    scale: str = "BF16",
    shape: tuple[int, int] = (6, 64),
    shape_type: str = "I64",
) -> Packed:
    """Return a reproducible weight of a module; its values are computed with Python's integers."""
    random = np.random.default_rng([*module.encode(), bits, group])
    rows, columns = shape
    each = 32 // bits
    words = random.integers(0, 2**32, (rows, columns // each), np.uint32)
    scales = (random.standard_normal((rows, columns // group)) / 50).astype(_TYPES[scale])
    values = np.empty(shape, _TYPES[scale])
    for row in range(rows):
        for column in range(columns):
            code = int(words[row, column // each]) >> bits * (column % each) & (1 << bits) - 1
            # An integer of 8 bits times a float of at most 24 is exact in float64.
            exact = (code - (1 << bits - 1)) * float(scales[row, column // group])
            values[row, column] = exact
    lengths = np.array(shape, "<i8" if shape_type == "I64" else "<i4")
    tensors = {
        f"{module}.weight_packed": ("I32", [*words.shape], words.tobytes()),
        f"{module}.weight_scale": (scale, [*scales.shape], scales.tobytes()),
        f"{module}.weight_shape": (shape_type, [2], lengths.tobytes()),
    }
    return Packed(tensors, values)


def packed_config(*weights: Mapping[str, Any], **section: Any) -> dict[str, Any]:
    """Return a config with groups of modules, by default one of int4 in groups of 32."""
    usual = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    groups = {
        f"group_{number}": {"targets": ["Linear"], "weights": {**usual, **own}}
        for number, own in enumerate(weights or ({},))
    }
    method = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    return {"quantization_config": {**method, "config_groups": groups, **section}}


def write_packed(folder: Path, tensors: Tensors, config: Mapping[str, Any] | None = None) -> Path:
    """Write a folder of a model with these tensors and a norm, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(packed_config() if config is None else config))
    norm: Tensors = {"model.norm.weight": ("BF16", [64], bytes(128))}
    (folder / "model.safetensors").write_bytes(file_of({**norm, **tensors}, {"format": "pt"}))
    return folder
