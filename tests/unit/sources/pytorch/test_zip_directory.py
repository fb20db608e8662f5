from __future__ import annotations

import itertools
import struct
from zlib import crc32

import pytest

from blobstore.errors import BlobstoreError, DamagedSource, UnsupportedSource
from blobstore.sources.pytorch import zip_directory
from blobstore.sources.pytorch.zip_directory import Listed, read_directory
from tests.support.zip_files import Member, deflated, extra_field, make_zip, opened

FULL32 = 0xFFFFFFFF


def read(data: bytes) -> list[Listed]:
    with opened(data) as (descriptor, size):
        return read_directory(descriptor, size)[0]


def names(data: bytes) -> list[str]:
    return [entry[1] for entry in read(data)]


def refusal(data: bytes, kind: type[BlobstoreError] = DamagedSource) -> str:
    with pytest.raises(kind) as caught:
        read(data)
    assert type(caught.value) is kind
    return str(caught.value)


# End records


@pytest.mark.parametrize("size", [0, 1, 18, 21, 65535])
def test_finds_the_end_record_before_a_comment(size: int) -> None:
    assert names(make_zip([Member()], comment=b"c" * size)) == ["a"]


@pytest.mark.parametrize("is_wide", [False, True])
def test_finds_the_end_records_of_a_file_larger_than_the_longest_comment(is_wide: bool) -> None:
    member = Member(content=bytes(100_000))
    assert names(make_zip([member], comment=bytes(65535), is_wide=is_wide)) == ["a"]


@pytest.mark.parametrize("claimed", [0, 9, 11, 65535])
def test_rejects_a_comment_that_does_not_end_with_the_file(claimed: int) -> None:
    data = make_zip([Member()], comment=b"ten bytes.", end={"comment_size": claimed})
    assert f"followed by {claimed} bytes of comment, and is by 10" in refusal(data)


@pytest.mark.parametrize("after", [b"\0", bytes(70_000)], ids=["a byte", "more than a comment"])
def test_rejects_bytes_after_the_archive(after: bytes) -> None:
    assert "end record" in refusal(make_zip([Member()]) + after)


def test_rejects_an_end_record_inside_the_comment_of_another() -> None:
    comment = make_zip([Member(b"hidden")])
    for added in (b"", b"!"):
        refusal(make_zip([Member()], comment=comment + added))


def test_the_signature_of_an_end_record_too_near_to_the_end_is_comment() -> None:
    assert names(make_zip([Member()], comment=b"PK\5\6" + bytes(17))) == ["a"]
    refusal(make_zip([Member()], comment=b"PK\5\6" + bytes(19)))


def test_errors_in_the_end_records_of_a_large_file_say_where_they_are() -> None:
    member = Member(content=bytes(100_000))
    at = len(make_zip([member])) - 22
    assert f"end record at byte {at} should" in refusal(make_zip([member], end={"comment_size": 1}))
    message = refusal(make_zip([member], is_wide=True, locator={"at": 1}))
    assert f"record at byte {at}, right before" in message
    message = refusal(make_zip([member], is_wide=True, end64={"length": 1}))
    assert f"record at byte {at}, of 1 bytes" in message
    message = refusal(make_zip([member], is_wide=True, before_end=b"\0"))
    assert message.endswith(f"begin, at byte {at + 1}")


def test_rejects_every_shorter_file() -> None:
    data = make_zip([Member(), Member(b"b")], is_wide=True)
    for size in range(len(data)):
        assert "no end record" in refusal(data[:size])


def test_rejects_a_file_that_became_shorter() -> None:
    data = make_zip([Member(content=bytes(100_000))])
    with opened(data[:-1]) as (descriptor, _), pytest.raises(DamagedSource) as caught:
        read_directory(descriptor, len(data))
    assert f"ended at byte {len(data) - 1}: it was truncated while it was read" in str(caught.value)


def test_an_error_of_the_system_is_passed_on() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        read_directory(-1, 100)


def test_reads_the_wide_end_records() -> None:
    assert names(make_zip([Member(), Member(b"b")], is_wide=True)) == ["a", "b"]


def test_reads_full_fields_from_the_zip64_end_record() -> None:
    full = {"disk": 0xFFFF, "first_disk": 0xFFFF, "count_here": 0xFFFF, "count": 0xFFFF}
    data = make_zip([Member()], is_wide=True, end={**full, "size": FULL32, "start": FULL32})
    assert names(data) == ["a"]


