"""Linked and exported folders can be loaded by mlx-lm itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import blobstore
from blobstore.operations.export.export import export_model
from blobstore.operations.export.link import link_model
from blobstore.planning.grouping import ExpertForm
from blobstore.planning.plan import QuantizeOptions
from blobstore.store.local import LocalStore
from tests.real import test_integrations_mlx_lm as helpers
from tests.real.test_linking import assert_opened_by_safetensors

mx = pytest.importorskip("mlx.core", reason="MLX does not run on this machine")
mlx_lm = pytest.importorskip("mlx_lm", reason="mlx-lm does not run on this machine")
integration = import_module("blobstore.integrations.mlx_lm")

logits = helpers.logits


@pytest.mark.parametrize("quant_type", helpers.GROUPS)
@pytest.mark.parametrize(
    ("kind", "experts"), [("llama", "packed"), ("qwen3-moe", "packed"), ("qwen3-moe", "stacked")]
)
def test_mlx_lm_computes_the_same_from_links_as_its_own_conversion(
    kind: str, experts: ExpertForm, quant_type: str, store: LocalStore, tmp_path: Path
) -> None:
    # Its config is that of transformers 5, of which mlx-lm takes no word of ``rope_theta``.
    source = helpers.saved(kind, tmp_path / "source")
    helpers.create_as_mlx_lm_does(source, quant_type, experts, store)

    linked = link_model("m", tmp_path / "farm", store=store)

    ours, tokenizer = mlx_lm.load(str(tmp_path / "farm"))
    theirs = helpers.converted_by_mlx_lm(source, quant_type)
    assert helpers.modules_of(ours) == helpers.modules_of(theirs)
    assert mx.array_equal(logits(ours), logits(theirs))
    assert tokenizer.encode("w5 w6") == [5, 6]
    from_store, _ = integration.load_model("m", store=store)
    assert mx.array_equal(logits(ours), logits(from_store))
    assert_opened_by_safetensors(tmp_path / "farm")
    # Nothing but what is quantized is in a file of its own; all of one projection's experts are one.
    with blobstore.open("m", store=store) as model:
        packed = {name.removesuffix(".weight") for name in model.quantized}
        plain = [name for name in model if not name.startswith(tuple(packed))]
    assert linked.links == len(plain) > 0
    for path in (tmp_path / "farm").glob("*.safetensors"):
        names = mx.load(str(path)).keys()
        assert path.is_symlink() == (names <= set(plain))
        assert path.is_symlink() or any(name.endswith(".scales") for name in names)


@pytest.mark.parametrize("make", [export_model, link_model])
def test_mlx_lm_computes_the_same_from_a_quantized_folder_as_from_the_store(
    make: Callable[..., Any], store: LocalStore, tmp_path: Path
) -> None:
    source = write_model("gemma3", tmp_path / "source", torch.bfloat16)
    blobstore.create(
        source, "m", store=store, quantize=QuantizeOptions("int8", group_size=32, policy="uniform")
    )
    make("m", tmp_path / "out", store=store)
    ours, _ = mlx_lm.utils.load_model(tmp_path / "out")
    theirs, _ = integration.load_model("m", store=store)
    assert mx.array_equal(logits(ours), logits(theirs))


# Configs that only say what transformers 5 reads.

SHAPE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
# Settings that differ from the defaults of both libraries.
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 3e3}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 3e3,
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 16,
}
EXPERTS: dict[str, Any] = {"head_dim": 32, "moe_intermediate_size": 64, "num_experts_per_tok": 2}
SLIDING: dict[str, Any] = {
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": {**ROPE, "rope_type": "linear", "factor": 8.0},
        "sliding_attention": {**ROPE, "rope_theta": 2e2},
    },
}
CONFIGS: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**SHAPE, rope_parameters=LLAMA3),
    "qwen3-moe": transformers.Qwen3MoeConfig(
        **SHAPE, **EXPERTS, num_experts=6, rope_parameters=ROPE
    ),
    "mixtral": transformers.MixtralConfig(**SHAPE, num_local_experts=6, rope_parameters=ROPE),
    "gemma3": transformers.Gemma3TextConfig(**SHAPE, **SLIDING),
    "phi": transformers.PhiConfig(**SHAPE, rope_parameters={**ROPE, "partial_rotary_factor": 0.25}),
}


def write_model(kind: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write a model with reproducible random weights."""
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind], dtype=dtype)
    model.save_pretrained(folder)
    return folder


