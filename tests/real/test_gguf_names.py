"""GGUF models against models of transformers: equal values, and the errors of a real quantized one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import blobstore
from blobstore.store.local import LocalStore
from tests.real.test_gguf import write_first_blocks
from tests.real.tiny import EXPERTS, TEXT
from tests.support.converted import write_converted

HEADS: dict[str, Any] = {"head_dim": 32}
MODELS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, "llama", TEXT | {"attention_bias": True}),
    "tied": (transformers.LlamaConfig, "llama", TEXT | {"tie_word_embeddings": True}),
    "mistral": (transformers.MistralConfig, "llama", TEXT | HEADS),
    "ministral3": (transformers.Ministral3Config, "mistral3", TEXT | HEADS),
    "mixtral": (transformers.MixtralConfig, "llama", TEXT | {"num_local_experts": 12}),
    "qwen2": (transformers.Qwen2Config, "qwen2", TEXT),
    "qwen3": (transformers.Qwen3Config, "qwen3", TEXT | HEADS),
    "qwen3-moe": (transformers.Qwen3MoeConfig, "qwen3moe", TEXT | EXPERTS),
    "gemma3": (transformers.Gemma3TextConfig, "gemma3", TEXT | HEADS),
}


def saved(folder: Path, kind: str, dtype: torch.dtype) -> dict[str, Any]:
    """Save a model of random weights, norms and biases included, and return its tensors."""
    torch.manual_seed(0)
    config, _, options = MODELS[kind]
    model = transformers.AutoModelForCausalLM.from_config(config(**options), dtype=dtype)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.1)
    model.save_pretrained(folder)
    return {
        name: weight.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
        if dtype == torch.bfloat16
        else weight.numpy()
        for name, weight in load_file(folder / "model.safetensors").items()
    }


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_converted_model_equals_the_one_of_transformers(
    kind: str, dtype: str, tmp_path: Path
) -> None:
    types = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    tensors = saved(tmp_path / "hf", kind, types[dtype])
    file = write_converted(tmp_path / "m.gguf", tensors, MODELS[kind][1], dtype=dtype)
    store = LocalStore(tmp_path / "store")
    blobstore.create(tmp_path / "hf", "hf", store=store)
    blobstore.create(file, "gguf", store=store)
    for pair in (("gguf", "hf"), ("hf", "gguf")):
        compared = blobstore.compare(*pair, store=store)
        assert {tensor.name for tensor in compared.tensors} == set(tensors)
        assert (compared.differing, compared.only_in_model, compared.only_in_base) == ((), (), ())


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_first_blocks(tmp_path_factory.mktemp("smol"), 3)


@pytest.fixture(scope="module")
def weights(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, torch.Tensor]:
    """The weights of a real model, dequantized, renamed and put in order by transformers.

    It loads a folder of links to a store.
    """
    folder = tmp_path_factory.mktemp("linked")
    store = LocalStore(folder / "store")
    blobstore.create(file, "smol", store=store)
    blobstore.link("smol", folder / "link", store=store)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "link", gguf_file=file.name, dtype=torch.float32
    )
    return {
        name: weight.clone()
        for name, weight in model.state_dict().items()
        if name != "lm_head.weight"
    }


@pytest.fixture
def store(tmp_path: Path, file: Path) -> LocalStore:
    store = LocalStore(tmp_path / "store")
    blobstore.create(file, "smol", store=store)
    return store


def add(store: LocalStore, tensors: Mapping[str, torch.Tensor], name: str) -> None:
    save_file(dict(tensors), store.root.parent / "model.safetensors")
    blobstore.create(store.root.parent / "model.safetensors", name, store=store)


def test_a_real_model_has_the_values_of_transformers(
    store: LocalStore, weights: Mapping[str, torch.Tensor]
) -> None:
    add(store, weights, "hf")
    compared = blobstore.compare("smol", "hf", store=store)
    assert len(compared.tensors) == 3 * 9 + 2
    assert (compared.differing, compared.only_in_model, compared.only_in_base) == ((), (), ())


def test_transformers_loads_a_folder_of_links(
    store: LocalStore, weights: Mapping[str, torch.Tensor]
) -> None:
    names = {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.1.ffn_up.weight": "model.layers.1.mlp.up_proj.weight",
        "blk.2.attn_v.weight": "model.layers.2.self_attn.v_proj.weight",
        "output_norm.weight": "model.norm.weight",
    }
    with blobstore.open("smol", store=store, framework="torch", dequantize=True) as opened:
        for name, other in names.items():
            assert torch.equal(weights[other], opened[name])


def test_the_errors_of_a_real_model_are_those_of_its_tensors(
    store: LocalStore, file: Path, weights: Mapping[str, torch.Tensor]
) -> None:
    base = {name: weight.to(torch.bfloat16) for name, weight in weights.items()}
    add(store, base, "hf")
    compared = blobstore.compare("smol", "hf", store=store)
    tensors = {tensor.name: tensor for tensor in compared.tensors}
    (stored,) = [one for one in gguf.GGUFReader(file).tensors if one.name == "blk.2.attn_v.weight"]
    name = "model.layers.2.self_attn.v_proj.weight"
    expected = gguf.dequantize(stored.data, stored.tensor_type).astype(np.float64)
    found = tensors[name]
    error = expected - base[name].to(torch.float64).numpy()
    norm = np.linalg.norm(error) / np.linalg.norm(base[name].to(torch.float64).numpy())
    assert found.relative_error == pytest.approx(norm, rel=1e-9)
    assert found.snr_db == pytest.approx(-20 * np.log10(norm), rel=1e-9)
    assert found.max_abs_error == np.abs(error).max()
    assert (found.type, found.bits_per_weight) == ("q4_1", 5)
    # Rounding to BF16 is the only error, in queries and keys too.
    assert all(tensor.snr_db is None or tensor.snr_db > 50 for tensor in compared.tensors)
