"""Damaged and hostile archives: each fails with one clear error, in bounded memory, and leaves nothing."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import shutil
import struct
import tracemalloc
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import zstandard

from blobstore.archives.table import PREFIX, Kind, Member
from blobstore.compression.decoder import ColdBlobDecoder
from blobstore.compression.entropy import Method
from blobstore.compression.table import PREFIX as COLD_PREFIX
from blobstore.compression.table import Chunk, Part, StoredFactors, StoredPlane, Table, encode_table
from blobstore.core.digest import BlobId, Digest
from blobstore.errors import ArchiveDamaged, NameConflict, StoreError
from blobstore.manifests import media_types
from blobstore.manifests.descriptor import Descriptor
from blobstore.manifests.model import Manifest, ModelConfig
from blobstore.operations.archive.unpack import check_archive, unpack_archive
from blobstore.store.local import LocalStore
from tests.support.archives import Parts, archive, model_archive, packed_family, raw
from tests.support.cold import cold

NAME = "registry.ollama.ai/library/m:latest"


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("family")
    return packed_family(LocalStore(folder / "store"), folder / "family.bsar")


@pytest.fixture
def target(tmp_path: Path) -> Iterator[LocalStore]:
    """Return a store that must have no names and no blobs at the end."""
    store = LocalStore(tmp_path / "target")
    yield store
    left = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".bsar"]
    assert [path.name for path in left if path.name != "lock"] == []


def refused(data: bytes | bytearray, target: LocalStore) -> str:
    """Return why an archive is refused, which must be the same for unpacking and checking."""
    path = target.root.parent / "hostile.bsar"
    path.write_bytes(data)
    messages = []
    acts = partial(check_archive, path, jobs=1), partial(unpack_archive, path, store=target, jobs=1)
    for act in acts:
        tracemalloc.start()
        try:
            with pytest.raises(ArchiveDamaged) as caught:
                act()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 40 << 20
        messages.append(str(caught.value))
    assert len(set(messages)) == 1
    assert messages[0].isprintable()
    assert len(messages[0]) < 2000
    return messages[0]


def with_table(stored: bytes, table: bytes) -> bytes:
    """Return an archive with any table and a valid footer."""
    digest = hashlib.sha256(PREFIX + table).digest()
    return PREFIX + stored + table + struct.pack("<Q32s8s", len(table), digest, b"BSARCHE\x8f")


def model_of(blobs: dict[str, tuple[Digest, int]]) -> tuple[bytes, bytes]:
    """Return the manifest and the config of a model of tensor blobs."""
    config = ModelConfig().to_bytes()
    layers = [
        Descriptor(media_types.TENSOR, digest, size, name) for name, (digest, size) in blobs.items()
    ]
    described = Descriptor(media_types.CONFIG, Digest.of(config), len(config))
    return Manifest(config=described, layers=tuple(layers)).to_bytes(), config


def hostile(*members: tuple[Member, bytes]) -> bytes:
    """Return an archive of a model with these blobs."""
    blobs = {f"b{number}": (item.digest, item.size) for number, (item, _) in enumerate(members)}
    manifest, config = model_of(blobs)
    listed = [raw(manifest, Kind.MANIFEST), raw(config), *(item for item, _ in members)]
    return archive(listed, [manifest, config, *(data for _, data in members)], [(NAME, 0)])


def cold_member(data: bytes, digest: Digest, size: int) -> tuple[Member, bytes]:
    return Member(Kind.COLD, size, digest, len(data), Digest.of(data)), data


def test_the_attacked_archives_are_intact(family: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.bsar"
    data = b"a blob" * 1000
    for archived in (
        family,
        Parts(family).data(),
        model_archive({"a": b"blob"}),
        hostile(cold_member(cold(data), Digest.of(data), len(data))),
    ):
        path.write_bytes(archived)
        check_archive(path)


def test_rejects_a_small_archive_cut_at_any_byte(tmp_path: Path) -> None:
    data = model_archive({"a": b"blob", "b": b"another"})
    path = tmp_path / "x.bsar"
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(ArchiveDamaged):
            check_archive(path, jobs=1)


def test_rejects_truncated_archives(family: bytes, target: LocalStore) -> None:
    sizes = {0, 1, 7, 8, 9, len(family) - 1, len(family) - 48, len(family) - 49}
    for size in sizes | set(range(100, len(family), len(family) // 20)):
        refused(family[:size], target)


def test_rejects_flipped_bits_anywhere_in_a_small_archive(tmp_path: Path) -> None:
    data = bytearray(model_archive({"a": b"blob"}))
    path = tmp_path / "x.bsar"
    for place, bit in itertools.product(range(len(data)), (0, 7)):
        data[place] ^= 1 << bit
        path.write_bytes(data)
        with pytest.raises(ArchiveDamaged):
            check_archive(path, jobs=1)
        data[place] ^= 1 << bit


def test_rejects_flipped_bits(family: bytes, target: LocalStore) -> None:
    chance = random.Random(7)
    data = bytearray(family)
    for _ in range(30):
        place, bit = chance.randrange(len(data)), chance.randrange(8)
        data[place] ^= 1 << bit
        refused(data, target)
        data[place] ^= 1 << bit
    assert data == family


def test_rejects_missing_and_duplicated_bytes(family: bytes, target: LocalStore) -> None:
    for place in range(0, len(family), len(family) // 15):
        refused(family[:place] + family[place + 1 :], target)
        refused(family[:place] + family[place : place + 1] + family[place:], target)


def test_rejects_bytes_after_the_end(family: bytes, target: LocalStore) -> None:
    for more in (b"\0", b"more", family):
        data = family + more
        if more == family:  # which ends like an archive
            assert "the table lists members of" in refused(data, target)
        else:
            refused(data, target)


def test_rejects_swapped_members(family: bytes, target: LocalStore) -> None:
    parts = Parts(family)
    for one, other in itertools.pairwise(range(len(parts.stored))):
        swapped = Parts(family)
        swapped.stored[one], swapped.stored[other] = swapped.stored[other], swapped.stored[one]
        refused(swapped.data(), target)


def test_rejects_swapped_table_entries(family: bytes, target: LocalStore) -> None:
    for one, other in itertools.pairwise(range(len(Parts(family).stored))):
        swapped = Parts(family)
        members = swapped.members
        members[one], members[other] = members[other], members[one]
        refused(swapped.data(), target)


def test_rejects_huge_counts(target: LocalStore) -> None:
    for counts in ((2**32 - 1, 0), (0, 2**32 - 1), (2**20, 0), (0, 2**16), (2**20, 2**16)):
        refused(with_table(b"", struct.pack("<II", *counts)), target)


def test_rejects_sizes_beyond_the_file(family: bytes, target: LocalStore) -> None:
    for size in (2**64 - 1, 2**63, len(family) + 1):
        parts = Parts(family)
        parts.change(parts.number(Kind.COLD), stored_size=size)
        refused(parts.data(), target)
    parts = Parts(family)  # one takes bytes of the next: they would overlap
    number = parts.number(Kind.COLD)
    parts.change(number, stored_size=parts.members[number].stored_size + 100)
    parts.change(number + 1, stored_size=parts.members[number + 1].stored_size - 100)
    refused(parts.data(), target)


def test_rejects_a_manifest_that_declares_a_larger_blob(target: LocalStore) -> None:
    manifest, config = model_of({"a": (Digest.of(b"blob"), 2**62)})
    members = [raw(manifest, Kind.MANIFEST), raw(config), raw(b"blob")]
    message = refused(archive(members, [manifest, config, b"blob"], [(NAME, 0)]), target)
    assert f"layer 'a': blob {Digest.of(b'blob')} has 4 bytes" in message
    assert "has 4 bytes, expected 4611686018427387904" in message


def test_rejects_a_cold_blob_that_declares_more_than_its_chunks_can_hold(
    target: LocalStore, tmp_path: Path
) -> None:
    size, digest = 2**60, Digest.of(b"blob")
    table = Table(digest, size, None, [Part(size)], [])
    path = tmp_path / "hostile.bsar"
    path.write_bytes(hostile(cold_member(COLD_PREFIX + encode_table(table), digest, size)))
    with pytest.raises(ArchiveDamaged, match="do not fit in the table"):
        check_archive(path)
    with pytest.raises(StoreError, match="not enough space"):
        unpack_archive(path, store=target)


def test_a_decompression_bomb_needs_free_space(
    target: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts that repeat another part cost little: a valid terabyte in a megabyte."""
    data = bytes(16 << 20)
    blob = ColdBlobDecoder(cold(data))
    planes = blob.data[len(COLD_PREFIX) : -48 - int.from_bytes(blob.data[-48:-40], "little")]
    (part,) = blob.table.parts
    parts = [part, *[part._replace(same_as=0)] * 65535]
    digest, size = Digest.of(b"whatever"), 1 << 40
    table = Table(digest, size, None, parts, blob.table.chunks)
    path = tmp_path / "hostile.bsar"
    bomb = COLD_PREFIX + bytes(planes) + encode_table(table)
    path.write_bytes(hostile(cold_member(bomb, digest, size)))
    assert path.stat().st_size < 2 << 20
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 39)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(StoreError, match=r"not enough space .*: 1\.1 TB are needed"):
        unpack_archive(path, store=target)


