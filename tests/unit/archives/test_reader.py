from __future__ import annotations

import base64
import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from blobstore.archives.reader import ArchiveReader, label_blobs, open_archive
from blobstore.archives.table import ArchiveTable, Kind
from blobstore.core.digest import Digest
from blobstore.errors import ArchiveDamaged, BlobstoreError, ModelNotFound, NotFound
from blobstore.manifests import media_types
from blobstore.manifests.descriptor import Descriptor
from blobstore.manifests.layers_digest import MAX_CONFIG_SIZE
from blobstore.manifests.model import Manifest
from blobstore.manifests.reference import Reference
from blobstore.store.local import LocalStore
from tests.readers.archives import read_archive
from tests.support.archives import Parts, archive, packed_family, raw
from tests.support.zip_files import opened

BASE, TUNED = Reference.parse("base"), Reference.parse("tuned")
VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "archive.json").read_text())


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("family")
    return packed_family(LocalStore(folder / "store"), folder / "family.bsar")


@pytest.fixture
def path(tmp_path: Path, family: bytes) -> Path:
    path = tmp_path / "family.bsar"
    path.write_bytes(family)
    return path


def read_member(data: bytes, number: int) -> bytes:
    """Open an archive and return one of its members."""
    with opened(data) as (descriptor, size):
        return ArchiveReader(descriptor, size, "x.bsar").read(number)


