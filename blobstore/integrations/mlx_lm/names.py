"""The names that mlx-lm uses for the tensors of a model. Does no I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from blobstore.core.tensor import TensorSpec
from blobstore.models.tensors import QPARAMS
from blobstore.quantization.formats import FORMATS
from blobstore.quantization.mlx_layout import joined_experts, mlx_name
from blobstore.quantization.recipes import BIAS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from blobstore.quantization.formats import QuantFormat


class Naming(NamedTuple):
    """How the tensors of a model map to those of mlx-lm."""

    single: dict[str, str]
    """Runtime name → MLX name."""
    split: dict[str, list[str]]
    """Runtime name → the MLX names of its parts, which mlx-lm joins itself."""
    joined: dict[str, list[str]]
    """MLX name → the runtime names of the tensors to stack."""
    types: dict[str, tuple[QuantFormat, int]]
    """Type and group size of the quantized weights, by MLX name."""


def mlx_naming(
    all_specs: Mapping[str, TensorSpec],
    quantized: Mapping[str, tuple[str, int]],
    stacks: Mapping[str, Sequence[str]],
) -> Naming:
    """Return how the tensors of a model map to those of mlx-lm.

    The names are those of an exported folder, where quantized experts are one tensor.

    Args:
        all_specs: the tensors by runtime name.
        quantized: type and group size of the quantized weights, as their blobs state them.
        stacks: the source names of stacked tensors.

    Raises:
        BlobstoreError: a weight has a global scale.
    """
    single: dict[str, str] = {}
    split: dict[str, list[str]] = {}
    packed: dict[str, TensorSpec] = {}
    plain: list[str] = []
    types: dict[str, tuple[QuantFormat, int]] = {}
    qparams: dict[str, tuple[str, str]] = {}
    for weight, (kind, _) in quantized.items():
        for suffix, end in QPARAMS.items():
            # A weight without offsets may have an unrelated tensor of that name.
            is_unrelated = suffix == BIAS and kind in FORMATS and not FORMATS[kind].has_bias
            if not is_unrelated and weight + end in all_specs:
                qparams[weight + end] = (weight, suffix)
    for runtime, spec in all_specs.items():
        weight, suffix = qparams.get(runtime, (runtime, ""))
        names = [mlx_name(name, suffix) for name in stacks.get(weight, (weight,))]
        shape = spec.shape
        if weight in stacks:
            split[runtime], shape = names, shape[1:]
        else:
            single[runtime] = names[0]
        if weight not in quantized:
            plain += names
            continue
        for name in names:
            packed[name] = TensorSpec(name, spec.dtype, shape)
        kind, group_size = quantized[weight]
        if kind in FORMATS and not suffix:
            types |= dict.fromkeys(names, (FORMATS[kind], group_size))
    return _joined(Naming(single, split, {}, types), packed, plain)


def _joined(naming: Naming, specs: Mapping[str, TensorSpec], plain: Sequence[str]) -> Naming:
    """Return the naming with the quantized experts of a projection joined."""
    single, split, _, types = naming
    runtime_names = {name: runtime for runtime, name in single.items()}
    stacks = {tuple(names): runtime for runtime, names in split.items()}
    joined: dict[str, list[str]] = {}
    renamed: dict[str, str] = {}
    for name, members in joined_experts(specs.values(), plain).items():
        stack = stacks.get(tuple(members))
        if stack is not None:
            single[stack] = name
            del split[stack]
        elif all(member in runtime_names for member in members):
            joined[name] = [runtime_names[member] for member in members]
            for runtime in joined[name]:
                del single[runtime]
        else:
            continue
        renamed |= dict.fromkeys(members, name)
    known = {renamed.get(name, name): value for name, value in types.items()}
    return Naming(single, split, joined, known)
