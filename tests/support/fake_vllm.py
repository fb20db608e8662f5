"""As much of vLLM as the loader of the store needs, for machines that do not have it."""

from __future__ import annotations

import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

_LAYERS = "vllm.model_executor"


class _BaseModelLoader:
    def __init__(self, load_config: Any) -> None:
        self.load_config = load_config

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        model = vllm_config.build()
        self.load_weights(model, model_config)  # type: ignore[attr-defined]
        return model


class FusedModel(torch.nn.Module):
    """A model that has some tensors in one parameter, as vLLM has them."""

    packed_modules_mapping: ClassVar = {"qkv_proj": ["q_proj", "k_proj"]}

    def __init__(self, rows: int, columns: int, dtype: torch.dtype, padding: int = 0) -> None:
        super().__init__()
        self.rows = rows
        empty = torch.empty(2 * rows + padding, columns, dtype=dtype)
        self.qkv_proj = torch.nn.Linear(columns, 2 * rows, bias=False)
        self.qkv_proj.weight = torch.nn.Parameter(empty, requires_grad=False)

    def load_weights(self, weights: Any) -> set[str]:
        for name, tensor in weights:
            start = {"q_proj.weight": 0, "k_proj.weight": self.rows}[name]
            self.qkv_proj.weight.data[start : start + self.rows].copy_(tensor)
        return {"qkv_proj.weight"}


def install(monkeypatch: pytest.MonkeyPatch, *, ranks: int = 1) -> Any:
    """Make the fake importable; return the config that vLLM would give to loaders."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=ranks, world_size=ranks, enable_expert_parallel=False
        ),
        device_config=SimpleNamespace(device="cpu:0"),
    )
    contents: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.config": {"get_current_vllm_config": lambda: config},
        "vllm.logger": {"init_logger": logging.getLogger},
        f"{_LAYERS}.layers.quantization.kv_cache": {"BaseKVCacheMethod": type("Method", (), {})},
        f"{_LAYERS}.model_loader.base_loader": {"BaseModelLoader": _BaseModelLoader},
        f"{_LAYERS}.models.utils": {
            "PPMissingLayer": type("Missing", (), {}),
            "StageMissingLayer": type("Missing", (), {}),
        },
    }
    for name, members in contents.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            parent = ".".join(parts[:end])
            if parent not in sys.modules or parent == name:
                monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        vars(sys.modules[name]).update(members)
    return config
