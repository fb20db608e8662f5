"""Values in a form in which Python's own and the pickle machine's records of them are alike."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from blobstore.unpickler.values import (
    Global,
    Items,
    Key,
    Number,
    Persistent,
    Record,
    Reduced,
)


def canonical(value: Any, above: tuple[int, ...] = ()) -> Any:
    """Return what a value is, with its types, as something that hashes and compares.

    A value inside itself becomes the number of levels up to it.
    """
    if id(value) in above:
        return ("itself", above.index(id(value)))
    within = (id(value), *above)
    kind = type(value)
    if kind is Key:
        return canonical(value.value, above)
    if kind in (list, tuple):
        return (kind.__name__, *(canonical(item, within) for item in value))
    if kind is dict:
        pairs = ((canonical(key, within), canonical(item, within)) for key, item in value.items())
        return ("dict", *pairs)
    if kind in (set, frozenset, Items):
        items = value.items if kind is Items else value
        return ("set", frozenset(canonical(item, within) for item in items))
    if kind is float:
        return ("float", struct.pack(">d", value))
    if kind is Number:
        return ("int", int(value))
    if kind in (bytes, bytearray):
        return ("bytes", bytes(value))
    return (kind.__name__, *_parts(value, within))


def _parts(value: Any, within: tuple[int, ...]) -> tuple[Any, ...]:
    if type(value) is Global:
        return (str(value),)
    if type(value) is Reduced:
        parts = [str(value.function), value.arguments, value.state]
    elif type(value) is Record:
        parts = [str(value.cls), value.arguments, value.state, value.entries]
    elif type(value) is Persistent:
        parts = [value.identifier]
    else:
        assert value is None or type(value) in (bool, int, str)
        return (value,)
    return tuple(canonical(part, within) for part in parts)


def _built(record: Record, state: Any) -> Record:
    record.state = state
    return record


EXAMPLES: Mapping[str, tuple[bytes, Any]] = {
    # constants and numbers
    "NONE": (b"N.", None),
    "NEWTRUE": (b"\x88.", True),
    "NEWFALSE": (b"\x89.", False),
    "BININT1": (b"K\xff.", 255),
    "BININT2": (b"M\x01\xff.", 0xFF01),
    "BININT": (b"J\xfe\xff\xff\xff.", -2),
    "INT": (b"I-12\n.", -12),
    "LONG": (b"L-123456789012345678901L\n.", -123456789012345678901),
    "LONG1": (b"\x8a\x02\x00\xff.", -256),
    "LONG4": (b"\x8b\x03\0\0\0\x00\x00\x01.", 65536),
    "FLOAT": (b"F-0.1\n.", -0.1),
    "BINFLOAT": (b"G\x3f\xf8\0\0\0\0\0\0.", 1.5),
    # texts and bytes
    "STRING": (b"S'a\\'\\n\\x7f'\n.", "a'\n\x7f"),
    "BINSTRING": (b"T\3\0\0\0abc.", "abc"),
    "SHORT_BINSTRING": (b"U\3abc.", "abc"),
    "UNICODE": (b"Va\\u20ac\n.", "a€"),
    "BINUNICODE": (b"X\3\0\0\0\xe2\x82\xac.", "€"),
    "SHORT_BINUNICODE": (b"\x8c\3\xe2\x82\xac.", "€"),
    "BINUNICODE8": (b"\x8d\3\0\0\0\0\0\0\0\xe2\x82\xac.", "€"),
    "BINBYTES": (b"B\2\0\0\0\xff\0.", b"\xff\0"),
    "SHORT_BINBYTES": (b"C\2\xff\0.", b"\xff\0"),
    "BINBYTES8": (b"\x8e\2\0\0\0\0\0\0\0\xff\0.", b"\xff\0"),
    "BYTEARRAY8": (b"\x96\2\0\0\0\0\0\0\0\xff\0.", bytearray(b"\xff\0")),
    # containers
    "MARK": (b"(t.", ()),
    "EMPTY_TUPLE": (b").", ()),
    "TUPLE": (b"(K\1K\2K\3K\4t.", (1, 2, 3, 4)),
    "TUPLE1": (b"K\1\x85.", (1,)),
    "TUPLE2": (b"K\1K\2\x86.", (1, 2)),
    "TUPLE3": (b"K\1K\2K\3\x87.", (1, 2, 3)),
    "EMPTY_LIST": (b"].", []),
    "LIST": (b"(K\1K\2l.", [1, 2]),
    "APPEND": (b"]K\1aK\2a.", [1, 2]),
    "APPENDS": (b"]K\1a(K\2K\3e.", [1, 2, 3]),
    "EMPTY_DICT": (b"}.", {}),
    "DICT": (b"(U\1aK\1U\1bK\2d.", {"a": 1, "b": 2}),
    "SETITEM": (b"}U\1aK\1s.", {"a": 1}),
    "SETITEMS": (b"}U\1aK\1s(U\1bK\2K\7K\3u.", {"a": 1, "b": 2, 7: 3}),
    "EMPTY_SET": (b"\x8f.", set()),
    "ADDITEMS": (b"\x8f(K\1K\2\x90.", {1, 2}),
    "FROZENSET": (b"(K\1K\2\x91.", frozenset({1, 2})),
    # the stack and the memo
    "POP": (b"K\1K\2" + b"0.", 1),
    "POP_MARK": (b"K\1(K\2K\3" + b"1.", 1),
    "DUP": (b"K\1" + b"2\x86.", (1, 1)),
    "PUT": (b"K\1p12\n0g12\n.", 1),
    "GET": (b"K\1p0\ng0\n\x86.", (1, 1)),
    "BINPUT": (b"K\1q\xff0h\xff.", 1),
    "BINGET": (b"K\1q\0h\0\x86.", (1, 1)),
    "LONG_BINPUT": (b"K\1r\1\0\0\xff0j\1\0\0\xff.", 1),
    "LONG_BINGET": (b"K\1q\7j\7\0\0\0\x86.", (1, 1)),
    "MEMOIZE": (b"K\1\x94K\2\x94h\0\x87.", (1, 2, 1)),
    # globals, calls and objects
    "GLOBAL": (b"cos\nsystem\n.", Global("os", "system", 0)),
    "STACK_GLOBAL": (b"U\2osU\6system\x93.", Global("os", "system", 0)),
    "REDUCE": (b"cos\nsystem\nU\2ls\x85R.", Reduced(Global("os", "system", 0), ("ls",), 0)),
    "NEWOBJ": (b"cm\nC\n)\x81.", Record(Global("m", "C", 0), (), 0)),
    "NEWOBJ_EX": (b"cm\nC\nK\1\x85}\x92.", Record(Global("m", "C", 0), (1,), 0)),
    "BUILD": (b"cm\nC\n)\x81}U\1aK\1sb.", _built(Record(Global("m", "C", 0), (), 0), {"a": 1})),
    "BINPERSID": (b"U\1aQ.", Persistent("a", 0)),
    # the pickle itself
    "PROTO": (b"\x80\5N.", None),
    "FRAME": (b"\x95\2\0\0\0\0\0\0\0N.", None),
    "STOP": (b"N.", None),
}
"""By the name of each opcode that makes something, a pickle that has it, and its value."""
