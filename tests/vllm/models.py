"""Tiny models saved by transformers, and helpers that run vLLM on them."""

from __future__ import annotations

import gc
import hashlib
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors.torch import load_file, save_file
from vllm import LLM, SamplingParams

from tests.real.tiny import changed as with_config
from tests.real.tiny import write_tokenizer

WORDS = 256
# Heads of 32 would let vLLM compute attention with AMX, which 0.32 does not ask the system for: the process
# dies of an illegal instruction unless another library has asked.
_TEXT: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 80,
    "max_position_embeddings": 64,
}
# More than ten experts, so that the order of their names is not the order of their numbers.
_EXPERTS = {"moe_intermediate_size": 64, "num_experts": 12, "num_experts_per_tok": 2}
FAST: dict[str, Any] = {
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "disable_log_stats": True,
    "max_model_len": 64,
    "seed": 0,
    "num_gpu_blocks_override": 64,
}
"""Options of an engine that starts quickly."""
_GPT_OSS = _TEXT | {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 32,
}
PROMPTS = [{"prompt_token_ids": list(range(1, 9))}, {"prompt_token_ids": [7, 200, 31]}]


class Answer(NamedTuple):
    tokens: list[list[int]]
    parameters: list[dict[str, str]]
    """Of each rank, the digest of each parameter in vLLM's memory."""


def saved(kind: str, folder: Path, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Path:
    """Write a model with reproducible random weights in the layout of transformers."""
    torch.manual_seed(0)
    model: Any
    if kind == "qwen3-moe":
        config = transformers.Qwen3MoeConfig(**(_TEXT | _EXPERTS | changes))
        model = transformers.Qwen3MoeForCausalLM(config)
    elif kind == "gpt-oss":
        model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**(_GPT_OSS | changes)))
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(_TEXT | changes)))
    model.to(dtype).save_pretrained(folder)
    write_tokenizer(folder, WORDS)
    return _with_quantized_experts(folder) if kind == "gpt-oss" else folder


def _with_quantized_experts(folder: Path) -> Path:
    """Replace the experts of a saved gpt-oss by random blocks and scales, as in published models."""

    def quantize(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_proj") and "experts" in name]:
            experts, rows, columns = tensors.pop(name).transpose(-1, -2).shape
            shape = (experts, rows, columns // 32)
            tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(118, 124, shape, dtype=torch.uint8)

    return changed(with_config(folder, quantization_config={"quant_method": "mxfp4"}), quantize)


def changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """Change the tensors of a saved model."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def answer(**options: Any) -> Answer:
    """Return vLLM's answers to the prompts, and the weights that it has loaded."""
    gc.freeze()  # vLLM collects eight times an engine: all that was ever imported, each time
    llm = LLM(**FAST, **options)
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    outputs = llm.generate(PROMPTS, greedy, use_tqdm=False)
    parameters = llm.apply_model(digests)
    return Answer([list(output.outputs[0].token_ids) for output in outputs], parameters)


@cache
def expected(kind: str, dtype: str = "bfloat16") -> Answer:
    """Return vLLM's answers from the folder of an unmodified model."""
    with tempfile.TemporaryDirectory() as name:
        folder = saved(kind, Path(name), getattr(torch, dtype))
        return answer(model=str(folder), dtype=dtype)


def digests(model: Any) -> dict[str, str]:
    return {
        name: hashlib.sha256(tensor.cpu().reshape(-1).view(torch.uint8).numpy()).hexdigest()
        for name, tensor in model.named_parameters()
    }
