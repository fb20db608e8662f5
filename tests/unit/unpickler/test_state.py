from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blobstore.errors import CheckpointDamaged, CheckpointRefused, CheckpointUnsupported
from blobstore.unpickler.state import CutShort, Memo, State
from blobstore.unpickler.values import Global, Items, Persistent, Record, Reduced, Use


def state(data: bytes = b"", start: int = 0) -> State:
    return State(data, start)


def refusal(act: Any, *arguments: Any, kind: type[CheckpointRefused] = CheckpointDamaged) -> str:
    with pytest.raises(CheckpointRefused) as caught:
        act(*arguments)
    assert type(caught.value) is kind
    return str(caught.value)


# bytes


def test_takes_bytes_up_to_the_end() -> None:
    assert state(b"abcd").take(1, 3) == b"bc"
    assert state(b"abcd").take(1, 4) == b"bcd"
    assert state(b"abcd").take(4, 4) == b""


@pytest.mark.parametrize("end", [5, 2**32, 2**64 + 3])
def test_takes_no_bytes_behind_the_end(end: int) -> None:
    with pytest.raises(CutShort, match="the pickle ends at byte 4, before its STOP"):
        state(b"abcd").take(1, end)


def test_reads_a_line_and_where_the_next_begins() -> None:
    assert state(b"-ab\ncd\n").line(1) == (b"ab", 4)
    assert state(b"-ab\ncd\n").line(4) == (b"cd", 7)
    assert state(b"\n").line(0) == (b"", 1)
    assert state(b"a\r\n").line(0) == (b"a\r", 3)


@pytest.mark.parametrize("data", [b"", b"ab", b"a" * 70_000])
def test_a_line_without_an_end_is_truncated_or_too_long(data: bytes) -> None:
    if len(data) < 65_536:
        with pytest.raises(CutShort):
            state(data).line(0)
    else:
        assert refusal(state(data).line, 0) == "a line is longer than 65536 bytes"


def test_a_line_has_at_most_64_kib() -> None:
    assert state(b"a" * 65_535 + b"\n").line(0) == (b"a" * 65_535, 65_536)
    assert "longer than 65536" in refusal(state(b"a" * 65_536 + b"\n").line, 0)


def test_says_where_the_opcode_at_hand_is() -> None:
    found = state(b"", 12).refusal("it is odd", "POP", CheckpointDamaged)
    assert str(found) == "pickle byte 12, POP: it is odd"


# globals


def test_finds_a_global_once() -> None:
    reading = state(b"", 5)
    found = reading.find("torch._utils", "_rebuild_tensor_v2")
    reading.at = 9
    assert reading.find("torch._utils", "_rebuild_tensor_v2") is found
    assert found.offset == 5
    assert found.use is Use.TENSOR
    assert reading.find("os", "system").offset == 9
    assert list(reading.globals) == [("torch._utils", "_rebuild_tensor_v2"), ("os", "system")]


@pytest.mark.parametrize(
    ("module", "name"),
    [("os", b"system"), (b"os", "system"), ("os", None), (1, "system"), (("os",), "a"), ([], [])],
    ids=repr,
)
def test_rejects_a_global_that_is_not_named_by_texts(module: Any, name: Any) -> None:
    assert refusal(state().find, module, name) == "the name of a global is not two strings"


def test_rejects_long_names_of_globals() -> None:
    most = "a" * 1024
    assert state().find(most, most).name == most
    message = "the name of a global is longer than 1024 characters"
    assert refusal(state().find, most + "a", "b", kind=CheckpointUnsupported) == message
    assert refusal(state().find, "b", most + "a", kind=CheckpointUnsupported) == message


def test_rejects_more_globals_than_a_checkpoint_has() -> None:
    reading = state()
    for index in range(4096):
        reading.find("module", str(index))
    assert reading.find("module", "7").name == "7"
    message = "the pickle refers to more than 4096 globals"
    assert refusal(reading.find, "module", "4096", kind=CheckpointUnsupported) == message


# calls


def test_keeps_a_call_as_a_record() -> None:
    reading = state()
    function = reading.find("torch._utils", "_rebuild_tensor_v2")
    made = reading.call(function, (1, 2), 33)
    assert type(made) is Reduced
    assert (made.function, made.arguments, made.offset) == (function, (1, 2), 33)
    assert function.is_called
    assert not function.is_class


