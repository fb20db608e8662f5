"""The plan of a model: its quantization detected or decided, and its tensors grouped into blobs."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from blobstore.core.escape import quote
from blobstore.errors import UnsupportedSource, UsageError
from blobstore.manifests import media_types
from blobstore.manifests.model import MAX_MANIFEST_SIZE
from blobstore.planning.grouping import BlobPlan, plan_blobs
from blobstore.quantization import gpt_oss
from blobstore.quantization.choose_format import Policy, parse_override
from blobstore.quantization.detect import detect_quantization, is_marker
from blobstore.quantization.formats import GGUF_TYPES, parse_format
from blobstore.quantization.recipes import Copied, Decoded, Prequantized, Quantized
from blobstore.quantization.source_config import SourceQuantConfig

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from typing import Any

    from blobstore.core.tensor import TensorSpec
    from blobstore.planning.grouping import ExpertForm
    from blobstore.quantization.choose_format import PolicyName
    from blobstore.quantization.recipes import Recipe
    from blobstore.sources.base import TensorSource


_LAYER_SIZE = len(
    '{"mediaType":"","digest":"sha256:","size":0,"name":""},' + media_types.TENSOR + 64 * "0"
)
"""The least bytes of a layer in a manifest, besides its name."""
_MARKER_BUFFER = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeOptions:
    """How to quantize a model, as a user specifies it."""

    quant_type: str | None = field(default=None, kw_only=False)
    """``int4``, ``int8``, ``nvfp4``, ``mxfp8`` or ``mxfp4``; without one, nothing is quantized."""
    group_size: int | None = None
    """Elements per scale: 32, 64 or 128 for int4 and int8; None is the default of the type."""
    policy: PolicyName = "recommended"
    """``recommended`` keeps the most sensitive tensors or promotes them to 8 bits; ``uniform`` quantizes all
    matrices except embeddings, norms, routers and vision."""
    overrides: Sequence[str] = ()
    """``GLOB=TYPE``; the last one that matches a tensor's name decides; ``none`` keeps it."""


def quantize_options(value: QuantizeOptions | str | None) -> QuantizeOptions:
    """Return options as they are, and a type as options. Raises UsageError for a value of another kind."""
    options = QuantizeOptions(value) if value is None or isinstance(value, str) else value
    if not hasattr(options, "quant_type"):  # or else only an import that has downloaded files fails
        raise UsageError(
            f"quantize must be QuantizeOptions or a type such as 'int4', got {value!r}"
        )
    return options


def policy_of(
    options: QuantizeOptions, config: Mapping[str, Any], specs: Iterable[TensorSpec]
) -> Policy | None:
    """Return the policy of options for a source with that ``config``; None to quantize nothing.

    Raises:
        UsageError: the options are invalid, or no type is given for them.
    """
    if options.quant_type is None:
        if options != QuantizeOptions():
            raise UsageError("a group size, policy or override requires a type to quantize to")
        return None
    return Policy(
        parse_format(options.quant_type),
        group_size=options.group_size,
        name=options.policy,
        overrides=tuple(map(parse_override, options.overrides)),
        config=config,
        specs=specs,
    )


