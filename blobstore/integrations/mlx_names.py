"""What mlx-lm calls the tensors of a model and the keys of its config. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from blobstore.quantize.mlx_form import joined_experts, mlx_name
from blobstore.quantize.recipes import BIAS, SCALE
from blobstore.tensor import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from blobstore.contents import StoredTensor
    from blobstore.quantize.formats import QuantFormat

_RUNTIME = {"": "", SCALE: "_scale", BIAS: "_qbias"}
_OLD_KEYS = {"num_local_experts": "num_experts"}
_ROPE = "rope_parameters"


class Naming(NamedTuple):
    """How the tensors of a model become those that mlx-lm takes, by their runtime names."""

    single: dict[str, str]
    """Runtime name → MLX's."""
    split: dict[str, list[str]]
    """Runtime name → the names of its parts, which mlx-lm itself joins in its own way."""
    joined: dict[str, list[str]]
    """MLX's name → the runtime names of what is stacked."""
    types: dict[str, tuple[QuantFormat, int]]
    """Type and group size of the packed weights, by MLX's names."""


def mlx_naming(tensors: Iterable[StoredTensor], stacks: Mapping[str, Sequence[str]]) -> Naming:
    """Return how the tensors of a model become those that mlx-lm takes.

    They get the names that they have in an exported folder. Packed experts are one tensor there.

    Args:
        tensors: all of the model.
        stacks: what stacked tensors were made of.

    Raises:
        BlobstoreError: a weight has a global scale.
    """
    single: dict[str, str] = {}
    split: dict[str, list[str]] = {}
    specs: dict[str, TensorSpec] = {}
    plain: list[str] = []
    types: dict[str, tuple[QuantFormat, int]] = {}
    for stored in tensors:
        sources = stacks.get(stored.name)
        for suffix, entry in {"": stored.entry, **stored.companions}.items():
            names = [mlx_name(name, suffix) for name in sources or (stored.name,)]
            runtime = stored.name + _RUNTIME[suffix]
            dtype, shape = entry.spec.dtype, entry.spec.shape
            if sources is None:
                single[runtime] = names[0]
            else:
                split[runtime], shape = names, shape[1:]
            if stored.companions:
                specs |= {name: TensorSpec(name, dtype, shape) for name in names}
            else:
                plain += names
        if stored.item is not None:
            types |= dict.fromkeys(sources or (stored.name,), (stored.item, stored.group_size))
    return _joined(Naming(single, split, {}, types), specs, plain)


def _joined(naming: Naming, specs: Mapping[str, TensorSpec], plain: Sequence[str]) -> Naming:
    """Return the naming with the packed experts of a projection as one."""
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


def mlx_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with the keys that mlx-lm reads beside those that transformers 5 writes."""
    old = dict(config)
    for new, key in _OLD_KEYS.items():
        if new in old:
            old.setdefault(key, old[new])
    rope = old.get(_ROPE)
    # Some have parameters for each kind of layer; mlx-lm reads those where they are.
    if isinstance(rope, dict) and "rope_theta" in rope:
        old.setdefault("rope_theta", rope["rope_theta"])
        if "partial_rotary_factor" in rope:
            old.setdefault("partial_rotary_factor", rope["partial_rotary_factor"])
        if rope.get("rope_type", "default") != "default":
            scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
            old.setdefault("rope_scaling", scaling)
    if isinstance(nested := old.get("text_config"), dict):
        old["text_config"] = mlx_config(nested)
    return old