@pytest.mark.parametrize(
    "name",
    [
        "registry.ollama.ai/library/../../../../etc/passwd:latest",
        "registry.ollama.ai/library/m:../../x",
        "../library/m:latest",
        "/etc/library/m:latest",
        "h/n/m:.hidden",
        "h/n/m:-rf",
        "h/n/m\x00:t",
        "h/n/\x1b[2Jm:t",
        "h\\n\\m:t",
        "registry.ollama.ai/library/m",
        "registry.ollama.ai/library/..:latest",
        "../../../etc:latest",
        "/a/b:c",
        "a//b:c",
        "a/b/c/d:e",
        "h/n/m:t\n",
        "h/n/-m:t",
        "h/n/m",
        "library/m:latest",
        "m",
        "HTTP://h/n/m:t",
    ],
)
def test_rejects_names_that_lead_out_of_the_store(target: LocalStore, name: str) -> None:
    assert "is not the full name of a model" in refused(model_archive({"a": b"blob"}, name), target)


def test_rejects_two_models_of_one_name(family: bytes, target: LocalStore) -> None:
    parts = Parts(family)
    name = parts.names[0][0]
    parts.names = [(name, 0), (name, 1)]
    assert "is not sorted after" in refused(parts.data(), target)
    parts.names = [(name.upper(), 1), (name, 0)]
    assert "differ in case only" in refused(parts.data(), target)


