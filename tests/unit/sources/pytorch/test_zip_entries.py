from __future__ import annotations

import io
import itertools
import os
import random
import struct
import tracemalloc
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.serialization import skip_data
from torch.utils.serialization import config

from blobstore.errors import BlobstoreError, DamagedSource, UnsupportedSource
from blobstore.sources.pytorch.zip_entries import (
    ZipEntry,
    read_entries,
    read_entry,
    read_small_entry,
)
from tests.support.samples import samples
from tests.support.zip_files import Member, deflated, extra_field, make_zip, opened

FULL32 = 0xFFFFFFFF
RANDOM = random.Random(7)
TENSORS = {
    "weight": torch.arange(1000.0).reshape(10, 100),
    "empty": torch.zeros(0),
    "one": torch.ones(1, dtype=torch.uint8),
    "重み": torch.arange(77, dtype=torch.int16),
}


def entries(data: bytes) -> dict[str, ZipEntry]:
    with opened(data) as (descriptor, size):
        return read_entries(descriptor, size)


def contents(data: bytes, capacity: int = 1 << 16) -> dict[str, bytes]:
    with opened(data) as (descriptor, size):
        return {
            name: b"".join(bytes(piece) for piece in read_entry(descriptor, entry, space(capacity)))
            for name, entry in read_entries(descriptor, size).items()
        }


def space(size: int) -> memoryview:
    return memoryview(bytearray(size))


def refusal(data: bytes, kind: type[BlobstoreError] = DamagedSource) -> str:
    with pytest.raises(kind) as caught:
        contents(data)
    assert type(caught.value) is kind
    return str(caught.value)


