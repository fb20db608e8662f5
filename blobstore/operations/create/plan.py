"""From a source to the plan of its blobs: recognised, decided, grouped. No byte is read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from blobstore.core.escape import quote
from blobstore.errors import UnsupportedSource, UsageError
from blobstore.operations.create.blobs import BlobPlan, plan
from blobstore.quantization import gpt_oss
from blobstore.quantization.detect import detect_quantization
from blobstore.quantization.formats import FORMATS, parse_format
from blobstore.quantization.policy import Policy, parse_override
from blobstore.quantization.recipes import Prequantized, Quantized
from blobstore.quantization.source_config import SourceQuantConfig

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    from blobstore.operations.create.blobs import ExpertForm
    from blobstore.quantization.policy import PolicyName
    from blobstore.quantization.recipes import Recipe
    from blobstore.sources.base import TensorSource


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeOptions:
    """What a model shall be quantized to, as a user says it."""

    quant_type: str | None = None
    """Name or alias of a type; None leaves the model as it is."""
    group_size: int | None = None
    """Of the requested type; None takes its usual one."""
    policy: PolicyName = "recommended"
    overrides: Sequence[str] = ()
    """``GLOB=TYPE``, the last that matches a tensor's name deciding; type ``none`` keeps it."""


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """The blobs of a model and how they were decided."""

    blobs: tuple[BlobPlan, ...]
    policy: Policy | None
    quant_type: str
    """The type that the model as a whole is said to have; empty for none."""
    notices: tuple[str, ...]

    def decisions(self) -> Iterator[PlannedTensor]:
        """Yield what becomes of every logical tensor, and why."""
        for blob in self.blobs:
            for recipe in blob.tensors:
                yield _planned(recipe, self.policy)


class PlannedTensor(NamedTuple):
    """What becomes of one tensor."""

    name: str
    shape: tuple[int, ...]
    """As the user knows it: unpacked."""
    dtype: str
    """Its element type before, or its quantization type if the source has quantized it."""
    type: str
    """Its quantization type afterwards, or its element type."""
    group_size: int
    """Elements that share a scale; 0 for a plain tensor."""
    bytes_before: int
    """In the source, 8-bit floats decoded."""
    bytes_after: int
    """Companions included."""
    reason: str

    @property
    def elements(self) -> int:
        """Number of logical elements."""
        return math.prod(self.shape)


def _planned(recipe: Recipe, policy: Policy | None) -> PlannedTensor:
    stored = sum(spec.nbytes for spec in recipe.stored)
    name, dtype, shape = recipe.spec
    if isinstance(recipe, Prequantized):
        kind, group_size = recipe.item.name, recipe.group_size or recipe.item.group_size
        shape = (*shape[:-1], recipe.item.columns(shape[-1]))
        return PlannedTensor(
            name, shape, kind, kind, group_size, stored, stored, "quantized in the source"
        )
    reason = policy.decide(recipe.spec).reason if policy is not None else "copied"
    kind, group_size = dtype.value, 0
    if isinstance(recipe, Quantized):
        kind, group_size = recipe.item.name, recipe.group_size
    return PlannedTensor(
        name, shape, dtype.value, kind, group_size, recipe.spec.nbytes, stored, reason
    )


def plan_source(
    source: TensorSource, *, experts: ExpertForm = "packed", quantize: QuantizeOptions | None = None
) -> ModelPlan:
    """Return the plan for an open source.

    Raises:
        UnsupportedSource: the source is of a kind that cannot be stored, or is quantized already
            and shall be quantized.
        UsageError: the request means nothing, or cannot be for one of the tensors.
    """
    recipes, notices, quant_type = detect_quantization(source.specs, source.config)
    request = quantize or QuantizeOptions()
    policy = _policy(request, source.config)
    if policy is not None:
        for recipe in recipes.values():
            if isinstance(recipe, Prequantized):
                raise UnsupportedSource(
                    f"tensor {quote(recipe.spec.name)} is quantized to {recipe.item.name} already; "
                    "create from the unquantized weights, or without quantizing"
                )
        if SourceQuantConfig(source.config).method == gpt_oss.METHOD:
            # Stored with this config, plain weights would pass for those of gpt-oss.
            raise UnsupportedSource(
                f"config.json says quant_method {quote(gpt_oss.METHOD)}, and no tensor is so; remove "
                "'quantization_config' from it, if the weights are plain"
            )
    # 8-bit floats are decoded, so that nothing of the model is of their type any more.
    quant_type = quant_type if quant_type in FORMATS else ""
    blobs = plan(recipes, experts=experts, policy=policy)
    if policy is not None:
        _check_overrides(policy)
    if any(isinstance(recipe, Quantized) for blob in blobs for recipe in blob.tensors):
        quant_type = parse_format(request.quant_type or "").name
    return ModelPlan(blobs, policy, quant_type, (*source.notices, *notices))


def _policy(quantize: QuantizeOptions, config: Mapping[str, Any]) -> Policy | None:
    if quantize.quant_type is None:
        if quantize != QuantizeOptions():
            raise UsageError(
                "a group size, policy or override means nothing without a type to quantize to"
            )
        return None
    return Policy(
        parse_format(quantize.quant_type),
        group_size=quantize.group_size,
        name=quantize.policy,
        overrides=tuple(map(parse_override, quantize.overrides)),
        config=config,
    )


def _check_overrides(policy: Policy) -> None:
    unused = policy.unused_overrides()
    if unused:
        raise UsageError(f"no tensor of the source matches the override {quote(unused[0])}")
