"""The table of quantization types.

Packed weights are U32 words. Element ``i`` of a row takes bits ``i * bits`` to ``(i + 1) * bits`` of the
row's words as one little-endian stream, which is MLX's layout. The 8-bit floats of fp8 are not packed.
Weights of GGUF files are bytes: the blocks of llama.cpp, which hold their scales.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal

from blobstore.core.escape import quote
from blobstore.core.tensor import DType
from blobstore.errors import UsageError
from blobstore.gguf.types import TYPES
from blobstore.quantization.tiles import tiled_shape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from blobstore.core.tensor import TensorSpec
    from blobstore.gguf.types import GgufType

    Block = tuple[int, int]
    Sharing = Literal["tensor", "channel"] | Block
    """The values that share a scale: a complete weight, one row, or a block of rows and columns."""

Mode = Literal["affine", "symmetric", "nvfp4", "mxfp4", "mxfp8", "fp8", "gguf"]
WORD_BITS: Final = 32
MAX_GROUP: Final = 999_999
"""Elements of a group at most, as the metadata of a blob can say."""
FLOAT8_TYPE: Final = "fp8"
_GGUF: Final = "gguf_"
TILED_TYPES: Final = ("nvfp4-tiled", "mxfp8-tiled")
"""The types of floats with tiled scales, which only sources have."""
SYMMETRIC_TYPES: Final = ("int4-sym", "int8-sym")
"""The types of integers without offsets, which only sources have."""
FLOAT8: Final = (DType.F8_E4M3, DType.F8_E5M2)
"""The element types of fp8 weights."""
FACTORS: Final = (DType.F32, DType.BF16, DType.F16, DType.F8_E8M0)
SCALE_SUFFIXES: Final = ("_scale", "_scale_inv")
"""Suffixes that sources append to the name of an fp8 weight for its scales."""
MODULE_SCALES: Final = (".scale_weight", ".scale")
"""What ComfyUI and DeepSeek V4 have for scales in place of ``.weight``. Blobs have the first of
:data:`SCALE_SUFFIXES`."""
INPUT_SCALES: Final = (
    "input_scale",
    "input_global_scale",
    "input_scale_ub",
    "activation_scale",
    "scale_input",
)
"""Ends of the names of scales of activations, which no blob holds."""
PACKED_SHAPE: Final = "_shape"
"""The suffix of compressed-tensors for the shape of a packed weight, which no blob holds."""
LEFT_OUT: Final = (*INPUT_SCALES, "_global_scale", ".weight_shape")
"""Ends of the names of all source tensors that no blob holds unchanged."""


def type_name(name: str, group_size: int) -> str:
    """Return a type with its group size, if it has one, such as ``int4 g64``."""
    return f"{name} g{group_size}" if group_size else name


@dataclass(frozen=True, slots=True)
class Float8Layout:
    """How an fp8 weight is stored. A stack of matrices counts as one tall matrix."""

    sharing: Sharing
    block: Block
    """Rows and columns that share a scale."""
    weight: DType
    scale: DType

    def blocks(self, shape: Sequence[int]) -> tuple[Block, tuple[int, int]]:
        """Return the block of a part of the weight, and the shape of the matrix of its scales.

        The part is at least a matrix, and begins with a block where a matrix has several.
        """
        *stack, rows, columns = shape
        block = height, width = (
            min(self.block[0], max(rows, 1)),
            min(self.block[1], max(columns, 1)),
        )
        return block, (math.prod(stack) * -(-rows // height), -(-columns // width))


@dataclass(frozen=True, slots=True)
class QuantFormat:
    """One quantization type, or for fp8 that of one weight."""

    name: str
    bits: int
    """Bits per packed element, without those of scales."""
    group_size: int
    """Default number of elements that share a scale."""
    mode: Mode
    """MLX's name for the arithmetic of elements and scales. MLX has no ``symmetric`` and no ``fp8``, and no
    ``gguf``: the blocks of llama.cpp."""
    group_sizes: tuple[int, ...]
    """All group sizes of the type; empty if they are not listed: see :meth:`has_group_size`."""
    aliases: tuple[str, ...] = ()
    is_target: bool = True
    """Whether we quantize to it; other types only come from quantized sources."""
    word_bits: int = WORD_BITS
    """Bits per stored element."""
    float8: Float8Layout | None = None
    """Of an fp8 weight; None in the table."""
    block_bytes: int = 0
    """Bytes of a block of ``group_size`` elements with their scales; 0 if scales are tensors of their own."""
    is_tiled: bool = False
    """Whether scales are in the layout of :mod:`blobstore.quantization.tiles`. The first of two codes in a byte
    then has the upper bits."""

    @property
    def gguf_name(self) -> str:
        """The name that llama.cpp has for a type of blocks."""
        return self.name.removeprefix(_GGUF).upper()

    @property
    def has_bias(self) -> bool:
        """Whether each group has an offset in addition to its scale."""
        return self.mode == "affine"

    @property
    def offset(self) -> int:
        """The code of zero, for symmetric types."""
        return 1 << self.bits - 1

    @property
    def has_float_scales(self) -> bool:
        """Whether scales have the element type that the weight had before it was quantized."""
        return self.mode in ("affine", "symmetric")

    def has_group_size(self, group_size: int) -> bool:
        """Return whether a group may have so many elements."""
        if self.mode == "symmetric":  # a group is a number of words
            return group_size > 0 and group_size * self.bits % WORD_BITS == 0
        return group_size in self.group_sizes or (self.is_tiled and group_size == self.group_size)

    def scale_shape(self, rows: Sequence[int], columns: int, group_size: int) -> tuple[int, ...]:
        """Return the shape of the scales of a weight of the logical shape ``(*rows, columns)``."""
        groups = columns // group_size
        return tiled_shape(math.prod(rows), groups) if self.is_tiled else (*rows, groups)

    def scale_dtype(self, dtype: DType) -> DType:
        """Return the element type of the scales of a weight of ``dtype``.

        Affine scales have the type of the weight. U8 holds E4M3 bits for nvfp4 and E8M0 exponents for mxfp4
        and mxfp8.
        """
        return dtype if self.mode == "affine" else DType.U8

    def words(self, columns: int) -> int:
        """Return the packed words per row of ``columns`` elements, which must fill them exactly."""
        if self.block_bytes:
            return columns // self.group_size * self.block_bytes
        return columns * self.bits // self.word_bits

    def columns(self, words: int) -> int:
        """Return the elements per row of ``words`` packed words."""
        if self.block_bytes:
            return words // self.block_bytes * self.group_size
        return words * self.word_bits // self.bits

    def logical_shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a weight whose packed words have the shape ``stored``."""
        return (*stored[:-1], *map(self.columns, stored[-1:]))


