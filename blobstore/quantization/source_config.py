"""What a source's ``config.json`` says of its quantized weights, in any of the forms that are in use.

MLX writes ``bits``, ``group_size`` and ``mode``, and the modules that differ by their names; others
write ``quant_method`` and how many numbers share a scale. Nothing is taken to have its right type.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from blobstore.core.escape import quote
from blobstore.errors import UnsupportedSource
from blobstore.quantization.formats import FORMATS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from typing import Final, Literal, NoReturn

    from blobstore.quantization.formats import QuantFormat

    Block = tuple[int, int]
    Sharing = Literal["tensor", "channel"] | Block
    """What shares a scale: all numbers of a weight, a row of it, or a block of rows and columns."""

_SECTIONS: Final = ("quantization", "quantization_config", "compression_config")
_NESTED: Final = "text_config"
_MLX_DEFAULTS: Final = {"affine": (4, 64), "nvfp4": (4, 16), "mxfp4": (4, 32), "mxfp8": (8, 32)}
"""Bits and group size of a mode, where the config does not say them."""


class SourceQuantConfig:
    """What a config says of quantization."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        nested = config.get(_NESTED)
        self._sections: list[dict[str, Any]] = [
            holder[key]
            for holder in (config, nested if isinstance(nested, dict) else {})
            for key in _SECTIONS
            if isinstance(holder.get(key), dict)
        ]
        self._mlx = next(filter(_is_mlx, self._sections), None)

    @property
    def is_mlx(self) -> bool:
        """Whether it is said how MLX has packed the weights."""
        return self._mlx is not None

    @property
    def method(self) -> str | None:
        """What the scheme is called, None if it has no name."""
        names = (section.get("quant_method") for section in self._sections)
        return next((name for name in names if isinstance(name, str) and name), None)

    def mlx_type(self, weight: str, module: str) -> tuple[QuantFormat, int] | None:
        """Return type and group size of a weight that MLX has packed, None if nothing is said.

        Raises:
            UnsupportedSource: it is said to be plain, or of a type that there is not.
        """
        section = self._mlx
        if section is None:
            return None
        own = section.get(module)
        if isinstance(own, dict):
            section = own  # and what it does not say is MLX's default, not that of the model
        elif own is not None and own is not True:
            _fail(
                weight, f"has scales, and is not quantized by config.json, which has {quote(own)}"
            )
        mode = section.get("mode") or "affine"
        usual = _MLX_DEFAULTS.get(mode) if isinstance(mode, str) else None
        if usual is None:
            _fail(weight, f"has the mode {quote(mode)} by config.json, which is unknown")
        bits, size = section.get("bits") or usual[0], section.get("group_size") or usual[1]
        # The table's own number is taken, for the one in the config may be 64.0.
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
        """Return the modules with a type of their own that are not among ``modules``."""
        return [
            key
            for key, value in (self._mlx or {}).items()
            if isinstance(value, dict) and "bits" in value and key not in modules
        ]

    def group_sizes(self, bits: int) -> set[Any]:
        """Return the group sizes that weights of small floats are said to have."""
        sizes = (weights.get("group_size") for weights in self._weights(bits))
        return {size for size in sizes if isinstance(size, int) and size}

    def sharings(self) -> list[Sharing]:
        """Return all ways in which weights of 8-bit floats are said to share scales.

        Raises:
            UnsupportedSource: a block is not two numbers.
        """
        found: list[Sharing] = [
            _block("weight_block_size", section["weight_block_size"])
            for section in self._sections
            if section.get("weight_block_size")
        ]
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
        """Yield what is said of weights of floats of so many bits."""
        for section in self._sections:
            groups = section.get("config_groups")
            for group in groups.values() if isinstance(groups, dict) else ():
                weights = group.get("weights") if isinstance(group, dict) else None
                if isinstance(weights, dict):
                    kind = weights.get("type"), weights.get("num_bits")
                    if kind == ("float", bits):
                        yield weights


def _is_mlx(section: Mapping[str, Any]) -> bool:
    # Other schemes count bits too, of numbers that MLX does not read.
    return bool(section.get("bits")) and ("mode" in section or "quant_method" not in section)


def _block(key: str, value: object) -> Block:
    match value:
        case [int(height), int(width)] if height > 0 and width > 0:
            return int(height), int(width)
    raise UnsupportedSource(
        f"config.json: {key} cannot be {quote(value)}; expected two positive numbers"
    )


def _fail(weight: str, what: str) -> NoReturn:
    raise UnsupportedSource(f"tensor {quote(weight)} {what}")
