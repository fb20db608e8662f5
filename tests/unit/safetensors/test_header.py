"""Every rule of the format, each broken on its own."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
import safetensors
import safetensors.numpy
from hypothesis import example, given, settings
from hypothesis import strategies as st

from blobstore.core.tensor import DTYPES, DType, TensorSpec
from blobstore.errors import InvalidHeader
from blobstore.safetensors import header as module
from blobstore.safetensors.header import (
    MAX_HEADER_SIZE,
    Header,
    TensorEntry,
    encode_header,
    header_size,
    parse_header,
    parse_start,
)
from tests.support.dtypes import IN_REFERENCE
from tests.support.samples import samples

U64 = 2**64 - 1


def parse(text: bytes | str, data: int) -> Header:
    """Parse a header in front of ``data`` bytes."""
    text = text.encode() if isinstance(text, str) else text
    return judge(len(text).to_bytes(8, "little") + text, 8 + len(text) + data)


def judge(start: bytes, file_size: int) -> Header:
    """Parse the header in ``start``; the short cut must not accept or tell anything else."""
    quick = parse_start(start, file_size)
    try:
        header = parse_header(start[8 : 8 + header_size(start, file_size)], file_size)
    except InvalidHeader:
        assert quick is None
        raise
    assert quick in (None, header)
    return header


def entry(dtype: str = "U8", shape: Any = (4,), offsets: Any = (0, 4), **more: Any) -> Any:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


def top(**entries: Any) -> str:
    return json.dumps(entries)


def spec(name: str, dtype: DType, *shape: int) -> TensorSpec:
    return TensorSpec(name, dtype, shape)


SOUND = top(a=entry())
TENSOR = '"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}'


# The extent: the length word, the header, the data


@pytest.mark.parametrize("size", range(8))
def test_rejects_a_file_too_short_for_the_length(size: int) -> None:
    with pytest.raises(InvalidHeader, match=f"too short for a safetensors file: {size} bytes"):
        header_size(bytes(size), size)


def test_rejects_a_prefix_that_was_cut_off() -> None:
    with pytest.raises(InvalidHeader, match="too short"):
        header_size(bytes(7), 100)


def test_takes_a_header_of_exactly_the_limit() -> None:
    prefix = MAX_HEADER_SIZE.to_bytes(8, "little")
    assert header_size(prefix, 8 + MAX_HEADER_SIZE) == MAX_HEADER_SIZE == 100_000_000


@pytest.mark.parametrize("size", [MAX_HEADER_SIZE + 1, 2**32, 2**62, U64])
def test_rejects_a_header_over_the_limit(size: int) -> None:
    with pytest.raises(InvalidHeader, match=f"header of {size} bytes is over the limit"):
        header_size(size.to_bytes(8, "little"), 8 + size)


def test_rejects_a_header_longer_than_its_file() -> None:
    prefix = (93).to_bytes(8, "little")
    assert header_size(prefix, 101) == 93
    with pytest.raises(InvalidHeader, match="header of 93 bytes does not fit in a file of 100"):
        header_size(prefix, 100)


@pytest.mark.parametrize(
    ("text", "data", "message"),
    [
        ("", 0, "does not begin with '{'"),
        (SOUND, 5, "data has trailing bytes: .* describes 4 .* has 5"),
        (SOUND, 3, "data is cut short: .* describes 4 .* has 3"),
        ("{}", 1, "trailing bytes"),
    ],
)
def test_rejects_data_of_another_size_than_the_header_describes(
    text: str, data: int, message: str
) -> None:
    with pytest.raises(InvalidHeader, match=message):
        parse(text, data)


def test_says_where_the_data_begins() -> None:
    assert parse(SOUND + "   ", 4).data_start == 8 + len(SOUND) + 3


# The text


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (b"\xef\xbb\xbf{}", "byte order mark"),
        ("{}".encode("utf-16"), "UTF-16"),
        (b" {}", "a space before"),
        (b"\n{}", "a line feed before"),
        (b"[]", "a list"),
        (b'"{}"', "a text"),
        (b"{}\n", "a line feed after"),
        (b"{}\0", "a NUL after"),
        (b"{}\t ", "a tab after"),
        (b"{}{}", "two objects"),
        (b"{} {}", "two objects in the padding"),
        (b"{},{}", "more than one value"),
        (b"{", "an open brace"),
        (b"{}}", "a brace too many"),
        (b'{"x":"\xc0\xaf"}', "an overlong form"),
        (b'{"x":"\xed\xa0\x80"}', "an encoded surrogate"),
        (b'{"x":"\xff"}', "no UTF-8"),
        (b'{"x":"\xf0\x9f\x98"}', "UTF-8 cut short"),
        (b"{'x':1}", "single quotes"),
        (b'{"__metadata__":{},}', "a trailing comma"),
        (b'{/**/"__metadata__":{}}', "a comment"),
        (b'{"__metadata__":{"a":"\x01"}}', "a raw control character"),
        (b'{"__metadata__":{"a":"\x1f"}}', "a raw control character"),
        (b'{"__metadata__":{"a":"\\x41"}}', "an unknown escape"),
        (b'{"__metadata__":{"a":"\\ud800"}}', "a lone high surrogate"),
        (b'{"__metadata__":{"a":"\\udc00"}}', "a lone low surrogate"),
        (b'{"__metadata__":{"a":"\\udc00\\ud800"}}', "surrogates the wrong way round"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_rejects_text_that_is_not_one_json_object(text: bytes, what: str) -> None:
    with pytest.raises(InvalidHeader):
        parse(text, 0)


@pytest.mark.parametrize("where", ["name", "metadata key", "metadata value", "unread field"])
def test_rejects_a_lone_surrogate_anywhere(where: str) -> None:
    text = {
        "name": TENSOR.replace('"a"', '"\\uD9ff"'),
        "metadata key": TENSOR + ',"__metadata__":{"\\udfff":""}',
        "metadata value": TENSOR + ',"__metadata__":{"":"\\udc00"}',
        "unread field": TENSOR.replace('{"d', '{"x":["\\ud800"],"d'),
    }[where]
    with pytest.raises(InvalidHeader, match="lone surrogate"):
        parse("{" + text + "}", 4)


def test_takes_a_pair_of_surrogates() -> None:
    text = "{" + TENSOR.replace('"a"', '"\\ud83d\\ude00"') + "}"
    assert list(parse(text, 4).tensors) == ["\U0001f600"]


@pytest.mark.parametrize(
    "number", ["NaN", "Infinity", "-Infinity", "01", "+1", "1.", ".5", "0x1", "1e99999", "-1e400"]
)
def test_rejects_invalid_json_numbers_in_unused_fields(number: str) -> None:
    text = "{" + TENSOR.replace('{"d', '{"x":' + number + ',"d') + "}"
    with pytest.raises(InvalidHeader, match="not valid JSON"):
        parse(text, 4)


def test_ignores_unknown_fields() -> None:
    header = parse(top(a=entry(extra={"deep": [1.5, None, -0, 10**200]})), 4)
    assert header.tensors["a"].spec == spec("a", DType.U8, 4)


@pytest.mark.parametrize("depth", [10_000, 1_000_000])
@pytest.mark.parametrize("pair", ["[]", "{}"])
def test_rejects_brackets_without_end_cleanly(depth: int, pair: str) -> None:
    opening = "[" if pair == "[]" else '{"a":'
    text = '{"x":' + opening * depth + "1" + pair[1] * depth + "}"
    message = "nested too deeply" if depth < 10**6 else "MiB of memory"
    with pytest.raises(InvalidHeader, match=message):
        parse(text, 0)


@pytest.mark.slow
@pytest.mark.parametrize("field", ["dtype", "shape", "data_offsets", "extra"])
def test_only_rejects_at_every_depth_that_the_parser_can_go(field: str) -> None:
    # Near the interpreter's limit the text can be parsed, but not be shown or encoded again.
    for depth in range(850, 1010, 1):
        value = "[" * depth + '"\\ud83d\\ude00"' + "]" * depth
        fields = {"dtype": '"U8"', "shape": "[4]", "data_offsets": "[0,4]", field: value}
        text = '{"a":{' + ",".join(f'"{key}":{item}' for key, item in fields.items()) + "}}"
        try:
            parse(text, 4)
        except InvalidHeader:
            continue
        assert field == "extra"


# Keys


TWICE = {
    "tensors": "{" + TENSOR + "," + TENSOR + "}",
    "one escaped": "{" + TENSOR + ',"\\u0061":{"dtype":"U8","shape":[0],"data_offsets":[4,4]}}',
    "metadata": "{" + TENSOR + ',"__metadata__":{},"__metadata__":{}}',
    "null metadata": "{" + TENSOR + ',"__metadata__":null,"__metadata__":null}',
    "metadata keys": "{" + TENSOR + ',"__metadata__":{"k":"v","k":"v"}}',
    "dtype": "{" + TENSOR.replace('{"d', '{"dtype":"U8","d') + "}",
    "shape": "{" + TENSOR.replace('{"d', '{"shape":[4],"d') + "}",
    "data_offsets": "{" + TENSOR.replace('{"d', '{"data_offsets":[0,4],"d') + "}",
    "unknown field": "{" + TENSOR.replace('{"d', '{"x":1,"x":1,"d') + "}",
    "nested unknown field": "{" + TENSOR.replace('{"d', '{"x":{"y":1,"y":1},"d') + "}",
}


@pytest.mark.parametrize("text", TWICE.values(), ids=TWICE)
def test_rejects_a_key_that_occurs_twice(text: str) -> None:
    with pytest.raises(InvalidHeader, match="occurs twice"):
        parse(text, 4)


@pytest.mark.parametrize(
    "name",
    ["", "\x00", "\x7f", "\x85", "../x", "/etc/passwd", "a\nb", "é", "\u202e", "x" * 10**6, "data"],
)
def test_any_text_is_a_name(name: str) -> None:
    assert list(parse(json.dumps({name: entry()}), 4).tensors) == [name]


# Metadata


@pytest.mark.parametrize(
    "value", ["[]", '""', "0", "false", '{"a":1}', '{"a":null}', '{"a":["b"]}', '{"a":{}}']
)
def test_rejects_metadata_that_is_not_a_map_of_strings(value: str) -> None:
    with pytest.raises(InvalidHeader, match="__metadata__ is not a map of strings"):
        parse('{"__metadata__":' + value + "," + TENSOR + "}", 4)


@pytest.mark.parametrize("value", ["null", "{}"])
@pytest.mark.parametrize("place", ["first", "last"])
def test_takes_metadata_that_is_empty(value: str, place: str) -> None:
    metadata = '"__metadata__":' + value
    members = [metadata, TENSOR] if place == "first" else [TENSOR, metadata]
    header = parse("{" + ",".join(members) + "}", 4)
    assert header.metadata == {}
    assert list(header.tensors) == ["a"]


def test_keeps_metadata() -> None:
    header = parse("{" + TENSOR + ',"__metadata__":{"b":"\\u0000","":"é"}}', 4)
    assert header.metadata == {"b": "\0", "": "é"}


def test_an_entry_in_place_of_metadata_is_no_tensor() -> None:
    # The plain form of a header, but for the reserved name.
    text = '{"__metadata__":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
    with pytest.raises(InvalidHeader, match="not a map of strings"):
        parse(text, 4)


@pytest.mark.parametrize("padding", [0, 7])
def test_the_short_cut_is_taken_for_a_canonical_header_of_one_tensor(padding: int) -> None:
    item = spec("a.weight", DType.BF16, 2, 3)
    start = encode_header([item])
    start = start[:-padding] if padding else start
    start = (len(start) - 8).to_bytes(8, "little") + start[8:]
    header = parse_start(start + b"data", len(start) + 12)
    assert header == Header({"a.weight": TensorEntry(item, 0, 12)}, {}, len(start))


def test_the_short_cut_holds_the_size_of_every_file_against_fields_it_has_seen() -> None:
    start = encode_header([spec("a", DType.U8, 4)])
    assert parse_start(start, len(start) + 4) is not None
    assert parse_start(start, len(start) + 3) is None
    assert parse_start(start, len(start) + 5) is None


def test_the_fast_path_leaves_a_truncated_or_unterminated_header_to_the_parser() -> None:
    start = encode_header([spec("a", DType.U8, 4)])
    assert parse_start(start[:-1], len(start) + 4) is None
    assert parse_start(b"\xff" * 8 + start[8:], len(start) + 4) is None


# Entries


@pytest.mark.parametrize("value", ["null", "4", "[]", '"U8"', '["U8",[4],[0,4]]', "true"])
def test_rejects_an_entry_that_is_not_an_object(value: str) -> None:
    with pytest.raises(InvalidHeader, match="tensor 'a': expected an object with dtype"):
        parse('{"a":' + value + "}", 4)


@pytest.mark.parametrize("field", ["dtype", "shape", "data_offsets"])
def test_rejects_an_entry_in_which_a_field_is_missing_or_null(field: str) -> None:
    fields = entry()
    del fields[field]
    with pytest.raises(InvalidHeader, match="tensor 'a': expected an object with dtype, shape and"):
        parse(top(a=fields), 4)
    with pytest.raises(InvalidHeader, match="tensor 'a'"):
        parse(top(a=entry() | {field: None}), 4)


NO_DTYPES: list[Any] = ["u8", "U8 ", "", "C128", "F128", "I4", "U4", "E8M0", "F8_", "F"]
NO_DTYPES += [8, True, ["U8"], {"U8": None}]


@pytest.mark.parametrize("code", NO_DTYPES)
def test_rejects_a_dtype_that_the_format_has_not(code: Any) -> None:
    with pytest.raises(
        InvalidHeader, match="tensor 'a': unknown dtype .*; a newer release of blobstore may"
    ):
        parse(top(a=entry(code)), 4)


@pytest.mark.parametrize(
    "shape", [4, "4", {"0": 4}, {}, [4.0], ["4"], [True], [None], [-4], [[4]], [U64 + 1]]
)
def test_rejects_a_shape_that_is_not_a_list_of_integers(shape: Any) -> None:
    with pytest.raises(InvalidHeader, match="tensor 'a': shape .* is not a list of whole numbers"):
        parse(top(a=entry(shape=shape)), 4)


NO_OFFSETS: list[Any] = [4, "04", {}, [], [0], [0, 4, 4], [0.0, 4], [0, 4.0], [0, "4"]]
NO_OFFSETS += [[False, 4], [None, 4], [-4, 0], [0, U64 + 1]]


@pytest.mark.parametrize("offsets", NO_OFFSETS)
def test_rejects_offsets_that_are_not_two_integers(offsets: Any) -> None:
    with pytest.raises(InvalidHeader, match="tensor 'a': data_offsets .* is not a .begin, end."):
        parse(top(a=entry(offsets=offsets)), 4)


@pytest.mark.parametrize("number", ["-0", "0.0", "0e0", "-0.0", "00"])
@pytest.mark.parametrize("field", ["shape", "begin", "end"])
def test_rejects_every_other_spelling_of_zero(number: str, field: str) -> None:
    values = {"shape": "0", "begin": "0", "end": "0", field: number}
    text = '{{"a":{{"dtype":"U8","shape":[{shape}],"data_offsets":[{begin},{end}]}}}}'
    with pytest.raises(InvalidHeader):
        parse(text.format(**values), 0)


def test_rejects_numbers_of_thousands_of_digits() -> None:
    for digits in ("9" * 4000, "9" * 5000):
        text = '{"a":{"dtype":"U8","shape":[' + digits + '],"data_offsets":[0,4]}}'
        with pytest.raises(InvalidHeader) as caught:
            parse(text, 4)
        assert len(str(caught.value)) < 500


def test_takes_fields_in_any_order() -> None:
    text = '{"a":{"data_offsets":[0,4],"shape":[4],"dtype":"U8"}}'
    assert parse(text, 4).tensors["a"].spec == spec("a", DType.U8, 4)


@pytest.mark.parametrize("dtype", DType, ids=lambda dtype: dtype.value)
def test_takes_every_dtype(dtype: DType) -> None:
    nbytes = 8 * dtype.bits // 8
    text = top(a=entry(dtype.value, [2, 4], [0, nbytes]), s=entry("U8", [], [nbytes, nbytes + 1]))
    found = parse(text, nbytes + 1).tensors["a"]
    assert found == (spec("a", dtype, 2, 4), 0, nbytes)


# Sizes


@pytest.mark.parametrize(
    ("dtype", "shape", "size"),
    [
        ("F4", [2, 3], 3),
        ("F4", [2], 1),
        ("F6_E2M3", [4], 3),
        ("F6_E3M2", [2, 2, 2], 6),
        ("F4", [0], 0),
    ],
)
def test_takes_sub_byte_elements_that_fill_whole_bytes(
    dtype: str, shape: list[int], size: int
) -> None:
    assert parse(top(a=entry(dtype, shape, [0, size])), size).tensors["a"].end == size


@pytest.mark.parametrize(
    ("dtype", "shape", "size"),
    [
        ("F4", [], 0),
        ("F4", [], 1),
        ("F4", [3], 1),
        ("F4", [3], 2),
        ("F6_E2M3", [1], 1),
        ("F6_E3M2", [2], 2),
    ],
)
def test_rejects_sub_byte_elements_that_do_not(dtype: str, shape: list[int], size: int) -> None:
    with pytest.raises(InvalidHeader, match="are not whole bytes"):
        parse(top(a=entry(dtype, shape, [0, size])), size)


@pytest.mark.parametrize("end", [0, 3, 5, 16])
def test_rejects_a_range_that_is_not_the_tensor_s_size(end: int) -> None:
    with pytest.raises(InvalidHeader, match=rf"U8 \[4\] takes 4 bytes, .* \[0, {end}\] span {end}"):
        parse(top(a=entry(offsets=[0, end])), end)


def test_rejects_a_range_that_ends_before_it_begins() -> None:
    with pytest.raises(InvalidHeader, match="span -4"):
        parse(top(a=entry(offsets=[4, 0])), 4)


@pytest.mark.parametrize(
    "shape", [[2**63, 2], [2**32, 2**32], [2**63, 2**63, 0], [U64, U64], [2**22] * 3, [3] * 100_000]
)
def test_rejects_a_product_that_overflows(shape: list[int]) -> None:
    with pytest.raises(InvalidHeader, match="number of elements overflows 64 bits"):
        parse(top(a=entry(shape=shape)), 4)


@pytest.mark.parametrize(
    ("dtype", "shape"), [("U8", [2**61]), ("F64", [2**58]), ("F4", [2**62]), ("F32", [U64])]
)
def test_rejects_a_number_of_bits_that_overflows(dtype: str, shape: list[int]) -> None:
    with pytest.raises(InvalidHeader, match="number of bits overflows 64 bits"):
        parse(top(a=entry(dtype, shape)), 4)


def test_a_wrapped_product_is_not_taken_for_the_size() -> None:
    with pytest.raises(InvalidHeader, match="overflow"):
        parse(top(a=entry(shape=[2**62, 4, 4])), 0)  # 2^66 is 0 in 64 bits


@pytest.mark.parametrize("shape", [[0, 2**63, 2**63], [0, U64], [0] * 100_000])
def test_nothing_times_much_is_nothing(shape: list[int]) -> None:
    assert parse(top(a=entry(shape=shape, offsets=[0, 0])), 0).tensors["a"].spec.elements == 0


def test_takes_a_hundred_thousand_dimensions() -> None:
    header = parse(top(a=entry(shape=[1] * 100_000, offsets=[0, 1])), 1)
    assert len(header.tensors["a"].spec.shape) == 100_000


def test_messages_stay_short_whatever_the_shape() -> None:
    for shape in ([1] * 100_000, [-1] * 100_000, [[1]] * 100_000):
        with pytest.raises(InvalidHeader) as caught:
            parse(top(a=entry(shape=shape)), 4)
        assert len(str(caught.value)) < 500


def test_messages_escape_and_shorten_names() -> None:
    with pytest.raises(InvalidHeader) as caught:
        parse(json.dumps({"\x1b[2J\u202e" + "x" * 70_000: entry("F7")}), 4)
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 500


# The cover


@pytest.mark.slow
def test_takes_the_shortest_entries_however_many() -> None:
    count = 20_000
    entries = (
        f'"{n:x}":{{"dtype":"U8","shape":[],"data_offsets":[{n},{n + 1}]}}' for n in range(count)
    )
    # One character beyond Unicode's basic plane doubles the memory of the text twice.
    metadata = '"__metadata__":{"a":"\U0001f600"}'
    assert len(parse(f"{{{metadata},{','.join(entries)}}}", count).tensors) == count


def test_rejects_a_header_of_many_empty_values_before_it_is_parsed() -> None:
    text = f'{{"a":[{"{}," * 10**6}0]}}'
    tracemalloc.start()
    try:
        with pytest.raises(InvalidHeader, match="it would take more than 85 MiB of memory"):
            parse(text, 0)
        assert tracemalloc.get_traced_memory()[1] < 10 * len(text)
    finally:
        tracemalloc.stop()


def test_the_order_of_the_text_is_not_that_of_the_data() -> None:
    header = parse(top(b=entry(offsets=[4, 8]), a=entry(offsets=[0, 4])), 8)
    assert list(header.tensors) == ["a", "b"]


@pytest.mark.parametrize(
    ("first", "second", "what"),
    [
        ([1, 5], [5, 9], "leaves a hole; expected 0"),
        ([0, 4], [5, 9], "leaves a hole; expected 4"),
        ([0, 4], [3, 7], "overlaps the tensor before it; expected 4"),
        ([0, 4], [0, 4], "overlaps the tensor before it; expected 4"),
        ([0, 4], [U64 - 4, U64], "leaves a hole; expected 4"),
    ],
)
def test_rejects_ranges_that_do_not_follow_each_other(
    first: list[int], second: list[int], what: str
) -> None:
    with pytest.raises(InvalidHeader, match=what):
        parse(top(a=entry(offsets=first), b=entry(offsets=second)), 9)


@pytest.mark.parametrize("offset", [0, 4, 8])
def test_takes_empty_tensors_at_any_seam(offset: int) -> None:
    empty = entry(shape=[0], offsets=[offset, offset])
    header = parse(
        top(e=empty, a=entry(offsets=[0, 4]), f=empty, b=entry(offsets=[4, 8]), g=empty), 8
    )
    assert set(header.tensors) == {"a", "b", "e", "f", "g"}


@pytest.mark.parametrize("offset", [1, 3, 9, U64])
def test_rejects_empty_tensors_inside_others_or_beyond(offset: int) -> None:
    empty = entry(shape=[0], offsets=[offset, offset])
    with pytest.raises(InvalidHeader):
        parse(top(a=entry(offsets=[0, 4]), b=entry(offsets=[4, 8]), e=empty), 8)


def test_takes_unaligned_tensors() -> None:
    header = parse(top(a=entry(shape=[3], offsets=[0, 3]), b=entry("F64", [1], [3, 11])), 11)
    assert header.tensors["b"].begin == 3


# The short way for canonical headers of one tensor is no other format


@pytest.mark.parametrize(
    ("text", "data"),
    [
        ('{"a":{"dtype":"F9","shape":[4],"data_offsets":[0,4]}}', 4),
        ('{"a":{"dtype":"U8","shape":[5],"data_offsets":[0,4]}}', 4),
        ('{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}', 5),
        ('{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,5]}}', 4),
        ('{"a":{"dtype":"F4","shape":[9],"data_offsets":[0,4]}}', 4),
        ('{"a":{"dtype":"U8","shape":[04],"data_offsets":[0,4]}}', 4),
        ('{"a":{"dtype":"U8","shape":[4,],"data_offsets":[0,4]}}', 4),
        ('{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}\t', 4),
        ('{"a":{"dtype":"U8","shape":[9999999999999999999],"data_offsets":[0,4]}}', 4),
        ('{"\x7f\\ud800":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}', 4),
        ('{"a\n":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}', 4),
    ],
)
def test_canonical_headers_of_one_tensor_are_checked_too(text: str, data: int) -> None:
    with pytest.raises(InvalidHeader):
        parse(text, data)


@st.composite
def nearly_canonical(draw: st.DrawFn) -> tuple[str, int]:
    name = draw(st.text(max_size=3) | st.just("__metadata__"))
    code = draw(st.sampled_from([*DTYPES, "F7", "u8"]))
    numbers = st.integers(0, 9) | st.sampled_from([2**32, 2**63, U64, 10**18, 10**19])
    shape = draw(st.lists(numbers, max_size=3))
    begin, end = draw(st.sampled_from([0, 0, 0, 1])), draw(numbers)
    data = draw(st.sampled_from([end, end, 0, end + 1]))
    quoted = json.dumps(name, ensure_ascii=draw(st.booleans()))
    dims = ",".join(map(str, shape))
    pad = " " * draw(st.integers(0, 3))
    return (
        f'{{{quoted}:{{"dtype":"{code}","shape":[{dims}],"data_offsets":[{begin},{end}]}}}}{pad}',
        data,
    )


@pytest.mark.slow
@settings(max_examples=samples(400))
@given(nearly_canonical())
@example((f'{{"a":{{"dtype":"U8","shape":[{2**61}],"data_offsets":[0,{2**61}]}}}}', 2**61))
@example((f'{{"a":{{"dtype":"U8","shape":[{2**63}],"data_offsets":[0,{2**63}]}}}}', 2**63))
def test_white_space_changes_nothing(case: tuple[str, int]) -> None:
    def outcome(text: str) -> Any:
        try:
            header = parse(text, data)
        except InvalidHeader as error:
            return str(error).partition(" at character")[0]
        return dict(header.tensors), header.metadata

    text, data = case
    try:
        text.encode()
    except UnicodeEncodeError:
        return
    assert outcome(text) == outcome("{ " + text[1:])


# Writing


def test_writes_the_canonical_bytes() -> None:
    specs = [
        spec("b<&>\u2028é", DType.F32, 2, 3),
        spec("Z", DType.U8),
        spec("a", DType.BF16, 0),
        spec('q"\\\n\x01\x7f/', DType.U8, 1),
    ]
    text = (
        '{"Z":{"dtype":"U8","shape":[],"data_offsets":[24,25]},'
        '"__metadata__":{"a":"1","b":"2"},'
        '"a":{"dtype":"BF16","shape":[0],"data_offsets":[25,25]},'
        '"b\\u003c\\u0026\\u003e\\u2028é":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},'
        '"q\\"\\\\\\n\\u0001\x7f/":{"dtype":"U8","shape":[1],"data_offsets":[25,26]}}'
    ).encode()
    text += b" " * (-len(text) % 8)
    assert encode_header(specs, {"b": "2", "a": "1"}) == len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize("name", [*"ABCDEFGH", "x" * 8, "_", "é"])
def test_pads_the_header_with_spaces_to_a_multiple_of_eight(name: str) -> None:
    written = encode_header([spec(name, DType.U8, 1)])
    size = int.from_bytes(written[:8], "little")
    assert size % 8 == 0
    assert len(written) == 8 + size
    assert written.rstrip(b" ").endswith(b"}")
    assert len(written) - len(written.rstrip(b" ")) < 8


def test_sorts_keys_by_their_bytes_and_metadata_among_them() -> None:
    names = ["\U0001f600", "\ufffd", "a", "Z", "0", "_", "__metadata", "__metadata___", "~", ""]
    written = encode_header([spec(name, DType.U8, 0) for name in names], {"k": "v"})
    keys = list(json.loads(written[8:]))
    assert keys == sorted([*names, "__metadata__"], key=str.encode)


def test_writes_no_metadata_where_there_is_none() -> None:
    assert encode_header([]) == encode_header([], {}) == b"\x08" + bytes(7) + b"{}      "


@pytest.mark.parametrize("name", ["__metadata__", "a"])
def test_does_not_write_a_name_twice_or_the_reserved_one(name: str) -> None:
    with pytest.raises(InvalidHeader, match=f"tensor name '{name}' is reserved or occurs twice"):
        encode_header([spec("a", DType.U8, 1), spec(name, DType.U8, 1)])


def test_does_not_write_parts_of_bytes() -> None:
    with pytest.raises(InvalidHeader, match="3 elements of 4 bits are not whole bytes"):
        encode_header([spec("a", DType.F4, 3)])


def test_does_not_write_a_header_over_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    written = encode_header([spec("a", DType.U8, 1)])
    monkeypatch.setattr(module, "MAX_HEADER_SIZE", len(written) - 8)
    assert encode_header([spec("a", DType.U8, 1)]) == written
    with pytest.raises(InvalidHeader, match="over the limit"):
        encode_header([spec("a" * 9, DType.U8, 1)])


@st.composite
def tensor_specs(draw: st.DrawFn) -> list[TensorSpec]:
    """Draw tensors of types that the reference library has."""
    names = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    found = draw(
        st.lists(names.filter(lambda name: name != "__metadata__"), unique=True, max_size=6)
    )
    shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
    dtypes = st.sampled_from(IN_REFERENCE)
    specs = [TensorSpec(name, draw(dtypes), draw(shapes)) for name in found]
    return [item for item in specs if item.elements * item.dtype.bits % 8 == 0]


METADATA = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"])),
    st.text(st.characters(exclude_categories=["Cs"])),
    max_size=3,
)


@pytest.mark.slow
@settings(max_examples=samples(200))
@given(tensor_specs(), METADATA)
def test_the_reference_library_reads_what_is_written(
    specs: list[TensorSpec], metadata: dict[str, str]
) -> None:
    size = sum(item.nbytes for item in specs)
    data = bytes(index % 251 for index in range(size))
    written = encode_header(specs, metadata)
    theirs = safetensors.deserialize(written + data)
    ours = parse_header(written[8:], len(written) + size)
    assert {
        (name, value["dtype"], tuple(value["shape"]), bytes(value["data"]))
        for name, value in theirs
    } == {
        (item.name, item.dtype.value, item.shape, data[begin:end])
        for item, begin, end in ours.tensors.values()
    }
    assert {found.spec for found in ours.tensors.values()} == set(specs)
    assert ours.metadata == metadata


# Damage

SAMPLES = [
    encode_header(
        [spec("a", DType.U8, 4), spec("b", DType.F32, 2, 1), spec("c", DType.F4, 0)], {"k": "v"}
    )
    + bytes(12),
    encode_header([spec("weight", DType.BF16, 3)]) + bytes(6),
    b"\x1c"
    + bytes(7)
    + b'{"__metadata__":null,"\\u00e9":{"data_offsets":[0,1],"shape":[],"dtype":"I8"}}'[:28]
    + b"x",
]


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    data = bytearray(draw(st.sampled_from(SAMPLES)))
    signs = [bytes([sign]) for sign in b'"{}[], \xff']
    pieces = st.binary(max_size=3) | st.sampled_from(
        [*signs, b"-0", b"1e9", b"null", b"\\u", b"\\ud800"]
    )
    for _ in range(draw(st.integers(1, 4))):
        begin = draw(st.integers(0, len(data)))
        data[begin : begin + draw(st.integers(0, 3))] = draw(pieces)
    if draw(st.booleans()) and len(data) > 16:  # a length that fits lets damage reach the parser
        end = data.rfind(b"}")
        data[:8] = max(0, end - 7).to_bytes(8, "little")
    return bytes(data)


@pytest.mark.slow
@settings(max_examples=samples(1000))
@given(damaged())
def test_damaged_bytes_are_rejected_or_what_the_reference_library_reads(data: bytes) -> None:
    try:
        ours = judge(data, len(data))
    except InvalidHeader:
        return
    theirs = dict(safetensors.deserialize(data))
    assert set(theirs) == set(ours.tensors)
    for name, (item, begin, end) in ours.tensors.items():
        assert theirs[name]["dtype"] == item.dtype.value
        assert tuple(theirs[name]["shape"]) == item.shape
        assert bytes(theirs[name]["data"]) == data[ours.data_start :][begin:end]


@pytest.mark.parametrize("start", [b"PK\x03\x04\x00\x00\x08\x08", b"\x80\x02\x8a\x0al\xfc\x9cF"])
def test_a_pytorch_checkpoint_is_recognised(start: bytes) -> None:
    for prefix in (start, memoryview(start)):
        with pytest.raises(InvalidHeader, match="this is a PyTorch checkpoint, which"):
            header_size(prefix, 1000)
