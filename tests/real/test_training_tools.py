"""What the guide says of accelerate and PEFT, with their packages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

import blobstore
from blobstore.integrations.trainer import StoreCallback
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


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT uses it
@pytest.mark.filterwarnings(
    "ignore:Could not find a config file in:UserWarning"
)  # PEFT looks for one
def test_a_trainer_resumes_the_adapter_of_a_step(store: LocalStore, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    callback = StoreCallback("run", store)

    def trainer(folder: str) -> Trainer:
        config = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False)
        model = peft.get_peft_model(make("llama"), config)
        args = TrainingArguments(
            str(tmp_path / folder), max_steps=1, save_steps=1, report_to=[], use_cpu=True
        )
        rows = [{"input_ids": list(range(8)), "labels": list(range(8))}] * 2
        return Trainer(model, args, train_dataset=rows, callbacks=[callback])

    def adapter(trained: Trainer) -> dict[str, torch.Tensor]:
        return dict(peft.get_peft_model_state_dict(trained.model))

    first, second = trainer("first"), trainer("second")
    first.train()
    expected = adapter(first)
    assert not any(value.equal(expected[name]) for name, value in adapter(second).items())
    second.train(resume_from_checkpoint=callback.restore(tmp_path / "second"))
    assert all(value.equal(expected[name]) for name, value in adapter(second).items())
