from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from blobstore.core.digest import Digest
from blobstore.manifests.reference import Reference
from blobstore.operations.compare.compare import compare_models
from blobstore.operations.create.create import create
from blobstore.pages import weight_statistics
from blobstore.pages.weight_statistics import histogram, measure_model
from blobstore.planning.plan import QuantizeOptions
from blobstore.store.local import LocalStore
from tests.support.converted import write_converted
from tests.support.models import quantizable_tensors, write_folder

PLAIN, INT8 = Reference.parse("plain"), Reference.parse("plain:int8")


@pytest.fixture
def quantized(store: LocalStore, tmp_path: Path) -> LocalStore:
    folder = write_folder(tmp_path / "plain", quantizable_tensors())
    create(folder, "plain", store=store)
    create(folder, "plain:int8", quantize=QuantizeOptions("int8"), store=store)
    return store


@pytest.mark.slow
def test_errors_are_those_of_compare(quantized: LocalStore) -> None:
    found = measure_model(quantized, INT8, PLAIN)

    compared = compare_models("plain:int8", "plain", store=quantized)
    errors = {tensor.name: tensor.relative_error for tensor in compared.tensors}
    assert {name: item["relative_error"] for name, item in found.items()} == errors
    assert any(errors.values())


@pytest.mark.slow
def test_histograms_count_the_values_of_a_tensor(quantized: LocalStore) -> None:
    found = measure_model(quantized, PLAIN, None)

    for name, values in quantizable_tensors().items():
        low, high, counts = found[name]["values"]
        assert (low, high) == pytest.approx((float(values.min()), float(values.max())))
        assert sum(counts) == values.size
        assert "errors" not in found[name]


def test_differences_are_measured_where_the_blobs_differ(quantized: LocalStore) -> None:
    found = measure_model(quantized, INT8, PLAIN)

    changed = {name for name, item in found.items() if item["relative_error"]}
    assert changed == {name for name, item in found.items() if "errors" in item} != set()


def test_large_tensors_are_sampled_evenly(
    quantized: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_statistics, "_SAMPLE", 100)

    found = measure_model(quantized, PLAIN, None)
    for name, values in quantizable_tensors().items():
        step = max(values.size // 100, 1)
        assert found[name]["values"] == histogram(values.reshape(-1)[::step].astype(np.float64))


@pytest.mark.slow
def test_a_measurement_is_read_from_the_cache(
    quantized: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = measure_model(quantized, INT8, PLAIN)
    monkeypatch.setattr(weight_statistics, "_measure", None)  # it is not made again

    assert measure_model(quantized, INT8, PLAIN) == first


@pytest.mark.slow
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"x\n{}",
        b"[1]",
        b'{"a": {"values": [1, 2, [3]]}}',
        b'{"a": {"snr_db": "x"}}',
        b'{"a": {"snr_db": 1' + b"0" * 400 + b"}}",
    ],
)
def test_a_cache_that_was_altered_is_ignored(quantized: LocalStore, content: bytes) -> None:
    first = measure_model(quantized, INT8, PLAIN)
    entries = sorted(quantized.folder("headers").iterdir(), key=lambda path: path.stat().st_mtime)
    checksum = f"{Digest.of(content)}\n".encode()
    for entry in entries:
        entry.write_bytes(checksum + content)

    assert measure_model(quantized, INT8, PLAIN) == first


def test_values_that_are_not_finite_are_in_no_bin() -> None:
    found = histogram(np.array([1.0, np.nan, np.inf, 2.0]))

    assert found is not None
    assert found[:2] == [1.0, 2.0]
    assert sum(found[2]) == 2
    assert histogram(np.array([np.nan])) is None


def test_a_gguf_model_is_measured_under_its_own_names(store: LocalStore, tmp_path: Path) -> None:
    arrays = {"model.norm.weight": np.ones(64, np.float32)}
    create(write_folder(tmp_path / "plain", arrays), "plain", store=store)
    create(write_converted(tmp_path / "m.gguf", arrays, "qwen2"), "plain:gguf", store=store)
    found = measure_model(store, Reference.parse("plain:gguf"), PLAIN)
    assert found.keys() == {"output_norm.weight"}
    assert "values" in found["output_norm.weight"]
    assert found["output_norm.weight"]["relative_error"] == 0


def test_errors_of_the_experts_of_a_gguf_tensor_are_one(store: LocalStore, tmp_path: Path) -> None:
    names = [f"model.layers.0.mlp.experts.{place}.up_proj.weight" for place in range(3)]
    arrays = {name: np.full((32, 64), 2.0, np.float32) for name in names}
    create(write_folder(tmp_path / "plain", arrays), "plain", store=store)
    arrays[names[1]] = np.full((32, 64), 4.0, np.float32)
    create(write_converted(tmp_path / "m.gguf", arrays, "qwen3moe"), "plain:gguf", store=store)

    found = measure_model(store, Reference.parse("plain:gguf"), PLAIN)

    assert found.keys() == {"blk.0.ffn_up_exps.weight"}
    assert found["blk.0.ffn_up_exps.weight"]["relative_error"] == pytest.approx((1 / 3) ** 0.5)
    assert found["blk.0.ffn_up_exps.weight"]["max_abs_error"] == 2