def of_zipfile(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {
            info.filename: archive.read(info) for info in archive.infolist() if not info.is_dir()
        }


def saved(value: object = TENSORS) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


# Archives of torch and zipfile


def same_as_torch(data: bytes) -> dict[str, ZipEntry]:
    reader: Any = torch._C.PyTorchFileReader(io.BytesIO(data))
    found = entries(data)
    assert [name.removeprefix("archive/") for name in found] == reader.get_all_records()
    for name, entry in found.items():
        assert entry.offset == reader.get_record_offset(name.removeprefix("archive/"))
    read = contents(data)
    assert read == {name: bytes(reader.get_record(name.removeprefix("archive/"))) for name in found}
    return found


@pytest.mark.parametrize(
    ("protocol", "alignment"), [(1, 64), (2, 64), (3, 64), (4, 64), (5, 64), (2, 4096)]
)
def test_reads_what_torch_saves(protocol: int, alignment: int) -> None:
    file = io.BytesIO()
    with config.patch("save.storage_alignment", alignment):  # type: ignore[attr-defined]
        torch.save(TENSORS, file, pickle_protocol=protocol)
    found = same_as_torch(file.getvalue())
    assert contents(file.getvalue()) == of_zipfile(file.getvalue())
    assert found["archive/data/0"].size == 4000
    assert all(entry.offset % alignment == 0 for entry in found.values())


def test_reads_a_file_of_torch_that_is_larger_than_4_gib(tmp_path: Path) -> None:
    path = tmp_path / "large.pt"
    holes = str(tmp_path / "holes")
    large = torch.from_file(holes, shared=True, size=9 << 29, dtype=torch.uint8)
    with skip_data():
        torch.save([torch.zeros(3), large, torch.zeros(5)], path)
    with path.open("rb") as file:
        found = read_entries(file.fileno(), path.stat().st_size)
        assert [found[f"large/data/{i}"].size for i in range(3)] == [12, 9 << 29, 20]
        assert found["large/data/2"].offset > 9 << 29
        version = read_small_entry(file.fileno(), found["large/version"], 10)
    assert version == b"3\n"


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_reads_what_zipfile_writes(method: int) -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        archive.comment = b"a comment"
        archive.mkdir("empty")
        archive.mkdir("folder/")
        for name, content in of_zipfile(saved()).items():
            archive.writestr(f"folder/{name}", content)
        with archive.open("wide", "w", force_zip64=True) as member:
            member.write(b"x" * 100_000)
    found = contents(file.getvalue())
    assert found == of_zipfile(file.getvalue())
    assert len(found) == 11


def test_reads_what_zipfile_writes_to_a_stream() -> None:
    class Stream(io.RawIOBase):
        def __init__(self) -> None:
            self.parts: list[bytes] = []

        def writable(self) -> bool:
            return True

        def write(self, part: bytes) -> int:  # type: ignore[override]
            self.parts.append(bytes(part))
            return len(part)

    stream = Stream()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:  # type: ignore[call-overload]
        for name in ("a", "b"):
            archive.writestr(name, name * 1000)
        with archive.open("wide", "w", force_zip64=True) as member:
            member.write(b"x" * 100_000)
    data = b"".join(stream.parts)
    assert contents(data) == of_zipfile(data)


@pytest.mark.slow
def test_reads_many_entries_of_all_distances() -> None:
    sizes = [(i * 7919) % 300 if i % 50 else 40_000 + i for i in range(3000)]
    data = saved([torch.full((size,), i % 251, dtype=torch.uint8) for i, size in enumerate(sizes)])
    same_as_torch(data)
    assert contents(data) == of_zipfile(data)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all reads."""
    sizes: list[int] = []
    pread = os.pread

    def noting(descriptor: int, size: int, offset: int) -> bytes:
        sizes.append(size)
        return pread(descriptor, size, offset)

    monkeypatch.setattr(os, "pread", noting)
    return sizes


@pytest.mark.slow
def test_headers_that_are_close_are_read_together(reads: list[int]) -> None:
    small = [Member(b"%d" % i, bytes(100)) for i in range(2000)]
    entries(make_zip([Member(b"large", bytes(3_000_000)), *small]))
    assert len(reads) < 20


def test_reads_headers_that_touch() -> None:
    names = [f"{i:040}" for i in range(1000)]
    assert [*entries(make_zip([Member(name.encode(), b"") for name in names]))] == names


def test_no_more_than_the_headers_is_read_between_large_entries(reads: list[int]) -> None:
    members = [Member(b"%d" % i, bytes(5000)) for i in range(300)]
    entries(make_zip(members))
    assert sum(reads) < 200_000


def test_entries_are_in_the_order_of_the_directory() -> None:
    first, second = make_zip([Member(b"a", b"1"), Member(b"b", b"2"), Member(b"c/", b"")]).split(
        b"PK\1\2", 1
    )
    a, b, rest = second.split(b"PK\1\2")
    swapped = first + b"PK\1\2" + b"PK\1\2".join((b, a, rest))
    assert [*contents(swapped).items()] == [("b", b"2"), ("a", b"1")]


def test_folders_are_left_out() -> None:
    members = [
        Member(b"a/", b""),
        Member(b"b/", b"", method=8),
        Member(b"c/d", b"content"),
        Member(b"/", b""),
    ]
    assert contents(make_zip(members)) == {"c/d": b"content"}


def test_rejects_a_folder_with_content() -> None:
    message = refusal(make_zip([Member(), Member(b"b/", b"content")]))
    assert message == "entry 'b/' at byte 38 is a folder, but has 7 bytes"


# Local headers against the directory


def test_returns_the_offset_of_the_data() -> None:
    members = [
        Member(b"a", b"1234", local_extra=extra_field(0x4246, b"ZZZ")),
        Member(b"b", b"x" * 50, 8, after=b"PK\7\10" + bytes(12)),
        Member(b"c", b""),
    ]
    packed = len(deflated(b"x" * 50))
    assert entries(make_zip(members)) == {
        "a": ZipEntry("a", 38, 4, 4, zlib.crc32(b"1234"), is_deflated=False),
        "b": ZipEntry("b", 73, packed, 50, zlib.crc32(b"x" * 50), is_deflated=True),
        "c": ZipEntry("c", 73 + packed + 16 + 31, 0, 0, 0, is_deflated=False),
    }


@pytest.mark.parametrize("sign", [b"PK\3\5", b"PK\1\2", bytes(4)])
def test_rejects_an_entry_without_its_header(sign: bytes) -> None:
    message = refusal(make_zip([Member(), Member(b"b", local={"sign": sign})]))
    assert message == "no header of entry 'b' is at byte 38"


@pytest.mark.parametrize("name", [b"B", b"", b"bb", b"b\0", b"longer" * 100])
def test_rejects_another_name_in_the_header(name: bytes) -> None:
    message = refusal(make_zip([Member(), Member(b"b", local_name=name), Member(b"c")]))
    assert message == "entry 'b' at byte 38 has another name there than in the directory"


def test_rejects_a_longer_name_in_the_last_header() -> None:
    assert "another name" in refusal(make_zip([Member(b"b", local={"name_size": 0xFFFF})]))


@pytest.mark.parametrize(("method", "other"), [(0, 8), (8, 0), (8, 9)])
def test_rejects_another_method_in_the_header(method: int, other: int) -> None:
    message = refusal(make_zip([Member(method=method, local={"method": other})]))
    assert message == f"entry 'a' at byte 0 has method {other}, but {method} in the directory"


@pytest.mark.parametrize("bit", [0, 5, 6, 13])
def test_rejects_an_entry_that_is_encrypted_by_its_header_alone(bit: int) -> None:
    message = refusal(make_zip([Member(local={"flags": 1 << bit})]), UnsupportedSource)
    assert "entry 'a' at byte 0 has flags 0x" in message


@pytest.mark.parametrize("flags", [0, 8, 0x808])
@pytest.mark.parametrize("field", ["crc", "stored", "size"])
def test_rejects_another_number_in_the_header(field: str, flags: int) -> None:
    message = refusal(make_zip([Member(local={field: 99, "flags": flags})]))
    what = {"crc": "CRC", "stored": "stored size", "size": "size"}[field]
    assert f"entry 'a' at byte 0 has the {what} 99 there, but " in message
    alone = {"crc": 0, "stored": 0, "size": 0, field: 99, "flags": flags | 8}
    assert f"has the {what} 99 there" in refusal(make_zip([Member(local=alone)]))


@pytest.mark.parametrize(
    ("other", "fault"),
    [
        ({"sign": b"PK\3\5"}, "no header of entry 'c'"),
        ({"flags": 9}, "encrypted"),
        ({"method": 8}, "method 8"),
        ({"crc": 5}, "CRC 5 there"),
        ({"size": 5}, "size 5 there"),
        ({"flags": 0}, "CRC 0 there"),
        ({"name_size": 2}, "another name"),
    ],
)
def test_a_header_unlike_those_before_it_is_checked_as_they_were(
    other: dict[str, Any], fault: str
) -> None:
    follows = {"flags": 8, "crc": 0, "stored": 0, "size": 0}
    members = [Member(name, local=follows) for name in (b"a", b"b")]
    with pytest.raises(BlobstoreError, match=fault):
        entries(make_zip([*members, Member(b"c", local=follows | other)]))


def test_numbers_may_be_missing_in_the_header_if_they_follow_the_data() -> None:
    for fields in itertools.product([{}, {"crc": 0}], [{}, {"stored": 0}], [{}, {"size": 0}]):
        missing: dict[str, int | bytes] = {k: v for part in fields for k, v in part.items()}
        member = Member(local={**missing, "flags": 8}, after=bytes(16))
        assert contents(make_zip([member, Member(b"b")])) == {"a": b"content", "b": b"content"}
        if missing:
            assert "has the" in refusal(make_zip([Member(local=missing)]))


def test_a_header_may_not_have_a_crc_that_the_directory_leaves_out() -> None:
    assert contents(make_zip([Member(listed={"crc": 0}, local={"crc": 0})]))
    for flags in (0, 8):
        data = make_zip([Member(listed={"crc": 0}, local={"flags": flags})])
        assert "but 0 in the directory" in refusal(data)


@pytest.mark.parametrize("flags", [0, 8])
def test_reads_wide_sizes_in_the_header(flags: int) -> None:
    packed = deflated(b"x" * 50)
    for size, stored in ((50, len(packed)), (51, len(packed)), (50, len(packed) + 1)):
        member = Member(
            content=b"x" * 50,
            method=8,
            local={"size": FULL32, "stored": FULL32, "flags": flags},
            local_extra=extra_field(0x4246, b"Z")
            + extra_field(1, struct.pack("<QQ", size, stored)),
        )
        if (size, stored) == (50, len(packed)):
            assert contents(make_zip([member])) == {"a": b"x" * 50}
        else:
            assert "in the directory" in refusal(make_zip([member]))


def test_rejects_full_sizes_in_the_header_without_wide_ones() -> None:
    data = make_zip([Member(local={"size": FULL32, "stored": FULL32})])
    assert "does not have the one zip64 field" in refusal(data)


def test_rejects_data_that_reaches_into_the_directory() -> None:
    for local in ({"extra_size": 1}, {"extra_size": 0xFFFF}):
        message = refusal(make_zip([Member(local=local)]))
        assert "7 bytes from byte" in message
        assert "which reach into the directory at byte 38" in message


def test_rejects_two_entries_on_one_header() -> None:
    data = make_zip([Member(), Member(b"b", listed={"header": 0})])
    assert "'b' at byte 0 begins before byte 38, where the one before it ends" in refusal(data)


def test_rejects_a_header_inside_the_data_of_another() -> None:
    inner = make_zip([Member(b"inner", b"evil")])[: 30 + 5 + 4]
    data = make_zip([Member(b"outer", inner), Member(b"inner", b"evil", listed={"header": 35})])
    assert "'inner' at byte 35 begins before byte 74, where" in refusal(data)


def test_rejects_data_that_reaches_into_the_next_header() -> None:
    data = make_zip([Member(local={"extra_size": 1}), Member(b"b")])
    assert "'b' at byte 38 begins before byte 39" in refusal(data)


def test_the_crc_reveals_shifted_data() -> None:
    member = Member(local={"extra_size": 8}, after=bytes(8))
    assert "has the CRC" in refusal(make_zip([member]))


def test_rejects_bytes_before_the_first_entry() -> None:
    message = refusal(make_zip([Member(before=b"#!stub\n"), Member(b"b")]))
    assert message == "entry 'a' at byte 7 is the first, and 7 bytes lie before it"


def test_rejects_a_stub_before_the_whole_archive() -> None:
    for is_wide in (False, True):
        refusal(b"#!stub\n" + make_zip([Member()], is_wide=is_wide))


# Content


@pytest.mark.parametrize("method", [0, 8])
@pytest.mark.parametrize("size", [0, 1, 2, 1000, 70_000, 300_000])
def test_content_comes_in_pieces_of_the_buffer(size: int, method: int) -> None:
    content = RANDOM.randbytes(size // 2) + bytes(size - size // 2)
    with opened(make_zip([Member(content=content, method=method)])) as (descriptor, file_size):
        (entry,) = read_entries(descriptor, file_size).values()
        for capacity in {1, 7, size - 1, size, size + 1, 1 << 20} if size < 9999 else {9999, size}:
            buffer = space(max(capacity, 1))
            found = b""
            for piece in read_entry(descriptor, entry, buffer):
                assert 0 < len(piece) <= len(buffer)
                assert piece == buffer[: len(piece)]
                assert piece.obj is buffer.obj
                found += piece
            assert found == content


@pytest.mark.parametrize("method", [0, 8])
def test_rejects_content_that_was_changed(method: int) -> None:
    data = bytearray(make_zip([Member(content=RANDOM.randbytes(1000), method=method)]))
    data[500] ^= 1
    message = refusal(bytes(data))
    assert "entry 'a' at byte 31 has the CRC" in message


@pytest.mark.parametrize("method", [0, 8])
def test_a_crc_of_zero_was_not_computed(method: int) -> None:
    member = Member(method=method, local={"crc": 0}, listed={"crc": 0})
    assert contents(make_zip([member])) == {"a": b"content"}


def test_rejects_a_crc_of_empty_content() -> None:
    member = Member(content=b"", local={"crc": 1}, listed={"crc": 1})
    assert "has the CRC 00000000, not 00000001" in refusal(make_zip([member]))


def packed(content: bytes, data: bytes) -> bytes:
    return make_zip([Member(content=content, data=data, method=8)])


@pytest.mark.parametrize("capacity", [1, 3, 7, 8, 100])
def test_rejects_content_of_another_size(capacity: int) -> None:
    with opened(packed(b"1234567", deflated(b"12345678"))) as (descriptor, size):
        entry = read_entries(descriptor, size)["a"]
        with pytest.raises(DamagedSource, match="'a' at byte 31 decompresses to more than its 7"):
            list(read_entry(descriptor, entry, space(capacity)))
    with opened(packed(b"1234567", deflated(b"123456"))) as (descriptor, size):
        entry = read_entries(descriptor, size)["a"]
        with pytest.raises(
            DamagedSource, match="'a' at byte 31 decompresses to 1 bytes less than its 7"
        ):
            list(read_entry(descriptor, entry, space(capacity)))


def test_rejects_data_after_the_end_of_the_compressed_data() -> None:
    stream = deflated(b"1234567")
    for after in (b"\0", stream, bytes(100_000)):
        message = refusal(packed(b"1234567", stream + after))
        assert f"at byte {31 + len(stream)} of {31 + len(stream) + len(after)}" in message


def test_rejects_compressed_data_without_an_end() -> None:
    stream = deflated(b"1234567")
    for size in range(len(stream)):
        assert "is truncated: its compressed data does not end" in refusal(
            packed(b"1234567", stream[:size])
        )
    unended = zlib.compressobj(9, zlib.DEFLATED, -15)
    stream = unended.compress(b"1234567") + unended.flush(zlib.Z_FULL_FLUSH)
    assert "is truncated" in refusal(packed(b"1234567", stream))


def test_rejects_data_that_is_not_compressed() -> None:
    assert "entry 'a' at byte 31 does not decompress" in refusal(packed(b"1234567", b"\xff" * 9))


@pytest.mark.parametrize("method", [0, 8])
def test_rejects_a_file_that_was_truncated_while_it_was_read(method: int) -> None:
    data = make_zip([Member(content=RANDOM.randbytes(100_000), method=method)])
    with opened(data) as (descriptor, size):
        entry = read_entries(descriptor, size)["a"]
        pieces = read_entry(descriptor, entry, space(1000))
        next(pieces)
        os.ftruncate(descriptor, 90_000)
        with pytest.raises(DamagedSource, match="is truncated: the file ended at byte 90000"):
            list(pieces)


@pytest.mark.slow
def test_memory_is_bounded_by_the_buffer() -> None:
    data = packed(bytes(1 << 26), deflated(bytes(1 << 26)))
    with opened(data) as (descriptor, size):
        entry = read_entries(descriptor, size)["a"]
        buffer = space(10_000)
        tracemalloc.start()
        try:
            assert sum(map(len, read_entry(descriptor, entry, buffer))) == 1 << 26
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < 200_000


@pytest.mark.parametrize("method", [0, 8])
@pytest.mark.parametrize("size", [0, 7, 3_000_000])
def test_reads_small_entries_whole(size: int, method: int) -> None:
    content = bytes(range(256)) * (size // 256 + 1)
    with opened(make_zip([Member(content=content[:size], method=method)])) as (descriptor, end):
        entry = read_entries(descriptor, end)["a"]
        assert read_small_entry(descriptor, entry, size) == content[:size]


def test_rejects_small_entries_that_are_not_small() -> None:
    entry = ZipEntry("\x1b", 31, 1 << 60, 1 << 60, 0, is_deflated=True)
    with pytest.raises(DamagedSource) as caught:
        read_small_entry(-1, entry, (1 << 60) - 1)
    assert str(caught.value) == (
        r"entry '\x1b' at byte 31 has 1152921504606846976 bytes, over the limit of 1152921504606846975"
    )


# Any damage

ARCHIVES = [
    saved({"a": torch.arange(3.0), "b": torch.arange(20, dtype=torch.uint8)}),
    make_zip([Member(b"f/", b""), Member(b"f/a", b"x" * 50, 8), Member(b"b")], comment=b"ok"),
    make_zip(
        [
            Member(
                listed={"size": FULL32, "stored": FULL32, "header": FULL32, "disk": 0xFFFF},
                extra=extra_field(1, struct.pack("<QQQI", 7, 7, 0, 0)),
                local={"crc": 0, "stored": 0, "size": 0, "flags": 8},
                after=b"PK\7\10" + bytes(12),
            ),
            Member(
                b"b",
                local={"size": FULL32, "stored": FULL32},
                local_extra=extra_field(1, struct.pack("<QQ", 7, 7)),
            ),
        ],
        is_wide=True,
    ),
]
WHOLE = [contents(archive) for archive in ARCHIVES]


@pytest.mark.slow
@given(st.integers(0, len(ARCHIVES) - 1), st.integers(0), st.integers(1, 255))
@settings(max_examples=samples(1000))
@example(0, 0, 1)
def test_reports_every_changed_byte_that_alters_content(which: int, at: int, change: int) -> None:
    data = bytearray(ARCHIVES[which])
    data[at % len(data)] ^= change
    try:
        assert contents(bytes(data)) == WHOLE[which]
    except BlobstoreError as error:
        assert type(error) in {DamagedSource, UnsupportedSource}
        assert len(str(error)) < 500
        assert str(error).isprintable()


@pytest.mark.slow
@pytest.mark.parametrize("data", ARCHIVES)
def test_rejects_every_archive_that_is_truncated_or_extended(data: bytes) -> None:
    for size in range(len(data)):
        refusal(data[:size])
    refusal(data + b"\0")
