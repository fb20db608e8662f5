"""The tables of quantization rules, which :mod:`blobstore.quantization.choose_format` evaluates.

A rule has the role of a weight, globs for the names of tensors, conditions, and the types to quantize to.
The first rule that applies decides. An architecture's rules precede the generic ones except those for
towers, so they only state deviations. Every table ends with a rule for all tensors. Rules only see float
weights of suitable shape: matrices and stacks of experts' matrices that are not tiny.

The tables are those of Ollama 0.33, extended by the names that other model families use.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal

from blobstore.core.globs import any_glob

if TYPE_CHECKING:
    from blobstore.quantization.model_facts import Role


Width = Literal["eight", "requested"]
"""A type to quantize to: the 8-bit type of the requested type's family, or the requested one."""
Layers = Literal["any", "known", "scheduled", "dense"]
"""The layers that a rule applies to: all tensors, all layers if their number is known, the layers of
the architecture's schedule, or the layers without experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule. Omitted conditions are always true."""

    reason: str
    role: Role | None = None
    """Applies to weights of this role; if a weight's role is unknown, those with matching names."""
    names: tuple[str, ...] = ("*",)
    """Globs; one must match the name."""
    unless: tuple[str, ...] = ()
    """Globs; none may match the name."""
    become: tuple[Width, ...] = ()
    """Types in order of preference. The first whose group size divides the last dimension is used;
    without one the tensor is kept."""
    requested: frozenset[str] | None = None
    """Requested types for which the rule applies."""
    experts: bool | None = None
    """Whether it applies only to weights of experts, or only to others."""
    num_experts: int | None = None
    """Applies only to models with this number of experts."""
    layers: Layers = "any"
    """If the number of layers is unknown, rules that need a schedule do not apply."""

    def applies_to(self, name: str, role: Role | None, *, is_expert: bool) -> bool:
        """Return whether the rule applies to a tensor in some layer of a model."""
        if self.experts is not None and self.experts != is_expert:
            return False
        if any_glob(self.unless).match(name):
            return False
        if role is not None and self.role is not None:
            return self.role == role
        return any_glob(self.names).match(name) is not None


@dataclass(frozen=True, slots=True)
class Schedule:
    """The layers whose sensitive projections get more bits.

    These are the first and last eighth, and every third layer between them up to the end of the cadence.
    """

    cadence_eighths: int = 7
    cadence_offset: int = 0

    def has(self, layer: int, layers: int) -> bool:
        """Return whether a layer of a model with ``layers`` layers is scheduled."""
        first = layers // 8
        if layer < first or layer >= 7 * layers // 8:
            return True
        end = self.cadence_eighths * layers // 8 + self.cadence_offset
        return layer < end and (layer - first) % 3 == 2  # the third of three


@dataclass(frozen=True, slots=True)
class DenseLayers:
    """The keys of a model's config that list the layers without experts."""

    numbers_key: str
    types_key: str
    """The key of a list with one type per layer."""
    dense_type: str
    default: frozenset[int]
    """The dense layers if the config lists none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The rules of one family of models."""

    names: tuple[str, ...]
    """Globs for the name of the architecture."""
    rules: tuple[Rule, ...]
    layers_keys: tuple[str, ...] = ()
    """Keys of the number of layers in the config; the first non-zero value counts."""
    experts_keys: tuple[str, ...] = ()
    """Keys of the number of experts."""
    schedule: Schedule = Schedule()
    unnumbered_scheduled: bool = False
    """Whether tensors outside of numbered layers count as scheduled."""
    dense_layers: DenseLayers | None = None


MIN_ELEMENTS: Final = 1024
"""Smaller tensors are not quantized."""

_EXPERT_NAMES: Final = (
    "*.experts.*",
    "*.mlp.switch_mlp.*",
    "*.mlp.shared_experts.*",
    "*.mixer.shared_experts.*",
)
"""Names of experts' weights. They need not end in ``.weight``, and may be stacks of matrices."""
_EXPERT_QPARAMS: Final = ("*.bias", "*.scale", "*.qbias", "*_bias")
"""Names of experts' tensors that are not weights. Stacked biases look like matrices."""


def is_expert_weight(name: str) -> bool:
    """Return whether a name is that of an expert's weight."""
    is_qparam = any_glob(_EXPERT_QPARAMS).match(name)
    return any_glob(_EXPERT_NAMES).match(name) is not None and is_qparam is None


_INT4: Final = frozenset({"int4"})
_FLOAT4: Final = frozenset({"nvfp4", "mxfp4"})
_FOUR_BITS: Final = _INT4 | _FLOAT4
_MXFP8: Final = frozenset({"mxfp8"})
_FLOATS: Final = _FLOAT4 | _MXFP8

