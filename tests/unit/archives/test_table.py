from __future__ import annotations

import hashlib
import struct

import pytest

from blobstore.archives.table import (
    MAX_MEMBERS,
    MAX_NAMES,
    PREFIX,
    ArchiveTable,
    Kind,
    Member,
)
from blobstore.compression.delta import MAX_CHAIN
from blobstore.core.digest import Digest
from blobstore.errors import ArchiveDamaged
from tests.support.archives import archive, raw

_NAMES = [("h/n/a:t", 0), ("h/n/b:t", 0)]
_MANIFEST, _BLOB = b"{}", b"bytes"
_COLD = Member(Kind.COLD, 100, Digest.of(b"1"), 3, Digest.of(b"col"))
_DELTA = Member(Kind.DELTA, 100, Digest.of(b"2"), 3, Digest.of(b"del"), 2)
_MEMBERS = [raw(_MANIFEST, Kind.MANIFEST), raw(_BLOB), _COLD, _DELTA]
_STORED = [_MANIFEST, _BLOB, b"col", b"del"]


def decoded(data: bytes) -> ArchiveTable:
    return ArchiveTable.parse(memoryview(data))


def with_table(table: bytes, stored: bytes = b"") -> bytes:
    """Return an archive with any table and a valid footer."""
    digest = hashlib.sha256(PREFIX + table).digest()
    return PREFIX + stored + table + struct.pack("<Q32s8s", len(table), digest, b"BSARCHE\x8f")


def table_of(data: bytes) -> bytes:
    (size,) = struct.unpack("<Q", data[-48:-40])
    return data[-48 - size : -48]


INTACT = archive(_MEMBERS, _STORED, _NAMES)


def refused(data: bytes) -> str:
    with pytest.raises(ArchiveDamaged) as caught:
        decoded(data)
    return str(caught.value)


def test_reads_what_was_written() -> None:
    assert decoded(INTACT) == ArchiveTable(_MEMBERS, _NAMES)
    assert decoded(archive([], [], [])) == ArchiveTable([], [])


def test_the_table_has_the_documented_bytes() -> None:
    table = table_of(archive([_MEMBERS[0]], [_MANIFEST], [("h/n/a:t", 0)]))
    digest = hashlib.sha256(_MANIFEST).digest()
    member = bytes(8) + struct.pack("<QQ", 2, 2) + digest + digest
    assert table == struct.pack("<II", 1, 1) + member + struct.pack("<IH", 0, 7) + b"h/n/a:t"
    entry = table_of(INTACT)[8 + 3 * 88 :][:8]
    assert entry == b"\x03\0\0\0\x02\0\0\0"


def test_rejects_every_cut() -> None:
    for size in range(len(INTACT)):
        refused(INTACT[:size])


@pytest.mark.slow
def test_rejects_every_flipped_bit_of_prefix_table_and_footer() -> None:
    members = range(len(PREFIX), len(PREFIX) + sum(map(len, _STORED)))
    for place in set(range(len(INTACT))) - set(members):
        for bit in range(8):
            data = bytearray(INTACT)
            data[place] ^= 1 << bit
            refused(bytes(data))


def test_rejects_bytes_after_the_end() -> None:
    assert "has no footer" in refused(INTACT + b"\0")
    assert "has 1 bytes after its last name" in refused(
        with_table(table_of(INTACT) + b"\0", b"".join(_STORED))
    )


def test_rejects_another_version() -> None:
    data = PREFIX[:-1] + b"\x02" + INTACT[len(PREFIX) :]
    assert refused(data) == "an archive of models of version 2; this program reads version 1"
    assert "not an archive of models: the prefix is different" in refused(b"PK\x03\x04" + INTACT)


def test_rejects_a_table_larger_than_the_file() -> None:
    footer = struct.pack("<Q32s8s", 2**63, bytes(32), b"BSARCHE\x8f")
    assert "cannot have a table of 9223372036854775808 bytes" in refused(INTACT[:-48] + footer)


@pytest.mark.parametrize(
    ("members", "names"),
    [(2**32 - 1, 0), (MAX_MEMBERS + 1, 0), (0, MAX_NAMES + 1), (1, 0), (0, 1), (1000, 1000)],
)
def test_rejects_counts_that_do_not_fit(members: int, names: int) -> None:
    message = refused(with_table(struct.pack("<II", members, names)))
    assert "more than an archive can have" in message or "do not fit in a table" in message


def test_rejects_sizes_that_do_not_add_up() -> None:
    for stored in (b"", b"byte", b"bytes and more"):
        message = refused(archive([raw(_BLOB)], [stored], []))
        assert message == f"the table lists members of 5 bytes, but the file stores {len(stored)}"
    huge = [Member(Kind.COLD, 1, Digest.of(bytes([key])), 2**63, Digest.of(b"")) for key in (1, 2)]
    assert "members of 18446744073709551616 bytes" in refused(archive(huge, [b""], []))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stored_size": 4}, "has two sizes or digests"),
        ({"size": 6}, "has two sizes or digests"),
        ({"digest": Digest.of(b"x")}, "has two sizes or digests"),
        ({"base": 1}, "kind 1 has no base, but 1 is stated"),
        ({"kind": 5}, "kind 5 is unknown"),
        ({"kind": 255}, "kind 255 is unknown"),
    ],
)
def test_rejects_a_member_that_contradicts_itself(change: dict[str, object], message: str) -> None:
    member = raw(_BLOB)._replace(**change)  # type: ignore[arg-type]
    assert message in refused(archive([member], [_BLOB], []))


