from __future__ import annotations

from typing import Any

import gguf
import pytest

from blobstore.errors import UsageError
from blobstore.gguf.header import InvalidGguf
from blobstore.gguf.names import ARCHITECTURES, Origin, architecture_of, origin_of
from tests.support.converted import ARCHITECTURES as NUMBERS

GENERATED = {gguf.MODEL_TENSOR.ROPE_FREQS, gguf.MODEL_TENSOR.ATTN_ROT_EMBD}
"""Tensors that no safetensors file has."""
# The peer knows the merged experts of Mixtral by the name that its converter gives them on the way.
MIXTRAL = {
    f"model.layers.7.block_sparse_moe.experts.{{expert}}.{part}": f"layers.7.feed_forward.experts.{part}"
    for part in ("w1", "w2", "w3")
}


def llama(**metadata: Any) -> dict[str, Any]:
    return {"general.architecture": "llama"} | {
        f"llama.attention.{key}": value for key, value in metadata.items()
    }


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_names_are_those_of_the_peer(architecture: str) -> None:
    number = NUMBERS[architecture]
    peer = gguf.get_tensor_name_map(number, 8)
    known = {
        gguf.TENSOR_NAMES[tensor].format(bid=7)
        for tensor in gguf.MODEL_TENSORS[number]
        if tensor not in GENERATED
    }
    for name in known:
        origin = origin_of(
            f"{name}.weight",
            ARCHITECTURES[architecture],
            {"general.architecture": "x", "x.attention.head_count": 4},
        )
        assert origin is not None, name
        stem = origin.name.removesuffix(".weight")
        assert peer.get_name(MIXTRAL.get(stem, stem.replace(".{expert}", ""))) == name


def test_layers_and_experts_have_numbers() -> None:
    qwen = ARCHITECTURES["qwen3moe"]
    found = origin_of("blk.12.ffn_up_exps.weight", qwen, {})
    assert found == Origin("model.layers.12.mlp.experts.{expert}.up_proj.weight")
    given = architecture_of({}, {"blk.{layer}.up.{expert}": "up.{expert}.of.{layer}"})
    assert given is not None
    assert origin_of("blk.3.up.4.weight", given, {}) == Origin("up.4.of.3.weight")
    assert origin_of("blk.3.up.4.scale", given, {}) is None


@pytest.mark.parametrize(
    "name", ["rope_freqs.weight", "blk.0.attn_q.lora_a", "blk.x.attn_q.weight", "", "."]
)
def test_other_tensors_have_no_origin(name: str) -> None:
    assert origin_of(name, ARCHITECTURES["llama"], llama(head_count=4)) is None


def test_queries_and_keys_have_heads_of_their_own() -> None:
    architecture = ARCHITECTURES["llama"]
    metadata = llama(head_count=[4, 8], head_count_kv=2)
    heads = [
        getattr(origin_of(f"blk.1.attn_{kind}.bias", architecture, metadata), "heads", None)
        for kind in "qkv"
    ]
    assert heads == [8, 2, 0]
    origin = origin_of("blk.0.attn_k.weight", architecture, llama(head_count=4))
    assert origin is not None
    assert origin.heads == 4


@pytest.mark.parametrize("count", [None, 0, -1, True, 4.0, "4", [], [4]])
def test_rows_in_an_unknown_order_are_an_error(count: Any) -> None:
    metadata = llama() if count is None else llama(head_count=count)
    with pytest.raises(InvalidGguf, match=r"llama\.attention\.head_count is .* attention heads"):
        origin_of("blk.1.attn_q.weight", ARCHITECTURES["llama"], metadata)


def test_callers_choose_the_architecture() -> None:
    metadata: dict[str, Any] = {"general.architecture": "other"}
    assert architecture_of(metadata, None) is None
    assert architecture_of({"general.architecture": 5}, None) is None
    assert architecture_of(metadata, "llama") is ARCHITECTURES["llama"]
    assert architecture_of({"general.architecture": "gemma3"}, None) is ARCHITECTURES["gemma3"]
    like = architecture_of(metadata, {"like": "llama", "output": "head"})
    assert like is not None
    assert like.interleaves
    assert (like.names["output"], like.names["output_norm"]) == ("head", "model.norm")
    for names in ("other", {"like": "other"}):
        with pytest.raises(
            UsageError, match=r"'other' are not known, only those of llama, .*gemma3"
        ):
            architecture_of(metadata, names)


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [("gemma3", [True, True, False, False]), ("qwen3", [False] * 4)],
)
def test_one_is_added_to_the_norms_of_gemma(architecture: str, expected: list[bool]) -> None:
    names = ("output_norm", "blk.0.attn_q_norm", "token_embd", "blk.0.ffn_up")
    origins = [origin_of(f"{name}.weight", ARCHITECTURES[architecture], {}) for name in names]
    assert [origin is not None and origin.adds_one for origin in origins] == expected


def test_only_embeddings_and_heads_have_a_row_per_token() -> None:
    names = ("token_embd.weight", "output.weight", "output_norm.weight", "blk.0.attn_v.weight")
    origins = [origin_of(name, ARCHITECTURES["llama"], {}) for name in names]
    assert [origin is not None and origin.is_vocabulary for origin in origins] == [
        True,
        True,
        False,
        False,
    ]
