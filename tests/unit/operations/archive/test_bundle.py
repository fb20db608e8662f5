from __future__ import annotations

import base64
import json
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from blobstore.core.digest import Digest
from blobstore.errors import ArchiveDamaged
from blobstore.operations.archive.bundle import Bundle
from blobstore.operations.archive.format import Kind
from blobstore.store.local import LocalStore
from tests.readers.archives import read_archive
from tests.support.archives import Parts, packed_family
from tests.support.cold import cold


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("family")
    return packed_family(LocalStore(folder / "store"), folder / "family.bsar")


def test_the_family_has_members_of_every_kind(family: bytes) -> None:
    assert {member.kind for member in Bundle(family).members} == set(Kind)


def test_every_member_is_read_by_itself(family: bytes) -> None:
    for number, member in enumerate(Bundle(family).members):
        bundle = Bundle(family)
        bundle.check_stored(number)
        assert Digest.of(bundle.read(number)) == member.digest


def test_members_follow_one_another(family: bytes) -> None:
    bundle = Bundle(family)
    places = [bundle.place(number) for number in range(len(bundle.members))]
    assert places[0][0] == 8
    assert all(one[1] == other[0] for one, other in pairwise(places))
    assert (
        b"".join(bundle.stored(number) for number in range(len(places)))
        == (family[8 : places[-1][1]])
    )


def test_blobs_are_found_by_their_digests(family: bytes) -> None:
    bundle = Bundle(family)
    kinds = [bundle.members[number].kind for number in bundle.blobs.values()]
    assert Kind.MANIFEST not in kinds
    assert len(kinds) == sum(member.kind != Kind.MANIFEST for member in bundle.members)
    assert all(bundle.members[number].digest == digest for digest, number in bundle.blobs.items())


def test_threads_share_it(family: bytes) -> None:
    bundle = Bundle(family)
    numbers = list(bundle.blobs.values()) * 5
    with ThreadPoolExecutor(4) as pool:
        digests = list(pool.map(lambda number: Digest.of(bundle.read(number)), numbers))
    assert digests == [bundle.members[number].digest for number in numbers]


def test_rejects_stored_bytes_that_are_altered(family: bytes) -> None:
    for number in range(len(Bundle(family).members)):
        begin, end = Bundle(family).place(number)
        data = bytearray(family)
        data[(begin + end) // 2] ^= 1
        with pytest.raises(ArchiveDamaged, match=f"member {number}\\) is altered"):
            Bundle(data).check_stored(number)
        with pytest.raises(ArchiveDamaged):
            Bundle(data).read(number)


@pytest.mark.parametrize("kind", [Kind.COLD, Kind.DELTA])
def test_rejects_a_cold_blob_that_stands_for_another(family: bytes, kind: Kind) -> None:
    parts = Parts(family)
    number = parts.number(kind)
    parts.change(number, digest=Digest.of(b"another"))
    with pytest.raises(ArchiveDamaged, match="it is that of sha256:"):
        Bundle(parts.data()).read(number)
    parts = Parts(family)
    parts.change(number, size=parts.members[number].size + 1)
    with pytest.raises(ArchiveDamaged, match="it is that of sha256:"):
        Bundle(parts.data()).read(number)


def test_rejects_a_cold_blob_that_says_another_digest_of_the_same_bytes(family: bytes) -> None:
    parts = Parts(family)
    number = parts.number(Kind.COLD)
    other = Digest.of(b"another")
    parts.put(number, cold(Bundle(family).read(number), digest=other))
    parts.change(number, digest=other)
    with pytest.raises(ArchiveDamaged, match="decodes to"):
        Bundle(parts.data()).read(number)


def test_rejects_what_is_no_cold_blob(family: bytes) -> None:
    parts = Parts(family)
    number = parts.number(Kind.COLD)
    for data in (b"", b"no cold blob", bytes(1000)):
        parts.put(number, data)
        with pytest.raises(ArchiveDamaged, match=f"member {number}\\): "):
            Bundle(parts.data()).read(number)


def test_rejects_a_delta_that_is_said_to_need_no_base(family: bytes) -> None:
    parts = Parts(family)
    number = parts.number(Kind.DELTA)
    parts.change(number, kind=Kind.COLD, base=None)
    with pytest.raises(ArchiveDamaged, match="no base is stated"):
        Bundle(parts.data()).read(number)


def test_rejects_another_base_than_the_delta_was_made_from(family: bytes) -> None:
    parts = Parts(family)
    number = max(place for place, item in enumerate(parts.members) if item.kind == Kind.DELTA)
    right = parts.members[number].base
    others = [
        place
        for place, item in enumerate(parts.members[:number])
        if item.kind in {Kind.RAW, Kind.COLD} and place != right
    ]
    assert {parts.members[place].kind for place in others} == {Kind.RAW, Kind.COLD}
    for other in others:
        parts.change(number, base=other)
        with pytest.raises(ArchiveDamaged, match="what is needed is"):
            Bundle(parts.data()).read(number)


def test_rejects_a_blob_that_is_said_to_have_a_base(family: bytes) -> None:
    parts = Parts(family)
    cold = [number for number, item in enumerate(parts.members) if item.kind == Kind.COLD]
    parts.change(cold[1], kind=Kind.DELTA, base=cold[0])
    for number, item in enumerate(parts.members):
        if item.base == cold[1]:
            parts.change(number, base=cold[0])
    with pytest.raises(ArchiveDamaged, match="what is needed is none"):
        Bundle(parts.data()).read(cold[1])


def test_an_altered_base_is_told(family: bytes) -> None:
    parts = Parts(family)
    delta = parts.number(Kind.DELTA)
    base = parts.members[delta].base
    assert base is not None
    begin, end = Bundle(family).place(base)
    data = bytearray(family)
    data[(begin + end) // 2] ^= 1
    with pytest.raises(ArchiveDamaged):
        Bundle(data).read(delta)


def test_reading_a_member_touches_none_but_its_base(family: bytes) -> None:
    data = bytearray(family)
    bundle = Bundle(family)
    deltas = [number for number, item in enumerate(bundle.members) if item.kind == Kind.DELTA]
    for number in deltas:
        begin, end = bundle.place(number)
        data[begin:end] = bytes(end - begin)
    changed = Bundle(data)
    for number, member in enumerate(bundle.members):
        if number not in deltas:
            assert Digest.of(changed.read(number)) == member.digest


VECTORS = json.loads((Path(__file__).parents[3] / "vectors" / "archive.json").read_text())


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["why"])
def test_reads_what_version_1_wrote(vector: dict[str, Any]) -> None:
    bundle = Bundle(base64.b64decode(vector["archive"]))
    names = {name: str(bundle.members[number].digest) for name, number in bundle.names}
    assert names == vector["names"]
    found = [
        {
            "kind": item.kind,
            "size": len(bundle.read(number)),
            "digest": str(Digest.of(bundle.read(number))),
            "base": item.base,
        }
        for number, item in enumerate(bundle.members)
    ]
    assert found == vector["members"]


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["why"])
def test_a_second_reader_reads_the_same(vector: dict[str, Any]) -> None:
    read = read_archive(base64.b64decode(vector["archive"]))
    assert {name: f"sha256:{digest}" for name, digest in read.names.items()} == vector["names"]
    blobs = [item for item in vector["members"] if item["kind"]]
    assert [f"sha256:{digest}" for digest in read.blobs] == [item["digest"] for item in blobs]
    assert len(read.bases) == sum(item["kind"] == 3 for item in blobs)