@pytest.mark.parametrize("place", [1, 2, 3])
def test_rejects_reserved_bytes_that_are_not_0(place: int) -> None:
    table = bytearray(table_of(archive([raw(_BLOB)], [_BLOB], [])))
    table[8 + place] = 1
    assert "the reserved bytes are not 0" in refused(with_table(bytes(table), _BLOB))


@pytest.mark.parametrize("base", [0, 3, 4, 2**32 - 1])
def test_rejects_a_base_that_is_a_manifest_or_comes_later(base: int) -> None:
    members = [*_MEMBERS[:3], _DELTA._replace(base=base)]
    message = refused(archive(members, _STORED, _NAMES))
    assert f"member {base} cannot be its base" in message


@pytest.mark.parametrize("signed", [1, 4, 5, 2**32 - 1])
def test_rejects_a_signature_of_anything_but_an_earlier_manifest(signed: int) -> None:
    signature = raw(b"sig", Kind.SIGNATURE)._replace(base=0)
    members, stored = [*_MEMBERS, signature], [*_STORED, b"sig"]
    assert decoded(archive(members, stored, _NAMES)).members == members
    members[-1] = signature._replace(base=signed)
    message = refused(archive(members, stored, _NAMES))
    assert message == (
        f"member 4: member {signed} cannot be what it signs, which must be an earlier manifest"
    )


def test_rejects_a_signature_as_a_base_and_one_over_the_limit() -> None:
    signature = raw(b"sig", Kind.SIGNATURE)._replace(base=0)
    members = [_MEMBERS[0], signature, _DELTA._replace(base=1)]
    assert "member 1 cannot be its base" in refused(
        archive(members, [_MANIFEST, b"sig", b"del"], _NAMES)
    )
    large = signature._replace(size=2**25 + 1, stored_size=2**25 + 1)
    message = refused(archive([_MEMBERS[0], large], [_MANIFEST, b""], _NAMES))
    assert "a signature of 33554433 bytes is over the limit of 33554432" in message


def test_a_base_may_be_a_delta_in_a_chain_that_is_not_too_long() -> None:
    many = MAX_CHAIN + 1
    deltas = [
        _DELTA._replace(digest=Digest.of(b"delta %d" % number), base=number + 2)
        for number in range(many)
    ]
    stored = [*_STORED[:3], *[b"del"] * many]
    whole = [*_MEMBERS[:3], *deltas]
    assert decoded(archive(whole[:-1], stored[:-1], _NAMES)).members == whole[:-1]
    message = refused(archive(whole, stored, _NAMES))
    assert message == f"member {many + 2} ends a chain of {many} deltas"


def test_rejects_the_same_digest_twice() -> None:
    members = [_MEMBERS[0], raw(_BLOB), _COLD._replace(digest=Digest.of(_BLOB))]
    assert "is listed twice" in refused(archive(members, _STORED[:3], _NAMES))
    manifests = [_MEMBERS[0], _MEMBERS[0]]
    names = [("h/n/a:t", 0), ("h/n/b:t", 1)]
    assert "is listed twice" in refused(archive(manifests, [_MANIFEST] * 2, names))


def test_a_manifest_may_be_a_blob_too() -> None:
    members = [_MEMBERS[0], raw(_MANIFEST)]
    assert decoded(archive(members, [_MANIFEST] * 2, _NAMES)).members == members


def test_rejects_a_manifest_without_a_name() -> None:
    assert "without a name" in refused(archive([_MEMBERS[0]], [_MANIFEST], []))


def test_rejects_a_manifest_over_the_limit() -> None:
    member = raw(_MANIFEST, Kind.MANIFEST)._replace(stored_size=2**26 + 1, size=2**26 + 1)
    assert "a manifest of 67108865 bytes is over the limit of 67108864" in refused(
        archive([member], [b""], [])
    )


@pytest.mark.parametrize(
    "names",
    [
        [("h/n/b:t", 0), ("h/n/a:t", 0)],
        [("h/n/a:t", 0), ("h/n/a:t", 0)],
        [("", 0)],
        [("h" * 601, 0)],
        [("h/n/a:t", 1)],
        [("h/n/a:t", 4)],
    ],
    ids=["descending", "twice", "empty", "long", "of a blob", "of nothing"],
)
def test_rejects_names(names: list[tuple[str, int]]) -> None:
    assert "the name '" in refused(archive(_MEMBERS, _STORED, names))


def test_rejects_a_name_that_is_not_ascii_or_cut_short() -> None:
    table = table_of(archive([_MEMBERS[0]], [_MANIFEST], [("h/n/a:t", 0)]))
    assert "not ASCII" in refused(with_table(table[:-1] + b"\xff", _MANIFEST))
    assert "not ASCII" in refused(with_table(table[:-1], _MANIFEST))
    two = table_of(INTACT)
    assert "the table ends in the middle of a name" in refused(
        with_table(two[:-12], b"".join(_STORED))
    )


def test_messages_have_no_control_characters() -> None:
    table = table_of(archive([_MEMBERS[0]], [_MANIFEST], [("\x1b[2J/n/a:t", 1)]))
    assert refused(with_table(table, _MANIFEST)).isprintable()


def test_encodes_what_it_decodes() -> None:
    assert decoded(INTACT).to_bytes() == INTACT[len(PREFIX) + sum(map(len, _STORED)) :]
