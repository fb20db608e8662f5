"""The names and types of quantized weights in the folders that models are imported from.

:class:`SourceNaming` has those of folders of other tools than MLX, which its layout cannot hold. 8-bit floats and
their scales have their own names in blobs. Weights of 4-bit floats and symmetric integers have these names:

=====================  ================================  =======================
in a blob              compressed-tensors                ModelOpt
=====================  ================================  =======================
``X.weight`` U32       ``X.weight_packed`` U8, or I32    ``X.weight`` U8
``X.weight.scale``     ``X.weight_scale``                ``X.weight_scale``
``.global_scale``      ``X.weight_global_scale``, 1 / x  ``X.weight_scale_2``
=====================  ================================  =======================
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from blobstore.core.escape import quote
from blobstore.core.tensor import DType, TensorSpec
from blobstore.errors import BlobstoreError
from blobstore.quantization.formats import MODULE_SCALES, PACKED_SHAPE, SCALE_SUFFIXES, WORD_BITS
from blobstore.quantization.recipes import BIAS, GLOBAL_SCALE, SCALE
from blobstore.quantization.source_config import SourceQuantConfig

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence

    from blobstore.quantization.formats import QuantFormat

_COMPRESSED_TENSORS: Final = "compressed-tensors"
_WORD_BYTES: Final = WORD_BITS // 8
_ENDS: Final = {
    "": ("", "_packed", "_blocks"),
    SCALE: ("_scale", "_scale_inv", "_scales"),
    BIAS: (),
    GLOBAL_SCALE: ("_global_scale", "_scale_2"),
}
"""Suffixes of the names of a weight and its quantization parameters in sources."""
_MLX_ENDS: Final = {SCALE: ".scales", BIAS: ".biases"}
"""MLX's suffixes of quantization parameters in place of ``.weight``."""
_PACKED: Final = (DType.U8, DType.I8, DType.F8_E4M3)
_FLOAT8_SCALES: Final = (DType.F8_E4M3, DType.F8_E8M0)


class SourceNaming:
    """The names of the tensors of a source.

    Args:
        config: the config of its folder, any JSON value.
        published: the tensors of the source by their names in blobs, as its record has them.
    """

    def __init__(self, config: Any, published: Mapping[str, TensorSpec] | None = None) -> None:
        self._published = published or {}
        section = SourceQuantConfig(config if isinstance(config, dict) else {})
        self._is_compressed_tensors = section.method == _COMPRESSED_TENSORS

    def is_reciprocal(self, suffix: str) -> bool:
        """Return whether the source has the reciprocals of quantization parameters with this suffix."""
        return self._is_compressed_tensors and suffix == GLOBAL_SCALE

    def spec(self, name: str, suffix: str, stored: TensorSpec, item: QuantFormat) -> TensorSpec:
        """Return the spec in the source of a quantized weight, or of its quantization parameter.

        Args:
            name: the name of the weight.
            suffix: the suffix of the quantization parameter, or none for the weight itself.
            stored: the tensor in the blob.
            item: the type of the weight.

        Raises:
            BlobstoreError: no such folder holds weights of this type.
        """
        published = self._published.get(stored.name)
        # The record is not trusted.
        if published is not None and is_renamed_to(published, stored, {name, name + SCALE}):
            return published
        if item.float8 is not None:
            return stored
        if item.mode == "symmetric":
            if suffix == SCALE:
                return stored._replace(name=f"{name}_scale")
            return stored._replace(name=f"{name}_packed", dtype=DType.I32)
        if item.mode == "affine":
            raise BlobstoreError(
                f"tensor {quote(name)} is {item.name}, and others have types that only folders of "
                "other tools hold; export the model dequantized"
            )
        if suffix == GLOBAL_SCALE:
            end = "_global_scale" if self._is_compressed_tensors else "_scale_2"
            return stored._replace(name=name + end)
        if suffix == SCALE:
            dtype = DType.F8_E4M3 if item.mode == "nvfp4" else stored.dtype
            return stored._replace(name=f"{name}_scale", dtype=dtype)
        shape = (*stored.shape[:-1], stored.shape[-1] * _WORD_BYTES)
        if item.mode == "mxfp8":
            return TensorSpec(name, DType.F8_E4M3, shape)
        end = "_packed" if self._is_compressed_tensors else ""
        return TensorSpec(name + end, DType.U8, shape)


def packed_shape(
    name: str, shape: Sequence[int], dtype: DType = DType.I64
) -> tuple[TensorSpec, bytes]:
    """Return the tensor that compressed-tensors has with the shape of a packed weight, and its bytes.

    Args:
        name: the weight.
        shape: its logical shape.
        dtype: I64 or I32, if the shape fits.
    """
    if dtype is not DType.I32 or max(shape, default=0) >> 31:
        dtype = DType.I64
    size = dtype.bits // 8
    data = b"".join(length.to_bytes(size, "little") for length in shape)
    return TensorSpec(name + PACKED_SHAPE, dtype, (len(shape),)), data


def is_renamed_to(source: TensorSpec, stored: TensorSpec, blob: Container[str]) -> bool:
    """Return whether an import may store a part of a quantized weight as another tensor, bytes unchanged.

    Args:
        source: the tensor of the source.
        stored: the tensor in the blob.
        blob: the names of all tensors of the blob.
    """
    scaled = stored.name.removesuffix(SCALE_SUFFIXES[0])
    if scaled != stored.name and scaled in blob and source.name in _module_names(scaled):
        return source[1:] == stored[1:]
    for suffix, ends in _ENDS.items():
        weight = stored.name.removesuffix(suffix)
        if weight + suffix != stored.name or not (weight in blob and weight + SCALE in blob):
            continue
        names = {weight + end for end in ends}
        if suffix in _MLX_ENDS:
            names.add(weight.removesuffix(".weight") + _MLX_ENDS[suffix])
        if suffix == SCALE:
            names |= _module_names(weight)
        if source.name in names and _has_same_bits(source, stored, is_weight=not suffix):
            return True
    return False


def _module_names(weight: str) -> set[str]:
    """Return the names that the scales of a weight may have after that of its module."""
    module = weight.removesuffix(".weight")
    return {module + end for end in MODULE_SCALES} if module != weight else set()


def _has_same_bits(source: TensorSpec, stored: TensorSpec, *, is_weight: bool) -> bool:
    """Return whether a quantized weight or a quantization parameter of a source is only relabelled in a blob."""
    _, dtype, shape = source
    if not is_weight:
        is_relabelled = stored.dtype is DType.U8 and dtype in _FLOAT8_SCALES
        return shape == stored.shape and (is_relabelled or dtype is stored.dtype)
    if source.name.endswith("_blocks"):
        shape = (*shape[:-2], math.prod(shape[-2:]))
    if dtype is DType.I32:
        return (
            stored.dtype is DType.U32 and source.name.endswith("_packed") and shape == stored.shape
        )
    words = (*stored.shape[:-1], math.prod(stored.shape[-1:]) * _WORD_BYTES)
    return stored.dtype is DType.U32 and dtype in _PACKED and shape == words
