from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from blobstore.errors import CheckpointDamaged, CheckpointRefused, CheckpointUnsupported
from blobstore.unpickler.handlers import ENDING, NOTING, PUSHING, TAKING
from blobstore.unpickler.machine import run
from blobstore.unpickler.state import CutShort
from blobstore.unpickler.values import Items, Key, Number, Persistent, Record, Reduced
from tests.support.pickle_values import canonical


def value(data: bytes) -> Any:
    return run(data).value


def refusal(data: bytes, kind: type[CheckpointRefused] = CheckpointDamaged) -> str:
    with pytest.raises(CheckpointRefused) as caught:
        run(data)
    assert type(caught.value) is kind
    return str(caught.value)


def test_each_opcode_is_in_one_table() -> None:
    tables = [PUSHING, ENDING, TAKING, NOTING]
    assert sum(map(len, tables)) == len(set().union(*tables))


# numbers


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"J\xff\xff\xff\x7f.", 2**31 - 1),
        (b"J\0\0\0\x80.", -(2**31)),
        (b"\x8a\0.", 0),
        (b"\x8a\1\x80.", -128),
        (b"\x8a\2\x80\0.", 128),
        (b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.", 0x1950A86A20F9469CFC6C),
        (b"\x8b\0\0\0\0.", 0),
        (b"\x8b\0\4\0\0" + b"\xff" * 1024 + b".", -1),
        (b"I0\n.", 0),
        (b"I007\n.", 7),
        (b"I123456789012345678901234567890\n.", 123456789012345678901234567890),
        (b"I00\n.", False),
        (b"I01\n.", True),
        (b"L0L\n.", 0),
        (b"L-5L\n.", -5),
        (b"L5\n.", 5),
        (b"I" + b"9" * 1024 + b"\n.", 10**1024 - 1),
        (b"F1\n.", 1.0),
        (b"F-1e-300\n.", -1e-300),
        (b"F1.7976931348623157e+308\n.", 1.7976931348623157e308),
        (b"Finf\n.", float("inf")),
        (b"F-inf\n.", float("-inf")),
        (b"Fnan\n.", float("nan")),
        (b"G\x7f\xf0\0\0\0\0\0\0.", float("inf")),
        (b"G\x80\0\0\0\0\0\0\0.", -0.0),
        (b"G\xc0\x09\x21\xfb\x54\x44\x2d\x18.", -3.141592653589793),
    ],
)
def test_reads_numbers(data: bytes, expected: object) -> None:
    assert canonical(value(data)) == canonical(expected)


@pytest.mark.parametrize(
    "line",
    [
        *[b"", b"-", b"--5", b"+5", b" 5", b"5 ", b"5_0", b"0x5", b"5.0", b"5L ", b"5\r"],
        *[b"\xd9\xa5", b"9" * 1025, b"9" * 60_000],
    ],
)
@pytest.mark.parametrize("opcode", [b"I", b"L", b"g", b"Np"])
def test_rejects_lines_that_are_not_integers(opcode: bytes, line: bytes) -> None:
    message = f": a line of {len(line)} bytes is not an integer"
    assert refusal(opcode + line + b"\n.").endswith(message)


@pytest.mark.parametrize("line", [b"", b"x", b"1,5", b"0x1p3", b"1" * 1025, b"0." + b"0" * 1023])
def test_rejects_lines_that_are_not_numbers(line: bytes) -> None:
    message = f"pickle byte 0, FLOAT: a line of {len(line)} bytes is not a number"
    assert refusal(b"F" + line + b"\n.") == message


@pytest.mark.parametrize("opcode", [b"I", b"L", b"I-", b"F", b"V", b"S'", b"g", b"Np", b"c"])
def test_rejects_lines_of_millions_of_bytes(opcode: bytes) -> None:
    data = opcode + b"9" * 3_000_000 + b"\n."
    assert taken(data) < 300_000
    assert refusal(data).endswith("a line is longer than 65536 bytes")


def test_rejects_integers_of_more_than_a_kibibyte() -> None:
    message = "pickle byte 0, LONG4: an integer has 1025 bytes"
    data = b"\x8b\1\4\0\0" + b"\xff" * 1025 + b"."
    assert refusal(data, CheckpointUnsupported) == message


