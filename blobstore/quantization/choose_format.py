"""Decides which tensors are quantized to which type, from names, shapes, element types and the config.

The tables are in :mod:`blobstore.quantization.policy_rules`. A tensor is checked in this order: the user's
overrides (the last match wins), the requirements on element type, dimensions, size and orientation, the
rules for towers, those of its architecture, and the generic ones. The types of a rule are tried in turn,
each with its group size: the requested one for the requested type, the default for other types. A tensor
is kept unchanged if no group size divides its last dimension.

Schedules need numbers from the model's config. If one is missing or zero, the rules that need it do not
apply. If one is not a number, that is an error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from blobstore.core.escape import quote
from blobstore.core.globs import any_glob
from blobstore.core.tensor import DType
from blobstore.errors import UnsupportedSource, UsageError
from blobstore.quantization.formats import FORMATS, check_group_size, parse_format
from blobstore.quantization.model_facts import ModelFacts
from blobstore.quantization.policy_rules import (
    ARCHITECTURES,
    GENERIC,
    KEPT,
    MIN_ELEMENTS,
    TOWERS,
    UNIFORM,
    Architecture,
    is_expert_weight,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from blobstore.core.tensor import TensorSpec
    from blobstore.quantization.formats import QuantFormat
    from blobstore.quantization.model_facts import Role
    from blobstore.quantization.policy_rules import Rule

PolicyName = Literal["recommended", "uniform"]
POLICIES: Final[tuple[PolicyName, ...]] = get_args(PolicyName)

_QUANTIZABLE: Final = frozenset({DType.F16, DType.BF16, DType.F32})
_NOT_QUANTIZABLE: Final = "elements; only F32, F16 and BF16 are quantized"
_MATRIX: Final = 2
_STACK: Final = 3
# Longer numbers are not layers, and int() is slow on them.
_LAYER: Final = re.compile(r"(?:^|\.)layers\.(\d{1,9})\.", re.ASCII)
_NO_CONFIG: Final[Mapping[str, Any]] = MappingProxyType({})
_PLAIN: Final = Architecture(names=(), rules=())


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision for one tensor."""

    item: QuantFormat | None
    """The type to quantize to, or None to keep the tensor unchanged."""
    group_size: int
    """Elements that share a scale; 0 for a tensor that is not quantized."""
    reason: str
    """A short explanation."""


