"""Models quantized by this library and by mlx-lm with the same settings give the same results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import blobstore
from blobstore.manifests import media_types
from blobstore.manifests.reference import Reference
from blobstore.operations.export.export import export_model
from blobstore.planning.grouping import ExpertForm
from blobstore.planning.plan import QuantizeOptions
from blobstore.quantization.formats import FORMATS
from blobstore.store.local import LocalStore
from tests.real import tiny

mx = pytest.importorskip("mlx.core", reason="MLX does not run on this machine")
mlx_utils = pytest.importorskip("mlx_lm.utils", reason="mlx-lm does not run on this machine")

NAME = Reference.parse("m")
_TEXT: dict[str, Any] = {
    **tiny.TEXT,
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_GROUPS = {"int4": 64, "int8": 64, "nvfp4": 16, "mxfp8": 32, "mxfp4": 32}


def make(folder: Path, *, experts: bool) -> Path:
    """Write a bf16 model with reproducible random weights."""
    torch.manual_seed(0)
    model: Any
    if experts:
        model = transformers.Qwen3MoeForCausalLM(
            transformers.Qwen3MoeConfig(**_TEXT, **tiny.EXPERTS)
        )
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**_TEXT))
    model.to(torch.bfloat16).save_pretrained(folder)
    path = folder / "config.json"
    # Where mlx-lm still looks for these.
    config = json.loads(path.read_text()) | {"rope_theta": 10_000.0}
    path.write_text(json.dumps(config | ({"num_experts": 12} if experts else {})))
    return folder


def logits(model: Any) -> Any:
    result = model(mx.arange(1, 33)[None])
    mx.eval(result)
    return result


@pytest.fixture(params=["llama", "qwen3-moe"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make(tmp_path / "source", experts=request.param == "qwen3-moe")


@pytest.mark.parametrize("experts", ["packed", "stacked"])
@pytest.mark.parametrize("quant_type", _GROUPS)
def test_mlx_lm_computes_the_same_with_our_weights_as_with_its_own(
    quant_type: str, experts: ExpertForm, source: Path, tmp_path: Path
) -> None:
    item, group_size = FORMATS[quant_type], _GROUPS[quant_type]
    theirs, config = mlx_utils.load_model(source)
    theirs, _ = mlx_utils.quantize_model(theirs, config, group_size, item.bits, item.mode)
    # What mlx-lm quantizes too, and the one module of these models that it treats in its own way.
    overrides = [f"*embed_tokens.weight={quant_type}"]
    if "num_experts" in config:
        overrides.append("*.mlp.gate.weight=int8")
    store = LocalStore(tmp_path / "store")
    blobstore.create(
        source,
        NAME,
        store=store,
        quantize=QuantizeOptions(
            quant_type, group_size=group_size, policy="uniform", overrides=overrides
        ),
        experts=experts,
    )
    export_model(NAME, tmp_path / "out", store=store)
    ours, _ = mlx_utils.load_model(tmp_path / "out")
    assert mx.array_equal(logits(ours), logits(theirs))
    assert any(type(module).__name__ == "QuantizedLinear" for module in ours.modules())
    for layer in store.resolve(NAME).layers_of(media_types.TENSOR):
        loaded = mx.load(store.blob_path(layer.digest), format="safetensors")
        assert any(name.startswith(layer.name) for name in loaded)


def test_an_exported_model_of_mlx_survives_import_and_export(source: Path, tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    blobstore.create(source, "first", store=store, quantize=QuantizeOptions("int4"))
    export_model("first", tmp_path / "one", store=store)
    blobstore.create(tmp_path / "one", "second", store=store)
    export_model("second", tmp_path / "two", store=store)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes(), path.name