# texts and bytes


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"S''\n.", ""),
        (b'S"it\'s"\n.', "it's"),
        (b"S'\\t\\n\\r\\\\\\'\\\"'\n.", "\t\n\r\\'\""),
        (b"S'\\xe2\\x82\\xac'\n.", "€"),
        (b"S'\xe2\x82\xac'\n.", "€"),
        (b"S'\\xff\\x00'\n.", b"\xff\0"),
        (b"U\0.", ""),
        (b"U\3\xe2\x82\xac.", "€"),
        (b"U\2\xff\0.", b"\xff\0"),
        (b"T\2\0\0\0\xff\0.", b"\xff\0"),
        (b"V\n.", ""),
        (b"V\\u000a\\u005c\\U0001f600\xe9\n.", "\n\\\U0001f600é"),
        (b"V\\ud800\n.", "\ud800"),
        (b"Va\\x41\\n\n.", "a\\x41\\n"),
        (b"\x8c\3\xed\xa0\x80.", "\ud800"),
        (b"\x8d\0\0\0\0\0\0\0\0.", ""),
        (b"C\0.", b""),
        (b"B\0\0\0\0.", b""),
        (b"\x8e\0\0\0\0\0\0\0\0.", b""),
        (b"\x96\0\0\0\0\0\0\0\0.", b""),
    ],
)
def test_reads_texts_and_bytes(data: bytes, expected: object) -> None:
    assert canonical(value(data)) == canonical(expected)


@pytest.mark.parametrize(
    "line", [b"", b"'", b"a", b"'a", b"a'", b"\"a'", b"'a\"", b"'a' ", b" 'a'", b"u'a'"]
)
def test_rejects_texts_without_quotes(line: bytes) -> None:
    assert refusal(b"S" + line + b"\n.") == "pickle byte 0, STRING: a string is not in quotes"


@pytest.mark.parametrize(
    "escape",
    [
        *[b"\\u0041", b"\\u1234", b"\\U00000041", b"\\N{DIGIT ONE}", b"\\q", b"\\", b"\\x4"],
        *[b"\\xZZ", b"\\xFF", b"\\400", b"\\0", b"\\a", b"\\\\\\"],
    ],
)
def test_rejects_escapes_that_python_2_does_not_write(escape: bytes) -> None:
    message = "pickle byte 0, STRING: a string has an escape that Python 2 does not write"
    assert refusal(b"S'" + escape + b"'\n.") == message


@pytest.mark.parametrize("escape", [b"\\u12", b"\\U00110000", b"\\uzzzz"])
def test_rejects_invalid_escapes(escape: bytes) -> None:
    message = "pickle byte 0, UNICODE: a string has an invalid escape"
    assert refusal(b"V" + escape + b"\n.") == message


@pytest.mark.parametrize("data", [b"\x8c\1\xff.", b"\x8d\1\0\0\0\0\0\0\0\x80.", b"X\1\0\0\0\xc0."])
def test_rejects_texts_that_are_not_utf_8(data: bytes) -> None:
    assert refusal(data).endswith(": a string is not UTF-8")


@pytest.mark.parametrize("opcode", ["BINSTRING", "LONG4"])
def test_rejects_negative_lengths(opcode: str) -> None:
    code = {"BINSTRING": b"T", "LONG4": b"\x8b"}[opcode]
    assert (
        refusal(code + b"\xfe\xff\xff\xff....") == f"pickle byte 0, {opcode}: a negative length: -2"
    )


