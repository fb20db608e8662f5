"""A program that saves and loads models with the libraries, on the safetensors library that it is given.

``python drop_in.py ours|reference FOLDER SOURCE`` writes files below ``FOLDER`` and prints, as JSON, the
digests of these files and of the outputs of the models that are loaded from them: random models, and the one
in the folder ``SOURCE``.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.support.clients import OFFLINE, TORCH, run_python


def run(chosen: str, folder: Path, source: Path) -> dict[str, Any]:
    """Run this program, and return what it prints."""
    folder.mkdir()
    command = (sys.executable, __file__, chosen, folder, source)
    done = run_python(command, os.environ | OFFLINE, TORCH)
    assert done.code == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def install() -> None:
    """Let ``import safetensors`` find the library of this project."""
    import blobstore.safetensors
    import blobstore.safetensors.mlx
    import blobstore.safetensors.numpy
    import blobstore.safetensors.torch

    sys.modules["safetensors"] = blobstore.safetensors
    for name in ("numpy", "torch", "mlx"):
        sys.modules[f"safetensors.{name}"] = sys.modules[f"blobstore.safetensors.{name}"]


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def library(name: str) -> Any:
    """Import a library whose types are incomplete."""
    return import_module(name)


def logits_of(model: Any) -> str:
    import torch

    with torch.no_grad():
        logits = model.eval()(torch.arange(8)[None]).logits
    return digest(logits.float().numpy().tobytes())


def transformers_models(folder: Path) -> dict[str, str]:
    """Save and load random models: with tied weights, in shards, and with an adapter."""
    import torch

    peft, transformers = library("peft"), library("transformers")

    found = {}
    for name, tied, shard in [("tied", True, "1GB"), ("sharded", False, "40KB")]:
        torch.manual_seed(1)
        config = transformers.LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=128,
            tie_word_embeddings=tied,
        )
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        model.save_pretrained(folder / name, max_shard_size=shard)
        loaded = transformers.LlamaForCausalLM.from_pretrained(folder / name, dtype="auto")
        found[f"{name} before"] = logits_of(model)
        found[f"{name} after"] = logits_of(loaded)
    adapted = peft.get_peft_model(model, peft.LoraConfig(init_lora_weights="gaussian"))
    adapted.save_pretrained(folder / "adapter")
    again = peft.PeftModel.from_pretrained(loaded, folder / "adapter")
    found["adapter before"], found["adapter after"] = logits_of(adapted), logits_of(again)
    return found


def real_model(folder: Path, source: Path) -> dict[str, str]:
    """Load a model, and save it with transformers and with accelerate, and load it again."""
    import torch

    transformers, accelerate = library("transformers"), library("accelerate")
    model = transformers.AutoModel.from_pretrained(source)
    model.save_pretrained(folder / "real", max_shard_size="40MB")
    loaded = transformers.AutoModel.from_pretrained(folder / "real")
    accelerate.Accelerator(cpu=True).save_model(model, folder / "accelerated")
    other = transformers.AutoModel.from_config(model.config)
    accelerate.load_checkpoint_in_model(other, folder / "accelerated")
    tokens = torch.arange(1000, 1016)[None]
    found = {}
    for when, each in ("before", model), ("after", loaded), ("after accelerate", other):
        with torch.no_grad():
            hidden = each.eval()(tokens).last_hidden_state
        found[f"real {when}"] = digest(hidden.numpy().tobytes())
    return found


def diffusers_models(folder: Path) -> dict[str, str]:
    import torch

    diffusers = library("diffusers")

    torch.manual_seed(2)
    model = diffusers.AutoencoderKL(
        block_out_channels=(32,), norm_num_groups=8, sample_size=8, latent_channels=2
    )
    model.save_pretrained(folder / "vae")
    loaded = diffusers.AutoencoderKL.from_pretrained(folder / "vae", low_cpu_mem_usage=False)
    image = torch.ones(1, 3, 8, 8)
    with torch.no_grad():
        results = [x.eval().encode(image).latent_dist.mean for x in (model, loaded)]
    return {
        f"vae {when}": digest(x.numpy().tobytes())
        for when, x in zip(("before", "after"), results, strict=True)
    }


def accelerate_models(folder: Path) -> dict[str, str]:
    import torch

    accelerate = library("accelerate")

    torch.manual_seed(3)
    model, loaded = torch.nn.Linear(40, 50), torch.nn.Linear(40, 50)
    accelerate.Accelerator(cpu=True).save_model(model, folder / "linear", max_shard_size="6KB")
    accelerate.load_checkpoint_in_model(loaded, folder / "linear")
    results = [x(torch.ones(40)).detach().numpy().tobytes() for x in (model, loaded)]
    return {
        f"linear {when}": digest(x) for when, x in zip(("before", "after"), results, strict=True)
    }


def distributed_checkpoint() -> dict[str, str]:
    """Let torch.distributed save tensors, and load them. Its metadata have more than one entry."""
    import torch

    checkpoint = library("torch.distributed.checkpoint")

    torch.manual_seed(4)
    saved = {"a": torch.rand(7, 5), "b": torch.rand(6)}
    loaded = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    with tempfile.TemporaryDirectory() as place:
        writer = checkpoint.HuggingFaceStorageWriter(place)
        checkpoint.save(saved, storage_writer=writer, no_dist=True)
        reader = checkpoint.HuggingFaceStorageReader(place)
        checkpoint.load(loaded, storage_reader=reader, no_dist=True)
    return {
        f"distributed {when}": digest(torch.cat([x["a"].flatten(), x["b"]]).numpy().tobytes())
        for when, x in (("before", saved), ("after", loaded))
    }


def mlx_models(folder: Path) -> dict[str, str]:
    """Let mlx-lm load what transformers saved, and save it."""
    import mlx.core as mx
    from mlx_lm import utils

    model, config = utils.load_model(folder / "sharded")
    utils.save_model(folder / "mlx", model)
    utils.save_config(config, folder / "mlx" / "config.json")
    loaded, _ = utils.load_model(folder / "mlx")
    tokens = mx.arange(8)[None]
    found = {}
    for when, each in ("before", model), ("after", loaded):
        logits = each(tokens).astype(mx.float32)
        found[f"mlx {when}"] = digest(bytes(memoryview(logits)))
    return found


def main(chosen: str, place: str, source: str) -> None:
    if chosen == "ours":
        install()
    folder = Path(place)
    results = {
        **real_model(folder, Path(source)),
        **transformers_models(folder),
        **diffusers_models(folder),
        **accelerate_models(folder),
        **distributed_checkpoint(),
        **mlx_models(folder),
    }
    import safetensors

    home = Path(safetensors.__file__).parent.parent.name
    files = {
        path.relative_to(folder).as_posix(): digest(path.read_bytes())
        for path in sorted(folder.rglob("*.safetensors*"))
    }
    print(json.dumps({"home": home, "results": results, "files": files}))  # noqa: T201 - to the test


if __name__ == "__main__":
    main(*sys.argv[1:])