_AFFINE_GROUPS: Final = (32, 64, 128)

FORMATS: Final[Mapping[str, QuantFormat]] = {
    item.name: item
    for item in (
        QuantFormat("int4", 4, 32, "affine", _AFFINE_GROUPS, ("q4",)),
        QuantFormat("int8", 8, 64, "affine", _AFFINE_GROUPS, ("q8",)),
        QuantFormat("nvfp4", 4, 16, "nvfp4", (16,)),
        QuantFormat("mxfp8", 8, 32, "mxfp8", (32,)),
        QuantFormat("mxfp4", 4, 32, "mxfp4", (32,)),
        QuantFormat("int2", 2, 64, "affine", _AFFINE_GROUPS, is_target=False),
        QuantFormat("int3", 3, 64, "affine", _AFFINE_GROUPS, is_target=False),
        QuantFormat("int5", 5, 64, "affine", _AFFINE_GROUPS, is_target=False),
        QuantFormat("int6", 6, 64, "affine", _AFFINE_GROUPS, is_target=False),
        QuantFormat("int4-sym", 4, 0, "symmetric", (), is_target=False),
        QuantFormat("int8-sym", 8, 0, "symmetric", (), is_target=False),
        QuantFormat("nvfp4-tiled", 4, 16, "nvfp4", (), is_target=False, is_tiled=True),
        QuantFormat("mxfp8-tiled", 8, 32, "mxfp8", (), is_target=False, is_tiled=True),
        QuantFormat(FLOAT8_TYPE, 8, 0, "fp8", (), is_target=False, word_bits=8),
    )
}
"""Quantization types by name, whose weights are U32 words or 8-bit floats."""


