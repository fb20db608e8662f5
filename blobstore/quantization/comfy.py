"""The markers of ComfyUI: a tensor ``X.comfy_quant`` for each weight, or one text in the header of a file.

Both are JSON. They decide what the bytes of a weight mean, so a reading has to know every key of them: FP8 is as
the tensors say, but scales of NVFP4 and MXFP8 are stored in tiles, and weights may be rotated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from blobstore.core import strict_json
from blobstore.core.tensor import DType

if TYPE_CHECKING:
    from collections.abc import Mapping

    from blobstore.core.tensor import TensorSpec

MARKER: Final = ".comfy_quant"
"""The end of the name of a marker."""
_HEADER_KEY: Final = "_quantization_metadata"
_SCALED: Final = "scaled_fp8"
"""The name of a tensor that says that 8-bit floats have scales. Earlier versions had no other marker."""
MAX_MARKER: Final = 4096
"""Bytes of a marker; real ones have about 30."""
_FORMATS: Final = {"float8_e4m3fn": DType.F8_E4M3, "float8_e5m2": DType.F8_E5M2}
_KEYS: Final = frozenset({"format", "full_precision_matrix_mult"})
"""Keys that do not change the values of a weight."""
_HEADER_KEYS: Final = frozenset({"format_version", "layers"})


def is_stale(name: str) -> bool:
    """Return whether a tensor is a marker, which no longer holds once weights are decoded."""
    return name == _SCALED or name.endswith((MARKER, f".{_SCALED}"))


def is_float8_marker(name: str, text: bytes, specs: Mapping[str, TensorSpec]) -> bool:
    """Return whether a marker says no more than that a weight is of 8-bit floats, as its type says too."""
    return _is_float8(_json(text), specs.get(f"{name.removesuffix(MARKER)}.weight"))


def are_float8_layers(key: str, text: str, specs: Mapping[str, TensorSpec]) -> bool:
    """Return whether an entry of a header says no more than that of each of its layers."""
    if key != _HEADER_KEY:
        return False
    value = _json(text.encode("utf-8", "surrogatepass"))
    if not isinstance(value, dict) or not value.keys() <= _HEADER_KEYS:
        return False
    layers = value.get("layers")
    return isinstance(layers, dict) and all(
        _is_float8(layer, specs.get(f"{name}.weight")) for name, layer in layers.items()
    )


def _json(text: bytes) -> Any:
    try:
        return strict_json.loads_any(text)
    except ValueError:
        return None


def _is_float8(value: Any, weight: TensorSpec | None) -> bool:
    if weight is None or not isinstance(value, dict) or not value.keys() <= _KEYS:
        return False
    name = value.get("format")
    return isinstance(name, str) and _FORMATS.get(name) is weight.dtype