@pytest.mark.parametrize("place", ["end", "end64"])
@pytest.mark.parametrize("field", ["disk", "first_disk", "count_here", "count", "size", "start"])
def test_rejects_end_records_that_differ(place: str, field: str) -> None:
    data = make_zip([Member(), Member(b"b")], is_wide=True, **{place: {field: 3}})  # type: ignore[arg-type]
    assert "contradict each other" in refusal(data)


def test_rejects_a_wide_end_record_of_another_length() -> None:
    assert "of 45 bytes" in refusal(make_zip([Member()], is_wide=True, end64={"length": 45}))


def test_rejects_a_locator_that_points_elsewhere() -> None:
    good = make_zip([Member()], is_wide=True)
    at = good.index(b"PK\6\6")
    for wrong in (0, at - 1, at + 1, 1 << 63):
        data = make_zip([Member()], is_wide=True, locator={"at": wrong})
        assert f"at byte {at}, right before its locator, which has it at byte {wrong}" in refusal(
            data
        )


def test_rejects_a_locator_without_its_record() -> None:
    data = make_zip([Member()], is_wide=True, end64={"sign": b"PK\6\5"})
    assert "no zip64 end record" in refusal(data)
    assert "no zip64 end record" in refusal(data[data.index(b"PK\6\7") :])


def test_rejects_bytes_between_the_wide_end_record_and_its_locator() -> None:
    assert "no zip64 end record" in refusal(
        make_zip([Member()], is_wide=True, before_locator=b"\0")
    )


def test_rejects_wide_end_records_without_their_locator() -> None:
    data = make_zip([Member()], is_wide=True, locator={"sign": b"PK\6\5"})
    assert "does not end where the end records begin" in refusal(data)


@pytest.mark.parametrize(
    "replaced",
    [
        {"end": {"disk": 1}},
        {"end": {"first_disk": 1}},
        {"end": {"disk": 1}, "end64": {"disk": 1}, "is_wide": True},
        {"end": {"disk": 0xFFFF}, "end64": {"disk": 1 << 16}, "is_wide": True},
        {"locator": {"disk": 1}, "is_wide": True},
        {"locator": {"disks": 2}, "is_wide": True},
    ],
)
def test_rejects_an_archive_in_several_files(replaced: dict[str, dict[str, int | bytes]]) -> None:
    message = refusal(make_zip([Member()], **replaced), UnsupportedSource)  # type: ignore[arg-type]
    assert "archives in several files are not supported" in message


def test_reports_which_file_of_a_set_it_is() -> None:
    assert "is file 3 of a set" in refusal(make_zip([Member()], end={"disk": 2}), UnsupportedSource)
    data = make_zip([Member()], locator={"disk": 2, "disks": 4}, is_wide=True)
    assert "is file 3 of 4" in refusal(data, UnsupportedSource)


# Counts and sizes


@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize("count", [1, 3, 4, 500, 65535])
def test_rejects_a_count_of_entries_that_is_wrong(count: int, is_wide: bool) -> None:
    counts: dict[str, int | bytes] = {"count": count, "count_here": count}
    members = [Member(), Member(b"b", comment=bytes(60))]
    message = refusal(make_zip(members, end=counts, end64=counts, is_wide=is_wide))
    assert str(count) in message


def test_rejects_counts_that_differ() -> None:
    message = refusal(make_zip([Member(), Member(b"b")], end={"count_here": 1}))
    assert "counts 1 of 2 entries" in message


def test_rejects_an_empty_archive() -> None:
    assert refusal(make_zip([])) == "the archive is empty"
    assert refusal(make_zip([], is_wide=True)) == "the archive is empty"


@pytest.mark.parametrize("size", [1, 45, 46, 47, 1000, 300_000])
def test_rejects_bytes_at_the_end_of_the_directory(size: int) -> None:
    data = make_zip([Member()])
    listed = len(data) - data.index(b"PK\1\2") - 22
    grown = make_zip([Member()], before_end=bytes(size), end={"size": listed + size})
    refusal(grown)


@pytest.mark.parametrize("is_wide", [False, True])
def test_rejects_bytes_after_the_directory(is_wide: bool) -> None:
    data = make_zip([Member()], before_end=b"\0", is_wide=is_wide)
    assert "does not end where the end records begin" in refusal(data)


def test_rejects_an_entry_that_reaches_past_the_directory() -> None:
    for replaced in ({"extra_size": 1}, {"comment_size": 1}):
        assert "does not have exactly the 1 entries" in refusal(make_zip([Member(listed=replaced)]))