def taken(data: bytes) -> int:
    """Return how many bytes of memory reading takes, which is refused."""
    tracemalloc.start()
    with pytest.raises(CheckpointRefused):
        run(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


@pytest.mark.parametrize("length", [2**20, 2**31 - 1])
@pytest.mark.parametrize("opcode", [b"T", b"\x8b", b"B", b"X"])
def test_takes_no_memory_for_lengths_of_32_bits(opcode: bytes, length: int) -> None:
    assert taken(opcode + length.to_bytes(4, "little") + b"abc.") < 100_000


@pytest.mark.parametrize("length", [2**31, 2**40, 2**63 - 1, 2**63, 2**64 - 9, 2**64 - 1])
@pytest.mark.parametrize("opcode", [b"\x8d", b"\x8e", b"\x96", b"\x95"])
def test_takes_no_memory_for_lengths_of_64_bits(opcode: bytes, length: int) -> None:
    data = opcode + length.to_bytes(8, "little") + b"abc."
    assert taken(data) < 100_000
    with pytest.raises(CutShort):
        run(data)


# globals


@pytest.mark.parametrize("data", [b"c\xff\nname\n.", b"cmodule\n\xff\n."])
def test_rejects_globals_whose_names_are_not_utf_8(data: bytes) -> None:
    assert refusal(data) == "pickle byte 0, GLOBAL: the name of a global is not two strings"


def test_a_global_has_the_names_on_the_stack() -> None:
    # The memo holds another name; scanners that look at texts and not at the stack are misled.
    remembered = b"\x8c\2os\x940\x8c\6system\x940"
    decoys = b"\x8c\x0bcollections\x940\x8c\x0bOrderedDict\x940"
    for data in [remembered + decoys + b"h\0h\1", decoys + remembered + b"h\2h\3"]:
        found = value(data + b"\x93.")
        assert (found.module, found.name, found.use) == ("os", "system", None)
    found = value(remembered + decoys + b"h\2h\3\x93.")
    assert str(found) == "collections.OrderedDict"
    found = value(remembered + b"h\1h\0\x93.")
    assert (found.module, found.name) == ("system", "os")


def test_a_memo_slot_holds_the_last_value() -> None:
    found = value(b"U\x0bcollectionsq\0000U\2osq\0000U\6systemq\0010h\0h\1\x93.")
    assert str(found) == "os.system"


@pytest.mark.parametrize("names", [b"NN", b"U\2osN", b"NU\2os", b"U\1\xffU\2os", b")U\2os", b"]]"])
def test_rejects_globals_of_the_stack_without_string_names(names: bytes) -> None:
    message = ", STACK_GLOBAL: the name of a global is not two strings"
    assert refusal(names + b"\x93.").endswith(message)


def test_inst_is_refused_with_its_class() -> None:
    message = (
        "pickle byte 1, INST: the opcode makes an object of 'os.system', in a way that torch "
        "never writes"
    )
    assert refusal(b"(ios\nsystem\n.") == message


# containers


TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n)R"


@pytest.mark.parametrize(
    ("opcode", "message", "targets"),
    [
        (
            b"Na",
            "APPEND: the target of an append is not a list",
            [b"}", b")", b"\x8f"],
        ),
        (b"(Ne", "APPENDS: the target of an append is not a list", [b"}"]),
        (b"(e", "APPENDS: the target of an append is not a list", [b"U\1a"]),
        (
            b"K\0Ns",
            "SETITEM: the target of a new entry is not a dict",
            [b"]", b"U\1aQ", b"\x96\1\0\0\0\0\0\0\0a", b"cm\nC\n"],
        ),
        (b"(K\0Nu", "SETITEMS: the target of a new entry is not a dict", [b"]"]),
        (b"(N\x90", "ADDITEMS: the target of new items is not a set", [b"]", b"}"]),
    ],
)
def test_adds_only_to_containers_of_the_right_type(
    opcode: bytes, message: str, targets: list[bytes]
) -> None:
    for target in targets:
        assert message in refusal(target + opcode + b".")


@pytest.mark.parametrize(
    ("opcode", "what", "targets"),
    [
        (b"Na", "an append", [b"cm\nC\n)\x81", b"cos\nsystem\n)R", TENSOR]),
        (b"(Ne", "an append", [b"cm\nC\n)\x81", TENSOR]),
        (b"K\0Ns", "a new entry", [b"cos\nsystem\n)R", TENSOR]),
        (b"(K\0Nu", "a new entry", [TENSOR]),
    ],
)
def test_a_class_that_derives_from_a_container_is_unsupported(
    opcode: bytes, what: str, targets: list[bytes]
) -> None:
    message = f": the target of {what} is an object of a class"
    for target in targets:
        assert refusal(target + opcode + b".", CheckpointUnsupported).endswith(message)


@pytest.mark.parametrize("data", [b"}(U\1au.", b"(U\1ad."])
def test_rejects_a_key_without_a_value(data: bytes) -> None:
    assert refusal(data).endswith(": a key has no value")