def test_keeps_a_call_of_a_global_that_is_not_on_the_list() -> None:
    reading = state()
    function = reading.find("os", "system")
    made = reading.call(function, ("ls",), 3)
    assert type(made) is Reduced
    assert function.is_called
    assert reading.records == []


def test_makes_plain_values_of_calls() -> None:
    reading = state()
    function = reading.find("collections", "OrderedDict")
    assert reading.call(function, ([["a", 1]],), 3) == {"a": 1}
    assert not function.is_called


FUNCTION = Global("os", "system", 0)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        *[
            (function, ())
            for function in (*(Persistent("a", 0), Items([]), "os.system", ("os", "system"), None),)
        ],
        *[(FUNCTION, []), (FUNCTION, {}), (FUNCTION, None), (FUNCTION, "ab")],
        (FUNCTION, Items([])),
    ],
    ids=range(10),
)
def test_calls_and_makes_objects_of_globals_and_tuples_only(function: Any, arguments: Any) -> None:
    message = "a call is not of a global with a tuple of arguments"
    assert refusal(state().call, function, arguments, 0) == message
    message = "an object is not made of a global with a tuple of arguments"
    assert refusal(state().new, function, arguments) == message


@pytest.mark.parametrize(
    "made", [Reduced(FUNCTION, (), 0), Record(FUNCTION, (), 0)], ids=["reduced", "record"]
)
def test_a_call_of_what_a_class_made_is_unsupported(made: Any) -> None:
    message = "a call is of an object that is not a global"
    assert refusal(state().call, made, (), 0, kind=CheckpointUnsupported) == message


@pytest.mark.parametrize("name", ["FloatStorage", "float32", "UntypedStorage", "bool"])
def test_calls_no_storages_and_no_element_types(name: str) -> None:
    reading = state()
    function = reading.find("torch", name)
    assert refusal(reading.call, function, (5,), 0) == f"'torch.{name}' is not a function"
    assert not function.is_called


def test_rejects_other_arguments_than_torch_writes() -> None:
    reading = state()
    function = reading.find("builtins", "bytearray")
    message = "the arguments of 'builtins.bytearray' are not those that torch writes"
    assert refusal(reading.call, function, (2**36,), 0, kind=CheckpointUnsupported) == message
    assert refusal(reading.new, function, (2**36,), kind=CheckpointUnsupported) == message


def test_shows_hostile_names_escaped_and_short() -> None:
    reading = state()
    hostile = Global("\x1b[2J\u202e" * 100, "\ud800", 0, Use.STORAGE)
    message = refusal(reading.call, hostile, (), 0)
    assert message.isprintable()
    assert len(message) < 3000


def test_reports_a_duplicate_key_in_a_call() -> None:
    reading = state()
    function = reading.find("collections", "OrderedDict")
    message = "a dict has the same key twice"
    assert refusal(reading.call, function, ([["a", 1], ["a", 1]],), 0) == message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "argument"),
    [
        (("collections", "OrderedDict"), dict.fromkeys(map(str, range(1000)))),
        (("collections", "OrderedDict"), [[str(index), 0] for index in range(1000)]),
        (("builtins", "set"), [0] * 1000),
        (("builtins", "frozenset"), (0,) * 1000),
        (("builtins", "bytearray"), [0] * 1000),
    ],
    ids=["dict", "pairs", "list", "tuple", "numbers"],
)
def test_copies_a_shared_value_only_so_often(name: tuple[str, str], argument: Any) -> None:
    reading = state()
    function = reading.find(*name)
    for _ in range(1048):
        reading.call(function, (argument,), 0)
    message = "the pickle copies its lists and strings too often"
    assert refusal(reading.call, function, (argument,), 0, kind=CheckpointUnsupported) == message


def test_encodes_a_shared_text_only_so_often() -> None:
    reading = state()
    function = reading.find("_codecs", "encode")
    for _ in range(1048):
        reading.call(function, ("a" * 64_000, "latin1"), 0)
    message = "the pickle copies its lists and strings too often"
    assert (
        refusal(reading.call, function, ("a" * 64_000, "latin1"), 0, kind=CheckpointUnsupported)
        == message
    )


