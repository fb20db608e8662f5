from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

import blobstore
from blobstore.errors import UnsupportedSource
from blobstore.manifests import media_types
from blobstore.operations.export.export import export_model
from blobstore.planning.plan import QuantizeOptions
from blobstore.quantization.formats import FORMATS
from blobstore.quantization.gpt_oss import is_gpt_oss
from blobstore.store.local import LocalStore
from tests.support.models import Arrays, write_folder
from tests.unit.operations.export.folders import add_layers

CONFIG: dict[str, Any] = {"quantization_config": {"quant_method": "mxfp4"}}
NAME = "model.layers.0.mlp.experts.down_proj"
MXFP4 = FORMATS["mxfp4"]


FILES = {"config.json": json.dumps(CONFIG).encode()}


@pytest.fixture
def source(tmp_path: Path, store: LocalStore) -> Path:
    """Create model ``m``; return its folder."""
    random = np.random.default_rng(1)
    tensors: Arrays = {
        f"{NAME}_blocks": random.integers(0, 256, (3, 64, 2, 16), np.uint8),
        f"{NAME}_scales": random.integers(120, 130, (3, 64, 2), np.uint8),
        f"{NAME}_bias": random.standard_normal((3, 64)).astype(ml_dtypes.bfloat16),
    }
    folder = write_folder(tmp_path / "source", tensors, files=FILES)
    blobstore.create(folder, "m", store=store)
    return folder


def test_packed_experts_are_exported_unchanged(
    source: Path, store: LocalStore, tmp_path: Path
) -> None:
    export_model("m", tmp_path / "out", store=store)
    given, back = (load_file(path / "model.safetensors") for path in (source, tmp_path / "out"))
    assert given.keys() == back.keys()
    for name, array in given.items():
        assert back[name].dtype == array.dtype
        assert np.array_equal(back[name], array), name
    config = (tmp_path / "out" / "config.json").read_bytes()
    assert config == (source / "config.json").read_bytes()


def test_dequantized_experts_are_transposed_and_the_config_has_no_quantization(
    source: Path, store: LocalStore, tmp_path: Path
) -> None:
    export_model("m", tmp_path / "out", store=store, dequantize=True)
    given, back = (load_file(path / "model.safetensors") for path in (source, tmp_path / "out"))
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    values = np.concatenate([values, -values])
    blocks = given[f"{NAME}_blocks"]
    numbers: Any = values[np.stack([blocks & 15, blocks >> 4], -1)].reshape(3, 64, 2, 32)
    scales = np.ldexp(np.float32(1), given[f"{NAME}_scales"].astype(np.int32) - 127)
    numbers = (numbers * scales[..., None]).reshape(3, 64, 64)
    assert np.array_equal(back[NAME].astype(np.float32), numbers.transpose(0, 2, 1))
    assert not np.array_equal(numbers, numbers.transpose(0, 2, 1))
    assert back.keys() == {NAME, f"{NAME}_bias"}
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_stacked_experts_are_split_before_they_are_transposed(
    source: Path, store: LocalStore, tmp_path: Path
) -> None:
    export_model("m", tmp_path / "whole", store=store, dequantize=True)
    whole = load_file(tmp_path / "whole" / "model.safetensors")[NAME]
    add_layers(store, (media_types.STACKS, "", json.dumps({NAME: ["a", "b", "c"]}).encode()))
    export_model("m", tmp_path / "parts", store=store, dequantize=True)
    parts = load_file(tmp_path / "parts" / "model.safetensors")
    for place, name in enumerate("abc"):
        assert np.array_equal(parts[name], whole[place])


def test_rejects_quantizing_plain_weights_with_the_config_of_gpt_oss(
    store: LocalStore, tmp_path: Path
) -> None:
    tensors: Arrays = {NAME: np.ones((3, 64, 64), np.float16)}
    folder = write_folder(tmp_path / "plain", tensors, files=FILES)
    with pytest.raises(
        UnsupportedSource, match="quant_method 'mxfp4', but no tensor has that form"
    ):
        blobstore.create(folder, "m", store=store, quantize=QuantizeOptions("mxfp4"))


@pytest.mark.parametrize(
    ("config", "weight"),
    [
        ([1], (NAME, (3, 64, 64), MXFP4)),
        ({}, (NAME, (3, 64, 64), MXFP4)),
        (CONFIG | {"quantization": {"bits": 4, "mode": "mxfp4"}}, (NAME, (3, 64, 64), MXFP4)),
        (CONFIG, (f"{NAME}.weight", (3, 64, 64), MXFP4)),
        (CONFIG, (NAME, (3, 64, 64), FORMATS["int4"])),
        (CONFIG, (NAME, (3, 64, 64), None)),
        (CONFIG, (NAME, (64,), MXFP4)),
        (CONFIG, (NAME, (3, 0, 64), MXFP4)),
    ],
)
def test_other_configs_and_weights_are_not_gpt_oss(config: Any, weight: Any) -> None:
    assert is_gpt_oss(CONFIG, [(NAME, (3, 64, 64), MXFP4)])
    assert not is_gpt_oss(config, [weight])


def test_a_model_without_packed_weights_is_not_gpt_oss() -> None:
    assert not is_gpt_oss(CONFIG, [])
