from __future__ import annotations

import json
from typing import Any

import pytest

from blobstore.errors import BlobDamaged
from blobstore.manifests.step_record import StepRecord, stored_name

RECORD = StepRecord(
    model="model",
    tensors={"model.w": ("model", "w"), "optimizer.0": ("optimizer", 0)},
    values={"step": (("step",), 7)},
    containers={(): {"$OrderedDict": [["optimizer", None]]}, ("optimizer", 0): {}},
)


def test_comes_back_from_its_bytes() -> None:
    assert StepRecord.from_bytes(RECORD.to_bytes()) == RECORD


def test_tensors_of_the_model_have_the_names_of_the_model() -> None:
    assert stored_name("model.w", "model") == "w"
    assert stored_name("optimizer.model.w", "model") == "optimizer.model.w"
    assert stored_name("model.w", "") == "model.w"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "newer"),
        ({"version": "1"}, "not the record"),
        ({"model": None}, "not the record"),
        ({"tensors": []}, "not the record"),
        ({"tensors": {"a": "b"}}, "not the record"),
        ({"tensors": {"a": [1.5]}}, "not the record"),
        ({"tensors": {"a": []}}, "not the record"),
        ({"values": {"a": {"path": ["a"]}}}, "not the record"),
        ({"values": {"a": 1}}, "not the record"),
        ({"containers": [1]}, "not the record"),
        ({"containers": {"path": []}}, "not the record"),
        ({"containers": [{"path": [None], "value": {}}]}, "not the record"),
    ],
    ids=str,
)
def test_a_malformed_record_is_damaged(change: dict[str, Any], message: str) -> None:
    value = json.loads(RECORD.to_bytes()) | change
    with pytest.raises(BlobDamaged, match=message):
        StepRecord.from_bytes(json.dumps(value).encode())


def test_a_record_that_is_not_json_is_damaged() -> None:
    with pytest.raises(BlobDamaged):
        StepRecord.from_bytes(b"{")
