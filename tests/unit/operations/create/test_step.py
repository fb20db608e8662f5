from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import blobstore
from blobstore.core.tensor import DType, TensorSpec
from blobstore.errors import StoreError, UsageError
from blobstore.manifests.reference import Reference
from blobstore.operations.create.step import StepPlan, unread
from blobstore.store.local import LocalStore

SPECS = {
    key: (TensorSpec(key, DType.F32, (2, 3)), unread)
    for key in ("model.b", "model.a", "optimizer.a", "scheduler")
}


def test_a_blob_of_the_model_is_one_of_the_state() -> None:
    step = StepPlan(SPECS, model="model")
    assert step.model is not None
    assert [blob.name for blob in step.model.plan.blobs] == ["a", "b"]
    assert [blob.name for blob in step.blobs] == ["a", "b", "optimizer.a", "scheduler"]
    assert step.keys["a"] == "model.a"


def test_the_name_of_all_of_the_state_comes_first() -> None:
    reference = Reference.parse("run:step-1")
    assert [str(name) for name in StepPlan(SPECS, model="model").names(reference)] == [
        "run:step-1.state",
        "run:step-1",
    ]
    assert StepPlan(SPECS).names(reference) == [reference]


def test_without_a_model_tensors_have_the_names_of_the_state() -> None:
    assert {blob.name for blob in StepPlan(SPECS).blobs} == set(SPECS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "net"}, "no tensors under 'net'"),
        ({"files": {"config.json": b"{}"}}, "which part"),
        ({"metrics": {"loss": "low"}}, "a metric is a number"),
        ({"metrics": {"loss": float("nan")}}, "metrics"),
        ({"metrics": [1.5]}, "metrics are numbers by name, got 'list'"),
        ({"model": "model", "files": {"../x": b""}}, "x"),
    ],
    ids=["model", "files", "text", "nan", "list", "path"],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        StepPlan(SPECS, **options)
    assert str(caught.value)


def test_two_tensors_of_one_name_are_refused() -> None:
    specs = {key: (TensorSpec(key, DType.F32, (1,)), unread) for key in ("model.x", "x")}
    with pytest.raises(UsageError, match=r"'model\.x' and 'x'"):
        StepPlan(specs, model="model")


def test_experts_of_a_layer_are_one_blob() -> None:
    prefix = "model.layers.0.mlp.experts"
    names = [f"model.{prefix}.{index}.up.weight" for index in range(2)]
    tensors = {key: (TensorSpec(key, DType.F32, (1,)), unread) for key in names}
    step = StepPlan(tensors, model="model")
    assert [blob.name for blob in step.blobs] == [prefix]


def test_metrics_are_a_file(tmp_path: Path) -> None:
    step = StepPlan(SPECS, model="model", metrics={"loss": 1.5})
    assert step.model is not None
    (file,) = step.model.source.files
    assert json.loads(file.content or b"") == {"loss": 1.5}
    blobstore.save({"a": np.ones(1)}, "m", files={file.name: file.content or b""}, store=tmp_path)


def test_a_full_disk_names_what_the_step_needs(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalStore, "free_space", lambda _: 10)
    with pytest.raises(StoreError, match=r" 2 MB are needed"):
        blobstore.save({"w": np.zeros(2 * 10**6, np.uint8), "step": 1}, "run:1", store=store)
