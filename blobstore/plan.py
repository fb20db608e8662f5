"""Which tensors go into which blob. Pure: decided by the specs alone, no byte is read.

Tensors are blobs of their own, but for the experts of a layer. In *packed* form all experts of a layer
keep their tensors and names inside one blob named by their prefix, and so do its shared experts. In
*stacked* form the experts' tensors of one projection become one tensor with a leading expert
dimension, as Ollama 0.33 does. The result does not depend on the sharding or order of the source.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from blobstore.errors import UnsupportedSource, UsageError
from blobstore.tensor import TensorSpec
from blobstore.text import quoted

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

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


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor of a blob, and the source tensors whose bytes, one after another, are its own."""

    spec: TensorSpec
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BlobPlan:
    """One blob: its layer name and its tensors in the order of the data."""

    name: str
    tensors: tuple[PlannedTensor, ...]
    is_group: bool = False
    metadata: Mapping[str, str] = field(default_factory=dict)


def plan(
    specs: Mapping[str, TensorSpec], *, experts: ExpertForm = "packed"
) -> tuple[BlobPlan, ...]:
    """Return the blobs for the tensors of a source: plain ones by name, then groups by prefix.

    Raises:
        UnsupportedSource: the experts of a projection cannot be stacked, for they differ in type
            or shape; or two blobs would have one name.
        UsageError: ``experts`` is no known form.
    """
    if experts not in EXPERT_FORMS:
        message = f"unknown form of experts {quoted(experts)}; expected packed or stacked"
        raise UsageError(message)
    plain: list[BlobPlan] = []
    groups: dict[str, dict[str, TensorSpec]] = {}
    for name, spec in specs.items():
        prefix = _group_prefix(name, experts)
        if prefix is None:
            plain.append(BlobPlan(name, (PlannedTensor(spec, (name,)),)))
        else:
            groups.setdefault(prefix, {})[name] = spec
    pack = _packed if experts == "packed" else _stacked
    packed = [
        BlobPlan(prefix, tuple(pack(members)), is_group=True)
        for prefix, members in sorted(groups.items())
    ]
    plans = (*sorted(plain, key=lambda blob: blob.name), *packed)
    _check_unique(plans)
    return plans


def stacks(plans: Iterable[BlobPlan]) -> dict[str, tuple[str, ...]]:
    """Return which source tensors each stacked tensor was made of, in order."""
    return {
        tensor.spec.name: tensor.sources
        for blob in plans
        for tensor in blob.tensors
        if tensor.sources != (tensor.spec.name,)
    }


def _group_prefix(name: str, experts: ExpertForm) -> str | None:
    match = _EXPERTS.fullmatch(name)
    if match is not None:
        prefix = match["prefix"]
        # Ollama stacks only what its own list of prefixes has, and Mixtral's is not in it.
        return prefix if experts == "packed" or _STACKED_PREFIXES.fullmatch(prefix) else None
    match = _SHARED.fullmatch(name) if experts == "packed" else None
    return match["prefix"] if match is not None else None


def _packed(members: Mapping[str, TensorSpec]) -> Iterable[PlannedTensor]:
    return (PlannedTensor(spec, (name,)) for name, spec in sorted(members.items()))


def _stacked(members: Mapping[str, TensorSpec]) -> Iterable[PlannedTensor]:
    projections: dict[str, list[tuple[tuple[int, str], str]]] = {}
    for name in members:
        match = _EXPERTS.fullmatch(name)
        assert match is not None  # noqa: S101 - only such names are grouped in stacked form
        stacked = f"{match['prefix']}.{match['rest']}"
        # By length, then digits: the order of the numbers, which may be too long for int().
        number = (len(match["expert"]), match["expert"])
        projections.setdefault(stacked, []).append((number, name))
    for stacked, numbered in sorted(projections.items()):
        names = tuple(name for _, name in sorted(numbered))
        first = members[names[0]]
        for name in names:
            if (members[name].dtype, members[name].shape) != (first.dtype, first.shape):
                message = (
                    f"experts {quoted(names[0])} and {quoted(name)} differ in dtype or shape and "
                    "cannot be stacked; use --experts packed"
                )
                raise UnsupportedSource(message)
        spec = TensorSpec(stacked, first.dtype, (len(names), *first.shape))
        yield PlannedTensor(spec, names)


def _check_unique(plans: Iterable[BlobPlan]) -> None:
    blobs: set[str] = set()
    tensors: set[str] = set()
    for blob in plans:
        for name, seen in ((blob.name, blobs), *((t.spec.name, tensors) for t in blob.tensors)):
            if name in seen:
                message = f"two tensors of the source would both be stored as {quoted(name)}"
                raise UnsupportedSource(message)
            seen.add(name)
