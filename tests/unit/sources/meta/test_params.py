from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, LlamaConfig

from blobstore.core.tensor import DTYPES, TensorSpec
from blobstore.errors import DamagedSource, UnsupportedSource
from tests.support.meta_models import (
    PARAMS,
    WIDTH,
    Maker,
    Params,
    closing,
    hf_model,
    split,
    to_meta,
)


def config_of(maker: Maker, params: Params, shards: int = 1, **options: Any) -> Mapping[str, Any]:
    tensors = to_meta(hf_model(PARAMS, **options), PARAMS)
    source = closing(maker.write(split(tensors, shards), params).open())
    made = next(file for file in source.files if file.name == "config.json")
    assert made.content is not None
    assert json.loads(made.content) == source.config
    return source.config


def test_makes_the_config_that_transformers_reads(maker: Maker, tmp_path: Path) -> None:
    made = config_of(maker, PARAMS | {"use_scaled_rope": True})
    folder = tmp_path / "config"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(made))
    config = AutoConfig.from_pretrained(folder)
    assert type(config) is LlamaConfig
    assert config.architectures == ["LlamaForCausalLM"]
    shape = (config.hidden_size, config.intermediate_size, config.vocab_size, config.head_dim)
    assert shape == (32, WIDTH, 48, 4)
    counts = (config.num_attention_heads, config.num_key_value_heads, config.num_hidden_layers)
    assert counts == (8, 4, 2)
    assert config.rms_norm_eps == 1e-05
    assert config.dtype == torch.bfloat16
    assert config.max_position_embeddings == 131072
    assert not config.tie_word_embeddings
    assert config.rope_parameters == {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


@pytest.mark.parametrize(
    ("changes", "positions", "theta", "factor"),
    [
        ({"rope_theta": None}, 4096, 10000.0, None),
        ({"rope_theta": 10000}, 4096, 10000.0, None),
        ({"rope_theta": 1000000.0}, 16384, 1000000.0, None),
        ({}, 8192, 500000.0, None),
        ({"use_scaled_rope": False}, 8192, 500000.0, None),
        ({"use_scaled_rope": True}, 131072, 500000.0, 8.0),
        ({"use_scaled_rope": True, "rope_scaling_factor": 32}, 131072, 500000.0, 32.0),
    ],
)
def test_states_positions_as_the_model_s_generation_has_them(
    maker: Maker, changes: Params, positions: int, theta: float, factor: float | None
) -> None:
    config = config_of(maker, PARAMS | changes)
    assert config["max_position_embeddings"] == positions
    assert config["rope_theta"] == theta
    assert (config["rope_scaling"] or {}).get("factor") == factor


def test_scales_positions_of_the_small_llamas_by_32(maker: Maker) -> None:
    params = PARAMS | {"dim": 2048, "n_layers": 16, "n_heads": 32, "use_scaled_rope": True}
    shapes = {
        "attention.wq": (2048, 2048), "attention.wk": (256, 2048), "attention.wv": (256, 2048),
        "attention.wo": (2048, 2048), "feed_forward.w1": (1, 2048), "feed_forward.w2": (2048, 1),
        "feed_forward.w3": (1, 2048), "attention_norm": (2048,), "ffn_norm": (2048,),
    }  # fmt: skip
    one = torch.zeros((), dtype=torch.bfloat16)
    tensors = {"tok_embeddings.weight": one.expand(48, 2048), "norm.weight": one.expand(2048)}
    for layer in range(16):
        for name, shape in shapes.items():
            tensors[f"layers.{layer}.{name}.weight"] = one.expand(shape)
    specs = {
        name: TensorSpec(name, DTYPES["BF16"], tuple(tensor.shape))
        for name, tensor in tensors.items()
    }
    maker.write([{}], params)
    shard = maker.shards["consolidated.00.pth"]
    shard.specs = specs
    source = closing(maker.open())
    assert source.config["rope_scaling"]["factor"] == 32.0
    assert any("rope scaling by 32" in notice for notice in source.notices)


def test_says_what_the_config_assumes(maker: Maker) -> None:
    params = PARAMS | {"rope_theta": None, "use_scaled_rope": True, "multiple_of": 256, "new": 1}
    source = closing(maker.write([to_meta(hf_model(PARAMS), PARAMS)], params).open())
    text = "\n".join(source.notices)
    assert "max_position_embeddings 131072" in text
    assert "rope_theta 10000" in text
    assert "rope scaling by 8" in text
    assert (
        f"intermediate_size is {WIDTH}, as in the tensors; by params.json it would be 256" in text
    )
    assert "'new' is unknown" in text


def test_knows_the_special_tokens_of_llama_3_by_its_vocabulary(maker: Maker) -> None:
    tensors = to_meta(hf_model(PARAMS), PARAMS)
    tensors["tok_embeddings.weight"] = torch.zeros(128256, 32, dtype=torch.bfloat16)
    del tensors["output.weight"]
    params = PARAMS | {"vocab_size": 128256}
    source = closing(maker.write([tensors], params).open())
    config = source.config
    assert source.files[0].content == json.dumps(config, indent=2, sort_keys=True).encode() + b"\n"
    assert config["bos_token_id"] == 128000
    assert config["eos_token_id"] == [128001, 128008, 128009]


def test_makes_a_complete_config(maker: Maker) -> None:
    assert config_of(maker, PARAMS) == {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "head_dim": 4,
        "hidden_act": "silu",
        "hidden_size": 32,
        "intermediate_size": WIDTH,
        "max_position_embeddings": 8192,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 8,
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 48,
    }


def test_does_not_report_values_that_params_state(maker: Maker) -> None:
    # 1.1 of 85 is 93, and 96 the next multiple of 8.
    params = PARAMS | {"ffn_dim_multiplier": 1.1, "max_seq_len": 2048, "max_batch_size": 4}
    source = closing(maker.write([to_meta(hf_model(PARAMS), PARAMS)], params).open())
    said = [notice for notice in source.notices if "a notice" not in notice]
    assert said == ["config.json: assumed max_position_embeddings 8192"]


def test_reads_params_below_a_model_key(maker: Maker) -> None:
    assert config_of(maker, {"model": PARAMS, "other": 1})["hidden_size"] == 32


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ("", "this is an empty file"),
        ("[]", "not a JSON object"),
        ('{"model": 3}', "not a JSON object"),
        ("\xff", "params.json"),
        ("[" * 100_000, "nested too deeply"),
        ('{"dim": 32, "dim": 32}', "occurs twice"),
        ('{"dim": NaN}', "NaN"),
        ('{"dim": ' + "9" * 5000 + "}", "params.json"),
        (" " * (2**20 + 1), "over the limit"),
    ],
)
def test_rejects_params_that_are_not_a_strict_json_object(
    maker: Maker, params: str, message: str
) -> None:
    maker.write([to_meta(hf_model(PARAMS), PARAMS)], params)
    with pytest.raises(DamagedSource, match=message):
        maker.open()


