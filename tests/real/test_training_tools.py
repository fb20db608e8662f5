"""What the guide says of accelerate and PEFT, with their packages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import blobstore
from blobstore.integrations.transformers import from_store
from blobstore.store.local import LocalStore
from tests.real.tiny import make
from tests.support.transcripts import PYTHON_BLOCK, ROOT


def example(name: str) -> Any:
    """Return a function of the guide."""
    blocks = PYTHON_BLOCK.findall((ROOT / "docs/guides/train.md").read_text())
    (block,) = (block for block in blocks if f"def {name}(" in block)
    found: dict[str, Any] = {}
    exec(block, found)
    return found[name]


def test_accelerate_keeps_its_models_in_the_store(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="it is in the test group")
    accelerator = accelerate.Accelerator(cpu=True)
    layer = nn.Linear(2, 2)
    layer, optimizer = accelerator.prepare(layer, torch.optim.AdamW(layer.parameters()))
    example("keep_in_store")(accelerator, optimizer, tmp_path / "store")
    layer(torch.ones(2)).sum().backward()
    optimizer.step()
    saved = layer.weight.detach().clone()
    accelerator.save_state(str(tmp_path / "step-1"))
    assert not list(tmp_path.glob("step-1/*.safetensors"))
    optimizer.step()
    accelerator.load_state(str(tmp_path / "step-1"))
    assert layer.weight.equal(saved)
    state = blobstore.load("run:step-1", store=tmp_path / "store")
    optimizer.load_state_dict(state["optimizer"])


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT uses it
@pytest.mark.filterwarnings("ignore:Could not find a config file in llama")  # on the Hub
def test_an_adapter_names_its_base_of_the_store(store: LocalStore, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = make("llama")
    base.save_pretrained(tmp_path / "base")
    blobstore.create(tmp_path / "base", "llama", store=store)
    config = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(from_store("llama", store=store), config)
    model.save_pretrained(tmp_path / "checkpoint-1")
    blobstore.create(tmp_path / "checkpoint-1", "run:last", store=store, state=True)
    loaded = from_store("run:last", store=store)
    tokens = torch.arange(8)[None]
    assert loaded(tokens).logits.equal(model.eval()(tokens).logits)