@pytest.mark.parametrize(
    "key",
    [b"U\1a", b"X\0\0\0\0", b"K\1", b"J\xff\xff\xff\xff", b"\x8a\7\xff\xff\xff\xff\xff\xff\x7f"],
)
@pytest.mark.parametrize(
    "form", [b"}%bNs%bNs.", b"}(%bN%bNu.", b"(%bN%bNd.", b"}(%bNu(%bNu.", b"cm\nC\n)\x81%bNs%bNs."]
)
def test_rejects_the_same_key_twice(form: bytes, key: bytes) -> None:
    assert refusal(form % (key, key)).endswith(": a dict has the same key twice")


def test_numbers_and_texts_of_the_same_digits_are_two_keys() -> None:
    assert [str(key) for key in value(b"}(K\1NU\0011NM\2\1NU\1aNu.")] == ["1", "1", "258", "a"]


def test_boxes_keys_other_than_strings_and_integers() -> None:
    made = value(b"}(U\1aNK\1NG\0\0\0\0\0\0\0\0N\x88N)N)N]N}Nu.")
    assert [type(key) for key in made] == [str, Number, *[Key] * 6]


def test_a_set_holds_what_cannot_be_hashed() -> None:
    made = value(b"\x8f(]}K\1K\1\x90.")
    assert type(made) is Items
    assert made.items == [[], {}, 1, 1]
    assert type(value(b"(]\x91.")) is Items


def test_keeps_entries_and_attributes_of_an_object_apart() -> None:
    made = value(b"cm\nC\n)\x81U\1kK\1s(U\1lK\2u}U\1aK\3sb.")
    assert type(made) is Record
    assert made.entries == {"k": 1, "l": 2}
    assert made.state == {"a": 3}


# attributes


def test_attributes_of_dicts_and_sets_are_not_their_entries() -> None:
    made = value(b"ccollections\nOrderedDict\n)RU\1wK\1s}(U\5itemsK\2U\x09_metadataK\3ub.")
    assert type(made) is dict
    assert made == {"w": 1}
    assert value(b"}}U\1aK\1sb.") == {}
    assert value(b"\x8f(K\1\x90}U\5itemsK\2sb.").items == [1]


def test_attributes_of_a_call_are_kept_with_it() -> None:
    made = value(b"ctorch\ndevice\nU\3cpu\x85R}U\1aK\1sb.")
    assert type(made) is Reduced
    assert made.arguments == ("cpu",)
    assert made.state == {"a": 1}


@pytest.mark.parametrize(
    "target",
    [b"N", b"K\1", b"U\1a", b"]", b")", b"C\0", b"cos\nsystem\n", b"U\1aQ", b"cm\nC\n)\x81)b"],
)
def test_rejects_attributes_of_anything_else_and_a_second_time(target: bytes) -> None:
    message = "BUILD: the target of attributes is not an object, or has some already"
    assert refusal(target + b"}b.").endswith(message)


@pytest.mark.parametrize("state", [b"}", b"N", b")", b"K\0)))t"])
@pytest.mark.parametrize(
    "function",
    [
        *[
            f"ctorch._utils\n_rebuild_{name}\n".encode()
            for name in (
                *("tensor_v2", "tensor", "parameter", "parameter_with_state"),
                *("sparse_tensor", "qtensor"),
            )
        ],
        b"ctorch._tensor\n_rebuild_from_type_v2\n",
    ],
)
def test_rejects_a_state_of_tensors(function: bytes, state: bytes) -> None:
    state = b"(" + state if state.endswith(b"t") else state
    message = "BUILD: it sets the state of a tensor, which torch.save never writes"
    assert refusal(function + b")R" + state + b"b.").endswith(message)


# calls and objects


@pytest.mark.parametrize(
    "function",
    [
        *[b"N", b"U\x09os.system", b"U\2osU\6system\x86", b"U\1aQ", b"}"],
    ],
)
def test_rejects_calls_of_other_values_than_functions(function: bytes) -> None:
    message = ", REDUCE: a call is not of a global with a tuple of arguments"
    assert refusal(function + b")R.").endswith(message)


@pytest.mark.parametrize("function", [b"cos\nsystem\n)R", b"cm\nC\n)\x81", TENSOR])
def test_a_call_of_an_object_is_unsupported(function: bytes) -> None:
    message = ", REDUCE: a call is of an object that is not a global"
    assert refusal(function + b")R.", CheckpointUnsupported).endswith(message)


