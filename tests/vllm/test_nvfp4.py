"""vLLM gets NVFP4 weights of ModelOpt and compressed-tensors as they were published."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM does not run on this machine")

import torch
from vllm import LLM
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.model_executor.kernels import linear
from vllm.model_executor.layers.fused_moe.experts import nvfp4_emulation_moe
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w4a4_nvfp4 import (
    CompressedTensorsW4A4Nvfp4MoEMethod,
)
from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4FusedMoE
from vllm.model_executor.model_loader import base_loader
from vllm.platforms import PlatformEnum

import blobstore
from blobstore.errors import BlobstoreError
from blobstore.integrations.vllm import engine_options
from blobstore.operations.export.export import export_model
from blobstore.operations.export.link import link_model
from blobstore.store.local import LocalStore
from tests.real.tiny import with_nvfp4
from tests.vllm.models import FAST, answer, changed, digests, saved

METHODS = [ModelOptNvFp4FusedMoE, CompressedTensorsW4A4Nvfp4MoEMethod, UnquantizedFusedMoEMethod]
MAKERS = ["compressed-tensors", "modelopt"]
SCALES = {"compressed-tensors": "input_global_scale", "modelopt": "input_scale"}


@pytest.fixture(autouse=True)
def _one_engine_after_another() -> Iterator[None]:
    yield
    cleanup_dist_env_and_memory()


@pytest.fixture(autouse=True)
def _emulated_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let vLLM use kernels that need no special hardware, which it does not offer for CPUs."""
    kernels = {platform: [linear.EmulationNvFp4LinearKernel] for platform in PlatformEnum}
    monkeypatch.setattr(linear, "_POSSIBLE_NVFP4_KERNELS", kernels)
    experts = nvfp4_emulation_moe.Nvfp4QuantizationEmulationTritonExperts
    monkeypatch.setattr(experts, "is_supported_config", lambda *_, **__: (True, None))


def with_settings_apart(folder: Path) -> Path:
    """Move a model's quantization settings to the file in which earlier versions of ModelOpt wrote them."""
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    described: dict[str, Any] = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None}
    described |= {"group_size": 16, "exclude_modules": ["lm_head"]}
    value = {"producer": {"name": "modelopt"}, "quantization": described}
    (folder / "hf_quant_config.json").write_text(json.dumps(value))
    return folder


@pytest.mark.parametrize("maker", [*MAKERS, "modelopt with a file of its own"])
def test_answers_the_same_from_the_store_as_from_the_folder(
    maker: str, store: LocalStore, tmp_path: Path
) -> None:
    source = saved("llama", tmp_path / "source")
    with_nvfp4(source, maker.partition(" ")[0])
    if maker not in MAKERS:
        with_settings_apart(source)
    blobstore.create(source, "m", store=store)
    theirs = answer(model=str(source))
    with engine_options("m", store=store, dequantize=False) as engine:
        assert answer(**engine) == theirs
    link_model("m", tmp_path / "links", store=store)
    assert answer(model=str(tmp_path / "links")) == theirs
    export_model("m", tmp_path / "plain", store=store, dequantize=True)
    with engine_options("m", store=store, dequantize=True) as engine:
        assert answer(**engine) == answer(model=str(tmp_path / "plain")) != theirs


class _Loaded(Exception):
    """Ends the construction of an engine."""


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that returns the parameters of a model as vLLM loads them, before it changes them.

    vLLM cannot compute with quantized experts on CPUs.
    """
    found: dict[str, str] = {}

    def stop(model: torch.nn.Module, *_: Any) -> None:
        found.update(digests(model))
        raise _Loaded

    monkeypatch.setattr(base_loader, "process_weights_after_loading", stop)

    def load(**options: Any) -> dict[str, str]:
        found.clear()
        with pytest.raises(_Loaded):
            LLM(**FAST, **options)
        cleanup_dist_env_and_memory()
        return dict(found)

    return load


@pytest.mark.parametrize("maker", MAKERS)
def test_experts_are_loaded_as_from_the_folder(
    maker: str, store: LocalStore, tmp_path: Path, loaded: Any
) -> None:
    source = saved("qwen3-moe", tmp_path / "source")
    with_nvfp4(source, maker)
    blobstore.create(source, "m", store=store)
    theirs = loaded(model=str(source))
    assert any(".experts." in name and name.endswith("weight_scale") for name in theirs)
    with engine_options("m", store=store, dequantize=False) as engine:
        assert loaded(**engine) == theirs


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("kind", ["llama", "qwen3-moe"])
def test_a_missing_scale_of_activations_is_reported(
    kind: str, maker: str, store: LocalStore, tmp_path: Path
) -> None:
    source = saved(kind, tmp_path / "source")
    with_nvfp4(source, maker)
    name = f"model.layers.1.self_attn.q_proj.{SCALES[maker]}"
    changed(source, lambda tensors: tensors.pop(name))
    blobstore.create(source, "m", store=store)
    with (
        engine_options("m", store=store, dequantize=False) as engine,
        pytest.raises(BlobstoreError, match=f": 1 tensor missing: '{name}'"),
    ):
        LLM(**FAST, **engine)


@pytest.mark.parametrize("maker", ["", *MAKERS])
def test_experts_may_be_larger_than_those_of_the_checkpoint(
    maker: str, store: LocalStore, tmp_path: Path, loaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rounded_up(_: object, hidden: int, intermediate: int, *__: object) -> tuple[int, int]:
        return hidden + 32, intermediate + 32

    for method in METHODS:
        monkeypatch.setattr(method, "maybe_roundup_sizes", rounded_up)
    source = saved("qwen3-moe", tmp_path / "source")
    if maker:
        with_nvfp4(source, maker)
    blobstore.create(source, "m", store=store)
    with engine_options("m", store=store, dequantize=not maker) as engine:
        assert any(".experts." in name for name in loaded(**engine))
    last = [f"model.layers.1.mlp.experts.11.{name}_proj." for name in ("down", "gate", "up")]
    changed(
        source, lambda own: [own.pop(name) for name in list(own) if name.startswith(tuple(last))]
    )
    blobstore.create(source, "m", store=store)
    with (
        engine_options("m", store=store, dequantize=not maker) as engine,
        pytest.raises(BlobstoreError, match=r"missing: 'model\.layers\.1\.mlp\.experts\."),
    ):
        LLM(**FAST, **engine)
