from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from enum import IntEnum
from typing import Any

import numpy as np
import pytest

from blobstore.core import strict_json
from blobstore.errors import UnsupportedSource
from blobstore.manifests import plain_values
from blobstore.manifests.plain_values import decode, encode

VALUES: list[Any] = [
    None,
    True,
    0,
    -(2**63),
    2**64,
    -(2**200),
    10**5000,
    1.0,
    -0.0,
    0.1,
    5e-324,
    math.inf,
    -math.inf,
    1 - 2j,
    "",
    "Zoë <&>\u2028",
    b"\x00\xff",
    [],
    [1, [2.0, "three"], None],
    (),
    (1, (2, [3])),
    {1, 2},
    frozenset({"a"}),
    {},
    {"a": {"b": 1}},
    {"$tuple": [1], "$": 2},
    {1: "one", (2, 3): [4], None: 5},
    OrderedDict([("b", 1), ("a", 2)]),
    Counter({30: 2, 60: 1}),
    {"betas": (0.9, 0.95), "lr": 1e-3, "params": ["w", "b"]},
]


def travelled(value: Any) -> Any:
    """Return what a value is after it was written and read as strict JSON."""
    written = strict_json.dumps(encode(value, "v")).encode()
    return decode(strict_json.loads(written))


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_values_come_back_with_their_types(value: Any) -> None:
    found = travelled(value)
    assert found == value
    assert type(found) is type(value)
    if type(value) is not int:
        assert repr(found) == repr(value)  # also of what is inside, and the sign of zero


def test_what_is_not_a_number_comes_back() -> None:
    assert math.isnan(travelled(math.nan))


@pytest.mark.parametrize("dtype", ["<u4", ">f8", "|b1", "<c16", "<i8"])
def test_arrays_and_numbers_of_numpy_come_back(dtype: str) -> None:
    array = np.arange(6).astype(dtype).reshape(2, 3)
    found = travelled({"state": array, "one": array[1, 2]})
    assert found["state"].dtype == array.dtype
    assert np.array_equal(found["state"], array)
    assert found["state"].flags.writeable
    assert type(found["one"]) is type(array[1, 2])
    assert found["one"] == array[1, 2]


def test_equal_sets_have_equal_bytes() -> None:
    one, other = {"a", "b", "c"}, {"c", "a", "b"}
    assert encode(one, "v") == encode(other, "v")


class Colour(IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "place", "kind"),
    [
        (object(), "v", "builtins.object"),
        ({"a": [0, Colour.RED]}, "v.a[1]", "Colour"),
        ({"a": defaultdict(int)}, "v.a", "collections.defaultdict"),
        (np.array([object()]), "v", "numpy.ndarray"),
        (np.array(["2020"], "M8[Y]"), "v", "numpy.ndarray"),
        (np.zeros((1, 1)).view(np.matrix), "v", "numpy.matrix"),
        ("\ud800", "v", "not Unicode"),
        (print, "v", "builtin_function_or_method"),
    ],
    ids=["object", "enum", "defaultdict", "objects", "dates", "matrix", "surrogate", "function"],
)
def test_other_values_are_refused_by_their_place(value: Any, place: str, kind: str) -> None:
    with pytest.raises(UnsupportedSource) as caught:
        encode(value, "v")
    assert place in caught.value.message
    assert kind in caught.value.message


@pytest.mark.parametrize(
    "value",
    [
        {"$eval": "1"},
        {"$int": "x"},
        {"$int": 5},
        {"$int": []},
        {"$tuple": 1},
        {"$bytes": "?"},
        {"$float": "1"},
        {"$dict": [[1]]},
        {"$dict": [[[], 1]]},
        {"$array": ["|O", [1], "AAAA"]},
        {"$array": ["<u4", [2**40], "AAAA"]},
        {"$array": ["<u4", [-5], ""]},
        {"$array": "<u4"},
        {"$tuple": [], "more": 1},
        {"more": 1, "$tuple": []},
        [{"$complex": [1, "a"]}],
        {"$complex": [10**400, 0]},
    ],
    ids=str,
)
def test_other_json_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="value"):
        decode(value)


@pytest.mark.parametrize("name", ["set", "frozenset", "dict", "OrderedDict", "Counter"])
def test_keys_that_are_chosen_to_collide_are_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain_values, "_SECONDS", 0.01)
    keys = [{"$int": hex(number * (2**61 - 1))} for number in range(1, 20_000)]
    with pytest.raises(ValueError, match="the keys collide"):
        decode({f"${name}": keys if "set" in name else [[key, 0] for key in keys]}, {})


def test_libraries_have_kinds_of_their_own() -> None:
    found = encode([range(3)], "v", {range: ("range", lambda one: [one.start, one.stop])})
    assert decode(found, {"range": lambda ends: range(*ends)}) == [range(3)]