def assert_as_transformers_computes(
    found: Any, folder: Path, model_class: Any = transformers.AutoModelForCausalLM
) -> None:
    model: Any = model_class.from_pretrained(folder)
    if isinstance(model, transformers.Llama4ForConditionalGeneration):
        model = (
            model.language_model
        )  # around it, transformers 5.24 looks for pictures that a text does not have
    with torch.no_grad():
        expected = model(torch.arange(1, 33)[None]).logits
    torch.testing.assert_close(torch.tensor(logits(found).tolist()), expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_config_means_to_mlx_lm_what_it_does_to_transformers(
    kind: str, store: LocalStore, tmp_path: Path
) -> None:
    source = write_model(kind, tmp_path / "source")
    blobstore.create(source, "m", store=store)
    found, _ = integration.load_model("m", store=store)
    assert_as_transformers_computes(found, source)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_plain_linked_folder_means_the_same_to_both_if_it_has_the_old_keys(
    kind: str, store: LocalStore, tmp_path: Path
) -> None:
    source = write_model(kind, tmp_path / "source")
    blobstore.create(source, "m", store=store)
    link_model("m", tmp_path / "farm", store=store, old_keys=True)
    found, _ = mlx_lm.utils.load_model(tmp_path / "farm")
    for folder in (source, tmp_path / "farm"):
        assert_as_transformers_computes(found, folder)
    stated, both = (
        json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "farm")
    )
    assert {key: both[key] for key in stated} == stated
    assert stated.keys() < both.keys()


SPECIAL: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {
        "vocab_size": 128,
        "n_embd": 128,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "n_ctx": 64,
    },
    "Llama4ForConditionalGeneration": {
        "text_config": {
            **SHAPE,
            "num_hidden_layers": 4,
            "head_dim": 32,
            "intermediate_size_mlp": 256,
            "num_local_experts": 4,
            "pad_token_id": 0,
            "attention_chunk_size": 32,
        },
        "vision_config": {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "vision_output_dim": 64,
            "projector_input_dim": 64,
            "projector_output_dim": 64,
        },
    },
    "DeepseekV3ForCausalLM": {
        **SHAPE,
        "num_key_value_heads": 4,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 32,
        "kv_lora_rank": 64,
        "q_lora_rank": 64,
        "moe_intermediate_size": 64,
        "n_routed_experts": 8,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "NemotronHForCausalLM": {
        **SHAPE,
        "layers_block_type": ["mamba", "moe", "attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 32,
        "n_groups": 2,
        "head_dim": 32,
        "moe_intermediate_size": 64,
        "moe_shared_expert_intermediate_size": 64,
        "n_routed_experts": 8,
        "n_group": 1,
        "topk_group": 1,
    },
}


@pytest.mark.parametrize("quant_type", ["int4", "nvfp4"])
@pytest.mark.parametrize("kind", SPECIAL)
def test_mlx_lm_loads_quantized_models_with_weights_that_it_transposes_splits_or_renames(
    kind: str, quant_type: str, store: LocalStore, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model_class: Any = getattr(transformers, kind)
    model = model_class(model_class.config_class(**SPECIAL[kind]))
    # mlx-lm expects the tensor names of the first repository of GPT-2.
    getattr(model, "transformer", model).save_pretrained(tmp_path / "source")
    blobstore.create(tmp_path / "source", "m", store=store, quantize=QuantizeOptions(quant_type))
    export_model("m", tmp_path / "out", store=store)
    export_model("m", tmp_path / "plain", store=store, dequantize=True)
    found, _ = mlx_lm.utils.load_model(tmp_path / "out")
    assert_as_transformers_computes(found, tmp_path / "plain", model_class)
