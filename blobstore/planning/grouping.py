"""The grouping of tensors into blobs. It depends on the specs alone; no data is read.

Each tensor is a blob of its own, except the experts of a layer. In *packed* form, one blob holds all
experts of a layer and another one its shared experts; tensors keep their names, and the blob has the
name of their common prefix. In *stacked* form, as in Ollama 0.33, the experts' tensors of one projection
become one tensor with a leading expert dimension. There is one blob per layer, or one per projection
if the projections have different quantization types. The result does not depend on the sharding or
order of the source.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field, replace
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Literal

from blobstore.core.escape import quote
from blobstore.core.fork import cached_property
from blobstore.core.tensor import TensorSpec
from blobstore.errors import UnsupportedSource, UsageError
from blobstore.quantization.formats import SCALE_SUFFIXES
from blobstore.quantization.metadata import quant_metadata, stated
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
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from typing_extensions import Buffer

    from blobstore.quantization.choose_format import Policy
    from blobstore.quantization.metadata import Stated
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
# Ollama stacks only these, and Mixtral's block_sparse_moe is not among them.
_STACKED_PREFIXES = re.compile(r".*\.(?:mlp|moe|mixer)\.experts", re.ASCII)
_PUBLISHED_EXPERTS = re.compile(
    r"(?P<prefix>.+\.experts)\.(?:0|[1-9]\d*)\.(?P<rest>.+)", re.ASCII | re.DOTALL
)
"""Any tensor of an expert, also a scale under a name that is not known."""
_QPARAM_SUFFIXES = (SCALE, BIAS, GLOBAL_SCALE, *SCALE_SUFFIXES, "_qbias")
"""Suffixes of the quantization parameters of a quantized weight, in blobs and at run time."""
_BY_NAME = attrgetter("spec.name")


@dataclass(frozen=True)
class BlobPlan:
    """One blob: its layer name, and its tensors in the order of the data."""

    name: str
    tensors: tuple[Recipe, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def stored(self) -> list[TensorSpec]:
        """The tensors and their quantization parameters in the order of the data."""
        return [spec for recipe in self.tensors for spec in recipe.stored]

    @cached_property
    def header(self) -> bytes:
        """The blob's first bytes, which the data follows.

        Raises:
            InvalidHeader: a header cannot hold the tensors' names, or would exceed its size limit.
        """
        return encode_header(self.stored, self.metadata)

    @cached_property
    def size(self) -> int:
        """Bytes of header and data. Raises as :attr:`header`."""
        return len(self.header) + sum(spec.nbytes for spec in self.stored)

    def buffers(self, convert: Callable[[Recipe], Iterable[Buffer]]) -> Iterator[Buffer]:
        """Yield the bytes of the blob; ``convert`` returns those of a tensor and its quantization parameters.

        A buffer is valid until the next one is requested.
        """
        yield self.header
        for recipe in self.tensors:
            yield from convert(recipe)


def plan_blobs(
    recipes: Mapping[str, Recipe],
    *,
    experts: ExpertForm = "packed",
    policy: Policy | None = None,
    is_published: bool = False,
) -> tuple[BlobPlan, ...]:
    """Return the blobs for the tensors of a source: single tensors by name, then groups by prefix.

    Args:
        recipes: the logical tensors by name.
        experts: the form of the experts.
        policy: decides which plain tensors are quantized; without one, none are.
        is_published: whether the tensors are quantized in a way that is not understood. Then experts are
            grouped whatever the names of their parts, and never stacked.

    Raises:
        UnsupportedSource: the experts of a projection differ in dtype or shape, or one is missing, so
            that they cannot be stacked; or two tensors would have the same name.
        UsageError: ``experts`` is unknown, or a tensor cannot be quantized as the policy asks.
    """
    if experts not in EXPERT_FORMS:
        raise UsageError(f"unknown form of experts {quote(experts)}; expected packed or stacked")
    single: list[Recipe] = []
    groups: dict[str, list[Recipe]] = defaultdict(list)
    for name, recipe in recipes.items():
        match = _EXPERTS.fullmatch(name)
        if is_published:
            match = _PUBLISHED_EXPERTS.fullmatch(name) if experts == "packed" else None
        elif experts == "packed":
            match = match or _SHARED.fullmatch(name)
        elif isinstance(recipe, Prequantized) or (
            match and not _STACKED_PREFIXES.fullmatch(match["prefix"])
        ):
            match = None
        if match is None:
            single.append(recipe)
        else:
            groups[match["prefix"]].append(recipe)
    blobs = [
        _plan_blob(recipe.spec.name, [recipe], policy) for recipe in sorted(single, key=_BY_NAME)
    ]
    for prefix, members in sorted(groups.items()):
        if experts == "packed":
            blobs.append(_plan_blob(prefix, sorted(members, key=_BY_NAME), policy))
            continue
        projections = _stack_experts(members)
        layer = _plan_blob(prefix, projections, policy)
        if len(set(map(_quantization, layer.tensors))) == 1:
            blobs.append(layer)
        else:
            blobs += (_plan_blob(recipe.spec.name, [recipe], policy) for recipe in projections)
    _check_names(blobs)
    return tuple(blobs)


def stacked_sources(blobs: Iterable[BlobPlan]) -> dict[str, tuple[str, ...]]:
    """Return the source tensors of each stacked tensor, in order."""
    return {
        recipe.spec.name: recipe.sources
        for blob in blobs
        for recipe in blob.tensors
        if not isinstance(recipe, Prequantized) and recipe.spec.name not in recipe.sources
    }


def _plan_blob(name: str, members: Iterable[Recipe], policy: Policy | None) -> BlobPlan:
    recipes = list(members)
    for index, recipe in enumerate(recipes):
        if policy is not None and not isinstance(recipe, Prequantized | Quantized):
            decision = policy.decide(recipe.spec)
            if decision.item is not None:
                recipes[index] = Quantized(recipe, decision.item, decision.group_size)
    metadata = quant_metadata({recipe.spec.name: _quantization(recipe) for recipe in recipes})
    return BlobPlan(name, tuple(recipes), metadata)


def _quantization(recipe: Recipe) -> Stated | None:
    """Return the quantization of a tensor by the metadata, or None for a plain tensor."""
    if isinstance(recipe, Prequantized | Quantized):
        return stated(recipe.item, recipe.group_size)
    return None


def _stack_experts(members: Iterable[Recipe]) -> list[Recipe]:
    """Return one stacked tensor per projection, sorted by name."""
    projections: dict[str, list[tuple[tuple[int, str], Copied | Decoded]]] = defaultdict(list)
    for recipe in members:
        match = _EXPERTS.fullmatch(recipe.spec.name)
        assert match is not None  # noqa: S101 - only such names are grouped in stacked form
        assert isinstance(recipe, Copied | Decoded)  # noqa: S101 - and only such recipes
        # By length, then digits: the order of the numbers, which may be too long for int().
        number = (len(match["expert"]), match["expert"])
        projections[f"{match['prefix']}.{match['rest']}"].append((number, recipe))
    stacked: list[Recipe] = []
    for name, numbered in sorted(projections.items()):
        numbered.sort(key=itemgetter(0))
        experts = [expert for _, expert in numbered]
        first = experts[0]
        for index, ((_, digits), expert) in enumerate(numbered):
            if digits != str(index):
                raise UnsupportedSource(
                    f"there is no expert {index} of {quote(name)} before {quote(expert.spec.name)}, so "
                    "the experts cannot be stacked; use --experts packed"
                )
        for expert in experts:
            if _stacking_key(expert) != _stacking_key(first):
                raise UnsupportedSource(
                    f"experts {quote(first.spec.name)} and {quote(expert.spec.name)} differ in "
                    "dtype or shape and cannot be stacked; use --experts packed"
                )
        spec = TensorSpec(name, first.spec.dtype, (len(experts), *first.spec.shape))
        sources = tuple(source for expert in experts for source in expert.sources)
        joined = replace(first, spec=spec, sources=sources)
        if isinstance(joined, Decoded):
            decoded = (expert for expert in experts if isinstance(expert, Decoded))
            scales = tuple(scale for expert in decoded for scale in expert.scales)
            joined = replace(joined, scales=scales)
        stacked.append(joined)
    return stacked


def _stacking_key(recipe: Copied | Decoded) -> tuple[object, ...]:
    """Return everything that experts must have in common to be stacked."""
    key = recipe.spec.dtype, recipe.spec.shape
    if isinstance(recipe, Copied):
        return key
    return (*key, recipe.weight.dtype, recipe.scale.dtype, recipe.scale.shape, recipe.block)


def _check_names(blobs: Iterable[BlobPlan]) -> None:
    """Check that names are unique, and that no tensor could be mistaken for a quantization parameter."""
    layers: set[str] = set()
    tensors: set[str] = set()
    for blob in blobs:
        for name, seen in ((blob.name, layers), *((spec.name, tensors) for spec in blob.stored)):
            if name in seen:
                raise UnsupportedSource(
                    f"two tensors of the source would both be stored as {quote(name)}"
                )
            seen.add(name)
    for recipe in (recipe for blob in blobs for recipe in blob.tensors if _quantization(recipe)):
        own = {spec.name for spec in recipe.stored}
        for name in (recipe.spec.name + suffix for suffix in _QPARAM_SUFFIXES):
            if name in tensors and name not in own:
                raise UnsupportedSource(
                    f"tensor {quote(name)} has the name of a quantization parameter of {quote(recipe.spec.name)}, "
                    "which is quantized; keep that one with an override to none, or rename "
                    "the tensor"
                )