class Policy:
    """The decisions for the tensors of one model."""

    def __init__(
        self,
        requested: QuantFormat,
        *,
        group_size: int | None = None,
        name: PolicyName = "recommended",
        overrides: Sequence[tuple[str, QuantFormat | None]] = (),
        config: Mapping[str, Any] = _NO_CONFIG,
        specs: Iterable[TensorSpec] = (),
    ) -> None:
        """Choose the rules for a model.

        Args:
            requested: the requested type.
            group_size: its group size, by default that of the type.
            name: ``recommended``, or ``uniform`` for the requested type wherever possible.
            overrides: globs on tensor names, each with a type, or None to keep the tensor.
            config: the model's ``config.json``, which has the architecture and its dimensions.
            specs: all tensors of the model, which tell its parts apart.

        Raises:
            UsageError: the type does not support the group size, or the policy is unknown.
            UnsupportedSource: a field of the config that the architecture's rules need has the
                wrong type.
        """
        if name not in POLICIES:
            raise UsageError(f"unknown policy {quote(name)}; expected one of {', '.join(POLICIES)}")
        if group_size is not None:
            check_group_size(requested, group_size)
        targets = {item: _Target(item, item.group_size) for item in FORMATS.values()}
        if group_size is not None:
            targets[requested] = _Target(requested, group_size)
        self._requested = targets[requested]
        self._eight = targets[FORMATS["int8" if requested.mode == "affine" else "mxfp8"]]
        self._overrides = tuple(
            _Override(glob, None if item is None else targets[item]) for glob, item in overrides
        )
        self._used: set[str] = set()
        self._facts = ModelFacts(config, specs)
        self._transposed: set[str] = set()
        self._layers = _LayerNumbers()
        self._rules = (*TOWERS, *(UNIFORM if name == "uniform" else self._recommended(config)))

    def decide(self, spec: TensorSpec) -> Decision:
        """Return the decision for a tensor.

        Raises:
            UsageError: an override requests a type that is impossible for the tensor.
        """
        name = spec.name
        matching = [item for item in self._overrides if any_glob((item.glob,)).match(name)]
        if matching:
            self._used.update(item.glob for item in matching)
            return matching[-1].decide(spec)
        is_expert = is_expert_weight(name)
        role = self._facts.role(spec) if len(spec.shape) == _MATRIX and not is_expert else None
        unmet = _requirement(spec, role, is_expert=is_expert)
        if unmet:
            return Decision(None, 0, unmet)
        if self._facts.is_transposed(spec):
            self._transposed.add(name)
            return Decision(None, 0, "stored transposed")
        # There is always one, because the last rule applies to everything.
        rule = next(
            rule
            for rule in self._rules
            if rule.applies_to(name, role, is_expert=is_expert)
            if self._layers.has_rule(rule, name)
        )
        if not rule.become:
            return Decision(None, 0, rule.reason)
        reason = ""
        for width in rule.become:
            target = self._eight if width == "eight" else self._requested
            note = f", but {reason}" if reason else ", 8 bits" if width == "eight" else ""
            reason = target.misfit(spec)
            if not reason:
                return Decision(target.item, target.group_size, f"{rule.reason}{note}")
        return Decision(None, 0, reason)

    def unused_overrides(self) -> tuple[str, ...]:
        """Return the globs of overrides that have matched no tensor so far."""
        return tuple(item.glob for item in self._overrides if item.glob not in self._used)

    def notices(self) -> tuple[str, ...]:
        """Return notices for the user about the decisions so far."""
        names = sorted(self._transposed)
        if not names:
            return ()
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        notice = (
            f"kept {quote(names[0])}{others} unquantized: stored as [inputs, outputs], and types group "
            "values along the inputs"
        )
        return (notice,)

    def _recommended(self, config: Mapping[str, Any]) -> tuple[Rule, ...]:
        names = _list_at(config, "architectures", _is_text, "a list of names")
        fitting = (item for item in ARCHITECTURES if names and any_glob(item.names).match(names[0]))
        architecture = next(fitting, _PLAIN)
        layers = _count(config, architecture.layers_keys)
        experts = _count(config, architecture.experts_keys)
        dense: frozenset[int] = frozenset()
        keys = architecture.dense_layers
        if keys is not None:
            numbers = _list_at(config, keys.numbers_key, _is_count, "a list of layers' numbers")
            types = _list_at(config, keys.types_key, _is_text, "a list of names")
            named = {number for number, name in enumerate(types) if name == keys.dense_type}
            dense = frozenset(named.union(numbers)) or keys.default
            layers = layers or len(types) or None
        self._layers = _LayerNumbers(architecture, layers, dense)
        return tuple(
            rule
            for rule in (*architecture.rules, *GENERIC)
            if rule.requested is None or self._requested.item.name in rule.requested
            if rule.num_experts is None or rule.num_experts == experts
        )


def parse_override(text: str) -> tuple[str, QuantFormat | None]:
    """Return the glob and the type of ``GLOB=TYPE``; the type ``none`` becomes None.

    Raises:
        UsageError: the text has no glob, or its type is unknown.
    """
    glob, separator, name = text.rpartition("=")
    if not separator or not glob:
        raise UsageError(f"override {quote(text)} is not GLOB=TYPE, such as *.v_proj.weight=int8")
    if name.strip().lower() == "none":
        return glob, None
    try:
        return glob, parse_format(name)
    except UsageError as error:
        raise UsageError(f"override {quote(text)}: {error}, or none to keep what matches") from None


