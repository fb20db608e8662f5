from __future__ import annotations

import json
from typing import Any

import pytest

from blobstore.errors import BlobDamaged
from blobstore.manifests.step_record import FlatState, StepRecord, join, stored_name

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
        ({"tensors": {"a": ["a"] * 101}}, "not the record"),
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


def record(**parts: Any) -> StepRecord:
    return StepRecord(**{"model": "", "tensors": {}, "values": {}} | parts)


def values(*paths: tuple[str | int, ...]) -> dict[str, Any]:
    return {str(path): (path, 7) for path in paths}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"tensors": {"w": ("w",)}}, "does not describe a state: .*w"),
        ({"values": values(("a",), ("a", "b"))}, "is in a value"),
        ({"values": values(("a", "b"), ("a",))}, "occurs twice"),
        ({"values": values(("a", 10**12))}, "does not describe"),
        ({"values": values(("a", 0), ("a", "0"))}, "does not describe"),
        (
            {"values": values(("a", "b"), ("a", "c")), "containers": {("a",): {"b": None}}},
            "2 values",
        ),
        ({"values": values(("a", "b")), "containers": {("a",): {"$tuple": [None]}}}, "describe"),
        ({"values": values(("a", 0)), "containers": {("a",): 5}}, "does not describe"),
        ({"values": values(("a", 0)), "containers": {("a",): "s"}}, "does not describe"),
        ({"values": values(("a", "b")), "containers": {("a",): {"$set": ["b"]}}}, "set has values"),
        ({"values": values((0,))}, "describes a list"),
        ({"containers": {("a",): {"$sys": []}}}, "no value of the kind 'sys'"),
    ],
    ids=range(12),
)
def test_a_record_that_does_not_fit_is_damaged(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(BlobDamaged, match=message):
        join(record(**parts), {}, {})


def test_keys_are_those_of_torch() -> None:
    state = {"a": [{"b": 1.5}, [[2.5]]], "c": {0: 3.5}, "d": [["x"], (4.5, "y")]}
    flat = FlatState(state, lambda value: isinstance(value, float), {}, "")
    found = flat.record
    assert flat.tensors == {"a.0.b": 1.5, "a.1.0.0": 2.5, "c.0": 3.5, "d.1.0": 4.5}
    assert found.tensors["d.1.0"] == ("d", 1, 0)
    assert found.values == {"d.0": (("d", 0), ["x"]), "d.1.1": (("d", 1, 1), "y")}
    assert found.containers == {
        ("c",): {"$dict": [[0, None]]},
        ("d", 1): {"$tuple": [None, None]},
    }
    assert join(StepRecord.from_bytes(found.to_bytes()), flat.tensors, {}) == state