def _of_gguf(kind: GgufType) -> QuantFormat:
    name = kind.name.lower()
    return QuantFormat(
        # llama.cpp orders the bytes of two of them otherwise.
        _GGUF + name if name in FORMATS else name,
        int(kind.bits),
        kind.weights,
        "gguf",
        (kind.weights,),
        is_target=False,
        word_bits=8,
        block_bytes=kind.size,
    )


GGUF_TYPES: Final[Mapping[str, QuantFormat]] = {
    kind.name: _of_gguf(kind) for kind in TYPES.values() if kind.weights > 1
}
"""The types whose weights are blocks of llama.cpp, as they are in GGUF files, by their names there."""
GGUF_FORMATS: Final[Mapping[str, QuantFormat]] = {item.name: item for item in GGUF_TYPES.values()}
"""The same by name."""

_TARGETS: Final = {
    alias: item
    for item in FORMATS.values()
    if item.is_target
    for alias in (item.name, *item.aliases)
}
_AMBIGUOUS: Final = {
    "fp8": "in Ollama it means int8, which is not a floating-point type; use int8 or mxfp8",
    "fp4": "in Ollama it means int4, which is not a floating-point type; use int4, nvfp4 or mxfp4",
}


def parse_format(text: str) -> QuantFormat:
    """Return the type to quantize to, by name or alias, ignoring case.

    Raises:
        UsageError: there is no such type, or its name is ambiguous.
    """
    if not isinstance(text, str):
        raise UsageError(f"a type of quantization is a text such as int4, got {quote(text)}")
    key = text.strip().lower()
    found = _TARGETS.get(key)
    if found is not None:
        return found
    known = ", ".join(item.name for item in FORMATS.values() if item.is_target)
    reason = _AMBIGUOUS.get(key, f"expected one of {known}")
    raise UsageError(f"cannot quantize to {quote(text)}: {reason}")


def float8_format(weight: TensorSpec, scale: TensorSpec, sharing: Sharing) -> QuantFormat | None:
    """Return the type of a weight of 8-bit floats, or None if the tensors do not fit.

    Args:
        weight: a matrix or a stack of matrices.
        scale: its scales.
        sharing: the values that share a scale.
    """
    shape = weight.shape
    is_known = weight.dtype in FLOAT8 and scale.dtype in FACTORS
    is_known = is_known and scale.name.removeprefix(weight.name) in SCALE_SUFFIXES
    if not is_known or len(shape) not in (2, 3):
        return None
    *stack, rows, columns = shape
    block: Block | None
    if sharing == "tensor":
        ones = ((*stack, 1, 1)[:count] for count in range(len(stack), len(shape) + 1))
        block = (rows, columns) if scale.shape in ones else None
        if scale.elements == 1:
            block = math.prod(stack) * rows, columns
    elif sharing == "channel":
        block = (1, columns) if scale.shape in ((*stack, rows), (*stack, rows, 1)) else None
    else:
        block = height, width = (min(sharing[0], rows), sharing[1]) if stack else sharing
        grid = (*stack, -(-rows // height), -(-columns // width))
        # No matrix of a stack may end within a block.
        is_known = scale.shape == grid or (not stack and height == 1 and scale.shape == (*grid, 1))
        if not is_known or (stack and rows % height):
            block = None
    if block is None or not weight.elements:
        return None
    group_size = 0 if isinstance(sharing, str) else sharing[1]
    layout = Float8Layout(sharing, block, weight.dtype, scale.dtype)
    return replace(FORMATS[FLOAT8_TYPE], group_size=group_size, float8=layout)


def check_group_size(item: QuantFormat, group_size: int) -> None:
    """Check that a type supports a group size.

    Raises:
        UsageError: it does not; the message lists the possible sizes.
    """
    if group_size not in item.group_sizes:
        sizes = ", ".join(map(str, item.group_sizes))
        raise UsageError(f"{item.name} cannot have groups of {group_size}; possible: {sizes}")