@dataclass(frozen=True, slots=True)
class _Target:
    """A type to quantize to, with its group size."""

    item: QuantFormat
    group_size: int

    def misfit(self, spec: TensorSpec) -> str:
        """Return why the group size does not divide the rows of a tensor, or an empty string."""
        if spec.shape[-1] % self.group_size == 0:
            return ""
        return f"last dimension {spec.shape[-1]} is not a multiple of {self.group_size}"


@dataclass(frozen=True, slots=True)
class _Override:
    glob: str
    target: _Target | None

    def decide(self, spec: TensorSpec) -> Decision:
        """Return the decision for a tensor that the glob matches."""
        reason = f"override {quote(self.glob)}"
        if self.target is None:
            return Decision(None, 0, reason)
        if spec.dtype not in _QUANTIZABLE:
            obstacle = f"{spec.dtype.value} {_NOT_QUANTIZABLE}"
        elif len(spec.shape) not in {_MATRIX, _STACK}:
            obstacle = (
                f"only matrices and stacks of them are quantized, it has shape {list(spec.shape)}"
            )
        elif spec.elements == 0:
            obstacle = "it has no elements"
        else:
            obstacle = self.target.misfit(spec)
        if obstacle:
            name = self.target.item.name
            raise UsageError(f"{reason}: {quote(spec.name)} cannot be {name}: {obstacle}")
        return Decision(self.target.item, self.target.group_size, reason)


@dataclass(frozen=True, slots=True)
class _LayerNumbers:
    """The layers of a model according to its config."""

    architecture: Architecture = _PLAIN
    layers: int | None = None
    dense: frozenset[int] = frozenset()

    def has_rule(self, rule: Rule, name: str) -> bool:
        """Return whether a rule applies to the layer of a tensor."""
        if rule.layers == "any":
            return True
        match = _LAYER.search(name)
        layer = int(match[1]) if match is not None else None
        if rule.layers == "dense":
            return layer in self.dense
        if self.layers is None:
            return False
        if rule.layers == "known":
            return True
        if layer is None:
            return self.architecture.unnumbered_scheduled
        return self.architecture.schedule.has(layer, self.layers)


def _requirement(spec: TensorSpec, role: Role | None, *, is_expert: bool) -> str:
    """Return why a tensor's type or shape cannot be quantized, or an empty string."""
    if spec.dtype not in _QUANTIZABLE:
        return f"{spec.dtype.value} {_NOT_QUANTIZABLE}"
    rank = len(spec.shape)
    if rank != _MATRIX and not (rank == _STACK and is_expert):
        shape_reason = f"{rank} dimension{'' if rank == 1 else 's'}"
    elif not is_expert and not spec.name.endswith(".weight"):
        shape_reason = "name does not end in .weight"
    elif spec.elements < MIN_ELEMENTS:
        shape_reason = f"fewer than {MIN_ELEMENTS} elements"
    else:
        return ""
    # "norm" is more helpful than "1 dimension".
    rules = (
        rule for rule in (*TOWERS, *KEPT) if rule.applies_to(spec.name, role, is_expert=is_expert)
    )
    return next((rule.reason for rule in rules), shape_reason)


def _count(config: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    """Return the first non-zero number at the dotted keys."""
    counts = []
    for key in keys:
        section, _, last = key.rpartition(".")
        holder = config.get(section) if section else config
        if holder is None:
            continue
        if not isinstance(holder, dict):
            raise _wrong(section, "an object", holder)
        value = holder.get(last)
        if value is not None and not _is_count(value):
            raise _wrong(key, "a number, zero or more", value)
        counts.append(value)
    return next((count for count in counts if count), None)


def _list_at(
    config: Mapping[str, Any], key: str, is_item: Callable[[object], bool], expected: str
) -> list[Any]:
    value = config.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(map(is_item, value)):
        raise _wrong(key, expected, value)
    return value


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _wrong(key: str, expected: str, value: object) -> UnsupportedSource:
    return UnsupportedSource(f"config.json: {key} must be {expected}, not {quote(value)}")
