"""PEFT's adapters and pipelines of diffusers load after a turn through a store."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from blobstore.operations.create.create import create
from blobstore.operations.export.export import export_model
from blobstore.operations.export.link import link_model
from blobstore.store.local import LocalStore
from tests.real.tiny import logits, make


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file below a folder, by its relative name."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


# Adapters of PEFT


def save_adapter(peft: Any, folder: Path) -> Any:
    """Save a LoRA of a tiny model with random weights, and return the adapted model."""
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(make("llama"), config).eval()
    adapted.save_pretrained(folder)
    return adapted


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT uses it
@pytest.mark.parametrize("written", ["exported", "sharded", "linked"])
def test_peft_loads_an_adapter(written: str, store: LocalStore, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    adapted = save_adapter(peft, tmp_path / "source")
    create(tmp_path / "source", "lora", store=store)
    folder = tmp_path / written
    if written == "linked":
        link_model("lora", folder, store=store)
    else:
        shard_size = 1 if written == "sharded" else None
        export_model("lora", folder, store=store, shard_size=shard_size)
    if written == "exported":
        assert digests(folder) == digests(tmp_path / "source")
    again = peft.PeftModel.from_pretrained(make("llama"), folder).eval()
    assert torch.equal(logits(again), logits(adapted))
    assert not torch.equal(logits(make("llama")), logits(adapted))


# Pipelines of diffusers


def save_pipeline(folder: Path) -> dict[str, torch.Tensor]:
    """Write a pipeline with a component of each library; return the tensors of that of diffusers."""
    text_encoder = make("llama")
    text_encoder.save_pretrained(folder / "text_encoder")
    torch.manual_seed(0)
    unet = {f"blocks.{number}.weight": torch.randn(4, 4) for number in range(12)}
    (folder / "unet").mkdir()
    (folder / "scheduler").mkdir()
    save_file(
        unet, folder / "unet/diffusion_pytorch_model.safetensors", {"format": "pt", "title": "x"}
    )
    configs = {
        "model_index.json": {
            "_class_name": "TinyPipeline",
            "_diffusers_version": "0.36.0",
            "text_encoder": ["transformers", type(text_encoder).__name__],
            "unet": ["diffusers", "UNet2DModel"],
            "scheduler": ["diffusers", "DDIMScheduler"],
        },
        "unet/config.json": {"_class_name": "UNet2DModel", "_diffusers_version": "0.36.0"},
        "scheduler/scheduler_config.json": {"_class_name": "DDIMScheduler"},
    }
    for name, value in configs.items():
        (folder / name).write_text(json.dumps(value))
    return unet


def test_a_pipeline_is_exported_file_by_file(store: LocalStore, tmp_path: Path) -> None:
    save_pipeline(tmp_path / "source")
    create(tmp_path / "source", "pipeline", store=store)
    export_model("pipeline", tmp_path / "exported", store=store)
    assert digests(tmp_path / "exported") == digests(tmp_path / "source")


@pytest.mark.parametrize("written", ["sharded", "linked"])
def test_the_components_of_a_pipeline_load(written: str, store: LocalStore, tmp_path: Path) -> None:
    unet = save_pipeline(tmp_path / "source")
    create(tmp_path / "source", "pipeline", store=store)
    folder = tmp_path / written
    if written == "linked":
        link_model("pipeline", folder, store=store)
    else:
        export_model("pipeline", folder, store=store, shard_size=256)
    encoder = transformers.AutoModelForCausalLM.from_pretrained(folder, subfolder="text_encoder")
    assert torch.equal(logits(encoder.eval()), logits(make("llama")))
    index = json.loads(
        (folder / "unet/diffusion_pytorch_model.safetensors.index.json").read_bytes()
    )
    files = {name: load_file(folder / "unet" / name) for name in {*index["weight_map"].values()}}
    assert index["weight_map"].keys() == unet.keys()
    for name, file in index["weight_map"].items():
        assert torch.equal(files[file][name], unet[name])
    source, found = digests(tmp_path / "source"), digests(folder)
    small = [name for name in source if not name.endswith(".safetensors")]
    assert {name: found[name] for name in small} == {name: source[name] for name in small}