def test_rejects_two_members_with_one_digest(family: bytes, target: LocalStore) -> None:
    parts = Parts(family)
    number = parts.number(Kind.COLD)
    parts.add(parts.members[number], parts.stored[number])
    assert "is listed twice" in refused(parts.data(), target)


def test_rejects_a_manifest_with_missing_blobs(family: bytes, target: LocalStore) -> None:
    manifest, config = model_of({"a": (Digest.of(b"blob"), 4)})
    members = [raw(manifest, Kind.MANIFEST), raw(config)]
    message = refused(archive(members, [manifest, config], [(NAME, 0)]), target)
    assert f"layer 'a': blob {Digest.of(b'blob')} is not in the archive" in message
    parts = Parts(family)
    del parts.members[-1], parts.stored[-1]
    assert "is not in the archive" in refused(parts.data(), target)


def test_rejects_a_blob_as_a_manifest_and_a_manifest_as_a_blob(target: LocalStore) -> None:
    manifest, config = model_of({})
    members = [raw(config, Kind.MANIFEST), raw(manifest)]
    assert "model 'm:latest': " in refused(
        archive(members, [config, manifest], [(NAME, 0)]), target
    )
    members = [raw(manifest, Kind.MANIFEST), raw(config, Kind.RAW)]
    assert "is not a manifest" in refused(archive(members, [manifest, config], [(NAME, 1)]), target)


@pytest.mark.parametrize(
    "manifest",
    [
        b"",
        b"{}",
        b"[" * 100_000,
        b'{"schemaVersion":2,"schemaVersion":2}',
        b"\xff\xfe",
        b'{"layers":' + b"9" * 5000 + b"}",
    ],
    ids=["empty", "object", "deep", "twice", "not UTF-8", "long number"],
)
def test_rejects_bytes_that_are_not_a_manifest(target: LocalStore, manifest: bytes) -> None:
    data = archive([raw(manifest, Kind.MANIFEST)], [manifest], [(NAME, 0)])
    assert "model 'm:latest': " in refused(data, target)


