"""What a record says that no program wrote; states that come back are in tests/unit/operations/test_load.py."""

from __future__ import annotations

from typing import Any

import pytest

from blobstore.errors import BlobDamaged
from blobstore.manifests.nested_state import flatten, join
from blobstore.manifests.step_record import StepRecord


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
        ({"values": values(("a",) * 100_000)}, "does not describe"),
        (
            {"values": values(("a", "b"), ("a", "c")), "containers": {("a",): {"b": None}}},
            "2 values",
        ),
        ({"values": values(("a", "b")), "containers": {("a",): {"$tuple": [None]}}}, "describe"),
        ({"values": values(("a", 0)), "containers": {("a",): 5}}, "does not describe"),
        ({"values": values(("a", 0)), "containers": {("a",): "s"}}, "does not describe"),
        ({"containers": {("a",): {"$sys": []}}}, "no value of the kind 'sys'"),
    ],
    ids=range(10),
)
def test_a_record_that_does_not_fit_is_damaged(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(BlobDamaged, match=message):
        join(record(**parts), {}, {})


def test_keys_are_those_of_torch() -> None:
    state = {"a": [{"b": 1.5}, [[2.5]]], "c": {0: 3.5}, "d": [["x"], (4.5, "y")]}
    tensors, found = flatten(state, "", lambda value: isinstance(value, float), {})
    assert tensors == {"a.0.b": 1.5, "a.1.0.0": 2.5, "c.0": 3.5, "d.1.0": 4.5}
    assert found.tensors["d.1.0"] == ("d", 1, 0)
    assert found.values == {"d.0": (("d", 0), ["x"]), "d.1.1": (("d", 1, 1), "y")}
    assert found.containers == {
        ("c",): {"$dict": [[0, None]]},
        ("d", 1): {"$tuple": [None, None]},
    }
    assert join(StepRecord.from_bytes(found.to_bytes()), tensors, {}) == state