class PlannedTensor(NamedTuple):
    """How one tensor is stored, and why."""

    name: str
    shape: tuple[int, ...]
    """The logical shape, not that of packed weights."""
    dtype: str
    """Element type in the source, or quantization type if the source is quantized."""
    type: str
    """Quantization type in the store, or element type."""
    group_size: int
    """Elements per scale; 0 for a plain tensor."""
    bytes_before: int
    """In the source; 8-bit floats that are decoded count as BF16."""
    bytes_after: int
    """In the store, with scales and biases."""
    reason: str

    @property
    def elements(self) -> int:
        """Number of logical elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """The blobs of a model, and how they were decided."""

    blobs: tuple[BlobPlan, ...]
    policy: Policy | None
    quant_type: str
    """The type of the model as a whole; empty if it is not quantized."""
    files: tuple[str, ...]
    """Names of the small files that are stored as they are."""
    notices: tuple[str, ...]
    """Messages for the user, one line each."""
    scheme: str = ""
    """The name of the quantization, if the source is kept as published; otherwise empty."""

    @property
    def tensors(self) -> int:
        """Number of logical tensors."""
        return sum(len(blob.tensors) for blob in self.blobs)

    @property
    def size(self) -> int:
        """Bytes of the blobs of tensors."""
        return sum(blob.size for blob in self.blobs)

    def decisions(self) -> Iterator[PlannedTensor]:
        """Yield how each logical tensor is stored: its types, and its bytes before and after."""
        for blob in self.blobs:
            for recipe in blob.tensors:
                name, dtype, shape = recipe.spec
                before, after = recipe.spec.nbytes, sum(spec.nbytes for spec in recipe.stored)
                source_type, stored_type, group_size = dtype.value, dtype.value, 0
                if isinstance(recipe, Prequantized):
                    source_type = stored_type = recipe.item.name
                    group_size = recipe.group_size or recipe.item.group_size
                    shape = (*shape[:-1], recipe.item.columns(shape[-1]))
                    before, reason = after, "quantized in the source"
                else:
                    reason = (
                        "copied" if self.policy is None else self.policy.decide(recipe.spec).reason
                    )
                    if isinstance(recipe, Quantized):
                        stored_type, group_size = recipe.item.name, recipe.group_size
                yield PlannedTensor(
                    name, shape, source_type, stored_type, group_size, before, after, reason
                )


def plan_source(
    source: TensorSource,
    *,
    experts: ExpertForm = "packed",
    quantize: QuantizeOptions | None = None,
    decode: bool = False,
    as_is: bool = False,
) -> ModelPlan:
    """Return the plan for an open source.

    Args:
        source: the source.
        experts: the form of the experts.
        quantize: how to quantize; by default, nothing is quantized.
        decode: decode 8-bit floats with scales to BF16. Quantizing decodes them in any case.
        as_is: keep the tensors as published, whether their quantization is understood or not.

    Raises:
        UnsupportedSource: the source cannot be stored, or should be decoded or quantized and is
            quantized already, or in a way that is not understood.
        UsageError: the options contradict each other, or do not apply to one of the tensors.
    """
    options = quantize or QuantizeOptions()
    decode = decode or options.quant_type is not None
    if as_is and decode:
        raise UsageError("tensors that are kept as published are neither decoded nor quantized")
    blocks = {name: _blocks(source.specs[name], kind) for name, kind in source.block_types.items()}
    found = detect_quantization(
        {name: spec for name, spec in source.specs.items() if name not in blocks},
        source.config,
        metadata={pair for own in source.metadata.values() for pair in own.items()},
        markers=_markers(source),
        decode=decode,
        as_is=as_is,
    )
    if found.scheme and decode:
        what = "decoded" if options.quant_type is None else "quantized"
        raise UnsupportedSource(
            f"the source cannot be {what}: {found.reason}; create from the unquantized weights"
        )
    notices, quant_type = found.notices, found.quant_type
    recipes: dict[str, Recipe] = {**found.recipes, **blocks}
    if blocks:
        counts = Counter(recipe.item.name for recipe in blocks.values())
        quant_type = counts.most_common(1)[0][0]
    policy = policy_of(options, source.config, (recipe.spec for recipe in recipes.values()))
    if policy is not None:
        _check_quantizable(recipes, source.config)
    blobs = plan_blobs(recipes, experts=experts, policy=policy, is_published=bool(found.scheme))
    unused = policy.unused_overrides() if policy is not None else ()
    if unused:
        raise UsageError(f"no tensor of the source matches the override {quote(unused[0])}")
    if any(isinstance(recipe, Quantized) for blob in blobs for recipe in blob.tensors):
        quant_type = parse_format(options.quant_type or "").name
    # Nothing else that limits the number of blobs is known before all of them are written.
    least = sum(_LAYER_SIZE + len(blob.name) for blob in blobs)
    if least > MAX_MANIFEST_SIZE:
        raise UnsupportedSource(
            f"the model has {len(blobs):,} blobs; a manifest that lists them would have more than "
            f"{MAX_MANIFEST_SIZE >> 20} MiB"
        )
    kept = (
        *_unused_options(options, recipes, blobs, decode=decode),
        *(policy.notices() if policy else ()),
    )
    files = tuple(file.name for file in source.files)
    notices = (*source.notices, *notices, *kept)
    return ModelPlan(blobs, policy, quant_type, files, notices, found.scheme)


def _blocks(spec: TensorSpec, kind: str) -> Prequantized:
    """Return the recipe of a tensor whose bytes are blocks of llama.cpp."""
    item = GGUF_TYPES[kind]
    return Prequantized((Copied(spec, (spec.name,)),), item, item.group_size)


def _markers(source: TensorSource) -> dict[str, bytes]:
    """Return the contents of the small tensors that say how weights are quantized."""
    buffer = memoryview(bytearray(_MARKER_BUFFER))
    return {
        name: b"".join(map(bytes, source.read(name, buffer)))
        for name, spec in source.specs.items()
        if is_marker(spec)
    }


def _unused_options(
    options: QuantizeOptions,
    recipes: Mapping[str, Recipe],
    blobs: Sequence[BlobPlan],
    *,
    decode: bool,
) -> Iterator[str]:
    """Yield a notice if the request to quantize or decode changes nothing."""
    if options.quant_type is not None:
        if not any(isinstance(recipe, Quantized) for blob in blobs for recipe in blob.tensors):
            yield (
                f"nothing was quantized: no tensor can be {parse_format(options.quant_type).name}; "
                "--dry-run has the reason for each"
            )
    elif decode and not any(isinstance(recipe, Decoded) for recipe in recipes.values()):
        types = {it.item.name for it in recipes.values() if isinstance(it, Prequantized)}
        why = "the source has no 8-bit floats with scales"
        if types:
            why = (
                f"the weights are {' and '.join(sorted(types))}, which --decode does not change; "
                "'blobstore export NAME FOLDER --dequantize' writes plain values"
            )
        yield f"nothing was decoded: {why}"


def _check_quantizable(recipes: Mapping[str, Recipe], config: Mapping[str, Any]) -> None:
    """Check that a source has tensors, and that none of them is quantized.

    Raises:
        UsageError: it has no tensors.
        UnsupportedSource: it is quantized, or its config says so.
    """
    if not recipes:
        raise UsageError("the source has no tensors, so there is nothing to quantize")
    for recipe in recipes.values():
        if isinstance(recipe, Prequantized):
            raise UnsupportedSource(
                f"tensor {quote(recipe.spec.name)} is already quantized to {recipe.item.name}; "
                "create from the unquantized weights, or without quantizing"
            )
    if SourceQuantConfig(config).method == gpt_oss.METHOD:
        # Stored with this config, plain weights would be mistaken for those of gpt-oss.
        raise UnsupportedSource(
            f"config.json says quant_method {quote(gpt_oss.METHOD)}, but no tensor has that "
            "form; if the weights are plain, remove 'quantization_config' from it"
        )
