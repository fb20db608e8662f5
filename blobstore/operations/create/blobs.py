"""Which tensors go into which blob. Pure: decided by the specs alone, no byte is read.

Tensors are blobs of their own, but for the experts of a layer. In *packed* form all experts of a layer
keep their tensors and names inside one blob named by their prefix, and so do its shared experts. In
*stacked* form the experts' tensors of one projection become one tensor with a leading expert
dimension, as Ollama 0.33 does, in one blob a layer, or in one a projection where the projections are
of different quantization types. The result does not depend on the sharding or order of the source.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Literal

from blobstore.core.escape import quote
from blobstore.core.tensor import TensorSpec
from blobstore.errors import UnsupportedSource, UsageError
from blobstore.quantization.metadata import describe
from blobstore.quantization.recipes import (
    BIAS,
    GLOBAL_SCALE,
    SCALE,
    Copied,
    Decoded,
    Prequantized,
    Quantized,
)
from blobstore.safetensors.header import encode_header

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from typing_extensions import Buffer

    from blobstore.quantization.policy import Policy
    from blobstore.quantization.recipes import Recipe


ExpertForm = Literal["packed", "stacked"]
EXPERT_FORMS: tuple[ExpertForm, ...] = ("packed", "stacked")

_LAYER = (
    r"(?:model\.language_model\.|language_model\.model\.|language_model\.|model\."
    r"|(?:model\.)?(?:language_model\.)?backbone\.|mtp\.)?layers\.\d+"
)
_EXPERTS = re.compile(
    rf"(?P<prefix>{_LAYER}\.(?:mlp|moe|mixer|block_sparse_moe)\.experts)"
    r"\.(?P<expert>0|[1-9]\d*)\.(?P<rest>.+\.weight)",
    re.ASCII,
)
_SHARED = re.compile(
    rf"(?P<prefix>{_LAYER}\.(?:mlp|mixer)\.shared_experts)\.(?P<rest>.+\.weight)", re.ASCII
)
_STACKED_PREFIXES = re.compile(r".*\.(?:mlp|moe|mixer)\.experts", re.ASCII)
_COMPANION_ENDS = (SCALE, BIAS, GLOBAL_SCALE, "_scale", "_qbias")
"""What companions of a quantized weight end in, in blobs and at run time."""


@dataclass(frozen=True, slots=True)
class BlobPlan:
    """One blob: its layer name and its tensors in the order of the data."""

    name: str
    tensors: tuple[Recipe, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def stored(self) -> list[TensorSpec]:
        """The tensors and their companions in the order of the data."""
        return [spec for recipe in self.tensors for spec in recipe.stored]


def plan(
    recipes: Mapping[str, Recipe],
    *,
    experts: ExpertForm = "packed",
    policy: Policy | None = None,
) -> tuple[BlobPlan, ...]:
    """Return the blobs for the tensors of a source: plain ones by name, then groups by prefix.

    Args:
        recipes: the logical tensors by name.
        experts: the form of the experts.
        policy: decides which plain tensors are quantized; None leaves all as they are.

    Raises:
        UnsupportedSource: the experts of a projection cannot be stacked, for they differ in type
            or shape; or two tensors would have one name.
        UsageError: ``experts`` is no known form, or the policy asks for what cannot be.
    """
    if experts not in EXPERT_FORMS:
        raise UsageError(f"unknown form of experts {quote(experts)}; expected packed or stacked")
    plain: list[Recipe] = []
    groups: dict[str, list[Recipe]] = defaultdict(list)
    for name, recipe in recipes.items():
        prefix = _group_prefix(name, experts)
        if prefix is None or (experts == "stacked" and isinstance(recipe, Prequantized)):
            plain.append(recipe)
        else:
            groups[prefix].append(recipe)
    plans = [_blob(recipe.spec.name, [recipe], policy) for recipe in sorted(plain, key=_BY_NAME)]
    for prefix, members in sorted(groups.items()):
        if experts == "packed":
            plans.append(_blob(prefix, sorted(members, key=_BY_NAME), policy))
        else:
            plans.extend(_stacked_blobs(prefix, _stacked(members), policy))
    _check_unique(plans)
    return tuple(plans)


def stacks(plans: Iterable[BlobPlan]) -> dict[str, tuple[str, ...]]:
    """Return which source tensors each stacked tensor was made of, in order."""
    return {
        recipe.spec.name: recipe.sources
        for blob in plans
        for recipe in blob.tensors
        if not isinstance(recipe, Prequantized) and recipe.spec.name not in recipe.sources
    }


_BY_NAME = attrgetter("spec.name")


def _blob(name: str, members: Sequence[Recipe], policy: Policy | None) -> BlobPlan:
    recipes = tuple(_decided(recipe, policy) for recipe in members)
    metadata = describe({recipe.spec.name: _type(recipe) for recipe in recipes})
    return BlobPlan(name, recipes, metadata)


def _stacked_blobs(
    prefix: str, members: Sequence[Recipe], policy: Policy | None
) -> Iterable[BlobPlan]:
    whole = _blob(prefix, members, policy)
    if len({_type(recipe) for recipe in whole.tensors}) == 1:
        return [whole]
    return [_blob(recipe.spec.name, [recipe], policy) for recipe in members]


def _decided(recipe: Recipe, policy: Policy | None) -> Recipe:
    if policy is None or isinstance(recipe, Prequantized | Quantized):
        return recipe
    decision = policy.decide(recipe.spec)
    if decision.item is None:
        return recipe
    return Quantized(recipe, decision.item, decision.group_size)


def _type(recipe: Recipe) -> tuple[str, int | None] | None:
    """Return quantization type and group size, None for a plain tensor."""
    if isinstance(recipe, Prequantized | Quantized):
        return recipe.item.name, recipe.group_size
    return None


def _group_prefix(name: str, experts: ExpertForm) -> str | None:
    match = _EXPERTS.fullmatch(name)
    if match is not None:
        prefix = match["prefix"]
        # Ollama stacks only what its own list of prefixes has, and Mixtral's is not in it.
        return prefix if experts == "packed" or _STACKED_PREFIXES.fullmatch(prefix) else None
    match = _SHARED.fullmatch(name) if experts == "packed" else None
    return match["prefix"] if match is not None else None


def _stacked(members: Iterable[Recipe]) -> list[Recipe]:
    """Return the experts' tensors of each projection as one, by projection."""
    projections: dict[str, list[tuple[tuple[int, str], Copied | Decoded]]] = defaultdict(list)
    for recipe in members:
        match = _EXPERTS.fullmatch(recipe.spec.name)
        assert match is not None  # noqa: S101 - only such names are grouped in stacked form
        assert isinstance(recipe, Copied | Decoded)  # noqa: S101 - and only such recipes
        # By length, then digits: the order of the numbers, which may be too long for int().
        number = (len(match["expert"]), match["expert"])
        projections[f"{match['prefix']}.{match['rest']}"].append((number, recipe))
    return [
        _joined(name, [recipe for _, recipe in sorted(numbered, key=lambda item: item[0])])
        for name, numbered in sorted(projections.items())
    ]


