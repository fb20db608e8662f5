from __future__ import annotations

import contextlib
import json
import math
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blobstore.core import strict_json

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=10,
)


@pytest.mark.slow
@given(VALUES)
def test_parses_its_own_output(value: object) -> None:
    assert strict_json.loads(strict_json.dumps(value).encode()) == value


@pytest.mark.slow
@given(VALUES)
def test_agrees_with_the_standard_library(value: object) -> None:
    data = json.dumps(value).encode()
    assert strict_json.loads(data) == json.loads(data)


@pytest.mark.slow
@given(st.binary() | TEXTS.map(str.encode))
def test_raises_only_value_errors(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        strict_json.loads(data)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\xff", "not valid UTF-8 at byte 0"),
        (b'{"a":"\xed\xa0\x80"}', "not valid UTF-8 at byte 6"),
        ("1".encode("utf-16"), "not valid UTF-8"),
        (b"\xef\xbb\xbf1", "not valid JSON at character 0"),
        (b"", "not valid JSON at character 0"),
        (b"1 2", "not valid JSON at character 2"),
        (b'{"a":1,}', "not valid JSON"),
        (b"NaN", "not valid JSON: NaN"),
        (b"[Infinity]", "not valid JSON: Infinity"),
        (b"-Infinity", "not valid JSON: -Infinity"),
        (b"1e400", "not valid JSON: 1e400"),
        (b"[-1e400]", "not valid JSON: -1e400"),
        (b"1" * 400 + b".0", "not valid JSON: 1111"),
        (b'{"a":1,"a":2}', "key 'a' occurs twice in one object"),
        (b'[{"x":{"b":1,"c":2,"b":1}}]', "key 'b' occurs twice"),
        (b'{"a":1,"\\u0061":2}', "key 'a' occurs twice"),
        (b'{"":1,"":2}', "key '' occurs twice"),
        (b'"\\ud800"', "a string holds a lone surrogate"),
        (b'{"\\udC00":1}', "a string holds a lone surrogate"),
        (b'"\n"', "not valid JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b"9" * 5000, "Exceeds the limit"),
    ],
)
def test_rejects_text_that_is_not_strict_json(data: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        strict_json.loads(data)


def test_shortens_and_escapes_a_duplicate_key() -> None:
    key = json.dumps("\x1b" + "x" * 70_000)
    with pytest.raises(ValueError, match="occurs twice") as caught:
        strict_json.loads(f"{{{key}:1,{key}:1}}".encode())
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("data", [b"-0", b'[-0,"x"]', b'{"a":-0}'])
def test_does_not_read_minus_zero_as_an_integer(data: bytes) -> None:
    value = strict_json.loads(data)
    while not isinstance(value, float):
        value = value["a"] if isinstance(value, dict) else value[0]
    assert math.copysign(1, value) == -1


def test_accepts_minus_zero_in_a_string_or_another_number() -> None:
    assert strict_json.loads(b'["-0", -07.5e-0]'.replace(b"-07", b"-7")) == ["-0", -7.5]
    value = strict_json.loads(b'["-0", -12, 7, 0]')
    assert value == ["-0", -12, 7, 0]
    assert [type(item) for item in value] == [str, int, int, int]


def test_accepts_the_same_key_in_different_objects() -> None:
    assert strict_json.loads(b'{"a":{"a":[{"a":1},{"a":2}]}}') == {"a": {"a": [{"a": 1}, {"a": 2}]}}


def test_parses_memoryviews_and_surrogate_pairs() -> None:
    assert strict_json.loads(memoryview(b'"\\ud83d\\uDE00 \\\\ud800"')) == "\U0001f600 \\ud800"


def test_writes_the_escapes_of_go() -> None:
    text = "<script>&\u2028\u2029é\x7f\x00\x1f\b\f\n\r\t\"\\/'"
    expected = (
        '"\\u003cscript\\u003e\\u0026\\u2028\\u2029é\x7f\\u0000\\u001f\\b\\f\\n\\r\\t\\"\\\\/\'"'
    )
    assert strict_json.dumps(text) == expected


def test_writes_compactly_and_keeps_the_order() -> None:
    assert (
        strict_json.dumps({"b": [1, 2.5, None, True], "a": {}}) == '{"b":[1,2.5,null,true],"a":{}}'
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_rejects_writing_numbers_that_it_would_not_parse(value: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        strict_json.dumps(value)


@pytest.mark.parametrize(
    "item", ["[],", "{},", '{"":0},', '{"a":"b"},', "1.5,", '"ab",', "[[[[[]]]]],", '"\U0001f600",']
)
def test_a_document_that_takes_much_memory_is_refused_before_it_is_parsed(item: str) -> None:
    text = f"[{item * 1000}0]"
    data, expected = text.encode(), json.loads(text)
    with pytest.raises(ValueError, match="^it would take more than 0 MiB of memory$"):
        strict_json.loads(data, max_memory=len(data) * 3)
    tracemalloc.start()
    try:
        found = strict_json.loads(data, max_memory=2**20)
        assert tracemalloc.get_traced_memory()[1] < strict_json._memory(text)
    finally:
        tracemalloc.stop()
    assert found == expected


@pytest.mark.parametrize("name", ["model.layers.weight", "\U0001f600"])
def test_a_manifest_of_200_000_layers_is_far_from_the_limit_of_memory(name: str) -> None:
    layer = {
        "mediaType": "application/vnd.ollama.image.tensor",
        "digest": f"sha256:{'0' * 64}",
        "size": 10**9,
        "name": name,
    }
    few = strict_json._memory(json.dumps([layer] * 1000, ensure_ascii=False))
    assert few * 200 < strict_json.MAX_MEMORY


# Elements, one at a time


@pytest.mark.slow
@given(st.lists(VALUES), st.sampled_from([None, 1]))
def test_elements_are_those_of_the_array(values: list[object], indent: int | None) -> None:
    assert list(strict_json.elements(json.dumps(values, indent=indent).encode())) == values


@pytest.mark.parametrize("data", [b"[]", b" [ ] \n", b"\xef\xbb\xbf[ ]"])
def test_an_empty_array_has_no_elements(data: bytes) -> None:
    assert list(strict_json.elements(data)) == []


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b'{"a":1}',
        b"1",
        b"[",
        b"[1",
        b"[1,",
        b"[1,]",
        b"[,]",
        b"[1 2]",
        b"[1]]",
        b"[1]x",
        b"\xff",
        b"[" * 100000,
        b"[" + b'{"a":' * 100000,
    ],
)
def test_other_text_has_no_elements(data: bytes) -> None:
    with pytest.raises(ValueError, match=".+"):
        list(strict_json.elements(data))


def test_elements_are_parsed_when_they_are_asked_for() -> None:
    found = strict_json.elements(b"[1,{},x")
    assert next(found) == 1
    assert next(found) == {}
    with pytest.raises(ValueError, match=".+"):
        next(found)


def test_pieces_of_a_text_take_the_memory_of_the_whole() -> None:
    text = b'[{"a": [1, 2]}, {"b": "c"}]' * 10
    pieces = [text[begin : begin + 7] for begin in range(0, len(text), 7)]
    assert sum(map(strict_json.memory_of, pieces)) == strict_json.memory_of(text)
    assert strict_json.memory_of(text) > 10 * len(text)