def test_values_that_are_not_copied_do_not_count() -> None:
    reading = state()
    size, copy = reading.find("torch", "Size"), reading.find("builtins", "bytes")
    shape, data = (0,) * 1000, bytes(64_000)
    for _ in range(2000):
        assert reading.call(size, (shape,), 0) is shape
        assert reading.call(copy, (data,), 0) is data
    assert reading.copied == 0


# objects


def test_keeps_an_object_of_an_unknown_class_as_a_record() -> None:
    reading = state(b"", 21)
    cls = reading.find("my.model", "Net")
    made = reading.new(cls, ())
    assert type(made) is Record
    assert (made.cls, made.arguments, made.offset) == (cls, (), 21)
    assert cls.is_class
    assert not cls.is_called
    assert reading.records == [made]


def test_an_object_made_with_arguments_is_a_call_of_its_class() -> None:
    reading = state()
    cls = reading.find("my.model", "Net")
    assert reading.new(cls, (1,)).arguments == (1,)
    assert cls.is_class
    assert cls.is_called
    reading.new(cls, ())
    assert cls.is_called  # it stays so


def test_does_not_record_objects_of_listed_classes() -> None:
    reading = state()
    made = reading.new(reading.find("argparse", "Namespace"), ())
    assert type(made) is Record
    assert reading.records == []


def test_records_objects_of_the_first_protocols() -> None:
    reading = state()
    function = reading.find("copy_reg", "_reconstructor")
    base = reading.find("__builtin__", "object")
    made = reading.call(function, (reading.find("m", "C"), base, None), 0)
    assert reading.records == [made]
    reading.call(function, (reading.find("argparse", "Namespace"), base, None), 0)
    assert reading.records == [made]


def test_makes_plain_values_of_plain_classes() -> None:
    reading = state()
    assert reading.new(reading.find("collections", "OrderedDict"), ()) == {}


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch", "FloatStorage"),
        ("torch", "float32"),
        ("torch._utils", "_rebuild_tensor_v2"),
        ("torch", "Tensor"),
        ("torch.storage", "TypedStorage"),
    ],
)
def test_makes_no_objects_of_storages_tensors_and_functions(module: str, name: str) -> None:
    reading = state()
    message = f"'{module}.{name}' cannot be made by this opcode"
    assert (
        refusal(reading.new, reading.find(module, name), (), kind=CheckpointUnsupported) == message
    )


def test_reports_a_complete_model_object() -> None:
    message = "it holds a complete model object, with its class; save its state_dict() instead"
    cls = Persistent(("module", FUNCTION, "net.py", "class Net: ..."), 0)
    assert refusal(state().new, cls, (), kind=CheckpointUnsupported) == message
    message = "an object is not made of a global with a tuple of arguments"
    assert refusal(state().new, Persistent("module", 0), ()) == message


def test_counts_calls_and_objects() -> None:
    reading = state()
    reading.call(FUNCTION, (), 0)
    reading.new(reading.find("m", "C"), ())
    reading.call(reading.find("collections", "OrderedDict"), (), 0)
    assert reading.objects == 3


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 12) | st.just(2**32 - 1), st.integers())))
def test_the_memo_behaves_like_a_dict(puts: list[tuple[int, int]]) -> None:
    memo, expected = Memo(), {}
    for slot, value in puts:
        memo[slot] = expected[slot] = value
        assert len(memo) == len(expected)
    for slot in {*range(14), 2**32 - 1}:
        if slot in expected:
            assert memo[slot] == expected[slot]
        else:
            with pytest.raises(KeyError):
                memo[slot]


def test_consecutive_numbers_are_kept_in_a_list() -> None:
    memo = Memo()
    for slot in range(5):
        memo[slot] = slot
    memo[2] = "new"
    assert memo.items == [0, 1, "new", 3, 4]
    assert not memo.others


def test_a_gap_is_filled() -> None:
    memo = Memo()
    for slot in [0, 2, 1, 2]:
        memo[slot] = slot
    assert memo.items == [0, 1, 2]
    assert not memo.others


def test_a_gap_in_the_numbers_needs_no_memory() -> None:
    memo = Memo()
    memo[2**32 - 1] = "far"
    assert not memo.items
    assert list(memo.others.values()) == ["far"]