_PER_LAYER: Final = ("*per_layer*",)
_SENSITIVE_NAMES: Final = ("*.v_proj*", "*.k_proj*", "*down_proj*")
_SENSITIVE: Final = "sensitive projection"
_SCHEDULED: Final = "sensitive projection of a scheduled layer"
_UNSCHEDULED: Final = "sensitive projection, but its layer is not scheduled"

TOWERS: Final = (
    Rule(
        reason="vision",
        names=("*vision*", "*visual*", "*siglip*", "*image_tower*", "*vpm.*", "vit.*", "*.vit.*"),
    ),
    Rule(
        reason="audio",
        names=("*audio_tower*", "*audio_encoder*", "*speech_encoder*", "*sound_encoder.*"),
    ),
    Rule(
        reason="projector",
        names=(
            "*multi_modal_projector*",
            "*mm_projector*",
            "*aligner.*",
            "*connector.*",
            "*resampler*",
            "mlp1.*",
            "sound_projection.*",
        ),
    ),
    Rule(reason="outside the language model's layers", role="tower", names=()),
)
"""What both policies keep, whatever the architecture."""
_EMBEDDING = Rule(
    reason="embedding",
    role="embedding",
    names=(
        "*embed*",
        "*_emb.weight",
        "*wte.weight",
        "*wpe.weight",
        "shared.weight",
        "*.shared.weight",
        "*relative_attention_bias.weight",
    ),
    experts=False,
)
_NORM = Rule(reason="norm", names=("*norm*", "*ln_*"), experts=False)
_ROUTER = Rule(
    reason="router",
    role="router",
    names=(
        "*.mlp.gate.weight",
        "*.mixer.gate.weight",
        "*.shared_expert_gate.weight",
        # Ollama's list ends here.
        "*.feed_forward.gate.weight",
        "*.ffn.gate.weight",
        "*moe.gate.weight",
        "*.gate.wg.weight",
        "*.gate.gate.weight",
        "*.router.weight",
        "*.router.*.weight",
        "*moe_statics*",
    ),
)
_PROMOTED = Rule(reason=_SENSITIVE, names=_SENSITIVE_NAMES, become=("eight", "requested"))
# Runtimes split these in two, and cannot split or must quantize again what is packed.
_LATENT = Rule(reason="latent attention", names=("*.kv_b_proj.weight", "*.wkv_b.weight"))
_REST = Rule(reason="requested type", become=("requested",))

KEPT: Final[tuple[Rule, ...]] = (_EMBEDDING, _NORM, _ROUTER, _LATENT)
"""The weights outside of towers that both policies keep."""

GENERIC: Final[tuple[Rule, ...]] = (
    *KEPT,
    Rule(
        reason="output head",
        role="head",
        names=(
            "*lm_head.weight",
            "*shared_head.head.weight",
            "*output_layer.weight",
            "output.weight",
            "head.weight",
            "score.weight",
        ),
        become=("eight",),
    ),
    replace(_PROMOTED, requested=_INT4),
    # Experts keep one type: the kernels for these types take one mode for all experts of a call.
    replace(_PROMOTED, requested=_FLOAT4, experts=False),
    _REST,
)
"""The recommended policy for every architecture."""

UNIFORM: Final[tuple[Rule, ...]] = (*KEPT, _REST)
"""The uniform policy: one type, regardless of the architecture."""


def _by_schedule(*names: str, requested: frozenset[str] = _FOUR_BITS) -> tuple[Rule, Rule]:
    """Return rules that give projections more bits on scheduled layers only."""
    rule = Rule(reason="", names=names, requested=requested)
    return (
        replace(rule, reason=_SCHEDULED, layers="scheduled", become=("eight", "requested")),
        replace(rule, reason=_UNSCHEDULED, layers="known", become=("requested",)),
    )


def _embeddings(*become: Width, requested: frozenset[str] | None = None) -> Rule:
    return Rule(
        reason="embedding",
        names=("*embed_tokens.weight",),
        unless=_PER_LAYER,
        requested=requested,
        become=become,
    )


_GEMMA4 = Architecture(
    names=("Gemma4*", "gemma4_unified*"),
    layers_keys=("num_hidden_layers", "text_config.num_hidden_layers"),
    experts_keys=("num_experts", "text_config.num_experts"),
    rules=(
        _embeddings("eight", "requested"),
        # Models of eight experts share very few key and value heads.
        replace(
            _PROMOTED,
            names=("*.v_proj*", "*.k_proj*"),
            requested=_FOUR_BITS,
            num_experts=8,
        ),
        *_by_schedule("*.v_proj*", "*down_proj*"),
        Rule(
            reason="key projection",
            names=("*.k_proj*",),
            requested=_FOUR_BITS,
            layers="known",
            become=("requested",),
        ),
    ),
)