@pytest.mark.parametrize("key", ["dim", "n_layers", "n_heads", "norm_eps"])
def test_rejects_params_without_a_key(maker: Maker, key: str) -> None:
    params = {name: value for name, value in PARAMS.items() if name != key}
    maker.write([to_meta(hf_model(PARAMS), PARAMS)], params)
    with pytest.raises(DamagedSource, match=f"params.json': key '{key}' is missing"):
        maker.open()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, value) for key in ("dim", "n_layers", "n_heads") for value in (0, -1, None)),
        *(("dim", value) for value in (True, 32.0, "32", 2**31)),
        *(("n_kv_heads", value) for value in (0, False)),
        *(("vocab_size", value) for value in (0, -2, -1.0, True)),
        *(("norm_eps", value) for value in (0, "1e-5", True, -1e-5)),
        *(("rope_theta", value) for value in (10**400, [1])),
        *(("use_scaled_rope", value) for value in (1, None)),
        *(("n_layers", 10**400), ("rope_scaling_factor", 0), ("multiple_of", 0)),
        *(("ffn_dim_multiplier", value) for value in ("x" * 10_000, 1e300)),
    ],
)
def test_rejects_params_of_impossible_values(maker: Maker, key: str, value: object) -> None:
    maker.write([to_meta(hf_model(PARAMS), PARAMS)], PARAMS | {key: value})
    with pytest.raises(DamagedSource, match=f"params.json': '{key}' is '.*expected") as caught:
        maker.open()
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("key", ["sliding_window", "moe", "lora_args", "quantization_args"])
def test_rejects_params_of_other_models(maker: Maker, key: str) -> None:
    maker.write([to_meta(hf_model(PARAMS), PARAMS)], PARAMS | {key: {"a": 1}})
    with pytest.raises(UnsupportedSource, match=f"has key '{key}': this is not a plain Llama"):
        maker.open()


def test_rejects_a_folder_whose_params_are_missing(maker: Maker, tmp_path: Path) -> None:
    maker.write([to_meta(hf_model(PARAMS), PARAMS)])
    (tmp_path / "params.json").unlink()
    with pytest.raises(DamagedSource, match="cannot read .*params.json'"):
        maker.open()
