from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import blobstore
from blobstore.errors import BlobstoreError
from blobstore.models.frameworks import ArrayTarget
from blobstore.operations.open import open_model
from blobstore.planning.plan import QuantizeOptions
from blobstore.store.local import LocalStore
from tests.support import fake_vllm
from tests.support.models import write_folder

if importlib.util.find_spec("vllm") is not None:
    pytest.skip("tests/vllm tests the loader with vLLM itself", allow_module_level=True)

ROWS, COLUMNS = 64, 128
LOADER = "blobstore.integrations.vllm.loader"


@pytest.fixture(autouse=True)
def _streamed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Send tensors to the device ``cpu:0`` as if it were a GPU."""
    monkeypatch.setattr(ArrayTarget, "has_stream", property(lambda target: target.device != "cpu"))
    yield
    sys.modules.pop(LOADER, None)


def weights() -> dict[str, np.ndarray[Any, Any]]:
    random = np.random.default_rng(0)
    return {
        f"{name}_proj.weight": random.standard_normal((ROWS, COLUMNS)).astype(ml_dtypes.bfloat16)
        for name in "qk"
    }


def loader_of(store: LocalStore) -> Any:
    from blobstore.integrations.vllm.loader import BlobstoreLoader

    settings = {"name": "m", "store": str(store.root)}
    return BlobstoreLoader(SimpleNamespace(model_loader_extra_config=settings, device=None))


def load(store: LocalStore, config: Any, build: Any = None) -> fake_vllm.FusedModel:
    loader = loader_of(store)
    hf_config = SimpleNamespace(architectures=[], get_text_config=lambda: None)
    config.build = build or partial(fake_vllm.FusedModel, ROWS, COLUMNS, torch.bfloat16)
    model: fake_vllm.FusedModel = loader.load_model(config, SimpleNamespace(hf_config=hf_config))
    return model


@pytest.mark.parametrize(
    ("quantize", "ranks", "device"),
    [(None, 1, "cpu:0"), (None, 2, "cpu"), ("int4", 1, "cpu:0"), ("int4", 2, "cpu:0")],
)
def test_weights_arrive_on_the_device_unless_ranks_copy_parts_of_views(
    quantize: str | None,
    ranks: int,
    device: str,
    store: LocalStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = fake_vllm.install(monkeypatch, ranks=ranks)
    source = write_folder(tmp_path / "source", weights())
    options = QuantizeOptions(quantize, policy="uniform") if quantize else None
    blobstore.create(source, "m", store=store, quantize=options)
    opened: list[str] = []

    def watched(*arguments: Any, **options: Any) -> Any:
        opened.append(options["device"])
        return open_model(*arguments, **options)

    monkeypatch.setattr("blobstore.integrations.vllm.settings.open_model", watched)
    model = load(store, config)
    assert opened[-1] == device
    with blobstore.open("m", store=store, framework="torch", dequantize=True) as stored:
        expected = torch.cat([stored["q_proj.weight"], stored["k_proj.weight"]])
    assert torch.equal(model.qkv_proj.weight, expected)


def test_a_tensor_that_is_missing_on_the_device_is_listed(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = fake_vllm.install(monkeypatch)
    tensors = weights()
    del tensors["k_proj.weight"]
    blobstore.create(write_folder(tmp_path / "source", tensors), "m", store=store)
    with pytest.raises(BlobstoreError, match=r"1 tensor missing: '.*qkv_proj.weight"):
        load(store, config)


@pytest.mark.parametrize(("ranks", "device"), [(1, "cpu:0"), (2, "cpu")])
def test_ranks_copy_parts_of_weights_that_vllm_takes_as_they_are_stored(
    ranks: int, device: str, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = fake_vllm.install(monkeypatch, ranks=ranks)
    hf_config = SimpleNamespace(quantization_config={"quant_method": "fp8"})
    found = loader_of(store)._target_device(config, SimpleNamespace(hf_config=hf_config))
    assert found == device


@pytest.mark.parametrize("place", ["parameter", "layer", "layer of ranks", ""])
@pytest.mark.parametrize("is_missing", [False, True])
def test_parameters_may_be_larger_than_a_checkpoint_fills_if_vllm_says_so(
    place: str,
    is_missing: bool,
    store: LocalStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = fake_vllm.install(monkeypatch)
    tensors = weights()
    if is_missing:
        del tensors["k_proj.weight"]
    blobstore.create(write_folder(tmp_path / "source", tensors), "m", store=store)
    model = fake_vllm.FusedModel(ROWS, COLUMNS, torch.bfloat16, padding=8)
    layer: Any = model.qkv_proj
    if place == "parameter":
        layer.weight.weight_loader_numel = 2 * ROWS * COLUMNS
    elif place:
        layer.moe_config = SimpleNamespace(
            hidden_dim=2 * ROWS + 8,
            hidden_dim_unpadded=2 * ROWS,
            intermediate_size_per_partition=COLUMNS,
            intermediate_size_per_partition_unpadded=None,
            tp_shard_with_padding="ranks" in place,
        )
    if not place or (is_missing and "ranks" not in place):
        with pytest.raises(BlobstoreError, match=r"1 tensor missing: 'qkv_proj.weight \("):
            load(store, config, lambda: model)
    else:
        load(store, config, lambda: model)
