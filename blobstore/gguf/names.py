"""The names of tensors of GGUF files in the safetensors files that they were converted from.

``convert_hf_to_gguf.py`` of llama.cpp renames tensors, merges the experts of a layer to one tensor, and changes
what some tensors hold. The tables say so for each architecture. In a template of names, ``{layer}`` stands for
the first number, and ``{expert}`` for the second.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from blobstore.core.escape import quote
from blobstore.errors import UsageError
from blobstore.gguf.header import InvalidGguf

if TYPE_CHECKING:
    from collections.abc import Mapping

    from blobstore.gguf.header import Value

LAYER: Final = "{layer}"
EXPERT: Final = "{expert}"
LIKE: Final = "like"
"""The key of a table's architecture among names that a user lists."""
EMBEDDING: Final = "model.embed_tokens.weight"
HEAD: Final = "lm_head.weight"
"""The names of the tensors that have a row per token. Models that share them have one of the two."""
_NUMBER: Final = re.compile(r"(?<=\.)[0-9]+(?=\.)")
_SUFFIXES: Final = (".weight", ".bias")
_QUERY: Final = "blk.{layer}.attn_q"
_KEY: Final = "blk.{layer}.attn_k"
_NORM: Final = "norm.weight"


class Architecture(NamedTuple):
    """How tensors of an architecture are converted."""

    names: Mapping[str, str]
    """Templates of names in GGUF files, and of those before, both with or without a suffix such as ``.weight``."""
    interleaves: bool = False
    """Whether the two halves of each attention head's rows are interleaved in queries and keys."""
    adds_one: bool = False
    """Whether norms are stored with 1 added."""


class Origin(NamedTuple):
    """The source of a tensor of a GGUF file, before the conversion."""

    name: str
    """With ``{expert}`` if the tensor is the stack of the experts of a layer."""
    heads: int = 0
    """The number of attention heads whose rows are interleaved: the rows 0, 1, 2, 3 … of a head were its rows
    0, n/2, 1, n/2 + 1 …; 0 if the order of rows is the same."""
    adds_one: bool = False
    """Whether 1 was added to each element."""
    is_vocabulary: bool = False
    """Whether there is a row per token. One of the two sides may have more rows, which no token uses."""


def _blocks(**names: str) -> dict[str, str]:
    return {f"blk.{LAYER}.{name}": f"model.layers.{LAYER}.{other}" for name, other in names.items()}


_COMMON: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
} | _blocks(
    attn_norm="input_layernorm",
    attn_q="self_attn.q_proj",
    attn_k="self_attn.k_proj",
    attn_v="self_attn.v_proj",
    attn_output="self_attn.o_proj",
    ffn_norm="post_attention_layernorm",
    ffn_gate="mlp.gate_proj",
    ffn_up="mlp.up_proj",
    ffn_down="mlp.down_proj",
)
_HEAD_NORMS: Final = _blocks(attn_q_norm="self_attn.q_norm", attn_k_norm="self_attn.k_norm")
_MIXTRAL: Final = _blocks(
    ffn_gate_inp="block_sparse_moe.gate",
    ffn_gate_exps="block_sparse_moe.experts.{expert}.w1",
    ffn_down_exps="block_sparse_moe.experts.{expert}.w2",
    ffn_up_exps="block_sparse_moe.experts.{expert}.w3",
)
_QWEN_EXPERTS: Final = _blocks(
    ffn_gate_inp="mlp.gate",
    ffn_gate_exps="mlp.experts.{expert}.gate_proj",
    ffn_down_exps="mlp.experts.{expert}.down_proj",
    ffn_up_exps="mlp.experts.{expert}.up_proj",
)
_GEMMA_NORMS: Final = _blocks(
    post_attention_norm="post_attention_layernorm",
    ffn_norm="pre_feedforward_layernorm",
    post_ffw_norm="post_feedforward_layernorm",
)
_LLAMA: Final = Architecture(_COMMON | _MIXTRAL, interleaves=True)
ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "llama": _LLAMA,
    "mistral3": _LLAMA,
    "qwen2": Architecture(_COMMON),
    "qwen3": Architecture(_COMMON | _HEAD_NORMS),
    "qwen3moe": Architecture(_COMMON | _HEAD_NORMS | _QWEN_EXPERTS),
    "gemma3": Architecture(_COMMON | _HEAD_NORMS | _GEMMA_NORMS, adds_one=True),
}
"""By ``general.architecture``. Models of Mistral and Mixtral are of ``llama``."""


def architecture_of(
    metadata: Mapping[str, Value], names: str | Mapping[str, str] | None
) -> Architecture | None:
    """Return how the tensors of a file were converted; None if that is not known.

    Args:
        metadata: that of the file.
        names: an architecture that has the same names. Or templates, which replace those of the file's own
            architecture, or of the one under the key ``like``.

    Raises:
        UsageError: the names of the given architecture are not known.
    """
    wanted = names if isinstance(names, str) else (names or {}).get(LIKE)
    if wanted is None:
        own = metadata.get("general.architecture")
        found = ARCHITECTURES.get(own) if isinstance(own, str) else None
    else:
        found = ARCHITECTURES.get(wanted)
        if found is None:
            raise UsageError(
                f"the names of the architecture {quote(wanted)} are not known, only those of "
                f"{', '.join(ARCHITECTURES)}"
            )
    if names is None or isinstance(names, str):
        return found
    given = {name: other for name, other in names.items() if name != LIKE}
    found = found or Architecture({})
    return found._replace(names={**found.names, **given})


def origin_of(
    name: str, architecture: Architecture, metadata: Mapping[str, Value]
) -> Origin | None:
    """Return the source of a tensor; None if the architecture does not determine it.

    Raises:
        InvalidGguf: the metadata do not have the number of heads of a tensor whose rows are interleaved.
    """
    numbers: list[str] = []

    def numbered(number: re.Match[str]) -> str:
        numbers.append(number[0])
        return LAYER if len(numbers) == 1 else EXPERT

    template = _NUMBER.sub(numbered, name)
    stem, dot, suffix = template.rpartition(".")
    found = architecture.names.get(template)
    if found is None and dot + suffix in _SUFFIXES and stem in architecture.names:
        found = architecture.names[stem] + dot + suffix
    if found is None:
        return None
    for text, number in zip((LAYER, EXPERT), numbers, strict=False):
        found = found.replace(text, number)
    heads = 0
    if architecture.interleaves and stem in (_QUERY, _KEY):
        heads = _heads(metadata, stem == _KEY, int(numbers[0]))
    return Origin(
        found,
        heads,
        adds_one=architecture.adds_one and name.endswith(_NORM),
        is_vocabulary=name in ("token_embd.weight", "output.weight"),
    )


def _heads(metadata: Mapping[str, Value], is_key: bool, layer: int) -> int:
    """Return the number of heads of queries or keys in a layer."""
    start = f"{metadata.get('general.architecture')}.attention.head_count"
    value = metadata.get(start)
    if is_key:
        value = metadata.get(f"{start}_kv", value)
    if not isinstance(value, bool | int | float | str | None):
        # An array has a number per layer.
        value = next((item for number, item in enumerate(value) if number == layer), None)
    if type(value) is not int or value < 1:
        raise InvalidGguf(
            f"{start} is {quote(str(value))}, expected the number of attention heads: without it, the order of "
            "the rows of queries and keys is not known"
        )
    return value
