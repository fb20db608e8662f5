"""Pickles that abuse the allowed globals or run code, in every container format."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest

from blobstore.core.tensor import DTYPES_BY_LIBRARY_NAME
from blobstore.unpickler.globals import STORAGES
from tests.support.checkpoints import (
    GOOD,
    HOOKS,
    VALUES,
    Reader,
    call,
    described,
    entries,
    legacy_file,
    listed,
    mapping,
    members,
    named,
    number,
    numbers,
    pickled,
    refusal,
    several,
    storage,
    tensor,
    tensors,
    text,
    zip_file,
)
from tests.support.zip_files import make_zip

Write = Callable[..., bytes]

PAYLOAD = call(named("os", "system"), text('echo fired >> "$PTH_CANARY"'))
ASKS = "uses '{}'"
STACK_GLOBAL = b"\x93"
NEWOBJ = b"\x81"


def with_tensor(value: bytes) -> bytes:
    """Return the pickle of a dict with a valid tensor and another value."""
    return pickled(mapping(w=tensor(), x=value), protocol=4)


def rebuilt(function: bytes, *arguments: bytes) -> bytes:
    """Return a call of ``_rebuild_from_type_v2``, which would call its first argument."""
    return call(
        named("torch._tensor", "_rebuild_from_type_v2"),
        function,
        named("torch", "Tensor"),
        several(*arguments),
        b"}",
    )


def test_reads_a_valid_tensor(written: Write, reader: Reader) -> None:
    assert tensors(reader, written(pickled(mapping(w=tensor())))) == {"w": GOOD}


def test_reads_a_tensor_with_attributes(written: Write, reader: Reader) -> None:
    value = rebuilt(
        named("torch._utils", "_rebuild_tensor_v2"),
        *(storage(), number(0), numbers(2, 2), numbers(2, 1), b"\x89", HOOKS),
    )
    assert tensors(reader, written(pickled(mapping(w=value)))) == {"w": GOOD}


@pytest.mark.parametrize(
    ("module", "name"),
    [
        *[(module, "system") for module in ("os", "posix", "nt")],
        *[("builtins", name) for name in ("exec", "getattr", "__import__")],
        *[("__builtin__", "eval"), ("subprocess", "Popen"), ("", "exec"), ("__main__", "anything")],
        *[
            ("pip", "main"),
            ("pip._internal", "main"),
            ("runpy", "run_path"),
            ("webbrowser", "open"),
        ],
        ("asyncio.unix_events", "_UnixSubprocessTransport._start"),
        *[("operator", "attrgetter"), ("functools", "partial"), ("ctypes", "CDLL")],
        *[("torch.storage", "_load_from_bytes"), ("torch._utils", "_import_dotted_name")],
        *[(f"torch{module}", "load") for module in ("", ".jit", ".hub", ".serialization")],
        *[("_pickle", "loads"), ("pickle", "loads"), ("numpy", "load")],
        ("numpy.core.multiarray", "fromfile"),
        *[("torch._utils", "os.system"), ("torch", "serialization.os.system")],
        ("torch._utils._rebuild_tensor_v2", "__globals__.get"),
        *[(module, "_rebuild_tensor_v2") for module in ("torch ._utils", "TORCH._utils")],
        *[(module, "_rebuild_tensor_v2") for module in ("torch._utils\0", "torch\u2024_utils")],
        *[("torch._utils", "_rebuild_tensor_v2 "), ("\uff54orch", "FloatStorage")],
    ],
)
def test_refuses_to_call_globals_that_are_not_allowed(
    module: str, name: str, written: Write, reader: Reader
) -> None:
    value = text(module) + text(name) + STACK_GLOBAL + several(text("x")) + b"R"
    shown = f"{module}.{name}".replace("\0", "\\x00")
    assert ASKS.format(shown) in refusal(reader, written(with_tensor(value)))
    if "\0" not in module:
        value = call(named(module, name), text("x"))
        assert ASKS.format(shown) in refusal(reader, written(with_tensor(value)))


def test_refuses_a_payload_whose_result_is_dropped(written: Write, reader: Reader) -> None:
    data = written(pickled(PAYLOAD + b"0" + mapping(w=tensor())))
    assert ASKS.format("os.system") in refusal(reader, data)


def test_refuses_a_stream_that_breaks_after_its_payload(written: Write, reader: Reader) -> None:
    refusal(reader, written(b"\x80\x02" + PAYLOAD + b"\xff"))
    cut = refusal(reader, written(b"\x80\x02" + PAYLOAD))
    assert written is legacy_file or "before its STOP" in cut
    assert "pickle" in refusal(reader, pickled(PAYLOAD))


def test_refuses_a_global_that_is_only_held(written: Write, reader: Reader) -> None:
    assert ASKS.format("os.system") in refusal(reader, written(with_tensor(named("os", "system"))))


def test_refuses_a_wrapper_around_another_function(written: Write, reader: Reader) -> None:
    data = written(pickled(mapping(w=rebuilt(named("os", "system"), text("id")))))
    assert ASKS.format("os.system") in refusal(reader, data)
    for module, name in [
        *[("collections", "OrderedDict"), ("_codecs", "encode"), ("builtins", "bytearray")],
        *[("torch", "FloatStorage"), ("torch", "device")],
    ]:
        value = rebuilt(named(module, name), text("id"), text("latin1"))
        outcome = reader.take(written(pickled(mapping(w=value)), {}))
        assert (outcome.tensors, outcome.unreadable, outcome.error) == ({}, ["w"], "")
    data = written(pickled(mapping(w=rebuilt(text("os.system"), text("id")))), {})
    assert "wrapped as torch does not" in refusal(reader, data)


def test_refuses_deeply_nested_wrappers(written: Write, reader: Reader) -> None:
    value = tensor()
    for _ in range(1000):
        value = call(named("torch._utils", "_rebuild_parameter"), value, b"\x89", HOOKS)
    assert "wrapped as torch does not" in refusal(reader, written(pickled(mapping(w=value))))


@pytest.mark.parametrize(
    "value",
    [
        *[call(named("builtins", name), number(2**36)) for name in ("bytearray", "bytes")],
        call(named("builtins", "bytes"), text("x"), text("rot13")),
        call(named("builtins", "bytes"), listed(number(256))),
        *[call(named("_codecs", "encode"), text("x"), text(codec)) for codec in ("rot13", "idna")],
        call(named("_codecs", "encode"), text("x")),
        call(named("_codecs", "encode"), text("\u0100"), text("latin1")),
        *[call(named("torch", f"{name}Storage"), number(2**40)) for name in ("Float", "Untyped")],
        *[call(named("torch", name), number(1)) for name in ("float32", "Size")],
        call(named("collections", "Counter"), number(5)),
        call(named("collections", "OrderedDict"), text("ab")),
        call(named("collections", "OrderedDict"), listed(listed(number(1)))),
        call(named("builtins", "set"), number(1)),
        named("collections", "OrderedDict") + text("x") + b"R",
        named("torch._utils", "_rebuild_tensor_v2") + b"]R",
        text("os.system") + several() + b"R",
        call(call(named("collections", "OrderedDict")), text("x")),
        call(tensor(), text("x")),
        call(storage(), text("x")),
        named("torch._utils", "_rebuild_tensor_v2") + several(text("x")) + NEWOBJ,
        named("torch", "FloatStorage") + several(number(2**40)) + NEWOBJ,
        named("torch", "Tensor") + several() + NEWOBJ,
        tensor() + several() + NEWOBJ,
        named("builtins", "object") + several() + mapping(a=number(1)) + b"\x92",
    ],
)
def test_refuses_calls_that_torch_does_not_write(
    value: bytes, written: Write, reader: Reader
) -> None:
    assert "pickle byte" in refusal(reader, written(with_tensor(value)))


def test_reads_bytes_as_old_protocols_write_them(written: Write, reader: Reader) -> None:
    value = call(named("_codecs", "encode"), text("\xff\0"), text("latin1"))
    assert tensors(reader, written(with_tensor(value))) == {"w": GOOD}
    assert tensors(reader, written(with_tensor(call(named("builtins", "bytearray"), value)))) == {
        "w": GOOD
    }


def test_attributes_of_a_dict_do_not_shadow_methods(written: Write, reader: Reader) -> None:
    state = mapping(items=number(1), keys=number(2), get=number(3), __class__=number(4))
    value = mapping(w=tensor()) + state + b"b"
    assert tensors(reader, written(pickled(value))) == {"w": GOOD}


@pytest.mark.parametrize("state", ["__setstate__", "__reduce__", "__del__", "__dict__"])
def test_attributes_of_a_tensor_are_refused(state: str, written: Write, reader: Reader) -> None:
    for value in (PAYLOAD, number(1)):
        built = tensor() + entries((text(state), value)) + b"b"
        reason = refusal(reader, written(pickled(mapping(w=built))))
        assert "BUILD: it sets the state of a tensor" in reason


@pytest.mark.parametrize(
    "opcodes",
    [
        b"(ios\nsystem\n",
        b"(" + named("os", "system") + text("x") + b"o",
        *[b"Psystem\n", b"\x82\x01", b"\x83\x01\x00", b"\x84\x01\x00\x00\x00", b"\x97"],
        *[b"C\x01a\x98", b"\xff", b"\x00"],
    ],
    ids=["INST", "OBJ", "PERSID", "EXT1", "EXT2", "EXT4", "NEXT_BUFFER", "READONLY", "ff", "00"],
)
def test_refuses_opcodes_that_torch_never_writes(
    opcodes: bytes, written: Write, reader: Reader
) -> None:
    assert "pickle byte" in refusal(reader, written(with_tensor(opcodes)))


@pytest.mark.parametrize(
    "opcodes",
    [
        *[opcode + struct.pack("<I", 2**32 - 1) for opcode in (b"B", b"X", b"j")],
        *[opcode + struct.pack("<i", 2**31 - 1) for opcode in (b"\x8b", b"T")],
        *[b"\x8b" + struct.pack("<i", -1), b"T" + struct.pack("<i", -5)],
        *[opcode + struct.pack("<Q", 2**40) for opcode in (b"\x8e", b"\x96")],
        *[b"\x8d" + struct.pack("<Q", 2**63), b"\x95" + struct.pack("<Q", 2**62)],
        b"\x96" + struct.pack("<Q", 2**64 - 1),
        *[b"g4294967295\n", b"g-1\n", b"p99999999999999999999\n", b"\x80\x06", b"I1_0\n"],
        *[
            b"I\xd9\xa1\n",
            b"F1e\n",
            b"S'\\u1234'\n",
            b"S'\\q'\n",
            b"S'\\x4'\n",
            b"S'\\'\n",
            b"S'\n",
        ],
        *[b"V\\ud8\n", b"V\\U00110000\n", b"c\xff\nx\n"],
    ],
)
def test_refuses_impossible_arguments(opcodes: bytes, written: Write, reader: Reader) -> None:
    refusal(reader, written(with_tensor(opcodes)))


def test_memoizes_under_any_number(written: Write, reader: Reader) -> None:
    slot = struct.pack("<I", 2**32 - 1)
    data = written(pickled(text("w") + b"r" + slot + b"0" + b"}j" + slot + tensor() + b"s"))
    assert tensors(reader, data) == {"w": GOOD}


@pytest.mark.parametrize("name", ["_rebuild_meta_tensor_no_storage", "_rebuild_sparse_tensor"])
def test_lists_tensors_without_plain_data_as_unreadable(
    name: str, written: Write, reader: Reader
) -> None:
    value = call(
        named("torch._utils", name), named("torch", "float32"), numbers(2), numbers(1), b"\x89"
    )
    outcome = reader.take(written(with_tensor(value)))
    assert (outcome.tensors, outcome.unreadable, outcome.error) == ({"w": GOOD}, ["x"], "")


def test_refuses_a_duplicate_key(written: Write, reader: Reader) -> None:
    value = entries((text("w"), tensor()), (text("w"), tensor()))
    assert "same key twice" in refusal(reader, written(pickled(value)))
    value = entries((text("a.b"), tensor()), (text("a"), mapping(b=tensor())))
    assert "two tensors" in refusal(reader, written(pickled(value)))


def test_refuses_keys_that_are_not_text(written: Write, reader: Reader) -> None:
    for key in (b"N", b"\x88", several(text("w")), b"C\x01w", b"G" + bytes(8)):
        data = written(pickled(entries((key, tensor()))))
        assert "a key that is not a string" in refusal(reader, data)


def test_refuses_an_object_of_an_unknown_class(written: Write, reader: Reader) -> None:
    value = named("evil", "Model") + b")" + NEWOBJ + mapping(w=tensor()) + b"b"
    assert "'evil.Model'" in refusal(reader, written(pickled(value)))


def test_reads_the_tensors_of_a_module_without_its_class(written: Write, reader: Reader) -> None:
    parts = mapping(_parameters=mapping(w=tensor()), _buffers=b"}", _modules=b"}", forward=b"N")
    value = named("evil", "Model") + b")" + NEWOBJ + parts + b"b"
    assert tensors(reader, written(pickled(value))) == {"w": GOOD}


def test_a_checkpoint_changes_nothing_in_python(written: Write, reader: Reader) -> None:
    value = named("builtins", "object") + mapping(x=number(1)) + b"b"
    refusal(reader, written(with_tensor(value)))
    assert tensors(reader, written(pickled(mapping(w=tensor())))) == {"w": GOOD}


def typed(dtype: str, kind: str, count: int, flags: bytes | None = None) -> bytes:
    """Return a tensor with a type of its own, as ``_rebuild_tensor_v3`` takes it."""
    return call(
        named("torch._utils", "_rebuild_tensor_v3"),
        *(storage("0", kind, count), number(0), numbers(1, 2), numbers(1, 1), b"\x89", HOOKS),
        named("torch", dtype),
        *([] if flags is None else [flags]),
    )


@pytest.mark.parametrize("flag", ["conj", "neg", "items"])
@pytest.mark.parametrize(
    "dtype",
    [*DTYPES_BY_LIBRARY_NAME, "complex128", "qint8", "bits8", "int4"],
)
def test_flags_of_any_type_are_read_or_refused(dtype: str, flag: str, reader: Reader) -> None:
    for value in (b"\x88", b"\x89", number(1)):
        data = zip_file(
            pickled(mapping(w=typed(dtype, "UntypedStorage", 16, entries((text(flag), value)))))
        )
        outcome = reader.take(data)
        assert not outcome.error
        assert flag != "items" or outcome.refusal or outcome.unreadable


@pytest.mark.parametrize(
    "kind",
    [
        *STORAGES,
        "ComplexDoubleStorage",
        "QInt8Storage",
        "QInt32Storage",
        "QUInt4x2Storage",
        "TypedStorage",
    ],
)
@pytest.mark.parametrize("order", [b"little", b"big"])
def test_tensors_of_another_type_than_their_storage_are_read_or_refused(
    kind: str, order: bytes, reader: Reader
) -> None:
    for dtype in ("float32", "float64", "bool", "bfloat16"):
        for count in (0, 1, 2, 4, 8, 16):
            parts = members(pickled(mapping(w=typed(dtype, kind, count))))
            parts["byteorder"].content = order
            assert not reader.take(make_zip(list(parts.values()))).error


def test_a_dimension_of_one_element_may_have_any_stride(written: Write, reader: Reader) -> None:
    found = tensors(reader, written(pickled(mapping(w=tensor((2, 1, 2), (1, 2**63 - 1, 2))))))
    words = struct.unpack("<4I", VALUES)
    assert found == {
        "w": described(struct.pack("<4I", *(words[i] for i in (0, 2, 1, 3))), [2, 1, 2])
    }


def test_refuses_views_outside_their_storage(reader: Reader) -> None:
    for part in (  # the tensor needs 4 elements
        *(
            several(text("v"), number(offset), number(count))
            for offset, count in ((-1, 4), (0, 5), (4, 1), (2**63, 1), (2, 2))
        ),
        *(several(text("v"), number(0)), several(text("v"), b"\x89", number(4)), number(0)),
    ):
        data = legacy_file(pickled(mapping(w=tensor(of=storage(view=part)))))
        assert "pickle byte" in refusal(reader, data)
    part = several(text("v"), number(1), number(2))
    data = legacy_file(pickled(mapping(w=tensor((2,), (1,), of=storage(view=part)))))
    assert tensors(reader, data) == {"w": described(VALUES[4:12], [2])}
