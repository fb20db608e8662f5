"""Weights as ComfyUI stores them with tiled scales, and their values, one element at a time."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from tests.support.published import Tensors

Array = np.ndarray[Any, Any]
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Tiled(NamedTuple):
    """A weight as its source has it, and its values as float32."""

    tensors: Tensors
    values: Array


def tiled_weight(
    kind: str, module: str = "m", shape: tuple[int, int] = (144, 96), exponents: str = "F8_E8M0"
) -> Tiled:
    """Return a reproducible weight of a module, with its marker.

    Args:
        kind: ``nvfp4`` or ``mxfp8``.
        module: the name of the module.
        shape: its logical shape.
        exponents: the element type of the scales of mxfp8.
    """
    random = np.random.default_rng([*module.encode(), *kind.encode()])
    rows, columns = shape
    group = 16 if kind == "nvfp4" else 32
    groups = columns // group
    height, width = -(-rows // 128) * 128, -(-groups // 4) * 4
    tiled = np.zeros(height * width, np.uint8)
    values = np.empty(shape, np.float32)
    codes = random.integers(0, 120, (rows, columns), np.uint8)
    factor = np.float32(random.uniform(0.001, 0.01))
    for row in range(rows):
        for column in range(groups):
            scale = int(random.integers(20, 110))
            tile = row // 128 * (width // 4) + column // 4
            tiled[tile * 512 + 16 * (row % 32) + 4 * (row % 128 // 32) + column % 4] = scale
            here = slice(column * group, (column + 1) * group)
            if kind == "nvfp4":
                number = np.uint8(scale).view(ml_dtypes.float8_e4m3fn).astype(np.float32) * factor
                values[row, here] = [_signed(code & 15) for code in codes[row, here].tolist()]
            else:
                number = np.float32(2.0 ** (scale - 127))
                values[row, here] = codes[row, here].view(ml_dtypes.float8_e4m3fn)
            values[row, here] *= number
    marker = json.dumps({"format": kind}).encode()
    scales = [height, width]
    tensors: dict[str, tuple[str, list[int], bytes]] = {
        f"{module}.comfy_quant": ("U8", [len(marker)], marker)
    }
    if kind == "nvfp4":
        packed = (codes[:, ::2] & 15) << 4 | codes[:, 1::2] & 15
        tensors[f"{module}.weight"] = ("U8", [*packed.shape], packed.tobytes())
        tensors[f"{module}.weight_scale"] = ("F8_E4M3", scales, tiled.tobytes())
        tensors[f"{module}.weight_scale_2"] = ("F32", [], factor.tobytes())
    else:
        tensors[f"{module}.weight"] = ("F8_E4M3", [rows, columns], codes.tobytes())
        tensors[f"{module}.weight_scale"] = (exponents, scales, tiled.tobytes())
    return Tiled(tensors, values)


def _signed(code: int) -> float:
    return -_E2M1[code & 7] if code & 8 else _E2M1[code & 7]
