from __future__ import annotations

import json
from collections import Counter, OrderedDict
from typing import Any

import pytest

from blobstore.errors import BlobDamaged, UsageError
from blobstore.manifests.step_record import (
    StoredName,
    decode_state,
    encode_state,
    nested,
    stored_name,
    take_tensors,
)


def test_tensors_of_the_model_have_the_names_of_the_model() -> None:
    assert stored_name("model.w", "model") == "w"
    assert stored_name("optimizer.model.w", "model") == "optimizer.model.w"
    assert stored_name("model.w", "") == "model.w"


def test_a_state_comes_back_with_its_tensors() -> None:
    state = {
        "milestones": Counter({30: 1}),
        "model": OrderedDict(b=0.5, a=1.5),
        "optimizer": {0: [{"$": 2.5}, {}], "x": ((), (3.5, "y"))},
    }
    taken, tensors = take_tensors(state, lambda value: isinstance(value, float), "model")
    keys = {"model.a": 1.5, "model.b": 0.5, "optimizer.0.0.$": 2.5, "optimizer.x.1.0": 3.5}
    assert tensors == keys
    assert taken["optimizer"]["x"] == ((), (StoredName("optimizer.x.1.0"), "y"))
    stored = {stored_name(key, "model"): value for key, value in tensors.items()}
    found = decode_state(encode_state(taken), stored)
    assert repr(found) == repr(state)


def test_equal_states_have_equal_bytes() -> None:
    assert encode_state({"a": 1, "b": {"d": 2, "c": 3}}) == encode_state(
        {"b": {"c": 3, "d": 2}, "a": 1}, {}
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not valid JSON"),
        (b"[]", "not the state"),
        ({"version": 2}, "version 2 is newer"),
        ({"version": "1", "state": {}}, "not the state"),
        ({"version": 1}, "not the state"),
        ({"version": 1, "state": [{"$tensor": "w"}]}, "it is a list"),
        ({"version": 1, "state": {"$tensor": "w"}}, "it is a float"),
        ({"version": 1, "state": {}}, "it has no tensor 'w'"),
        ({"version": 1, "state": {"a": {"$tensor": "v"}}}, "no value of the kind 'tensor'"),
        ({"version": 1, "state": {"a": {"$tensor": ["w"]}}}, "no value of the kind 'tensor'"),
        ({"version": 1, "state": {"a": {"$sys": []}}}, "no value of the kind 'sys'"),
    ],
    ids=range(11),
)
def test_a_malformed_state_is_damaged(content: Any, message: str) -> None:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    with pytest.raises(BlobDamaged, match=message):
        decode_state(data, {"w": 0.5})


def test_a_state_that_is_nested_too_deeply_is_damaged() -> None:
    data = b'{"version":1,"state":' + b'{"a":' * 5000 + b"1" + b"}" * 5001
    with pytest.raises(BlobDamaged, match="not the state"):
        decode_state(data, {})


def test_paths_lead_to_a_state() -> None:
    paths: list[tuple[tuple[str | int, ...], Any]] = [
        (("a", 1, "b"), 1),
        (("a", 0), {"c": 2}),
        (("d", 2), 3),  # what torch leaves of [[], {}, 3]
        (("e", "0"), 4),
    ]
    assert nested(paths) == {"a": [{"c": 2}, {"b": 1}], "d": {2: 3}, "e": {"0": 4}}


@pytest.mark.parametrize(
    "paths",
    [[("a",), ("a", "b")], [("a", "b"), ("a",)], [("a",), ("a",)], [("a", *range(100))]],
    ids=["through", "before", "twice", "long"],
)
def test_paths_that_lead_to_no_state_are_refused(paths: list[tuple[str | int, ...]]) -> None:
    with pytest.raises(UsageError, match=r"leads to two values|over 100 parts"):
        nested([(path, 7) for path in paths])


def test_a_number_far_behind_is_no_list() -> None:
    assert nested([(("a", 10**12), 7)]) == {"a": {10**12: 7}}
