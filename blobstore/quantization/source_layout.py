"""The names of quantized weights in folders of other tools than MLX, which its layout cannot hold.

8-bit floats and their scales have their own names in blobs. Weights of 4-bit floats have these names:

=====================  ================================  =======================
in a blob              compressed-tensors                ModelOpt
=====================  ================================  =======================
``X.weight`` U32       ``X.weight_packed`` U8            ``X.weight`` U8
``X.weight.scale``     ``X.weight_scale``                ``X.weight_scale``
``.global_scale``      ``X.weight_global_scale``, 1 / x  ``X.weight_scale_2``
=====================  ================================  =======================
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from blobstore.core.escape import quote
from blobstore.core.tensor import DType, TensorSpec
from blobstore.errors import BlobstoreError
from blobstore.quantization.formats import WORD_BITS
from blobstore.quantization.recipes import GLOBAL_SCALE, SCALE
from blobstore.quantization.source_config import SourceQuantConfig

if TYPE_CHECKING:
    from blobstore.quantization.formats import QuantFormat

_COMPRESSED_TENSORS: Final = "compressed-tensors"
_WORD_BYTES: Final = WORD_BITS // 8


class SourceNaming:
    """The names of the tensors of a source, by the ``config`` of its folder: any JSON value."""

    def __init__(self, config: Any) -> None:
        section = SourceQuantConfig(config if isinstance(config, dict) else {})
        self._is_compressed_tensors = section.method == _COMPRESSED_TENSORS

    def is_reciprocal(self, suffix: str) -> bool:
        """Return whether the source has the reciprocals of companions with this suffix."""
        return self._is_compressed_tensors and suffix == GLOBAL_SCALE

    def spec(self, name: str, suffix: str, stored: TensorSpec, item: QuantFormat) -> TensorSpec:
        """Return the spec in the source of a quantized weight, or of its companion.

        Args:
            name: the name of the weight.
            suffix: the suffix of the companion, or none for the weight itself.
            stored: the tensor in the blob.
            item: the type of the weight.

        Raises:
            BlobstoreError: no such folder holds weights of this type.
        """
        if item.float8 is not None:
            return stored
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
