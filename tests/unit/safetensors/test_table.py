"""Headers parsed column by column: the same as those parsed value by value."""

from __future__ import annotations

import json
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blobstore.core.tensor import DType, TensorSpec
from blobstore.errors import InvalidHeader
from blobstore.safetensors import safe_open
from blobstore.safetensors import table as tables
from blobstore.safetensors.header import encode_file_header, in_file_order, parse_header
from blobstore.safetensors.numpy import save
from blobstore.safetensors.table import _parse_columns, parse_table
from tests.support.samples import samples

TENSOR = '"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}'
OTHER = '"b":{"dtype":"U8","shape":[2,2],"data_offsets":[4,8]}'
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=9)


def agree(text: str | bytes, file_size: int) -> bool:
    """Compare both parsers, and return whether the columns were parsed."""
    raw = text.encode() if isinstance(text, str) else text
    quick = _parse_columns(raw, file_size)
    try:
        header = parse_header(raw, file_size)
    except InvalidHeader as error:
        assert quick is None
        with pytest.raises(InvalidHeader) as other:
            parse_table(raw, file_size)
        assert str(other.value) == str(error)
        return False
    table = parse_table(raw, file_size)
    assert quick in (None, table)
    assert list(table.names) == list(header.tensors)
    assert {name: table.entry(name) for name in table.names} == header.tensors
    assert table.metadata == (header.metadata if header.has_metadata else None)
    assert table.data_start == header.data_start
    starts = [header.data_start + entry.begin for entry in header.tensors.values()]
    assert [begin for _, _, begin in table.rows()] == starts
    return quick is not None


def agree_on(text: str, data: int = 8) -> bool:
    return agree(text, 8 + len(text.encode()) + data)


@pytest.mark.slow
@settings(max_examples=samples(1000), deadline=None)
@given(
    st.dictionaries(
        NAMES.filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(list(DType)), st.lists(st.integers(0, 9), max_size=3)),
        max_size=6,
    ),
    st.one_of(st.none(), st.dictionaries(NAMES, NAMES, max_size=3)),
)
def test_headers_of_the_writer_are_parsed_alike(found: Any, metadata: Any) -> None:
    specs = in_file_order(
        TensorSpec(name, kind, (8, *dims)) for name, (kind, dims) in found.items()
    )
    start = encode_file_header(specs, metadata)

    is_quick = agree(start[8:], len(start) + sum(spec.nbytes for spec in specs))

    names = "".join(spec.name for spec in specs)
    has_escapes = any(ord(char) < 32 or char in '"\\' for char in names)
    assert is_quick == (bool(specs) and not has_escapes)


@pytest.mark.slow
@settings(max_examples=samples(2000), deadline=None)
@given(st.data())
def test_altered_headers_are_parsed_alike(data: st.DataObject) -> None:
    text = bytearray(f'{{"__metadata__":{{"x":"y"}},{TENSOR},{OTHER}}}  '.encode())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at : at + data.draw(st.integers(0, 2))] = data.draw(
            st.sampled_from(
                [b"", b'"', b"}", b"{", b",", b":", b"0", b"4", b" ", b"\\", b"-", b"\n"]
            )
        )

    agree(bytes(text), 8 + len(text) + data.draw(st.sampled_from([8, 7, 4, 0])))


@pytest.mark.parametrize(
    "text",
    [
        f"{{{TENSOR},{TENSOR}}}",
        f"{{{TENSOR},{OTHER}}}x",
        f"{{{TENSOR},{OTHER},}}",
        f"{{{TENSOR} {OTHER}}}",
        f"{{{TENSOR},{OTHER}",
        f" {{{TENSOR},{OTHER}}}",
        f"{{{TENSOR},{OTHER}}}".replace("[4]", "[04]"),
        f"{{{TENSOR},{OTHER}}}".replace("[4]", "[4.0]"),
        f"{{{TENSOR},{OTHER}}}".replace("[4]", "[-4]"),
        f"{{{TENSOR},{OTHER}}}".replace("[4,8]", "[5,9]"),
        f"{{{TENSOR},{OTHER}}}".replace("[4,8]", "[3,7]"),
        f"{{{TENSOR},{OTHER}}}".replace("U8", "u8"),
        f"{{{TENSOR},{OTHER}}}".replace('"b"', '"__metadata__"'),
        f"{{{TENSOR},{OTHER}}}".replace('"b"', '"\x01"'),
        f"{{{TENSOR},{OTHER}}}".replace('"b"', '"\\ud800"'),
        f'{{"__metadata__":{{"x":1}},{TENSOR},{OTHER}}}',
        f'{{"__metadata__":{{"x":"1","x":"2"}},"__metadata__":{{}},{TENSOR},{OTHER}}}',
        f'{{"__metadata__":[],{TENSOR},{OTHER}}}',
        '{"a":{"dtype":"U8","shape":[9223372036854775808,2],"data_offsets":[0,0]}}',
        '{"a":{"dtype":"F4","shape":[3],"data_offsets":[0,1]}}',
    ],
)
def test_a_broken_header_is_not_parsed(text: str) -> None:
    assert not agree_on(text)
    with pytest.raises(InvalidHeader):
        parse_table(text.encode(), 16 + len(text.encode()))


