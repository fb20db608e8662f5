from __future__ import annotations

import itertools
import math
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from blobstore.gguf.header import MAX_HEADER, GgufArray, GgufHeader, InvalidGguf, read_header
from blobstore.gguf.types import TYPES
from tests.support.gguf_files import ARRAY, BOOL, TEXT, U32, gguf_file, text, texts
from tests.support.hostile_gguf import F32_TENSOR, HOSTILE, NAME


def parsed(data: bytes) -> GgufHeader:
    """Return the header of a file with these bytes."""
    return read_header(lambda begin, end: data[begin:end], len(data))


def test_reads_what_the_peer_writes(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    values: dict[str, tuple[str, Any]] = {
        "u8": ("uint8", 200),
        "i8": ("int8", -5),
        "u16": ("uint16", 60_000),
        "i16": ("int16", -300),
        "u32": ("uint32", 2**32 - 1),
        "i32": ("int32", -7),
        "f32": ("float32", 0.5),
        "u64": ("uint64", 2**64 - 1),
        "i64": ("int64", -(2**63)),
        "f64": ("float64", 0.1),
        "bool": ("bool", True),
        "string": ("string", "naïve"),
    }
    for key, (kind, value) in values.items():
        getattr(writer, f"add_{kind}")(f"test.{key}", value)
    writer.add_array("test.texts", ["a", "ß", "x" * 300])
    writer.add_array("test.numbers", [1, 2, 3])
    random = np.random.default_rng(0)
    for number, block in TYPES.items():
        if number not in set(gguf.GGMLQuantizationType) or number == 9:
            continue
        blocks = random.integers(0, 256, (3, 2 * block.size), dtype=np.uint8)
        writer.add_tensor(f"t.{block.name}", blocks, raw_dtype=gguf.GGMLQuantizationType(number))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    found, peer = parsed(path.read_bytes()), gguf.GGUFReader(path)

    assert found.architecture == "llama"
    assert {key: found.metadata[f"test.{key}"] for key in values} == {
        key: value for key, (_, value) in values.items()
    }
    assert [*found.metadata["test.texts"]] == ["a", "ß", "x" * 300]  # type: ignore[misc]
    assert [*found.metadata["test.numbers"]] == [1, 2, 3]  # type: ignore[misc]
    assert [
        (one.name, one.number, one.shape[::-1], one.begin, one.size)
        for one in found.tensors.values()
    ] == [
        (one.name, one.tensor_type, tuple(map(int, one.shape)), one.data_offset, one.n_bytes)
        for one in peer.tensors
    ]
    assert (found.version, found.alignment, found.data_start) == (3, 32, peer.data_offset)


def test_a_vocabulary_alone_has_no_data() -> None:
    data = gguf_file([NAME, ("tokenizer.ggml.tokens", ARRAY, texts(["a", b"\xff"]))])
    header = parsed(data)
    tokens = header.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, GgufArray)
    assert (tokens.type, len(tokens), [*tokens]) == ("string", 2, ["a", "\udcff"])
    assert repr(tokens) == "<GgufArray of 2 string>"
    assert header.tensors == {}
    assert header.data_start == len(data)


def test_the_alignment_may_stand_anywhere_and_be_larger() -> None:
    alignment = ("general.alignment", U32, struct.pack("<I", 256))
    tensors = [F32_TENSOR, ("b", 1, [1], bytes(2))]
    header = parsed(gguf_file([NAME, alignment], tensors, alignment=256))
    assert header.alignment == 256
    assert [tensor.begin - header.data_start for tensor in header.tensors.values()] == [0, 256]


def test_a_bool_is_true_unless_it_is_0() -> None:
    header = parsed(gguf_file([("a", BOOL, b"\x00"), ("b", BOOL, b"\x01"), ("c", BOOL, b"\x02")]))
    assert list(header.metadata.values()) == [False, True, True]


def test_the_last_tensor_needs_no_padding() -> None:
    data = gguf_file([NAME], [("a", 0, [1], bytes(4))])
    assert parsed(data[:-28]) == parsed(data)
    with pytest.raises(InvalidGguf, match="in tensor 'a', which ends at byte"):
        parsed(data[:-29])


def test_a_header_of_any_length_is_read_a_few_times() -> None:
    data = gguf_file([("tokens", ARRAY, texts(["token"] * 200_000))], [F32_TENSOR])
    reads: list[tuple[int, int]] = []

    def read(begin: int, end: int) -> bytes:
        reads.append((begin, end))
        return data[begin:end]

    header = read_header(read, len(data))
    assert len(reads) <= 4
    assert all(after[0] == before[1] for before, after in itertools.pairwise(reads))
    assert header.tensors["a"].begin == header.data_start


