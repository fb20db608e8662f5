"""Write the small models that the examples of the documentation use.

    python docs/examples/tiny_models.py [FOLDER]

makes, in FOLDER or here: ``tiny-llama``, a Llama with random weights; ``tiny-chat``, a fine-tune of it;
``tiny-moe``, a mixture of experts; and ``harmful.pt``, a checkpoint that would run a command if
``torch.load`` of an old PyTorch read it. Needs numpy alone; equal bytes each time.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

HIDDEN, FEED_FORWARD, VOCABULARY, LAYERS, EXPERTS = 256, 512, 1024, 2, 4
Weights = dict[str, np.ndarray[Any, np.dtype[np.float32]]]


def llama_weights(chance: np.random.Generator) -> Weights:
    """Return the tensors of a Llama with random weights."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for number in range(LAYERS):
        layer = f"model.layers.{number}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            shapes[f"{layer}.self_attn.{name}.weight"] = (HIDDEN, HIDDEN)
        for name in ("gate_proj", "up_proj"):
            shapes[f"{layer}.mlp.{name}.weight"] = (FEED_FORWARD, HIDDEN)
        shapes[f"{layer}.mlp.down_proj.weight"] = (HIDDEN, FEED_FORWARD)
        shapes[f"{layer}.input_layernorm.weight"] = (HIDDEN,)
    shapes["model.norm.weight"] = (HIDDEN,)
    return {name: random(chance, shape) for name, shape in shapes.items()}


def experts_weights(chance: np.random.Generator) -> Weights:
    """Return the tensors of a mixture of experts with random weights."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    shapes["model.layers.0.mlp.gate.weight"] = (EXPERTS, HIDDEN)
    for number in range(EXPERTS):
        expert = f"model.layers.0.mlp.experts.{number}"
        shapes[f"{expert}.gate_proj.weight"] = (FEED_FORWARD, HIDDEN)
        shapes[f"{expert}.up_proj.weight"] = (FEED_FORWARD, HIDDEN)
        shapes[f"{expert}.down_proj.weight"] = (HIDDEN, FEED_FORWARD)
    return {name: random(chance, shape) for name, shape in shapes.items()}


def random(chance: np.random.Generator, shape: tuple[int, ...]) -> Any:
    """Return random weights of the size that training gives them."""
    return chance.standard_normal(shape, np.float32) * np.float32(0.02)


def fine_tuned(weights: Weights, chance: np.random.Generator) -> Weights:
    """Return weights of which training has moved the matrices of the layers a little."""
    return {
        name: tensor + random(chance, tensor.shape) / 50 if "proj" in name else tensor
        for name, tensor in weights.items()
    }


def write_model(folder: Path, weights: Weights, config: dict[str, Any]) -> None:
    """Write a Hugging Face folder with one safetensors file in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, tensor in sorted(weights.items()):
        upper_halves = (tensor.view(np.uint32) >> 16).astype("<u2")
        end = len(data) + upper_halves.nbytes
        header[name] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": [len(data), end]}
        data += upper_halves.tobytes()
    encoded = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": {"vocab": {}}}))


class RunsACommand:
    """What an attacker pickles: loading it runs a command."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("echo this could be anything",)


def write_harmful_checkpoint(path: Path) -> None:
    """Write what looks like a PyTorch checkpoint."""
    program = io.BytesIO()
    pickle.dump({"weight": RunsACommand()}, program, protocol=2)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", program.getvalue())
        archive.writestr("archive/version", "3\n")


def main(folder: Path) -> None:
    """Write all of them."""
    chance = np.random.default_rng(0)
    llama = llama_weights(chance)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN}
    config |= {"num_hidden_layers": LAYERS, "intermediate_size": FEED_FORWARD}
    config |= {"num_attention_heads": 4, "vocab_size": VOCABULARY, "tie_word_embeddings": True}
    write_model(folder / "tiny-llama", llama, config)
    write_model(folder / "tiny-chat", fine_tuned(llama, chance), config)
    experts = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    experts |= {"num_experts": EXPERTS, "num_hidden_layers": 1, "hidden_size": HIDDEN}
    write_model(folder / "tiny-moe", experts_weights(chance), experts)
    write_harmful_checkpoint(folder / "harmful.pt")


if __name__ == "__main__":
    arguments = sys.argv[1:] or ["."]
    if len(arguments) > 1 or arguments[0].startswith("-"):
        sys.exit(f"usage: {sys.argv[0]} [FOLDER]")
    main(Path(arguments[0]))
