"""A frozen transformers model computes the same logits as before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import blobstore
from blobstore.integrations.transformers import from_store
from blobstore.models.read_strategy import Read
from blobstore.operations.create.create import create
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.store.local import LocalStore
from tests.support.frozen import forms_of

CONFIG = transformers.LlamaConfig(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
TOKENS = torch.arange(64).reshape(2, 32)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(TOKENS).logits
    return found


@pytest.mark.parametrize("read", ["mmap", "pread"])
def test_a_frozen_llama_computes_the_same_logits(tmp_path: Path, read: Read) -> None:
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(CONFIG).bfloat16()
    model.save_pretrained(tmp_path / "model")
    store = LocalStore(tmp_path / "store")
    create(tmp_path / "model", "llama", store=store)
    expected = logits(from_store("llama", store=store, read=read))
    frozen = freeze_models(["llama"], store=store)
    assert frozen.faults == ()
    assert frozen.stored < 0.75 * frozen.size
    forms = forms_of(store, "llama")
    assert forms["model.embed_tokens.weight"] == "cold"
    assert torch.equal(logits(from_store("llama", store=store, read=read)), expected)
    with blobstore.open("llama", store=store, framework="torch", thaw=True) as opened:
        assert torch.equal(opened["lm_head.weight"], model.lm_head.weight)
    assert set(forms_of(store, "llama").values()) == {"hot"}