@pytest.mark.parametrize("number", [33, 42, 142])
def test_a_type_of_another_program_is_opaque(number: int) -> None:
    # A fork of llama.cpp had blocks of 128 weights in 34 bytes under the number 42.
    tensors = [("a", number, [1280], bytes(340)), ("b", number, [128], bytes(36))]
    header = parsed(gguf_file([NAME], tensors))
    assert [one.type for one in header.tensors.values()] == [None, TYPES.get(number)]
    assert header.tensors["a"].size == 352
    assert header.tensors["a"].type_name == f"type {number}"


@pytest.mark.parametrize("case", HOSTILE)
def test_refuses_files_that_break_the_format(case: str) -> None:
    data, message = HOSTILE[case]
    with pytest.raises(InvalidGguf, match=message) as caught:
        parsed(data)
    assert "\n" not in str(caught.value)


def test_every_shorter_file_is_refused() -> None:
    values = [
        NAME,
        ("n", ARRAY, struct.pack("<IQIII", U32, 3, 1, 2, 3)),
        ("t", ARRAY, texts(["a", "b"])),
    ]
    data = gguf_file(values, [F32_TENSOR, ("b", 12, [256], bytes(144))])
    end = parsed(data).tensors["b"].begin + 144
    for size in range(end):
        with pytest.raises(InvalidGguf):
            parsed(data[:size])


def test_the_largest_dimension_next_to_0_can_be_held() -> None:
    (tensor,) = parsed(gguf_file([], [("a", 28, [0, 2**60 - 1], b"")])).tensors.values()
    assert np.empty(tensor.shape, np.float64).size == 0
    with pytest.raises(InvalidGguf, match="too many elements"):
        parsed(gguf_file([], [("a", 28, [0, 2**60], b"")]))


def test_a_size_is_that_of_complete_blocks() -> None:
    header = parsed(gguf_file([], [("a", 14, [512, 3, 2], bytes(210 * 12))]))
    tensor = header.tensors["a"]
    assert tensor.shape == (2, 3, 512)
    assert tensor.size == math.prod(tensor.shape) // 256 * 210


def test_a_version_that_is_newer_is_refused_with_what_to_do() -> None:
    with pytest.raises(InvalidGguf, match="version 4 of GGUF is not read") as caught:
        parsed(gguf_file(version=4))
    assert "'create --keep' stores the file as it is" in str(caught.value)


@pytest.mark.parametrize(
    ("counts", "what"), [((200_001, 0), "200001 tensors"), ((0, 100_001), "100001 values")]
)
def test_a_count_above_the_limit_is_refused_before_anything_is_read(
    counts: tuple[int, int], what: str
) -> None:
    with pytest.raises(InvalidGguf, match=f"says that it has {what}, expected at most"):
        parsed(gguf_file(counts=counts))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (struct.pack("<IQ", TEXT, MAX_HEADER), "the header has more than 256 MiB"),
        (struct.pack("<IIQ", ARRAY, TEXT, MAX_HEADER), "the file ends at byte"),
    ],
    ids=["a long text", "many texts"],
)
def test_no_more_is_read_of_a_header_that_cannot_be_right(value: bytes, message: str) -> None:
    start = gguf_file(counts=(0, 1)) + text("k") + value
    reads: list[tuple[int, int]] = []

    def read(begin: int, end: int) -> bytes:
        reads.append((begin, end))
        assert end <= 1 << 20
        return start.ljust(end, b"\0")[begin:end]

    with pytest.raises(InvalidGguf, match=message):
        read_header(read, 4 * MAX_HEADER)
    assert len(reads) == 1


def test_types_up_to_39_have_one_meaning_and_later_ones_may_be_those_of_a_fork() -> None:
    # The second tensor begins later than the first one ends by the sizes of llama.cpp.
    def header(number: int) -> GgufHeader:
        size = TYPES[number].size
        tensors = [
            ("a", number, [TYPES[number].weights], bytes(size + 64)),
            ("b", 0, [1], bytes(4)),
        ]
        return parsed(gguf_file([], tensors))

    with pytest.raises(InvalidGguf, match="the tensor after 'a' has offset"):
        header(39)
    assert header(40).tensors["a"].type is None


def test_keys_differ_by_case_and_an_architecture_is_a_text() -> None:
    number = struct.pack("<I", 7)
    header = parsed(gguf_file([("a", U32, bytes(4)), ("A", U32, number)]))
    assert header.metadata == {"a": 0, "A": 7}
    assert parsed(gguf_file([("general.architecture", U32, number)])).architecture == ""
