"""Folders of links to blobs can be read by the libraries that servers use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open

from blobstore.operations.create.create import create
from blobstore.operations.export.export import export_model
from blobstore.operations.export.link import link_model
from blobstore.planning.grouping import ExpertForm
from blobstore.store.local import LocalStore
from tests.real.tiny import logits, make
from tests.support.logs import logged
from tests.support.options import grouped


def assert_opened_by_safetensors(farm: Path) -> None:
    """Check that safetensors opens each file, and that the index, if any, matches the files."""
    found: dict[str, str] = {}
    for path in farm.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                assert file.get_tensor(name) is not None
                found[name] = path.name
    index = json.loads((farm / "model.safetensors.index.json").read_bytes())
    assert index["weight_map"] == found


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize(
    ("kind", "experts"),
    [
        ("llama", "packed"),
        ("qwen3-moe", "packed"),
        ("qwen3-moe", "stacked"),
        ("mixtral", "packed"),
        ("vit", "packed"),
    ],
)
def test_transformers_computes_the_same_from_links(
    kind: str, experts: ExpertForm, hard: bool, store: LocalStore, tmp_path: Path
) -> None:
    model = make(kind)
    model.save_pretrained(tmp_path / "source")
    create(tmp_path / "source", "m", store=store, experts=experts)
    linked = link_model("m", tmp_path / "farm", store=store, hard=hard)
    assert linked.links > 10
    # One file a layer of stacked experts.
    assert linked.copied + linked.shared == (2 if experts == "stacked" else 0)
    again = type(model).from_pretrained(tmp_path / "farm").eval()
    assert torch.equal(logits(again), logits(model))
    assert_opened_by_safetensors(tmp_path / "farm")


def test_accelerate_loads_links_although_they_have_no_metadata(
    store: LocalStore, tmp_path: Path
) -> None:
    accelerate: Any = pytest.importorskip("accelerate")
    model, loaded = make("llama"), make("llama")
    model.save_pretrained(tmp_path / "source")
    create(tmp_path / "source", "m", store=store)
    export_model("m", tmp_path / "exported", store=store)
    link_model("m", tmp_path / "farm", store=store)

    for folder in ("exported", "farm"):
        with torch.no_grad():
            for value in loaded.parameters():
                value.zero_()
        with logged() as messages:
            accelerate.load_checkpoint_in_model(loaded, tmp_path / folder)
        assert torch.equal(logits(loaded), logits(model))
        assert all(folder == "farm" and "does not contain metadata" in it for it in messages)


def test_transformers_finds_the_class_of_a_linked_model_by_itself(
    store: LocalStore, tmp_path: Path
) -> None:
    model = make("llama", torch.bfloat16)
    model.save_pretrained(tmp_path / "source")
    create(tmp_path / "source", "m", store=store)
    link_model("m", tmp_path / "farm", store=store)
    again: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "farm")
    assert type(again) is type(model)
    assert again.dtype is torch.bfloat16
    assert torch.equal(logits(again.eval()), logits(model))


@pytest.mark.parametrize("experts", ["packed", "stacked"])
@pytest.mark.parametrize(
    ("kind", "quant_type"),
    [
        ("llama", None),
        ("qwen3-moe", None),
        ("llama", "int4"),
        ("qwen3-moe", "int4"),
        ("qwen3-moe", "mxfp8"),
    ],
)
def test_mlx_lm_computes_the_same_from_links_as_from_an_export(
    kind: str, quant_type: str | None, experts: ExpertForm, store: LocalStore, tmp_path: Path
) -> None:
    mx = pytest.importorskip("mlx.core", reason="MLX does not run on this machine")
    mlx_utils = pytest.importorskip("mlx_lm.utils", reason="mlx-lm does not run on this machine")
    source = tmp_path / "source"
    # MLX multiplies the experts of plain models on a CPU in this type only.
    make(kind, torch.bfloat16 if quant_type else torch.float32).save_pretrained(source)
    config = json.loads((source / "config.json").read_text())
    # Where mlx-lm still looks for these.
    config |= {"rope_theta": 10_000.0} | ({"num_experts": 12} if "moe" in kind else {})
    (source / "config.json").write_text(json.dumps(config))
    quantization: Any = {"quantize": quant_type, "policy": "uniform"} if quant_type else {}
    create(source, "m", store=store, experts=experts, **grouped(quantization))
    export_model("m", tmp_path / "out", store=store)
    linked = link_model("m", tmp_path / "farm", store=store)
    assert linked.links
    results = []
    for folder in ("out", "farm"):
        model, _ = mlx_utils.load_model(tmp_path / folder)
        result = model(mx.arange(1, 33)[None])
        mx.eval(result)
        results.append(result)
        quantized = [one for one in model.modules() if type(one).__name__ == "QuantizedLinear"]
        assert bool(quantized) == (quant_type is not None)
    assert mx.array_equal(*results)
    assert_opened_by_safetensors(tmp_path / "farm")
