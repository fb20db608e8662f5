"""Zip archives and legacy streams that contradict themselves, or that other readers read differently."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

import blobstore
from tests.support.checkpoints import (
    GOOD,
    VALUES,
    Reader,
    call,
    deflated_file,
    described,
    entries,
    legacy_file,
    listed,
    mapping,
    members,
    named,
    number,
    pickled,
    refusal,
    several,
    storage,
    tensor,
    tensors,
    text,
    zip_file,
)
from tests.support.zip_files import Member, deflated, extra_field, make_zip

Write = Callable[..., bytes]

GOOD_PICKLE = pickled(mapping(w=tensor()))
PAYLOAD = pickled(call(named("os", "system"), text('echo fired >> "$PTH_CANARY"')))
OTHER = struct.pack("<4f", 5, 6, 7, 8)
BOTH = {"data.pkl", "data/0"}


def changed(name: str, method: int = 0, **fields: object) -> bytes:
    """Return a zip checkpoint with fields of one of its members replaced."""
    parts = members(GOOD_PICKLE, method=method)
    for field, value in fields.items():
        setattr(parts[name], field, value)
    return make_zip(list(parts.values()))


@pytest.mark.parametrize("name", sorted(BOTH))
@pytest.mark.parametrize("last", [True, False], ids=["last", "first"])
def test_refuses_a_duplicate_entry(name: str, last: bool, reader: Reader) -> None:
    parts = list(members(GOOD_PICKLE).values())
    other = Member(f"archive/{name}".encode(), OTHER if name == "data/0" else PAYLOAD)
    data = make_zip([*parts, other] if last else [other, *parts])
    assert f"more than one entry 'archive/{name}'" in refusal(reader, data)


@pytest.mark.parametrize("name", sorted(BOTH))
@pytest.mark.parametrize("method", [0, 8])
def test_refuses_a_local_header_that_contradicts_the_directory(
    name: str, method: int, reader: Reader
) -> None:
    local_name = f"archive/{name}".encode()
    for fields in (
        *({"method": 8 - method}, {"method": 99}, {"stored": 3}, {"size": 3}, {"crc": 12345}),
        *({"flags": 1 << 3, "size": 3}, {"flags": 1}, {"flags": 1 << 13}, {"sign": b"PK\3\5"}),
        *({"name_size": 2}, {"extra_size": 60_000}),
    ):
        refusal(reader, changed(name, method, local=fields))
    for other in (local_name.upper(), local_name + b"x", local_name[:-1], b""):
        refusal(reader, changed(name, method, local_name=other))


def test_accepts_local_headers_without_sizes_as_torch_writes_them(reader: Reader) -> None:
    zeros = {"flags": 0x808, "crc": 0, "stored": 0, "size": 0}
    assert tensors(reader, changed("data/0", local=zeros)) == {"w": GOOD}


@pytest.mark.parametrize("shift", [8, -8, 1, 64])
def test_a_shifted_extra_length_never_gives_other_bytes(shift: int, reader: Reader) -> None:
    extra = extra_field(0x4246, b"Z" * 64)
    for crc in (zlib.crc32(VALUES), 0):
        common = {"crc": crc}
        data = changed(
            "data/0",
            local_extra=extra,
            local={**common, "extra_size": len(extra) + shift},
            listed=common,
        )
        outcome = reader.take(data)
        # Without a checksum, only the local header has the offset of the data.
        assert outcome.refusal or (crc == 0 and not outcome.error)
    good = changed("data/0", local_extra=extra)
    assert tensors(reader, good) == {"w": GOOD}


@pytest.mark.parametrize("name", sorted(BOTH))
def test_refuses_two_entries_on_one_local_header(name: str, reader: Reader) -> None:
    parts = list(members(GOOD_PICKLE).values())
    plain = make_zip(parts)
    at = plain.index(f"archive/{name}".encode()) - 30
    target = next(part for part in parts if part.name.endswith(name.encode()))
    fields = {"header": at, "stored": len(target.content), "size": len(target.content)}
    for alias in (target.name, b"archive/data/1", b"archive/data/00"):
        other = Member(alias, b"", listed={**fields, "crc": zlib.crc32(target.content)})
        refusal(reader, make_zip([*parts, other]))


def test_refuses_an_entry_inside_another(reader: Reader) -> None:
    inner = make_zip([Member(b"archive/data/0", OTHER)])
    inner = inner[: inner.index(b"PK\1\2")]
    parts = members(GOOD_PICKLE)
    parts["version"].content = b"3\n"
    outer = Member(b"archive/outer", inner)
    listing = list(parts.values())
    plain = make_zip([outer, *listing])
    at = plain.index(inner)
    for member in listing:
        if member.name == b"archive/data/0":
            member.listed = {"header": at}
    assert "begins before byte" in refusal(reader, make_zip([outer, *listing]))


@pytest.mark.parametrize(
    "listed_fields",
    [
        *[{"header": at} for at in (1, 2**31, 0xFFFFFFFE, 2**32 - 1)],
        *[{"stored": size, "size": size} for size in (15, 17, 2**32 - 2, 2**32 - 1)],
        *[{"stored": 9}, {"size": 17}, {"flags": 1}, {"flags": 1 << 6}, {"disk": 1}, {"crc": 1}],
        *[{"method": other} for other in (12, 14, 93, 99)],
        *[{f"{part}_size": 60_000} for part in ("name", "extra", "comment")],
        {"sign": b"PK\1\3"},
    ],
    ids=str,
)
@pytest.mark.parametrize("method", [0, 8])
def test_refuses_a_false_directory_entry(
    listed_fields: Mapping[str, int], method: int, reader: Reader
) -> None:
    refusal(reader, changed("data/0", method, listed=listed_fields))


@pytest.mark.parametrize(
    "fields",
    [
        *[{"count": count, "count_here": count} for count in (0, 3, 5, 60_000)],
        *[{"count_here": 3}, {"size": 10}, {"start": 0}, {"start": 2**32 - 2}],
        *[{"disk": 1}, {"first_disk": 1}, {"comment_size": 1}],
    ],
    ids=str,
)
@pytest.mark.parametrize("is_wide", [False, True])
def test_refuses_false_end_records(
    fields: Mapping[str, int], is_wide: bool, reader: Reader
) -> None:
    parts = list(members(GOOD_PICKLE).values())
    assert tensors(reader, make_zip(parts, is_wide=is_wide)) == {"w": GOOD}
    refusal(reader, make_zip(parts, is_wide=is_wide, end=fields))


def test_refuses_bytes_outside_the_listed_entries(reader: Reader) -> None:
    good = zip_file(GOOD_PICKLE)
    refusal(reader, b"x" + good)
    refusal(reader, b"PK\3\4" + good)
    refusal(reader, zip_file(PAYLOAD) + good)
    refusal(reader, good + b"x")
    refusal(reader, good + good)
    parts = list(members(GOOD_PICKLE).values())
    refusal(reader, make_zip(parts, before_end=b"x"))
    refusal(reader, make_zip(parts, is_wide=True, before_locator=b"x"))
    second = make_zip([Member(b"archive/data.pkl", PAYLOAD)])
    refusal(reader, make_zip(parts, comment=second))


@pytest.mark.parametrize("name", ["byteorder", "version", *sorted(BOTH)])
@pytest.mark.parametrize("method", [0, 8])
def test_refuses_a_wrong_crc(name: str, method: int, reader: Reader) -> None:
    crc = {"crc": 12345}
    message = refusal(reader, changed(name, method, listed=crc, local=crc))
    assert f"entry 'archive/{name}' at byte" in message
    assert "not 00003039: its bytes have been changed" in message


@pytest.mark.parametrize("name", sorted(BOTH))
@pytest.mark.parametrize("method", [0, 8])
def test_treats_a_crc_of_zero_as_missing(name: str, method: int, reader: Reader) -> None:
    crc = {"crc": 0}
    assert tensors(reader, changed(name, method, listed=crc, local=crc)) == {"w": GOOD}


def test_reads_tensors_of_a_compressed_storage(reader: Reader) -> None:
    values = struct.pack("<400f", *range(400))
    value = mapping(
        w=tensor((20, 20), (20, 1), of=storage(count=400)),
        part=tensor((3,), (1,), of=storage(count=400), offset=7),
        across=tensor((2, 2), (1, 2), of=storage(count=400)),
    )
    found = tensors(reader, deflated_file(pickled(value), {"0": values}))
    assert found == {
        "w": described(values, [20, 20]),
        "part": described(values[28:40], [3]),
        "across": described(struct.pack("<4f", 0, 2, 1, 3), [2, 2]),
    }


@pytest.mark.parametrize("name", sorted(BOTH))
def test_refuses_damaged_compressed_data(name: str, reader: Reader) -> None:
    content = VALUES if name == "data/0" else GOOD_PICKLE
    stream = deflated(content)
    for data in (
        *(b"", b"\0", stream[:-1], stream + b"\0", stream + stream, content),
        *(deflated(content + b"x"), deflated(content[:-1]), zlib.compress(content)),
        bytes([stream[0] ^ 6]) + stream[1:],
    ):
        fields = {"stored": len(data)}
        refusal(reader, changed(name, 8, data=data, local=fields, listed=fields))


@pytest.mark.parametrize("count", [0, 1, 3, 5, 8, 2**40, 2**62])
@pytest.mark.parametrize("size", [0, 3])
def test_refuses_a_count_that_does_not_match_the_bytes(
    count: int, size: int, written: Write, reader: Reader
) -> None:
    value = tensor((size,), (1,), of=storage(count=count))
    message = refusal(reader, written(pickled(mapping(w=value))))
    if written is legacy_file:
        assert f"storage '0' has 4 elements, but its tensors say {count}" in message
    else:
        assert f"entry 'archive/data/0' has 16 bytes, but its tensors say {4 * count}" in message


def test_refuses_an_incomplete_element(written: Write, reader: Reader) -> None:
    value = mapping(w=tensor((1,), (1,), of=storage(count=1)))
    for size in (3, 5, 7):
        refusal(reader, written(pickled(value), {"0": bytes(size)}))


@pytest.mark.parametrize(
    "key",
    ["", "1", "00", "0 ", "0/", "./0", "0\0", "../data.pkl", "../../archive/data/0", "..", "/0"],
)
def test_refuses_a_key_without_a_storage(key: str, written: Write, reader: Reader) -> None:
    message = refusal(reader, written(pickled(mapping(w=tensor(of=storage(key))))))
    if not key:
        assert "a storage's key is not a string" in message
    elif written is legacy_file:
        assert "is in the list of keys or in a tensor, but not in both" in message
    else:
        assert "there is no entry for storage '" in message


@pytest.mark.parametrize(
    "key", ["w/x", "..", "../0", "_", "\n", "a b", "重み", "94340341200128", "x" * 1000]
)
def test_accepts_any_key_with_a_storage(key: str, written: Write, reader: Reader) -> None:
    data = written(pickled(mapping(w=tensor(of=storage(key)))), {key: VALUES})
    assert tensors(reader, data) == {"w": GOOD}


def test_refuses_entries_outside_the_folder(reader: Reader) -> None:
    for name in ("../../pwned", "/tmp/pwned", "other/x", "pwned", "archive", "archive2/x", ""):
        parts = [*members(GOOD_PICKLE).values(), Member(name.encode(), b"x")]
        message = refusal(reader, make_zip(parts))
        assert f"entry '{name}' is outside the archive's folder 'archive/'" in message
    refusal(reader, make_zip([*members(GOOD_PICKLE).values(), Member(b"\xff", b"x")]))


def test_never_uses_entry_names_as_paths(reader: Reader) -> None:
    for name in (b"archive/../../pwned", b"archive//etc/passwd", b"archive/C:\\x"):
        parts = [*members(GOOD_PICKLE).values(), Member(name, b"x")]
        assert tensors(reader, make_zip(parts)) == {"w": GOOD}
    assert not (reader.folder.parent / "pwned").exists()


def test_refuses_archives_without_a_pickle(reader: Reader) -> None:
    for name, message in (
        ("data.pkl", "has no data.pkl"),
        ("version", "the archive's version is '', not one of 1 to 10"),
    ):
        parts = members(GOOD_PICKLE)
        del parts[name]
        assert message in refusal(reader, make_zip(list(parts.values())))
    assert "the archive is empty" in refusal(reader, make_zip([]))
    for lone in (Member(b"archive/", b""), Member(b"data.pkl"), Member(b"/data.pkl")):
        message = refusal(reader, make_zip([lone]))
        assert "the zip archive has no folder with a checkpoint in it" in message


@pytest.mark.parametrize(
    ("name", "kind"), [("constants.pkl", "TorchScript"), ("models/model.json", "torch.export")]
)
def test_refuses_archives_with_programs(name: str, kind: str, reader: Reader) -> None:
    parts = members(GOOD_PICKLE) | {name: Member(f"archive/{name}".encode(), PAYLOAD)}
    for left_out in ("", "data.pkl"):
        parts.pop(left_out, None)
        message = refusal(reader, make_zip(list(parts.values())))
        assert f"this is a {kind} archive, which has a program; save" in message


@pytest.mark.parametrize("order", [b"", b"middle", b"Little", b"little\n", b"big\0", b"\x1b[2J"])
def test_refuses_another_byte_order(order: bytes, reader: Reader) -> None:
    assert ": the byte order is '" in refusal(reader, changed("byteorder", content=order))


@pytest.mark.parametrize(
    "version",
    [
        *[b"", b"\n", b"0\n", b"11\n", b"-1", b"3 ", b"3\n\n", b"x", b"1000", b"9" * 1000],
        *[b"\xff", b"\xb2", "٣".encode()],
    ],
)
def test_refuses_another_version(version: bytes, reader: Reader) -> None:
    message = refusal(reader, changed("version", content=version))
    assert message.startswith(": the archive's version is '")
    assert message.endswith("', not one of 1 to 10")


def test_refuses_bytes_after_the_pickle(reader: Reader) -> None:
    for more in (b".", PAYLOAD):
        message = refusal(reader, zip_file(GOOD_PICKLE + more))
        assert message == f": {len(more)} bytes follow the end of data.pkl's pickle"


def test_refuses_a_file_that_is_cut_at_any_byte(written: Write, reader: Reader) -> None:
    whole = written(GOOD_PICKLE)
    for size in range(len(whole)):
        refusal(reader, whole[:size])
    assert tensors(reader, whole) == {"w": GOOD}


def test_refuses_bytes_after_the_last_storage_of_a_legacy_stream(reader: Reader) -> None:
    whole = legacy_file(GOOD_PICKLE)
    for more in (1, 100):
        message = refusal(reader, whole + bytes(more))
        assert f"{more} bytes follow the last storage at byte {len(whole)}" in message


def test_refuses_legacy_keys_that_do_not_match_the_storages(reader: Reader) -> None:
    for keys, odd in (
        (listed(), "0"),
        (listed(text("1")), "0"),
        (listed(text("0"), text("1")), "1"),
    ):
        message = refusal(reader, legacy_file(GOOD_PICKLE, keys=keys))
        assert f"storage '{odd}' is in the list of keys or in a tensor, but not in both" in message
    twice = legacy_file(GOOD_PICKLE, keys=listed(text("0"), text("0")))
    assert "the list of storage keys has a key twice" in refusal(reader, twice)
    two = pickled(mapping(w=tensor(), x=tensor(of=storage("1"))))
    good = legacy_file(two, {"0": VALUES, "1": OTHER})
    assert tensors(reader, good) == {"w": GOOD, "x": described(OTHER, [2, 2])}
    # Other readers would leave a missing storage uninitialised.
    refusal(reader, legacy_file(two, {"0": VALUES}))
    refusal(reader, legacy_file(two, {"0": VALUES, "1": OTHER}, keys=listed(text("0"))))


@pytest.mark.parametrize(
    "keys",
    [
        *[listed(number(0)), listed(b"C\x010"), listed(b"N"), several(text("0")), b"}", b"N"],
        *[entries((text("0"), b"N")), text("0"), number(0)],
        *[listed(named("os", "system")), call(named("os", "system"), text("x"))],
    ],
)
def test_refuses_legacy_keys_that_are_not_a_list_of_texts(keys: bytes, reader: Reader) -> None:
    message = refusal(reader, legacy_file(GOOD_PICKLE, keys=keys))
    assert message.endswith(": the list of storage keys is not a list of strings")


def test_refuses_legacy_keys_that_ask_for_code(reader: Reader) -> None:
    keys = listed(text("0")) + named("os", "system") + b"0"
    message = refusal(reader, legacy_file(GOOD_PICKLE, keys=keys))
    assert message.endswith(": the stream's header uses 'os.system'")
    refusal(reader, legacy_file(GOOD_PICKLE, keys=b"(ios\nsystem\n"))


@pytest.mark.parametrize("count", [0, 3, 5, -1, -4, 2**62, -(2**63), 2**63 - 1])
def test_refuses_a_legacy_storage_of_another_count(count: int, reader: Reader) -> None:
    message = refusal(reader, legacy_file(GOOD_PICKLE, counts={"0": count}))
    assert f"storage '0' has {count} elements, but its tensors say 4" in message
    value = mapping(w=tensor((1,), (1,), of=storage(count=count)))
    refusal(reader, legacy_file(pickled(value), counts={"0": count}))


@pytest.mark.parametrize(
    "facts",
    [
        *[mapping(), listed(), b"N", mapping(protocol_version=number(1001))],
        *[mapping(little_endian=value) for value in (b"N", number(1), text("True"))],
    ],
)
def test_refuses_legacy_facts_without_a_byte_order(facts: bytes, reader: Reader) -> None:
    message = refusal(reader, legacy_file(GOOD_PICKLE, facts=facts))
    assert message.endswith(": the stream does not say its byte order")


@pytest.mark.parametrize(
    "value", [named("os", "system"), call(named("os", "system"), text("x")), storage()]
)
def test_refuses_legacy_facts_that_ask_for_more(value: bytes, reader: Reader) -> None:
    message = refusal(
        reader, legacy_file(GOOD_PICKLE, facts=mapping(little_endian=b"\x88", x=value))
    )
    assert value == storage() or message.endswith(": the stream's header uses 'os.system'")


def test_refuses_a_legacy_stream_of_another_protocol(reader: Reader) -> None:
    good = legacy_file(GOOD_PICKLE)
    protocol = pickled(number(1001))
    assert good.count(protocol) == 1
    for other in (*map(number, (1000, 1002, 0, -1)), text("1001"), b"N", b"\x88"):
        message = refusal(reader, good.replace(protocol, pickled(other)))
        assert message.endswith(": this is not a stream of torch's protocol 1001")
    refusal(reader, good.replace(protocol, pickled(call(named("os", "system")))))


def test_reads_big_endian_numbers(reader: Reader) -> None:
    swapped = struct.pack(">4f", 1, 2, 3, 4)
    facts = mapping(protocol_version=number(1001), little_endian=b"\x89")
    assert tensors(reader, legacy_file(GOOD_PICKLE, {"0": swapped}, facts=facts)) == {"w": GOOD}
    parts = members(GOOD_PICKLE, {"0": swapped})
    parts["byteorder"].content = b"big"
    assert tensors(reader, make_zip(list(parts.values()))) == {"w": GOOD}


NAMES = [
    *["../../x", "/tmp/pwned", "..", ".", "", "a\0b", "a\nb", "\x1b[2J", "w\u202egnp.exe"],
    *["a" * 70_000, "con", "C:\\x", "a//b", "重み.0 x"],
]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name)[:20])
def test_never_uses_tensor_names_as_paths(
    name: str, written: Write, reader: Reader, tmp_path: Path
) -> None:
    data = written(pickled(entries((text(name), tensor()))))
    assert tensors(reader, data) == {name: GOOD}
    path = tmp_path / "in" / "x.pt"
    path.parent.mkdir()
    path.write_bytes(data)
    store = blobstore.LocalStore(tmp_path / "a" / "b" / "store")
    try:
        blobstore.create(path, "m", store=store)
    except blobstore.BlobstoreError as error:
        assert str(error).isprintable()
        assert len(str(error)) < 2000
    else:
        with blobstore.open("m", store=store) as model:
            assert {key: bytes(model.view(key).data) for key in model} == {name: VALUES}
    top = {str(found.relative_to(tmp_path)) for found in tmp_path.rglob("*")}
    assert all(item in {"in", "in/x.pt", "a", "a/b"} or item[:9] == "a/b/store" for item in top)


def test_refuses_names_that_are_not_unicode(written: Write, reader: Reader) -> None:
    for name in ("\ud800", "a\udfffb"):
        data = written(pickled(entries((text(name), tensor()))))
        message = refusal(reader, data)
        assert message.endswith("of a tensor is not Unicode")
        assert message.isascii()
        data = written(pickled(mapping(x=text(name), w=tensor())))
        assert tensors(reader, data) == {"w": GOOD}


def test_refuses_files_that_are_not_checkpoints(reader: Reader) -> None:
    for data in (
        *(b"", b"\0", b"PK", b"PK\3\4", b"PK\5\6" + bytes(18), b"\x80", b"\x80\x02", PAYLOAD),
        *(GOOD_PICKLE, b"7z\xbc\xaf\x27\x1c" + PAYLOAD, bytes(257) + b"ustar" + PAYLOAD),
        *(b"GGUF" + bytes(100), b"<!DOCTYPE html>", struct.pack("<Q", 2) + b"{}", b"\xff" * 5000),
        b"version https://git-lfs.github.com/spec/v1\n",
    ):
        assert "this is" in refusal(reader, data) or data[:2] == b"PK"
