"""Recognises sources whose weights are quantized already."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blobstore.errors import UnsupportedSource
from blobstore.tensor import DType
from blobstore.text import quoted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from blobstore.tensor import TensorSpec

_ENDINGS = (".scales", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".qweight")
_FLOAT8 = frozenset(
    {DType.F8_E4M3, DType.F8_E5M2, DType.F8_E4M3FNUZ, DType.F8_E5M2FNUZ, DType.F8_E8M0}
)


def refuse_prequantized(specs: Mapping[str, TensorSpec]) -> None:
    """Refuse tensors that are only meaningful together with their scales.

    Stored one by one they would load as nonsense.

    Raises:
        UnsupportedSource: a name or type is that of a quantized weight; the message names it.
    """
    for name, spec in specs.items():
        is_float8 = spec.dtype in _FLOAT8 and name.endswith(".weight")
        if is_float8 or name.endswith(_ENDINGS):
            message = (
                f"tensor {quoted(name)} ({spec.dtype.value}) belongs to a model that is quantized "
                "already, which is not supported yet; create from the unquantized weights"
            )
            raise UnsupportedSource(message)
