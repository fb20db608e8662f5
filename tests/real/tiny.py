"""The smallest random models that the libraries accept, built by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

# Rows are of two groups of 32, so that every type of quantization fits.
TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
# More than ten experts, so that the order of their names is not the order of their numbers.
EXPERTS: dict[str, Any] = {
    "head_dim": 32,
    "moe_intermediate_size": 64,
    "num_experts": 12,
    "num_experts_per_tok": 2,
}
_IMAGE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
_CONFIGS: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**TEXT),
    "tied": transformers.LlamaConfig(**TEXT, tie_word_embeddings=True),
    "qwen3-moe": transformers.Qwen3MoeConfig(**TEXT, **EXPERTS),
    "mixtral": transformers.MixtralConfig(**TEXT, num_local_experts=12),
    "vit": transformers.ViTConfig(**_IMAGE),
}
_CLASSES: dict[str, Any] = {
    "llama": transformers.LlamaForCausalLM,
    "tied": transformers.LlamaForCausalLM,
    "qwen3-moe": transformers.Qwen3MoeForCausalLM,
    "mixtral": transformers.MixtralForCausalLM,
    "vit": transformers.ViTForImageClassification,
}


def make(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return a model with reproducible random weights."""
    torch.manual_seed(0)
    # Made in its type, not converted to it: a conversion also rounds what is not stored.
    return _CLASSES[kind]._from_config(_CONFIGS[kind], dtype=dtype).eval()


def write_tokenizer(folder: Path, words: int = 128) -> None:
    """Add a tokenizer with the words ``w0``, ``w1`` and so on to a model's folder."""
    model = WordLevel({f"w{number}": number for number in range(words)}, unk_token="w0")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0")
    fast.save_pretrained(folder)


def with_float8(
    folder: Path, *, has_blocks: bool = True, is_static: bool = False
) -> dict[str, torch.Tensor]:
    """Turn the matrices of a saved model's layers to 8-bit floats, and return all tensors.

    There is a scale for each block of 128 x 128, as in DeepSeek's models, or for each row, as in those of
    compressed-tensors. With ``is_static``, the activations have scales too.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        tensors[name] = weight
        if weight.ndim == 2 and ".layers." in name and not name.endswith(".gate.weight"):
            scale = weight.float().abs().amax(1, keepdim=True) / 448
            if has_blocks:
                scale = scale.amax().expand([-(-size // 128) for size in weight.shape])
            factor = scale[:1, :1] if has_blocks else scale
            tensors[name] = (weight.float() / factor).to(torch.float8_e4m3fn)
            end = "_scale_inv" if has_blocks else "_scale"
            tensors[name + end] = scale.contiguous()
            if is_static:
                tensors[name.replace(".weight", ".activation_scale")] = torch.tensor(0.5)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    kind = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": kind | {"strategy": "channel", "dynamic": False},
        "input_activations": kind | {"strategy": "token", "dynamic": True},
    }
    section: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    if has_blocks:
        scheme = "static" if is_static else "dynamic"
        section = {"quant_method": "fp8", "activation_scheme": scheme}
        section["weight_block_size"] = [128, 128]
    changed(folder, quantization_config=section)
    return tensors


def with_nvfp4(folder: Path, maker: str) -> dict[str, torch.Tensor]:
    """Quantize the matrices of a saved model's layers to NVFP4, and return all tensors.

    ``maker`` is the tool whose names and config they get: ``compressed-tensors`` or ``modelopt``. Both have
    scales of activations.
    """
    ends = (".weight", ".weight_scale_2", ".input_scale")
    is_modelopt = maker == "modelopt"
    if not is_modelopt:
        ends = (".weight_packed", ".weight_global_scale", ".input_global_scale")
    tensors: dict[str, torch.Tensor] = {}
    kept: list[str] = []
    for name, weight in load_file(folder / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if weight.ndim != 2 or ".layers." not in name or name.endswith(".gate.weight"):
            tensors[name] = weight
            kept.append(module)
            continue
        rows, columns = weight.shape
        divisor = 448 * 6 / weight.float().abs().amax()
        largest = weight.float().reshape(rows, -1, 16).abs().amax(-1)
        scale = (largest / 6 * divisor).to(torch.float8_e4m3fn)
        packed = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
        factors = 1 / divisor if is_modelopt else divisor.reshape(1)
        activations = torch.full_like(factors, 0.03 if is_modelopt else 30)
        parts = dict(zip(ends, (packed, factors, activations), strict=True))
        parts[".weight_scale"] = scale
        tensors |= {module + end: part for end, part in parts.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    kind: dict[str, Any] = {"num_bits": 4, "type": "float", "group_size": 16}
    weights, inputs = kind | {"dynamic": False}, kind | {"dynamic": False}
    section: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    if not is_modelopt:
        section = {"quant_method": maker, "format": "nvfp4-pack-quantized"}
        section["quantization_status"] = "compressed"
        shared = {"symmetric": True, "strategy": "tensor_group"}
        weights, inputs = weights | shared, kind | shared | {"dynamic": "local"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    section |= {"config_groups": {"group_0": group}, "ignore": kept}
    changed(folder, quantization_config=section)
    return tensors


def changed(folder: Path, **keys: Any) -> Path:
    """Change keys of the config of a saved model."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    return folder


def logits(model: Any) -> torch.Tensor:
    """Return a model's logits for a fixed input."""
    with torch.no_grad():
        if "ViT" in type(model).__name__:
            image = torch.linspace(-1, 1, 3 * 32 * 32, dtype=model.dtype)
            return model(image.reshape(1, 3, 32, 32)).logits  # type: ignore[no-any-return]
        return model(torch.arange(1, 33)[None]).logits  # type: ignore[no-any-return]