def test_numbers_beyond_the_file_are_refused_before_they_are_used() -> None:
    for field, value in itertools.product(("size", "start", "count"), (1 << 40, (1 << 64) - 1)):
        wide: dict[str, int | bytes] = {field: value}
        narrow: dict[str, int | bytes] = {field: 0xFFFF if field == "count" else FULL32}
        if field == "count":
            wide["count_here"], narrow["count_here"] = value, 0xFFFF
        assert str(value) in refusal(make_zip([Member()], is_wide=True, end=narrow, end64=wide))


def test_rejects_more_entries_than_are_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    members = [Member(name) for name in (b"a", b"b", b"c")]
    monkeypatch.setattr(zip_directory, "MAX_ENTRIES", 3)
    assert names(make_zip(members)) == ["a", "b", "c"]
    message = refusal(make_zip([*members, Member(b"d")]))
    assert "counts 4 of 4 entries" in message
    assert "at most 3 are supported" in message


def test_reads_a_directory_of_several_windows() -> None:
    expected = [f"{i:05}" for i in range(40)]
    members = [
        Member(name.encode(), extra=extra_field(9, bytes(60_000)), comment=bytes(65535 - i))
        for i, name in enumerate(expected)
    ]
    assert names(make_zip(members)) == expected
    members[30].name = b"\xff\xff\xff"
    data = make_zip(members)
    at = data.rindex(b"\xff\xff\xff")
    assert f"at byte {at}, is not UTF-8" in refusal(data)


# Entries


def test_reads_the_fields_of_the_directory() -> None:
    members = [Member(b"dir/a", b"x" * 50, 8, extra=b"?", comment=b"!"), Member(b"b", b"")]
    data = make_zip(members)
    packed = len(deflated(b"x" * 50))
    assert read(data) == [
        (0, "dir/a", b"dir/a", 8, crc32(b"x" * 50), packed, 50),
        (35 + packed, "b", b"b", 0, 0, 0, 0),
    ]
    with opened(data) as (descriptor, size):
        assert read_directory(descriptor, size)[1] == 35 + packed + 31


@pytest.mark.parametrize("sign", [b"PK\1\3", b"PK\5\5", b"PK\3\4", bytes(4)])
def test_rejects_an_entry_without_its_signature(sign: bytes) -> None:
    message = refusal(make_zip([Member(), Member(b"b", listed={"sign": sign})]))
    assert message == "no entry of the directory is at byte 123, where one should be"


@pytest.mark.parametrize("full", [*itertools.product([False, True], repeat=4)])
def test_reads_wide_fields_in_every_combination(full: tuple[bool, ...]) -> None:
    first = Member(b"first", b"")
    packed = deflated(b"x" * 50)
    wide = (50, len(packed), 35)
    values = b"".join(
        struct.pack("<Q", value) for value, is_full in zip(wide, full[:3], strict=True) if is_full
    )
    values += bytes(4) if full[3] else b""
    extra = extra_field(7, b"other") + extra_field(1, values) + extra_field(8, b"")
    listed = dict.fromkeys(itertools.compress(("size", "stored", "header"), full), FULL32)
    if full[3]:
        listed["disk"] = 0xFFFF
    member = Member(b"a", b"x" * 50, 8, listed=listed, extra=extra)
    assert read(make_zip([first, member]))[1] == (
        35, "a", b"a", 8, crc32(b"x" * 50), len(packed), 50,
    )  # fmt: skip


@pytest.mark.parametrize(
    "extra",
    [
        b"",
        extra_field(2, bytes(16)),
        extra_field(1, struct.pack("<Q", 7)),
        extra_field(1, struct.pack("<QQ", 7, 7)[:-1]),
        extra_field(1, struct.pack("<QQ", 7, 7))[:-1],
        extra_field(1, struct.pack("<QQ", 7, 7)) + b"\0",
        extra_field(1, struct.pack("<QQ", 7, 7)) * 2,
    ],
    ids=["missing", "other", "one short", "a byte short", "cut off", "not whole", "double"],
)
def test_rejects_a_full_field_without_its_one_wide_field(extra: bytes) -> None:
    member = Member(listed={"size": FULL32, "stored": FULL32}, extra=extra)
    message = refusal(make_zip([Member(b"b"), member]))
    assert message == "the entry at byte 123 does not have the one zip64 field that it needs"


def test_rejects_a_full_number_of_the_file_without_a_wide_one() -> None:
    for extra in (b"", extra_field(1, b""), extra_field(1, bytes(3))):
        member = Member(listed={"disk": 0xFFFF}, extra=extra)
        assert "does not have the one zip64 field" in refusal(make_zip([member]))