def _joined(name: str, experts: Sequence[Copied | Decoded]) -> Recipe:
    first = experts[0]
    for expert in experts:
        if _form(expert) != _form(first):
            raise UnsupportedSource(
                f"experts {quote(first.spec.name)} and {quote(expert.spec.name)} differ in dtype "
                "or shape and cannot be stacked; use --experts packed"
            )
    spec = TensorSpec(name, first.spec.dtype, (len(experts), *first.spec.shape))
    sources = tuple(source for expert in experts for source in expert.sources)
    if isinstance(first, Copied):
        return Copied(spec, sources)
    scales = tuple(
        scale for expert in experts if isinstance(expert, Decoded) for scale in expert.scales
    )
    return replace(first, spec=spec, sources=sources, scales=scales)


def _form(recipe: Copied | Decoded) -> tuple[object, ...]:
    """Return all that experts must have in common."""
    own = recipe.spec.dtype, recipe.spec.shape
    if isinstance(recipe, Copied):
        return own
    packed = (recipe.weight.dtype, recipe.scale.dtype, recipe.scale.shape, recipe.block)
    return (*own, *packed)


def _check_unique(plans: Iterable[BlobPlan]) -> None:
    blobs: set[str] = set()
    tensors: set[str] = set()
    for blob in plans:
        for name, seen in ((blob.name, blobs), *((spec.name, tensors) for spec in blob.stored)):
            if name in seen:
                raise UnsupportedSource(
                    f"two tensors of the source would both be stored as {quote(name)}"
                )
            seen.add(name)
    _check_companions([recipe for blob in plans for recipe in blob.tensors], tensors)


def _check_companions(recipes: Iterable[Recipe], names: Collection[str]) -> None:
    """Check that no other tensor would pass for a quantized weight's companion."""
    for recipe in filter(_type, recipes):
        own = {spec.name for spec in recipe.stored}
        for name in (recipe.spec.name + end for end in _COMPANION_ENDS):
            if name in names and name not in own:
                raise UnsupportedSource(
                    f"tensor {quote(name)} has the name of a companion of "
                    f"{quote(recipe.spec.name)}, which is quantized; keep that one with an override "
                    "to none, or rename the tensor"
                )


def blob_header(blob: BlobPlan) -> bytes:
    """Return the header of a blob; its data follows.

    Raises:
        InvalidHeader: the tensors' names cannot stand in a header, or it is over the size limit.
    """
    return encode_header(blob.stored, blob.metadata)


def blob_size(blob: BlobPlan) -> int:
    """Return the size in bytes of a blob, header included. Raises as :func:`blob_header`."""
    return len(blob_header(blob)) + sum(spec.nbytes for spec in blob.stored)


def blob_buffers(blob: BlobPlan, make: Callable[[Recipe], Iterable[Buffer]]) -> Iterator[Buffer]:
    """Yield the bytes of a blob; ``make`` gives the bytes of a tensor and its companions.

    A buffer is good until the next one is asked for.
    """
    yield blob_header(blob)
    for recipe in blob.tensors:
        yield from make(recipe)