def test_rejects_a_manifest_that_breaks_its_format(target: LocalStore) -> None:
    parts = Parts(model_archive({"a": b"blob"}))
    value = json.loads(parts.stored[0])
    del value["layers"]
    manifest = json.dumps(value).encode()
    parts.put(0, manifest)
    parts.members[0] = raw(manifest, Kind.MANIFEST)
    assert "model 'm:latest': $.layers" in refused(parts.data(), target)


def test_rejects_a_manifest_with_other_layers_than_its_config_states(target: LocalStore) -> None:
    parts = Parts(model_archive({"a": b"blob", "b": b"other"}))
    value = json.loads(parts.stored[0])
    first, second = value["layers"]
    first["name"], second["name"] = second["name"], first["name"]
    manifest = json.dumps(value, separators=(",", ":")).encode()
    parts.put(0, manifest)
    parts.members[0] = raw(manifest, Kind.MANIFEST)
    assert "was changed since it was written" in refused(parts.data(), target)


def test_rejects_a_cold_blob_of_another_digest(target: LocalStore) -> None:
    data = b"a blob" * 1000
    other = Digest.of(b"another")
    stated = hostile(cold_member(cold(data), other, len(data)))
    assert "it holds sha256:" in refused(stated, target)
    lying = hostile(cold_member(cold(data, digest=other), other, len(data)))
    assert "decodes to" in refused(lying, target)
    longer = hostile(cold_member(cold(data), Digest.of(data), len(data) + 1))
    assert "it holds sha256:" in refused(longer, target)


def test_rejects_cycles_of_deltas_and_bases_that_are_other_deltas(
    family: bytes, target: LocalStore
) -> None:
    numbers = [n for n, item in enumerate(Parts(family).members) if item.kind == Kind.DELTA]
    for number, base in itertools.product(numbers, numbers):
        parts = Parts(family)
        parts.change(number, base=base)
        message = refused(parts.data(), target)
        if base < number:
            assert "the base is sha256:" in message
        else:
            assert f"member {base} cannot be its base" in message


def test_rejects_chains_in_which_each_chunk_asks_for_many(target: LocalStore) -> None:
    size, chunk_size = 1 << 22, 1 << 20
    data = bytes(size)
    plane = struct.pack("<BBBBBI", 0, 1, 1, 1, 0, 0)  # no element differs
    stored = [(raw(data), data)]
    before = BlobId(Digest.of(data), size)
    for number in range(1, 16):
        first = 2 * number  # so that each chunk begins in the middle of one of the base
        blob = bytes([number]) * first + data[first:]
        start = Chunk(zlib.crc32(blob[:first]), 0, (StoredPlane(Method.RAW, first),))
        parts, chunks = [Part(first, 2, first)], [start]
        parts.append(Part(size - first, 2, chunk_size, base_begin=first - 2))
        for begin in range(first, size, chunk_size):
            content = blob[begin : min(begin + chunk_size, size)]
            entry = Chunk(zlib.crc32(content + plane), 37, (StoredPlane(Method.RAW, len(plane)),))
            chunks.append(entry)
        identity = BlobId(Digest.of(blob), size)
        table = Table(identity.digest, size, before, parts, chunks)
        delta = COLD_PREFIX + blob[:first] + plane * (len(chunks) - 1) + encode_table(table)
        member, _ = cold_member(delta, *identity)
        base = len(stored) + 1
        stored.append((member._replace(kind=Kind.DELTA, base=base), delta))
        before = identity
    assert "do not lie where those of its base lie" in refused(hostile(*stored), target)


def test_rejects_a_delta_that_is_listed_as_a_cold_blob(family: bytes, target: LocalStore) -> None:
    parts = Parts(family)
    number = parts.number(Kind.DELTA)
    parts.change(number, kind=Kind.COLD, base=None)
    assert "no base is stated" in refused(parts.data(), target)


def test_rejects_members_that_no_model_needs(family: bytes, target: LocalStore) -> None:
    parts = Parts(family)
    parts.add(raw(b"stowaway"), b"stowaway")
    assert "no model needs blob sha256:" in refused(parts.data(), target)
    check_archive(target.root.parent / "hostile.bsar", ["base"])  # reads no other model


def test_rejects_other_versions(family: bytes, target: LocalStore) -> None:
    for version in (0, 2, 255):
        data = bytearray(family)
        data[7] = version
        assert f"of version {version}; this program reads version 1" in refused(data, target)