def with_flipped_bit(data: bytes, number: int) -> bytes:
    """Return an archive with a flipped bit in the middle of a member."""
    begin, end = Parts(data).places[number]
    changed = bytearray(data)
    changed[(begin + end) // 2] ^= 1
    return bytes(changed)


# Members


def test_the_family_has_members_of_every_kind(family: bytes) -> None:
    assert {member.kind for member in Parts(family).members} == set(Kind)


def test_reads_every_member_alone(family: bytes) -> None:
    for number, member in enumerate(Parts(family).members):
        assert Digest.of(read_member(family, number)) == member.digest


def test_members_lie_next_to_each_other(family: bytes) -> None:
    parts = Parts(family)
    assert parts.places[0][0] == 8
    assert all(one[1] == other[0] for one, other in pairwise(parts.places))
    assert b"".join(parts.stored) == family[8 : parts.places[-1][1]]


def test_finds_blobs_by_digest(path: Path) -> None:
    with open_archive(path) as reader:
        kinds = [reader.members[number].kind for number in reader.blobs.values()]
        assert not {Kind.MANIFEST, Kind.SIGNATURE} & set(kinds)
        assert len(kinds) == len(reader.members) - 3  # two manifests and a signature
        for digest, number in reader.blobs.items():
            assert reader.members[number].digest == digest


def test_threads_share_a_reader(path: Path) -> None:
    with open_archive(path) as reader, ThreadPoolExecutor(4) as pool:
        numbers = list(reader.blobs.values()) * 5
        digests = list(pool.map(lambda number: Digest.of(reader.read(number)), numbers))
        assert digests == [reader.members[number].digest for number in numbers]


def test_rejects_altered_stored_bytes(family: bytes) -> None:
    for number in range(len(Parts(family).members)):
        with pytest.raises(ArchiveDamaged, match=f"member {number}\\) is altered"):
            read_member(with_flipped_bit(family, number), number)


@pytest.mark.parametrize("kind", [Kind.COLD, Kind.DELTA])
def test_rejects_a_cold_blob_in_place_of_another(family: bytes, kind: Kind) -> None:
    number = Parts(family).number(kind)
    size = Parts(family).members[number].size
    for change in ({"digest": Digest.of(b"another")}, {"size": size + 1}):
        parts = Parts(family)
        parts.change(number, **change)
        with pytest.raises(ArchiveDamaged, match="it holds sha256:"):
            read_member(parts.data(), number)


@pytest.mark.parametrize("data", [b"", b"no cold blob", bytes(1000)])
def test_rejects_a_member_that_is_not_a_cold_blob(family: bytes, data: bytes) -> None:
    parts = Parts(family)
    number = parts.number(Kind.COLD)
    parts.put(number, data)
    with pytest.raises(ArchiveDamaged, match=f"member {number}\\): "):
        read_member(parts.data(), number)


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
        with pytest.raises(ArchiveDamaged, match="expected"):
            read_member(parts.data(), number)


def test_rejects_a_base_for_a_blob_without_one(family: bytes) -> None:
    parts = Parts(family)
    numbers = [number for number, item in enumerate(parts.members) if item.kind == Kind.COLD]
    parts.change(numbers[1], kind=Kind.DELTA, base=numbers[0])
    for number, item in enumerate(parts.members):
        if item.base == numbers[1]:
            parts.change(number, base=numbers[0])
    with pytest.raises(ArchiveDamaged, match="expected none"):
        read_member(parts.data(), numbers[1])


def test_a_base_is_hashed_before_a_delta_is_decoded(family: bytes) -> None:
    delta = Parts(family).number(Kind.DELTA)
    base = Parts(family).members[delta].base
    assert base is not None
    damaged = with_flipped_bit(family, base)
    for number in (base, delta):
        with pytest.raises(ArchiveDamaged, match=f"member {base}\\) is altered"):
            read_member(damaged, number)


@pytest.mark.parametrize("kind", [Kind.COLD, Kind.DELTA])
def test_no_codec_sees_altered_bytes(
    family: bytes, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = Parts(family).number(kind)
    base = Parts(family).members[number].base
    opened_blobs: list[object] = []
    monkeypatch.setattr(
        "blobstore.archives.reader.ColdBlobDecoder",
        opened_blobs.append,
    )
    for damaged in {number, number if base is None else base}:
        with pytest.raises(ArchiveDamaged, match=f"member {damaged}\\) is altered"):
            read_member(with_flipped_bit(family, damaged), number)
    assert opened_blobs == []


def test_stored_bytes_are_hashed_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, read = os.preadv, 0

    def counted(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal read
        read += (count := real(descriptor, buffers, offset))
        return count

    monkeypatch.setattr(os, "preadv", counted)
    with open_archive(path) as reader:
        for number in range(len(reader.members)):
            reader.read(number)
        assert read == reader.offsets[-1] - reader.offsets[0]


def test_reading_a_member_touches_no_other_than_its_base(family: bytes) -> None:
    data = bytearray(family)
    parts = Parts(family)
    for (begin, end), item in zip(parts.places, parts.members, strict=True):
        if item.kind == Kind.DELTA:
            data[begin:end] = bytes(end - begin)
    for number, item in enumerate(parts.members):
        if item.kind != Kind.DELTA:
            assert Digest.of(read_member(bytes(data), number)) == item.digest


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["why"])
def test_reads_what_version_1_wrote(vector: dict[str, Any]) -> None:
    data = base64.b64decode(vector["archive"])
    table = ArchiveTable.parse(memoryview(data))
    names = {name: str(table.members[number].digest) for name, number in table.names}
    assert names == vector["names"]
    found = [
        {
            "kind": item.kind,
            "size": len(read_member(data, number)),
            "digest": str(Digest.of(read_member(data, number))),
            "base": item.base,
        }
        for number, item in enumerate(table.members)
    ]
    assert found == vector["members"]


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["why"])
def test_a_second_reader_reads_the_same(vector: dict[str, Any]) -> None:
    read = read_archive(base64.b64decode(vector["archive"]))
    assert {name: f"sha256:{digest}" for name, digest in read.names.items()} == vector["names"]
    blobs = [item for item in vector["members"] if item["kind"] in {1, 2, 3}]
    signatures = [item for item in vector["members"] if item["kind"] == 4]
    assert [f"sha256:{one}" for one in read.signatures] == [item["digest"] for item in signatures]
    assert [f"sha256:{digest}" for digest in read.blobs] == [item["digest"] for item in blobs]
    assert len(read.bases) == sum(item["kind"] == 3 for item in blobs)


# Blobs by digest


def test_reads_parts_of_blobs_of_every_kind(path: Path) -> None:
    with open_archive(path) as reader:
        for digest, number in reader.blobs.items():
            content = reader.read(number)
            buffer = bytearray(len(content) // 3)
            reader.read_into(digest, len(content), len(content) // 2, memoryview(buffer))
            assert buffer == content[len(content) // 2 :][: len(buffer)]


def test_does_not_decode_parts_of_altered_members(tmp_path: Path, family: bytes) -> None:
    path = tmp_path / "x.bsar"
    for number, member in enumerate(Parts(family).members):
        if member.kind in {Kind.MANIFEST, Kind.SIGNATURE}:
            continue
        for damaged in {number, number if member.base is None else member.base}:
            path.write_bytes(with_flipped_bit(family, damaged))
            with (
                pytest.raises(ArchiveDamaged, match=f"member {damaged}\\) is altered"),
                open_archive(path) as reader,
            ):
                reader.read_into(member.digest, member.size, 0, memoryview(bytearray(1)))


# Models


def refused(path: Path, data: bytes, *names: Reference) -> str:
    path.write_bytes(data)
    with pytest.raises(ArchiveDamaged) as caught, open_archive(path) as reader:
        reader.models(names)
    message = str(caught.value)
    assert message.startswith(f"archive '{path}': ")
    return message


def test_lists_names_and_models(path: Path) -> None:
    with open_archive(path) as reader:
        assert reader.references() == (BASE, TUNED)
        models = reader.models()
        assert [model.reference for model in models] == [BASE, TUNED]
        assert all(Manifest.from_bytes(model.data) == model.manifest for model in models)
        assert reader.models([TUNED]) == models[1:]


def test_lists_the_blobs_that_models_need(path: Path) -> None:
    with open_archive(path) as reader:
        for model in reader.models():
            assert {reader.members[number].digest for number in reader.needed([model])} == {
                blob.digest for blob in model.manifest.blobs
            }
        everything = reader.needed(reader.models())
        assert everything == sorted(reader.blobs.values())
        assert [Digest.of(reader.read(number)) for number in everything] == [
            reader.members[number].digest for number in everything
        ]


def test_labels_blobs_with_model_and_layer(path: Path) -> None:
    with open_archive(path) as reader:
        bases = set()
        for model in reader.models():
            labels = label_blobs([model], reader)
            layer = reader.blobs[model.manifest.layers[0].digest]
            assert labels[layer] == f"{model.reference}: layer 'l0'"
            for number in reader.needed([model]):
                base = reader.members[number].base
                if base is not None:
                    bases.add(base)
                    assert labels[base] == f"the base of {labels[number]}"
            assert labels.keys() - set(reader.needed([model])) <= bases
        assert len(bases) == 3


def test_rejects_a_name_that_the_archive_lacks(path: Path) -> None:
    with (
        open_archive(path) as reader,
        pytest.raises(ModelNotFound, match="no model 'other:latest' in the archive"),
    ):
        reader.models([Reference.parse("other")])


def test_a_config_over_the_limit_is_not_compared(tmp_path: Path) -> None:
    config = b"{" + b" " * MAX_CONFIG_SIZE + b"}"
    described = Descriptor(media_types.CONFIG, Digest.of(config), len(config))
    manifest = Manifest(config=described, layers=()).to_bytes()
    members = [raw(manifest, Kind.MANIFEST), raw(config)]
    path = tmp_path / "x.bsar"
    path.write_bytes(archive(members, [manifest, config], [("h/n/m:t", 0)]))
    with open_archive(path) as reader:
        assert [model.data for model in reader.models()] == [manifest]


# Files


def test_rejects_paths_that_are_not_files(tmp_path: Path, path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for wrong, error, message in (
        (tmp_path / "none.bsar", NotFound, "."),
        (tmp_path, BlobstoreError, "."),
        (tmp_path / "none" / "x.bsar", NotFound, "."),
        (tmp_path / "pipe", BlobstoreError, "is not a regular file"),
        (path / "x", BlobstoreError, "cannot read .*: Not a directory"),
    ):
        with pytest.raises(error, match=message), open_archive(wrong):
            pass
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


@pytest.mark.parametrize("data", [b"", b"x", b"PK\x03\x04" + bytes(100)])
def test_rejects_other_files(tmp_path: Path, data: bytes) -> None:
    refused(tmp_path / "x.bsar", data)


def test_reports_a_file_that_is_truncated_while_it_is_read(path: Path) -> None:
    with pytest.raises(ArchiveDamaged, match="cut short at byte"), open_archive(path) as reader:
        numbers = reader.needed(reader.models())
        os.truncate(path, reader.offsets[numbers[-1]] + 5)
        reader.read(numbers[-1])


def test_reports_a_disk_that_fails(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    with open_archive(path) as reader:
        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(BlobstoreError, match="at byte 8: Input/output error"):
            reader.models()
