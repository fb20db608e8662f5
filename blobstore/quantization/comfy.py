"""The markers of ComfyUI: a tensor ``X.comfy_quant`` for each weight, or one text in the header of a file.

Both are JSON. They decide what the bytes of a weight mean, so a reading has to know every key of them: FP8 is as
the tensors say, but scales of NVFP4 and MXFP8 are stored in tiles, and weights may be rotated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from blobstore.core import strict_json
from blobstore.core.tensor import DType
from blobstore.quantization.formats import FORMATS

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from blobstore.core.tensor import TensorSpec
    from blobstore.quantization.formats import QuantFormat

MARKER: Final = ".comfy_quant"
"""The end of the name of a marker."""
_HEADER_KEY: Final = "_quantization_metadata"
_SCALED: Final = "scaled_fp8"
"""The name of a tensor that says that 8-bit floats have scales. Earlier versions had no other marker."""
MAX_MARKER: Final = 4096
"""Bytes of a marker; real ones have about 30."""
_FORMATS: Final = {"float8_e4m3fn": DType.F8_E4M3, "float8_e5m2": DType.F8_E5M2}
_TILED: Final = {"nvfp4": FORMATS["nvfp4-tiled"], "mxfp8": FORMATS["mxfp8-tiled"]}
_KEYS: Final = frozenset({"format", "full_precision_matrix_mult"})
"""Keys that do not change the values of a weight."""
_HEADER_KEYS: Final = frozenset({"format_version", "layers"})


def is_stale(name: str) -> bool:
    """Return whether a tensor is a marker, which no longer holds once weights are decoded."""
    return name == _SCALED or name.endswith((MARKER, f".{_SCALED}"))


def tiled_types(
    metadata: Collection[tuple[str, str]], markers: Mapping[str, bytes]
) -> dict[str, QuantFormat]:
    """Return the types with tiled scales that weights have by their markers, by name.

    Args:
        metadata: keys and texts of headers.
        markers: the texts of marker tensors by name. They go before headers.
    """
    layers: dict[str, Any] = {}
    for key, text in metadata:
        layers |= _layers(key, text) or {}
    own = {name: text for name, text in markers.items() if name.endswith(MARKER)}
    layers |= {name.removesuffix(MARKER): _json(text) for name, text in own.items()}
    types = {f"{name}.weight": _TILED.get(_format(value)) for name, value in layers.items()}
    return {name: item for name, item in types.items() if item is not None}


def is_known_marker(
    name: str, text: bytes, specs: Mapping[str, TensorSpec], tiled: Mapping[str, QuantFormat]
) -> bool:
    """Return whether a marker says no more than how a weight is read.

    Args:
        name: the name of the marker.
        text: its content.
        specs: the tensors of the source.
        tiled: the weights that are read with tiled scales.
    """
    return _is_known(_json(text), f"{name.removesuffix(MARKER)}.weight", specs, tiled)


def are_known_layers(
    key: str, text: str, specs: Mapping[str, TensorSpec], tiled: Mapping[str, QuantFormat]
) -> bool:
    """Return whether an entry of a header says no more than how each of its layers is read."""
    layers = _layers(key, text)
    return layers is not None and all(
        _is_known(layer, f"{name}.weight", specs, tiled) for name, layer in layers.items()
    )


def _layers(key: str, text: str) -> dict[str, Any] | None:
    if key != _HEADER_KEY:
        return None
    value = _json(text.encode("utf-8", "surrogatepass"))
    if not isinstance(value, dict) or not value.keys() <= _HEADER_KEYS:
        return None
    layers = value.get("layers")
    return layers if isinstance(layers, dict) else None


def _json(text: bytes) -> Any:
    try:
        return strict_json.loads_any(text)
    except ValueError:
        return None


def _format(value: Any) -> str:
    """Return the format that a marker names; empty if it says more than that."""
    if not isinstance(value, dict) or not value.keys() <= _KEYS:
        return ""
    name = value.get("format")
    return name if isinstance(name, str) else ""


def _is_known(
    value: Any, name: str, specs: Mapping[str, TensorSpec], tiled: Mapping[str, QuantFormat]
) -> bool:
    weight, text = specs.get(name), _format(value)
    if weight is None or not text:
        return False
    if text in _TILED:
        return tiled.get(name) is _TILED[text]
    return name not in tiled and _FORMATS.get(text) is weight.dtype
