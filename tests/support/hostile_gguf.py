"""GGUF files that break the format, and what is said of each."""

from __future__ import annotations

import struct

from tests.support.gguf_files import ARRAY, BOOL, F32, TEXT, U32, gguf_file, text

NAME = ("general.architecture", TEXT, text("llama"))
F32_TENSOR = ("a", 0, [4, 2], bytes(32))
_KEY = text("k") + struct.pack("<I", TEXT)
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "ends at byte 0, in its header: the version"),
    "other magic": (b"GGML" + bytes(20), "does not begin with 'GGUF'"),
    "version 1": (gguf_file(version=1), "version 1 of GGUF is not read, only 2 and 3"),
    "big-endian": (gguf_file(version=3 << 24), "big-endian; convert it"),
    "many tensors": (gguf_file(counts=(2**63, 0)), "says that it has 9223372036854775808 tensors"),
    "many values": (
        gguf_file(counts=(0, 2**64 - 1)),
        "says that it has 18446744073709551615 values",
    ),
    "fewer tensors": (gguf_file(counts=(1, 0)), "in its header: the name of a tensor"),
    "long key": (
        gguf_file(counts=(0, 1)) + struct.pack("<Q", 2**63),
        "a key at byte 24 has 9223372036854775808",
    ),
    "empty key": (gguf_file([("", U32, bytes(4))]), "a key at byte 24 has 0 bytes"),
    "key of bytes": (
        gguf_file(counts=(0, 1)) + text(b"\xff") + bytes(8),
        "a key at byte 24 is not UTF-8",
    ),
    "long text": (
        gguf_file(counts=(0, 1)) + _KEY + struct.pack("<Q", 2**64 - 1),
        "the value of 'k' ends at byte",
    ),
    "long array": (
        gguf_file([("k", ARRAY, struct.pack("<IQ", 12, 2**61))]),
        "the value of 'k' ends at byte",
    ),
    "many texts": (
        gguf_file([("k", ARRAY, struct.pack("<IQ", TEXT, 2**60))]),
        "the value of 'k' ends at byte",
    ),
    "long text in an array": (
        gguf_file([("k", ARRAY, struct.pack("<IQQ", TEXT, 1, 2**62))]),
        "the value of 'k' ends at byte",
    ),
    "arrays of arrays": (
        gguf_file([("k", ARRAY, struct.pack("<IQ", ARRAY, 0))]),
        "an array of arrays",
    ),
    "unknown type": (gguf_file([("k", 13, b"")]), "'k' is of the unknown type 13"),
    "array of an unknown type": (
        gguf_file([("k", ARRAY, struct.pack("<IQ", 99, 0))]),
        "unknown type 99",
    ),
    "two keys": (gguf_file([NAME, NAME]), "'general.architecture' occurs twice"),
    "two tensors": (gguf_file([], [F32_TENSOR, F32_TENSOR]), "tensor 'a' occurs twice"),
    "alignment of 0": (
        gguf_file([("general.alignment", U32, bytes(4))]),
        "general.alignment is '0'",
    ),
    "alignment of 24": (
        gguf_file([("general.alignment", U32, struct.pack("<I", 24))]),
        "is '24', expected a power of two",
    ),
    "alignment of a float": (
        gguf_file([("general.alignment", F32, struct.pack("<f", 32))]),
        "is '32.0'",
    ),
    "alignment of a bool": (gguf_file([("general.alignment", BOOL, b"\x01")]), "is 'True'"),
    "five dimensions": (
        gguf_file([], [("a", 0, [1] * 5, bytes(4))]),
        "has 5 dimensions, expected at most 4",
    ),
    "many dimensions": (
        gguf_file(counts=(1, 0)) + text("a") + struct.pack("<I", 2**32 - 1),
        "4294967295 dimensions",
    ),
    "many elements": (gguf_file([], [("a", 0, [2**32, 2**32], b"")]), "too many elements"),
    "large dimensions": (gguf_file([], [("a", 0, [2**59], b"")]), "the file ends at byte"),
    "cut rows": (
        gguf_file([], [("a", 12, [255], bytes(144))]),
        "rows of 255 elements, which Q4_K does not",
    ),
    "late start": (
        gguf_file([], [F32_TENSOR], offsets=[32]),
        "tensor 'a' has offset 32, expected 0",
    ),
    "gap": (
        gguf_file([], [F32_TENSOR, ("b", 0, [1], bytes(64))], offsets=[0, 64]),
        "after 'a' has offset 64, expected 32",
    ),
    "overlap": (
        gguf_file([], [F32_TENSOR, ("b", 0, [1], bytes(64))], offsets=[0, 0]),
        "after 'a' has offset 0, expected 32",
    ),
    "other order": (
        gguf_file([], [("a", 99, [1], bytes(32)), ("b", 99, [1], bytes(4))], offsets=[32, 0]),
        "'a' has offset 32, expected 0",
    ),
    "backwards": (
        gguf_file([], [(name, 99, [1], bytes(32)) for name in "abc"], offsets=[0, 64, 32]),
        "tensor 'c' has offset 32, expected 64",
    ),
    "odd offset": (
        gguf_file([], [("a", 99, [1], bytes(32)), ("b", 99, [1], bytes(4))], offsets=[0, 33]),
        "'b' has offset 33",
    ),
    "offset beyond the file": (
        gguf_file([], [("a", 99, [1], b""), ("b", 0, [1], bytes(4))], offsets=[0, 2**63]),
        "the file ends at byte",
    ),
    "dimension of 2^63": (
        gguf_file([], [("a", 0, [2**63], bytes(32))]),
        "'a' has too many elements",
    ),
    "dimension of 2^64-1 next to 0": (
        gguf_file([], [("a", 0, [0, 2**64 - 1], b""), ("b", 0, [1], bytes(4))], offsets=[0, 2**63]),
        "'a' has too many elements",
    ),
    "offset of 2^64-32": (
        gguf_file([], [F32_TENSOR, ("b", 0, [1], bytes(4))], offsets=[0, 2**64 - 32]),
        "has offset 18446744073709551584, expected 32",
    ),
    "type of 2^32-1 beyond the file": (
        gguf_file([], [("a", 2**32 - 1, [1], b""), ("b", 0, [1], bytes(4))], offsets=[0, 2**62]),
        "the file ends at byte",
    ),
    "alignment of 2^31": (
        gguf_file([("general.alignment", U32, struct.pack("<I", 2**31))]),
        "is '2147483648', expected a power of two",
    ),
    "lines in a name": (
        gguf_file([], [("a\nb\x1b[2J", 12, [255], bytes(144))]),
        r"'a\\nb\\x1b\[2J' has rows of 255 elements",
    ),
}