_QWEN3_NEXT = Architecture(
    names=("Qwen3_5*", "Qwen3Next*"),
    rules=(
        Rule(
            reason="low-rank attention projection",
            names=tuple(f"*.linear_attn.in_proj_{part}.weight" for part in ("a", "b", "ba")),
        ),
    ),
)

_COHERE2_MOE = Architecture(
    names=("Cohere2Moe*",),
    layers_keys=("num_hidden_layers",),
    rules=(_embeddings("eight"), *_by_schedule(*_SENSITIVE_NAMES)),
)

_MUSE_GLIMMER = Architecture(
    names=("MuseGlimmer*",),
    layers_keys=("num_hidden_layers", "text_config.num_hidden_layers"),
    rules=(
        _embeddings("eight", "requested"),
        Rule(
            reason="attention",
            names=tuple(f"*.self_attn.{part}_proj*" for part in "qkvo"),
            requested=_FOUR_BITS,
            become=("eight", "requested"),
        ),
        *_by_schedule(
            "*.self_attn.gate_proj*", "*.self_attn.output_gate_proj*", "*.mlp.down_proj*"
        ),
    ),
)

_NEMOTRON_H = Architecture(
    names=("NemotronH*",),
    layers_keys=("num_hidden_layers", "llm_config.num_hidden_layers"),
    unnumbered_scheduled=True,
    rules=(
        Rule(reason="convolution", names=("*.conv1d.weight",)),
        Rule(reason="embedding", names=("*embeddings.weight",), become=("eight",)),
        # Few layers have attention, and with 4 bits it writes broken structured output.
        Rule(
            reason="attention",
            names=tuple(f"*.mixer.{part}_proj.weight" for part in "qkvo"),
            requested=_FLOAT4,
            become=("eight", "requested"),
        ),
        *_by_schedule(
            "*.mixer.out_proj.weight",
            "*.mixer.down_proj.weight",
            "*.mixer.experts.*down_proj.weight",
            "*.mixer.shared_experts.down_proj.weight",
            requested=_FLOAT4,
        ),
    ),
)

_LAGUNA_ATTENTION: Final = tuple(f"*.self_attn.{part}_proj.weight" for part in "qkvog")
_LAGUNA_SHARED: Final = ("*.mlp.shared_expert.*", "*.mlp.shared_experts.*")
_LAGUNA_SHARED_DOWN: Final = tuple(f"{name}down_proj.weight" for name in _LAGUNA_SHARED)
_LAGUNA = Architecture(
    names=("Laguna*",),
    layers_keys=("num_hidden_layers",),
    schedule=Schedule(cadence_eighths=4, cadence_offset=-4),
    dense_layers=DenseLayers("mlp_only_layers", "mlp_layer_types", "dense", frozenset({0})),
    rules=(
        _embeddings("eight", requested=_FLOATS),
        Rule(
            reason="output head", names=("*lm_head.weight",), requested=_FLOATS, become=("eight",)
        ),
        Rule(reason="router", names=("*.mlp.gate.weight",), requested=_FLOATS),
        Rule(reason="attention", names=_LAGUNA_ATTENTION, requested=_MXFP8),
        Rule(
            reason="attention",
            names=_LAGUNA_ATTENTION,
            requested=_FLOAT4,
            become=("requested",),
        ),
        Rule(
            reason="dense layer",
            names=tuple(f"*.mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
            requested=_FLOATS,
            layers="dense",
            become=("requested",),
        ),
        Rule(
            reason=_SCHEDULED,
            names=("*.mlp.experts.*down_proj*",),
            requested=_MXFP8,
            layers="scheduled",
        ),
        Rule(reason=_SENSITIVE, names=_LAGUNA_SHARED_DOWN, requested=_MXFP8),
        *_by_schedule(*_LAGUNA_SHARED_DOWN, requested=_FLOAT4),
        Rule(
            reason="expert",
            names=("*.mlp.experts.*_proj", "*.mlp.experts.*_proj.weight", *_LAGUNA_SHARED),
            requested=_FLOATS,
            become=("requested",),
        ),
        Rule(reason="not quantized in this architecture", requested=_FLOATS),
    ),
)

ARCHITECTURES: Final[tuple[Architecture, ...]] = (
    _GEMMA4,
    _QWEN3_NEXT,
    _COHERE2_MOE,
    _MUSE_GLIMMER,
    _NEMOTRON_H,
    _LAGUNA,
)
"""The architectures that deviate from the generic rules."""
