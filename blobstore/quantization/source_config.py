"""Reads the quantization sections of a source's ``config.json``, in all common formats.

MLX writes ``bits``, ``group_size`` and ``mode``, and entries for modules that differ. Other tools write
``quant_method`` and how many values share a scale. The type of every value is checked before use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from blobstore.core.escape import quote
from blobstore.errors import UnsupportedSource
from blobstore.quantization.formats import FORMATS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from typing import Final, NoReturn

    from blobstore.quantization.formats import Block, QuantFormat, Sharing

_SECTIONS: Final = ("quantization", "quantization_config", "compression_config")
_NESTED: Final = "text_config"
MODELOPT_FILE: Final = "hf_quant_config.json"
"""The file in which ModelOpt describes the quantization. Earlier versions did not change the config."""
_MODELOPT: Final = "modelopt"
_PACKED: Final = "pack-quantized"
_PACKED_BITS: Final = (4, 8)
_ORDERED: Final = (None, False, "weight", "static")
"""Values of ``actorder`` with which the columns of a weight stay in their groups."""
_MAX_BLOCK: Final = 999_999
_MLX_DEFAULTS: Final = {"affine": (4, 64), "nvfp4": (4, 16), "mxfp4": (4, 32), "mxfp8": (8, 32)}
"""Default bits and group size of each mode."""


class SourceQuantConfig:
    """The quantization settings in a config."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        nested = config.get(_NESTED)
        self._sections: list[dict[str, Any]] = [
            holder[key]
            for holder in (config, nested if isinstance(nested, dict) else {})
            for key in _SECTIONS
            if isinstance(holder.get(key), dict)
        ]
        self.has_fp4_experts = config.get("expert_dtype") == "fp4"
        """Whether experts are 4-bit floats, two in a byte, as in DeepSeek V4."""
        # Other schemes have a key "bits" too, but not the format of MLX.
        mlx = (
            section
            for section in self._sections
            if section.get("bits") and ("mode" in section or "quant_method" not in section)
        )
        self._mlx = next(mlx, None)

    @property
    def is_mlx(self) -> bool:
        """Whether the config describes weights packed by MLX."""
        return self._mlx is not None

    @property
    def is_quantized(self) -> bool:
        """Whether the config says that weights are quantized."""
        return any(self._sections)

    @property
    def has_transforms(self) -> bool:
        """Whether a module transforms its inputs or weights, as compressed-tensors can say."""
        return any(section.get("transform_config") for section in self._sections)

    @property
    def method(self) -> str | None:
        """The name of the scheme, or None."""
        names = (section.get("quant_method") for section in self._sections)
        return next((name for name in names if isinstance(name, str) and name), None)

    @property
    def has_static_activations(self) -> bool:
        """Whether the scales of activations are tensors of the source."""
        groups = [group for section in self._sections for group in _groups(section)]
        activations = [group.get("input_activations") for group in groups]
        if self.method == _MODELOPT:
            algorithms = [str(section.get("quant_algo")) for section in self._sections]
            return not any("A16" in algorithm for algorithm in algorithms) and (
                not activations or any(one is not None for one in activations)
            )
        return any(
            section.get("activation_scheme") == "static" for section in self._sections
        ) or any(isinstance(one, dict) and one.get("dynamic") is not True for one in activations)

    def mlx_type(self, weight: str, module: str) -> tuple[QuantFormat, int] | None:
        """Return type and group size of a weight packed by MLX, or None if the config has none.

        Raises:
            UnsupportedSource: the config says that it is not quantized, or has an unknown type.
        """
        section = self._mlx
        if section is None:
            return None
        own = section.get(module)
        if isinstance(own, dict):
            section = own  # missing values are MLX's defaults, not those of the model
        elif own is not None and own is not True:
            _fail(
                weight, f"has scales, and is not quantized by config.json, which has {quote(own)}"
            )
        mode = section.get("mode") or "affine"
        usual = _MLX_DEFAULTS.get(mode) if isinstance(mode, str) else None
        if usual is None:
            _fail(weight, f"has the mode {quote(mode)} by config.json, which is unknown")
        bits, size = section.get("bits") or usual[0], section.get("group_size") or usual[1]
        # Return the number from the table, because the config may have 64.0.
        found = [
            (item, known)
            for item in FORMATS.values()
            for known in item.group_sizes
            if (item.mode, item.bits, known) == (mode, bits, size)
        ]
        if not found:
            _fail(
                weight,
                f"has {quote(bits)} bits in groups of {quote(size)} by config.json, which "
                f"{mode} cannot have",
            )
        return found[0]

    def unmatched(self, modules: Collection[str]) -> list[str]:
        """Return the modules with their own entry that are not in ``modules``."""
        return [
            key
            for key, value in (self._mlx or {}).items()
            if isinstance(value, dict) and "bits" in value and key not in modules
        ]

    def group_sizes(self, bits: int) -> set[Any]:
        """Return the declared group sizes of weights of ``bits``-bit floats."""
        sizes = (weights.get("group_size") for weights in self._weights(bits))
        return {size for size in sizes if isinstance(size, int) and size}

    def packed_integers(self) -> set[tuple[int, int | None]]:
        """Return bits and group size of integers in the format ``pack-quantized``, None for a row.

        Empty if the config does not say, or if some of them have zero points, an order of their own, a scale
        for a complete weight, or other numbers of bits, whose words may have the same shapes.
        """
        found: set[tuple[int, int | None]] = set()
        for section in self._sections:
            sparsity = section.get("sparsity_config")
            if sparsity and not (isinstance(sparsity, dict) and sparsity.get("format") == "dense"):
                return set()
            for group in _groups(section):
                weights = group.get("weights")
                if (group.get("format") or section.get("format")) != _PACKED or not weights:
                    continue
                known = _packed_integers(weights)
                if known is None:
                    return set()
                found.add(known)
        return found

    def sharings(self) -> list[Sharing]:
        """Return all declared ways in which weights of 8-bit floats share scales.

        Raises:
            UnsupportedSource: the size of a block is invalid.
        """
        found: list[Sharing] = [
            _block("weight_block_size", section["weight_block_size"])
            for section in self._sections
            if section.get("weight_block_size")
        ]
        for section in self._sections:
            found += (_block("block_size", size) for size in _quark_blocks(section))
        for weights in self._weights(8):
            strategy = weights.get("strategy")
            if strategy in ("tensor", "channel"):
                found.append(strategy)
            elif strategy == "block":
                found.append(_block("block_structure", weights.get("block_structure")))
            elif strategy == "group":
                found.append(_block("group_size", [1, weights.get("group_size")]))
        return found

    def _weights(self, bits: int) -> Iterator[dict[str, Any]]:
        """Yield the settings for weights of ``bits``-bit floats."""
        for section in self._sections:
            for group in _groups(section):
                weights = group.get("weights")
                if isinstance(weights, dict):
                    kind = weights.get("type"), weights.get("num_bits")
                    if kind == ("float", bits):
                        yield weights


