from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from blobstore.errors import DamagedSource, UnsupportedSource
from tests.support.meta_models import (
    PARAMS,
    Maker,
    Params,
    Tensors,
    closing,
    contents,
    expected,
    hf_model,
    split,
    to_meta,
)


def test_takes_copies_of_key_and_value_heads_once(maker: Maker) -> None:
    params = PARAMS | {"n_kv_heads": 2}
    tensors = hf_model(params)
    shards = split(to_meta(tensors, params), 2)
    # Eight processors, of which four share a head.
    doubled = to_meta(tensors, params)
    eight = split({n: t for n, t in doubled.items() if "wk" not in n and "wv" not in n}, 8)
    for number, shard in enumerate(eight):
        head = shards[number // 4]
        shard |= {name: head[name] for name in head if "wk" in name or "wv" in name}
    source = maker.write(eight, params).open()
    assert contents(source) == expected(tensors)
    source.close()


IN_LAYERS = [f"layers.{layer}.attention.inner_attention.rope.freqs" for layer in range(2)]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["rope.freqs"], "left out: tensor 'rope.freqs', which runtimes compute"),
        (IN_LAYERS, f"left out: tensor '{IN_LAYERS[0]}' and 1 more, which runtimes compute"),
    ],
)
def test_leaves_out_the_stored_position_encoding(maker: Maker, names: list[str], said: str) -> None:
    tensors = hf_model(PARAMS)
    meta = to_meta(tensors, PARAMS) | {name: torch.ones(2) for name in names}
    source = maker.write(split(meta, 2)).open()
    assert contents(source) == expected(tensors)
    assert said in source.notices
    source.close()


@pytest.mark.parametrize(("shards", "keep_names"), [(1, False), (2, False), (2, True)])
def test_rejects_tensors_of_other_models(maker: Maker, shards: int, keep_names: bool) -> None:
    meta = to_meta(hf_model(PARAMS), PARAMS)
    meta |= {f"layers.0.attention.wq.lora_{letter}.weight": torch.ones(8, 8) for letter in "ABCD"}
    maker.write(split(meta, shards))
    with pytest.raises(UnsupportedSource, match=r"lora_A.* and 1 more.*--keep-names") as caught:
        maker.open(keep_names=keep_names)
    assert ("imports all tensors unchanged" in str(caught.value)) == (shards == 1)


@pytest.mark.parametrize(
    "name", ["layers.00.ffn_norm.weight", "layers.9999999.ffn_norm.weight", "layers.0.x", "x"]
)
def test_rejects_names_that_only_look_like_a_llama_s(maker: Maker, name: str) -> None:
    meta = to_meta(hf_model(PARAMS), PARAMS) | {name: torch.ones(32)}
    maker.write([meta])
    with pytest.raises(UnsupportedSource, match=name):
        maker.open()


def test_rejects_8_bit_floats_without_their_scales(maker: Maker) -> None:
    meta = to_meta(hf_model(PARAMS), PARAMS)
    name = "layers.1.feed_forward.w1.weight"
    meta[name] = meta[name].to(torch.float8_e4m3fn)
    maker.write([meta])
    with pytest.raises(UnsupportedSource, match=rf"{name}' has type F8_E4M3"):
        maker.open()


def test_ties_the_output_to_the_embedding_if_it_is_missing(maker: Maker) -> None:
    tensors = to_meta(hf_model(PARAMS), PARAMS)
    del tensors["output.weight"]
    source = closing(maker.write(split(tensors, 2)).open())
    assert source.config["tie_word_embeddings"]
    assert "lm_head.weight" not in source.specs


@pytest.mark.parametrize("embedding", [0, 1])
@pytest.mark.parametrize("stated", [-1, None, "absent"])
def test_takes_the_vocabulary_from_the_embedding(
    maker: Maker, embedding: int, stated: object
) -> None:
    params = PARAMS | {"vocab_size": stated}
    if stated == "absent":
        del params["vocab_size"]
    maker.write(split(to_meta(hf_model(PARAMS), PARAMS), 2, embedding=embedding), params)
    assert closing(maker.open()).config["vocab_size"] == 48


W1 = "layers.0.feed_forward.w1.weight"


def drop(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def put(name: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: torch.zeros(shape, dtype=dtype)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("norm.weight"), r"01\.pth' has no tensor 'norm.weight', which .*00\.pth' has"),
        (put("extra", 2), r"00\.pth' has no tensor 'extra', which .*01\.pth' has"),
        (put(W1, 47, 32), r"BF16 \[47, 32\] in .*01\.pth' and BF16 \[48, 32\] in .*00\.pth'"),
        (put(W1, 48, 32, dtype=torch.float16), r"w1.weight' is F16 \[48, 32\] in"),
    ],
)
def test_rejects_shards_that_differ(
    maker: Maker, change: Callable[[Tensors], object], message: str
) -> None:
    shards = split(to_meta(hf_model(PARAMS), PARAMS), 2)
    change(shards[1])
    maker.write(shards)
    with pytest.raises(DamagedSource, match=message):
        maker.open()