@pytest.mark.parametrize(
    "text",
    [
        f"{{{OTHER},{TENSOR}}}",
        json.dumps(json.loads(f"{{{TENSOR},{OTHER}}}"), indent=1),
        f'{{{TENSOR},{OTHER},"__metadata__":{{}}}}',
        f'{{"__metadata__":null,{TENSOR},{OTHER}}}',
        f"{{{TENSOR},{OTHER}}}".replace('"b"', '"\\u0062"'),
        f"{{{TENSOR},{OTHER}}}".replace('"shape"', '"more":1,"shape"'),
    ],
)
def test_other_forms_are_parsed_value_by_value(text: str) -> None:
    agree_on(text)
    assert parse_table(text.encode(), 16 + len(text.encode())).names.keys() == {"a", "b"}


def test_metadata_that_no_parser_should_see_is_refused_cleanly() -> None:
    for value, message in (
        (f"{'[' * 10**5}{']' * 10**5}", "nested too deeply"),
        (f"[{'[],' * 10**6}0]", "MiB of memory"),
        (f'{{"a":[{"{}," * 10**6}0]}}', "MiB of memory"),
    ):
        text = f'{{"__metadata__":{value},{TENSOR}}}'.encode()
        tracemalloc.start()
        try:
            with pytest.raises(InvalidHeader, match=message):
                parse_table(text, 10**9)
            assert tracemalloc.get_traced_memory()[1] < 10 * len(text)
        finally:
            tracemalloc.stop()


LONG = (
    "{"
    + ",".join(
        f'"{i:09}":{{"dtype":"U8","shape":[1],"data_offsets":[{i},{i + 1}]}}' for i in range(200)
    )
    + "}"
)


@pytest.fixture
def recent(monkeypatch: pytest.MonkeyPatch) -> dict[bytes, tables.Table]:
    found: dict[bytes, tables.Table] = {}
    monkeypatch.setattr(tables, "_recent", found)
    return found


def test_a_header_is_remembered_by_its_bytes(recent: dict[bytes, tables.Table]) -> None:
    size = 8 + len(LONG) + 200
    found = parse_table(LONG.encode(), size)

    assert parse_table(bytes(bytearray(LONG.encode())), size) is found
    other = LONG.replace("000000007", "00000000x").encode()
    assert "00000000x" in parse_table(other, size).names
    assert list(recent) == [LONG.encode(), other]


def test_a_caller_cannot_change_a_remembered_header() -> None:
    found = save({f"{i:09}": np.zeros(1, np.uint8) for i in range(200)}, {"a": "b"})
    for _ in range(2):
        with safe_open(found, "numpy") as file:
            assert len(file) == 200
            metadata = file.metadata()
            assert metadata == {"a": "b"}
            metadata["a"] = "changed"
            file.keys().clear()
            file.offset_keys().clear()


@pytest.mark.parametrize("more", [-1, 1])
def test_a_remembered_header_must_fit_the_file(
    recent: dict[bytes, tables.Table], more: int
) -> None:
    size = 8 + len(LONG) + 200
    parse_table(LONG.encode(), size)

    with pytest.raises(InvalidHeader) as error:
        parse_table(LONG.encode(), size + more)
    recent.clear()
    with pytest.raises(InvalidHeader) as first:
        parse_table(LONG.encode(), size + more)
    assert str(error.value) == str(first.value)


def test_small_headers_are_not_remembered(recent: dict[bytes, tables.Table]) -> None:
    assert agree_on(f"{{{TENSOR},{OTHER}}}")
    assert not recent


def test_the_oldest_headers_are_forgotten(
    recent: dict[bytes, tables.Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "_REMEMBERED", 2 * len(LONG))
    texts = [LONG.replace("000000007", f"00000000{char}").encode() for char in "abc"]
    for index in (0, 1, 0, 2):
        parse_table(texts[index], 8 + len(LONG) + 200)

    assert list(recent) == [texts[0], texts[2]]


@pytest.mark.slow
def test_threads_may_parse_headers_at_once(
    recent: dict[bytes, tables.Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "_REMEMBERED", 3 * len(LONG))
    texts = [LONG.replace("000000007", f"00000000{char}").encode() for char in "abcdefgh"]

    def parse(number: int) -> list[str]:
        return list(parse_table(texts[number % 8], 8 + len(LONG) + 200).names)

    with ThreadPoolExecutor(8) as pool:
        for number, names in enumerate(pool.map(parse, range(800))):
            assert f"00000000{'abcdefgh'[number % 8]}" in names
    assert len(recent) <= 3


def test_no_tensor_shares_a_range_with_another() -> None:
    empty = '"e":{"dtype":"F32","shape":[0,7],"data_offsets":[4,4]}'

    assert agree_on(f"{{{TENSOR},{empty},{OTHER}}}")
