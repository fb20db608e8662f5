"""The pickle opcodes, with their names in CPython's ``Lib/pickletools.py``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Final

MARK: Final = 0x28
EMPTY_TUPLE: Final = 0x29
STOP: Final = 0x2E
POP: Final = 0x30
POP_MARK: Final = 0x31
DUP: Final = 0x32
BINBYTES: Final = 0x42
SHORT_BINBYTES: Final = 0x43
FLOAT: Final = 0x46
BINFLOAT: Final = 0x47
INT: Final = 0x49
BININT: Final = 0x4A
BININT1: Final = 0x4B
LONG: Final = 0x4C
BININT2: Final = 0x4D
NONE: Final = 0x4E
PERSID: Final = 0x50
BINPERSID: Final = 0x51
REDUCE: Final = 0x52
STRING: Final = 0x53
BINSTRING: Final = 0x54
SHORT_BINSTRING: Final = 0x55
UNICODE: Final = 0x56
BINUNICODE: Final = 0x58
EMPTY_LIST: Final = 0x5D
APPEND: Final = 0x61
BUILD: Final = 0x62
GLOBAL: Final = 0x63
DICT: Final = 0x64
APPENDS: Final = 0x65
GET: Final = 0x67
BINGET: Final = 0x68
INST: Final = 0x69
LONG_BINGET: Final = 0x6A
LIST: Final = 0x6C
OBJ: Final = 0x6F
PUT: Final = 0x70
BINPUT: Final = 0x71
LONG_BINPUT: Final = 0x72
SETITEM: Final = 0x73
TUPLE: Final = 0x74
SETITEMS: Final = 0x75
EMPTY_DICT: Final = 0x7D
PROTO: Final = 0x80
NEWOBJ: Final = 0x81
EXT1: Final = 0x82
EXT2: Final = 0x83
EXT4: Final = 0x84
TUPLE1: Final = 0x85
TUPLE2: Final = 0x86
TUPLE3: Final = 0x87
NEWTRUE: Final = 0x88
NEWFALSE: Final = 0x89
LONG1: Final = 0x8A
LONG4: Final = 0x8B
SHORT_BINUNICODE: Final = 0x8C
BINUNICODE8: Final = 0x8D
BINBYTES8: Final = 0x8E
EMPTY_SET: Final = 0x8F
ADDITEMS: Final = 0x90
FROZENSET: Final = 0x91
NEWOBJ_EX: Final = 0x92
STACK_GLOBAL: Final = 0x93
MEMOIZE: Final = 0x94
FRAME: Final = 0x95
BYTEARRAY8: Final = 0x96
NEXT_BUFFER: Final = 0x97
READONLY_BUFFER: Final = 0x98

NAMES: Final[Mapping[int, str]] = {
    code: name for name, code in globals().items() if type(code) is int and name.isupper()
}
"""The names of all opcodes of protocols 0 to 5."""

REFUSED: Final[Mapping[int, str]] = {
    OBJ: "makes an object of a class in a way that torch never writes",
    PERSID: "refers to outside data by a line of text",
    EXT1: "refers to a registry outside the file",
    EXT2: "refers to a registry outside the file",
    EXT4: "refers to a registry outside the file",
    NEXT_BUFFER: "takes data from outside the file",
    READONLY_BUFFER: "takes data from outside the file",
}
"""Opcodes that no checkpoint has, and their effect. INST is refused by its handler, with its class."""