def test_rejects_damaged_cold_blobs_with_valid_stored_digests(
    family: bytes, target: LocalStore
) -> None:
    parts = Parts(family)
    number = parts.number(Kind.COLD)
    chance = random.Random(3)
    for _ in range(20):
        data = bytearray(parts.stored[number])
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        forged = Parts(family)
        forged.put(number, bytes(data))
        refused(forged.data(), target)


def test_rejects_planes_with_a_wrong_checksum(target: LocalStore) -> None:
    chunk = Chunk(0, 0, (StoredPlane(0, 4),))
    digest = Digest.of(b"blob")
    data = COLD_PREFIX + b"blob" + encode_table(Table(digest, 4, None, [Part(4)], [chunk]))
    assert "the file or the base is altered" in refused(
        hostile(cold_member(data, digest, 4)), target
    )


def padded_archive(padding: int, names: int) -> bytes:
    """Return an archive of one manifest, most of it spaces, with many names."""
    manifest, config = model_of({})
    manifest += b" " * padding
    members = [raw(manifest, Kind.MANIFEST), raw(config)]
    return archive(members, [manifest, config], [(f"h/n/m:{n:05}", 0) for n in range(names)])


def test_a_manifest_with_many_names_is_in_memory_once(tmp_path: Path) -> None:
    path = tmp_path / "hostile.bsar"
    path.write_bytes(padded_archive(4 << 20, 30))
    tracemalloc.start()
    try:
        assert len(check_archive(path, jobs=1).references) == 30
        assert tracemalloc.get_traced_memory()[1] < 40 << 20
    finally:
        tracemalloc.stop()


def test_a_manifest_with_many_names_needs_free_space_for_each(
    target: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "hostile.bsar"
    path.write_bytes(padded_archive(1 << 20, 30))
    usage = shutil.disk_usage(tmp_path)._replace(free=20 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(StoreError, match="not enough space"):
        unpack_archive(path, store=target)


@pytest.mark.parametrize(
    "names",
    [("h/n/Foo:a", "h/n/foo:b"), ("h/N/m:a", "h/n/m:b"), ("H/n/m:a", "h/n/m:b")],
    ids=["model", "namespace", "host"],
)
def test_names_that_differ_in_case_only_leave_no_name(
    target: LocalStore, tmp_path: Path, names: tuple[str, str]
) -> None:
    parts = Parts(model_archive({"a": b"blob"}))
    parts.names = [(name, 0) for name in names]
    path = tmp_path / "hostile.bsar"
    path.write_bytes(parts.data())
    with pytest.raises(NameConflict, match="differ in case only"):
        unpack_archive(path, store=target)


def test_factors_that_expand_far_beyond_their_parts_take_little_memory(tmp_path: Path) -> None:
    rows, columns, count = 1 << 13, 64, 60
    left = zstandard.compress(bytes(64 * rows), 19)
    right = bytes(64 * columns)
    sides = [(Method.ZSTD, len(left)), (Method.RAW, len(right))]
    factors = struct.pack("<BII64x", 64, rows, columns)
    factors += b"".join(struct.pack("<BI", *side) for side in sides) + left + right
    base = bytes(2 * rows * columns)
    blob = base * count
    plane = struct.pack("<BBBBBI", 0, 1, 1, 1, 0, 0)  # no element differs
    chunk = Chunk(zlib.crc32(base + plane), 37, (StoredPlane(Method.RAW, len(plane)),))
    stored = StoredFactors(zlib.crc32(factors), len(factors))
    parts = [Part(len(base), 2, len(base), base_begin=0, factors=stored)] * count
    identity = BlobId(Digest.of(base), len(base))
    table = Table(Digest.of(blob), len(blob), identity, parts, [chunk] * count)
    delta = COLD_PREFIX + (factors + plane) * count + encode_table(table)
    member, _ = cold_member(delta, Digest.of(blob), len(blob))
    path = tmp_path / "hostile.bsar"
    path.write_bytes(hostile((raw(base), base), (member._replace(kind=Kind.DELTA, base=2), delta)))
    tracemalloc.start()
    try:
        check_archive(path, jobs=1)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_errors_name_the_archive_and_give_advice(tmp_path: Path) -> None:
    path = tmp_path / "cut.bsar"
    path.write_bytes(model_archive({"a": b"blob"})[:-5])
    with pytest.raises(ArchiveDamaged, match=r"archive '.*cut\.bsar': .*; copy it again from"):
        check_archive(path)
