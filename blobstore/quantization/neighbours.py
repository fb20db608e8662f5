"""The rule for neighbours: which tensors next to a weight may change what its bytes mean.

A module that is quantized has a weight and a bias. Whatever else lies next to the weight belongs to the
quantization: scales, zero points, a shape, a permutation, a marker. If a reading of the weight does not use it,
the reading is uncertain. The rule knows no scheme, so that it catches the next one too.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from blobstore.quantization.formats import FLOAT8

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Mapping

    from blobstore.core.tensor import TensorSpec

_HARMLESS: Final = re.compile(r"(?:.*[._])?(?:bias|(?:k|v|q|kv|prob|output)_scale)", re.DOTALL)
"""Biases, and scales of attention and outputs: they do not change the values of a weight."""
_MAX_CUTS: Final = 8
"""The longest known ending, ``.quant_state.bitsandbytes__nf4``, has 5 places to cut at."""
_TAIL: Final = 200
"""Characters at the end of a name that are searched, so that long names cost no more than others."""
_SMALL: Final = 4096
"""Bytes. A larger tensor, also larger than the weight, is part of its quantization only if it fits its shape."""
_PACKED: Final = (2, 4, 8, 16)
"""How many columns a byte or word of packed weights may hold."""
_CUT: Final = re.compile(r"[._:]")


def owner(name: str, weights: Container[str]) -> str:
    """Return the name of the weight that a tensor belongs to by its own name, or an empty text."""
    module = name.rpartition(".")[0]
    weight = f"{module}.weight"
    if weight == name and "." in module:  # perhaps of a submodule, such as a rotation
        weight = f"{module.rpartition('.')[0]}.weight"
    if weight in weights and weight != name:
        return weight
    tail = name[-_TAIL:]
    ends = [match.start() - len(tail) for match in _CUT.finditer(tail)][-_MAX_CUTS:]
    for end in reversed(ends):
        if (start := name[:end]) in weights:
            return start
    return ""


def unclaimed_neighbour(
    specs: Mapping[str, TensorSpec], claimed: Container[str], weights: Mapping[str, TensorSpec]
) -> tuple[str, str] | None:
    """Return a tensor that may change the meaning of a weight and that no reading uses, and the weight.

    Args:
        specs: the tensors of the source.
        claimed: the names of those that readings use.
        weights: the weights that may be quantized, by name, as the source has them.
    """
    for name, spec in specs.items():
        if name in claimed or name in weights or _HARMLESS.fullmatch(name):
            continue
        weight = owner(name, weights)
        if weight and _may_change(spec, weights[weight]):
            return name, weight
    return None


def without_neighbours(specs: Mapping[str, TensorSpec], weights: Collection[str]) -> str:
    """Return the name of a weight with no neighbours but harmless ones, or an empty text."""
    others = (name for name in specs if name not in weights and not _HARMLESS.fullmatch(name))
    owners = {owner(name, weights) for name in others}
    return min((name for name in weights if name not in owners), default="")


def _may_change(spec: TensorSpec, weight: TensorSpec) -> bool:
    """Return whether a tensor is small, or has a dimension of a weight, as a rotation has."""
    if spec.nbytes < max(weight.nbytes, _SMALL):
        return True
    columns = weight.shape[-1:] if weight.dtype not in FLOAT8 else ()
    lengths = {*weight.shape, *(width * count for width in columns for count in _PACKED)} - {1}
    return not lengths.isdisjoint(spec.shape)