@pytest.mark.slow
@pytest.mark.parametrize(("shards", "keep_names"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("norm.weight"), "has no tensor 'norm.weight'"),
        (drop("tok_embeddings.weight"), "has no tensor 'tok_embeddings.weight'"),
        (drop("layers.1.attention.wk.weight"), "has no tensor 'layers.1.attention.wk.weight'"),
        (put("layers.2.ffn_norm.weight", 32), "layer 2, but params.json says n_layers 2"),
        (put(W1, 96), r"w1.weight' is BF16 \[96\], not a matrix"),
        (put(W1, 0, 32), r"w1.weight' is BF16 \[0, 32\], not a matrix"),
        (put(W1), r"w1.weight' is BF16 \[\], not a matrix"),
        (put("layers.1.feed_forward.w1.weight", 2, 2), r"w1.weight' is BF16 \[2, 2\]"),
        (put("layers.1.attention.wk.weight", 8), r"wk.weight' is BF16 \[8\]"),
        (put("layers.1.attention.wk.weight", 4, 32), r"wk.weight' is BF16 \[4, 32\]"),
        (put("layers.1.attention.wo.weight"), r"wo.weight' is BF16 \[\]"),
        (put("layers.1.attention.wo.weight", 32, 32, 1), r"wo.weight' is BF16 \[32, 32, 1\]"),
        (put("layers.1.ffn_norm.weight", 31), r"ffn_norm.weight' is BF16 \[31\]"),
        (put("output.weight", 47, 32), r"output.weight' is BF16 \[47, 32\]"),
        (put("tok_embeddings.weight", 48, 31), r"\[48, 31\] .*says dim 32"),
        (put("tok_embeddings.weight", 50, 32), r"\[50, 32\] .*says vocab_size 48"),
        (put("tok_embeddings.weight", 48), r"\[48\], not a matrix"),
    ],
)
def test_rejects_tensors_that_contradict_params(
    maker: Maker, change: Callable[[Tensors], object], message: str, shards: int, keep_names: bool
) -> None:
    made = split(to_meta(hf_model(PARAMS), PARAMS), shards)
    for shard in made:
        change(shard)
    maker.write(made)
    with pytest.raises(DamagedSource, match=message):
        maker.open(keep_names=keep_names)


def test_rejects_an_embedding_of_parts_or_copies(maker: Maker) -> None:
    tensors = to_meta(hf_model(PARAMS), PARAMS)
    del tensors["output.weight"]
    maker.write(split(tensors, 2), PARAMS | {"vocab_size": -1})
    with pytest.raises(DamagedSource, match="may be parts or copies"):
        maker.open()


def test_rejects_key_heads_whose_copies_are_ambiguous(maker: Maker) -> None:
    params = PARAMS | {"n_kv_heads": 1}
    tensors = to_meta(hf_model(params), params)
    shards = split(tensors, 2)
    for shard in shards:  # a head and a half for every shard
        for layer in range(2):
            shard[f"layers.{layer}.attention.wk.weight"] = torch.zeros(6, 32, dtype=torch.bfloat16)
    maker.write(shards, params)
    with pytest.raises(DamagedSource, match=r"wk.weight' is BF16 \[6, 32\] in each of 2 shards"):
        maker.open()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_heads": 5}, "dim 32 is not n_heads 5 times an even number"),
        ({"n_heads": 32, "n_kv_heads": 32}, "dim 32 is not n_heads 32 times an even number"),
        ({"n_kv_heads": 3}, "n_heads 8 is not a multiple of n_kv_heads 3"),
        ({"n_kv_heads": 16}, "n_heads 8 is not a multiple of n_kv_heads 16"),
        ({"dim": 64}, "says dim 64"),
        ({"n_layers": 3}, "has no tensor 'layers.2.attention.wq.weight'"),
        ({"n_layers": 2**31 - 1}, "has no tensor 'layers.2.attention.wq.weight'"),
        ({"n_layers": 1}, "layer 1, but params.json says n_layers 1"),
        ({"vocab_size": 2**31 - 1}, "says vocab_size 2147483647"),
        ({"n_kv_heads": 2}, "wk.weight"),
    ],
)
def test_rejects_params_that_the_tensors_contradict(
    maker: Maker, changes: Params, message: str
) -> None:
    maker.write([to_meta(hf_model(PARAMS), PARAMS)], PARAMS | changes)
    with pytest.raises(DamagedSource, match=message):
        maker.open()


def test_rejects_key_heads_that_shards_cannot_share_evenly(maker: Maker) -> None:
    params = PARAMS | {"dim": 48, "n_heads": 6, "n_kv_heads": 3}
    shards = split(to_meta(hf_model(params), params), 4)
    for shard in shards:
        for layer in range(2):
            shard[f"layers.{layer}.attention.wk.weight"] = torch.zeros(8, 48, dtype=torch.bfloat16)
    maker.write(shards, params)
    with pytest.raises(DamagedSource, match=r"wk.weight' is BF16 \[8, 48\] in each of 4 shards"):
        maker.open()