@pytest.mark.parametrize("opcode", [b"]R", b"NR", b"]\x81", b"N}\x92"])
def test_rejects_arguments_that_are_not_a_tuple(opcode: bytes) -> None:
    assert "a tuple of arguments" in refusal(b"cm\nC\n" + opcode + b".")


def test_rejects_named_arguments() -> None:
    message = "pickle byte 12, NEWOBJ_EX: an object is made with named arguments"
    assert refusal(b"cm\nC\n)}U\1aNs\x92.", CheckpointUnsupported) == message


# the stack and the memo


@pytest.mark.parametrize("number", [b"-1", b"4294967296", b"18446744073709551616"])
def test_memo_numbers_have_32_bits(number: bytes) -> None:
    message = "the memo has slots 0 to 4294967295"
    assert refusal(b"Np" + number + b"\n.") == f"pickle byte 1, PUT: {message}"
    assert refusal(b"g" + number + b"\n.") == f"pickle byte 0, GET: {message}"


def test_memoizes_under_the_largest_number() -> None:
    assert value(b"K\7p4294967295\n0j\xff\xff\xff\xff.") == 7


@pytest.mark.parametrize(
    ("data", "opcode"), [(b"g1\n.", "GET"), (b"h\1.", "BINGET"), (b"j\1\0\0\0.", "LONG_BINGET")]
)
def test_rejects_empty_memo_slots(data: bytes, opcode: str) -> None:
    message = f"pickle byte 3, {opcode}: the memo has no value of that number"
    assert refusal(b"Nq\0" + data) == message


def test_memoize_uses_the_number_of_memoized_values() -> None:
    assert value(b"K\7q\0050K\1\x940K\2\x940h\1h\2h\5\x87.") == (1, 2, 7)


def test_memoized_values_are_identical() -> None:
    made = value(b"]\x94h\0h\0\x87.")
    assert made[0] is made[1] is made[2]
    made = value(b"]2\x86.")
    assert made[0] is made[1]


@pytest.mark.parametrize("protocol", [6, 127, 255])
def test_rejects_protocols_to_come(protocol: int) -> None:
    message = f"pickle byte 0, PROTO: protocol {protocol} is unknown"
    assert refusal(b"\x80" + bytes([protocol]) + b"N.", CheckpointUnsupported) == message


def test_a_frame_ends_where_its_pickle_does_or_before() -> None:
    assert value(b"\x95\2\0\0\0\0\0\0\0K\1.") == 1
    assert value(b"\x95\3\0\0\0\0\0\0\0K\1.") == 1
    with pytest.raises(CutShort):
        run(b"\x95\4\0\0\0\0\0\0\0K\1.")


# streams of Python 2


def test_reads_a_state_dict_of_python_2() -> None:
    data = (
        b"\x80\2ccollections\nOrderedDict\nq\1]q\2(]q\3(U\4lin0q\4U\7storageq\5e]q\6(U\4lin1q\7K\2ee"
        b"\x85q\x08Rq\x09."
    )
    made = value(data)
    assert type(made) is dict
    assert made == {"lin0": "storage", "lin1": 2}


def test_reads_an_object_of_python_2() -> None:
    data = (
        b"ccopy_reg\n_reconstructor\np0\n(cnet\nNet\np1\nc__builtin__\nobject\np2\nNtp3\nRp4\n"
        b"(dp5\nS'width'\np6\nI12\nsS'bias'\np7\nI00\nsS'n'\np8\nL3L\nsb."
    )
    made = value(data)
    assert type(made) is Record
    assert str(made.cls) == "net.Net"
    assert made.state == {"width": 12, "bias": False, "n": 3}


def test_reads_plain_values_of_python_2() -> None:
    assert value(b"c__builtin__\nset\n((lp0\nI1\naI2\natR.").items == [1, 2]
    assert value(b"c__builtin__\nbytearray\n(V\xff\nS'latin-1'\ntR.") == b"\xff"
    assert value(b"c_codecs\nencode\n(V\xff\nS'latin1'\ntR.") == b"\xff"


def test_a_reference_is_kept_with_its_identifier() -> None:
    made = value(b"(U\7storagectorch\nFloatStorage\nU\0010U\3cpuK\4tQ.")
    assert type(made) is Persistent
    assert made.identifier[0] == "storage"
    assert str(made.identifier[1]) == "torch.FloatStorage"
    assert made.identifier[2:] == ("0", "cpu", 4)