def _groups(section: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the groups of modules of compressed-tensors."""
    groups = section.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        if isinstance(group, dict):
            yield group


def _quark_blocks(section: Mapping[str, Any]) -> Iterator[object]:
    """Yield the sizes of blocks of weights that AMD's Quark declares, for all layers and for some."""
    own = section.get("layer_quant_config")
    layers = own.values() if isinstance(own, dict) else ()
    for layer in (section.get("global_quant_config"), *layers):
        weights = layer.get("weight") if isinstance(layer, dict) else None
        if isinstance(weights, dict) and weights.get("qscheme") == "per_block":
            yield weights.get("block_size")


def _packed_integers(weights: object) -> tuple[int, int | None] | None:
    """Return bits and group size of packed weights, or None if they are not symmetric integers in order."""
    if not isinstance(weights, dict) or weights.get("type", "int") != "int":
        return None
    bits, size = weights.get("num_bits", 8), weights.get("group_size")
    is_plain = weights.get("symmetric", True) is True and weights.get("actorder") in _ORDERED
    strategy = weights.get("strategy")
    if strategy is None:  # compressed-tensors derives it
        strategy = "channel" if size == -1 else "group"
    if not is_plain or type(bits) is not int or bits not in _PACKED_BITS:
        return None
    if strategy == "channel":
        return bits, None
    return (bits, size) if strategy == "group" and type(size) is int else None


def modelopt_section(described: Any) -> dict[str, Any]:
    """Return the content of ModelOpt's own file as a section of a config; empty without quantized weights.

    Args:
        described: any JSON value.
    """
    section = described.get("quantization") if isinstance(described, dict) else None
    if not isinstance(section, dict) or not section.get("quant_algo"):
        return {}
    return {**section, "quant_method": _MODELOPT}


def _block(key: str, value: object) -> Block:
    match value:
        case [int(height), int(width)] if (
            min(height, width) > 0 and max(height, width) <= _MAX_BLOCK
        ):
            return int(height), int(width)
    raise UnsupportedSource(
        f"config.json: {key} cannot be {quote(value)}; expected two numbers from 1 to {_MAX_BLOCK}"
    )


def _fail(weight: str, what: str) -> NoReturn:
    raise UnsupportedSource(f"tensor {quote(weight)} {what}")