def test_wide_numbers_are_checked_like_others() -> None:
    wide = extra_field(1, struct.pack("<Q", 1 << 63))
    member = Member(listed={"header": FULL32}, extra=wide)
    assert "from byte 9223372036854775808, not all of them before" in refusal(make_zip([member]))
    disk = extra_field(1, struct.pack("<I", 1 << 16))
    message = refusal(make_zip([Member(listed={"disk": 0xFFFF}, extra=disk)]), UnsupportedSource)
    assert "entry 'a', listed at byte 38, is in file 65537 of a set" in message


@pytest.mark.parametrize("flags", [0, 0x800])
def test_names_are_utf8_whatever_the_flags(flags: int) -> None:
    member = Member("weiß/重み".encode(), listed={"flags": flags}, local={"flags": flags})
    assert names(make_zip([member])) == ["weiß/重み"]


@pytest.mark.parametrize("name", [b"\xff", b"caf\x82", b"\xed\xa0\x80", b"\xc0\x80"])
def test_rejects_a_name_that_is_not_utf8(name: bytes) -> None:
    assert "byte 84, is not UTF-8" in refusal(make_zip([Member(name, bytes(9 - len(name) - 1))]))


@pytest.mark.parametrize("name", [b"\0", b"a\0", b"a\0b"])
def test_rejects_a_name_with_nul(name: bytes) -> None:
    assert "has a NUL in its name" in refusal(make_zip([Member(name)]))


def test_names_are_not_taken_for_paths() -> None:
    odd = ["", "../../x", "/tmp/x", "a\\b", "x" * 65535, "w\u202egnp.exe"]
    assert names(make_zip([Member(name.encode()) for name in odd])) == odd
    assert names(make_zip([Member(name.encode()) for name in odd[::-1]])) == odd[::-1]


@pytest.mark.parametrize("content", [b"content", b"other"], ids=["equal", "different"])
def test_rejects_two_entries_of_one_name(content: bytes) -> None:
    data = make_zip([Member(b"\x1b"), Member(b"b"), Member(b"\x1b", content)])
    assert refusal(data) == r"the archive has more than one entry '\x1b'"


@pytest.mark.parametrize("bit", [0, 5, 6, 13])
def test_rejects_encrypted_entries_by_name(bit: int) -> None:
    message = refusal(make_zip([Member(listed={"flags": 1 << bit})]), UnsupportedSource)
    assert "entry 'a', listed at byte 38, has flags 0x" in message


@pytest.mark.parametrize("method", [1, 7, 9, 12, 14, 93, 99, 0xFFFF])
def test_rejects_other_compressions_by_name(method: int) -> None:
    message = refusal(make_zip([Member(method=method)]), UnsupportedSource)
    assert f"entry 'a', listed at byte 38, is compressed by method {method}" in message


def test_rejects_an_entry_in_another_file_by_name() -> None:
    message = refusal(make_zip([Member(listed={"disk": 2})]), UnsupportedSource)
    assert "entry 'a', listed at byte 38, is in file 3 of a set" in message


@pytest.mark.parametrize("replaced", [{"size": 6}, {"size": 8}, {"stored": 6}, {"stored": 0}])
def test_rejects_two_sizes_of_an_uncompressed_entry(replaced: dict[str, int | bytes]) -> None:
    assert "though it is not compressed" in refusal(make_zip([Member(listed=replaced)]))


def test_rejects_a_content_larger_than_deflate_can_give() -> None:
    zeros = bytes(1 << 24)  # as dense as it gets
    assert read(make_zip([Member(content=zeros, method=8)]))[0][-1] == 1 << 24
    packed = len(deflated(b"content"))
    assert read(make_zip([Member(method=8, listed={"size": 1032 * packed + 64})]))
    for size in (1032 * packed + 65, 1 << 31):
        message = refusal(make_zip([Member(method=8, listed={"size": size})]))
        assert (
            f"takes {packed} bytes for a content of {size}, more than deflate can compress"
            in message
        )


def test_rejects_an_entry_that_is_not_before_the_directory() -> None:
    assert "not all of them before the directory" in refusal(
        make_zip([Member(listed={"header": 1})])
    )
    assert read(make_zip([Member(listed={"header": 0})]))
    for header in (38, 100, FULL32 - 1):
        refusal(make_zip([Member(listed={"header": header})]))
    refusal(make_zip([Member(listed={"size": 8, "stored": 8})]))
