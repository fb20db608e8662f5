from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import blobstore
from blobstore.archives.table import Kind
from blobstore.compression import chunks
from blobstore.errors import (
    ArchiveDamaged,
    BlobstoreError,
    ModelNotFound,
    NameConflict,
    NameTaken,
    NotFound,
    StoreError,
    TooManyMaps,
)
from blobstore.manifests.reference import Reference
from blobstore.operations.archive import unpack
from blobstore.operations.archive.pack import pack_models
from blobstore.operations.archive.unpack import check_archive, unpack_archive
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.operations.maintenance.gc import collect_garbage
from blobstore.operations.maintenance.names import remove_models
from blobstore.operations.maintenance.verify import verify_models
from blobstore.store.local import LocalStore
from tests.support import sandbox
from tests.support.archives import FAMILY, Parts, packed_family
from tests.support.frozen import flip, layer, layers, put, steps
from tests.support.models import add_blobs


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> LocalStore:
    folder = tmp_path_factory.mktemp("origin")
    store = LocalStore(folder / "store")
    packed_family(store, folder / "family.bsar")
    return store


@pytest.fixture
def path(origin: LocalStore, tmp_path: Path) -> Path:
    path = tmp_path / "family.bsar"
    path.write_bytes((origin.root.parent / "family.bsar").read_bytes())
    return path


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store", lock_timeout=0.05)


def names(store: LocalStore) -> list[str]:
    return [reference.model for reference in store.references()]


def nothing_left(store: LocalStore) -> bool:
    folders = (store.folder("blobs"), store.folder("temporary"), store.folder("leases"))
    return not any(any(folder.iterdir()) for folder in folders if folder.exists())


def test_unpacks_models_unchanged(path: Path, store: LocalStore, origin: LocalStore) -> None:
    unpacked = unpack_archive(path, store=store)
    assert [reference.model for reference in unpacked.references] == names(store) == list(FAMILY)
    for name in FAMILY:
        reference = Reference.parse(name)
        assert store.read_manifest(reference) == origin.read_manifest(reference)
        for blob in store.resolve(reference).blobs:
            data = Path(store.blob_path(blob.digest)).read_bytes()
            assert data == Path(origin.blob_path(blob.digest)).read_bytes()
    verified = verify_models(store=store)
    assert (verified.models, verified.faults) == (2, ())
    assert (unpacked.blobs, unpacked.bytes_written) == (verified.blobs, verified.bytes_read)
    assert unpacked.bytes_present == 0
    assert collect_garbage(store=store, older_than=0, force=True).blobs == ()
    assert list(store.folder("temporary").iterdir()) == list(store.folder("leases").iterdir()) == []


def test_names_are_given_in_the_order_of_steps(store: LocalStore, tmp_path: Path) -> None:
    names = [
        "run:step-5",
        "run:step-10",
    ]  # so the last one is the newest, which rules of retention keep
    for step in names:
        put(store, step, {"w": len(step)})
    pack_models(names, tmp_path / "run.bsar", store=store)
    assert [*map(str, unpack_archive(tmp_path / "run.bsar", store=store).references)] == names


def test_blobs_are_read_only(path: Path, store: LocalStore) -> None:
    unpack_archive(path, ["base"], store=store)
    modes = {file.stat().st_mode & 0o777 for file in store.folder("blobs").iterdir()}
    assert modes == {0o444}


@pytest.mark.parametrize("name", FAMILY)
def test_unpacks_only_the_blobs_of_one_model(
    path: Path, store: LocalStore, origin: LocalStore, name: str
) -> None:
    unpacked = unpack_archive(path, [name], store=store)
    assert names(store) == [name]
    wanted = {blob.digest.file_name for blob in origin.resolve(Reference.parse(name)).blobs}
    assert {file.name for file in store.folder("blobs").iterdir()} == wanted
    assert unpacked.blobs == len(wanted)
    with blobstore.open(name, store=store, verify="rehash") as model:
        assert len(model) == 4


def test_reads_no_members_of_other_models(path: Path, store: LocalStore) -> None:
    data = bytearray(path.read_bytes())
    parts = Parts(bytes(data))
    delta = parts.members[parts.number(Kind.DELTA)]
    for (begin, end), member in zip(parts.places, parts.members, strict=True):
        if member.kind == Kind.DELTA:
            data[begin:end] = bytes(end - begin)
    path.write_bytes(data)
    (damaged,) = [
        name for name, number in parts.names if delta.digest.hex.encode() in parts.stored[number]
    ]
    (intact,) = [name for name, _ in parts.names if name != damaged]
    unpack_archive(path, [intact], store=store)
    assert check_archive(path, [intact]).references == (Reference.parse(intact),)
    with pytest.raises(ArchiveDamaged, match="is altered"):
        unpack_archive(path, [damaged], store=store)
    assert [reference.full for reference in store.references()] == [intact]


def test_does_not_rewrite_existing_blobs(path: Path, store: LocalStore) -> None:
    first = unpack_archive(path, ["base"], store=store)
    before = {file: file.stat().st_ino for file in store.folder("blobs").iterdir()}
    again = unpack_archive(path, ["base"], store=store)
    assert (again.bytes_written, again.bytes_present) == (0, first.bytes_written)
    assert {file: file.stat().st_ino for file in store.folder("blobs").iterdir()} == before
    other = unpack_archive(path, store=store)
    assert other.bytes_written > 0 < other.bytes_present


def test_does_not_rewrite_cold_blobs(path: Path, store: LocalStore) -> None:
    unpack_archive(path, ["base"], store=store)
    freeze_models(["base"], store=store)
    remove_models(["base"], store=store)
    assert unpack_archive(path, ["base"], store=store).bytes_written == 0
    assert verify_models(store=store).faults == ()


def test_replaces_a_damaged_blob_of_the_store(path: Path, store: LocalStore) -> None:
    unpack_archive(path, ["base"], store=store)
    blob = Path(store.blob_path(layers(store, "base")["l1"].digest))
    blob.unlink()
    blob.write_bytes(b"short")
    unpack_archive(path, store=store)
    assert verify_models(store=store).faults == ()
    (quarantined,) = store.folder("quarantine").iterdir()
    assert quarantined.read_bytes() == b"short"


def test_replaces_another_model_only_with_force(path: Path, store: LocalStore) -> None:
    put(store, "tuned", {"x": 50})
    before = store.read_manifest(Reference.parse("tuned"))
    with pytest.raises(NameTaken, match="another model has the name 'tuned:latest'"):
        unpack_archive(path, store=store)
    assert names(store) == ["tuned"]
    assert len(list(store.folder("blobs").iterdir())) == 2  # no blob was decoded
    assert store.read_manifest(Reference.parse("tuned")) == before
    unpack_archive(path, ["base"], store=store)
    unpack_archive(path, store=store, force=True)
    assert store.read_manifest(Reference.parse("tuned")) != before
    assert verify_models(store=store).faults == ()


def test_does_not_replace_a_model_that_appears_while_unpacking(
    path: Path, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = unpack._ingest_blobs

    def ingest_blobs(*arguments: object) -> object:
        put(store, "tuned", {"x": 50})
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(unpack, "_ingest_blobs", ingest_blobs)
    with pytest.raises(NameTaken):
        unpack_archive(path, store=store)
    assert names(store) == ["tuned"]
    assert set(layers(store, "tuned")) == {"x"}


def test_rejects_a_name_that_differs_from_an_existing_one_in_case(
    path: Path, store: LocalStore
) -> None:
    put(store, "BASE", {"x": 50})
    for force in (False, True):
        with pytest.raises(NameConflict):
            unpack_archive(path, store=store, force=force)
    assert names(store) == ["BASE"]


def test_accepts_names_of_other_hosts(path: Path, store: LocalStore) -> None:
    parts = Parts(path.read_bytes())
    name = "example.com:5000/other/base:v1"
    parts.names = [(name, parts.names[0][1]), ("h/n/m:t", parts.names[1][1])]
    path.write_bytes(parts.data())
    assert unpack_archive(path, [name], store=store).references == (Reference.parse(name),)
    assert (store.folder("manifests") / "example.com:5000" / "other" / "base" / "v1").is_file()


@pytest.mark.parametrize("kind", Kind)
def test_a_damaged_member_leaves_nothing_behind(path: Path, store: LocalStore, kind: Kind) -> None:
    parts = Parts(path.read_bytes())
    number = parts.number(kind)
    data = bytearray(parts.stored[number])
    data[len(data) // 2] ^= 1
    parts.stored[number] = bytes(data)
    path.write_bytes(parts.data())
    for act in (lambda: unpack_archive(path, store=store), lambda: check_archive(path)):
        with pytest.raises(ArchiveDamaged, match=f"member {number}\\) is altered") as caught:
            act()  # type: ignore[no-untyped-call]
        assert str(caught.value).startswith(f"archive '{path}': ")
    assert names(store) == []
    assert nothing_left(store)


def test_errors_inside_a_member_name_model_and_layer(path: Path, store: LocalStore) -> None:
    parts = Parts(path.read_bytes())
    number = parts.number(Kind.COLD)
    data = bytearray(parts.stored[number])
    data[100] ^= 1
    parts.put(number, bytes(data))
    path.write_bytes(parts.data())
    with pytest.raises(ArchiveDamaged, match=r": (base|tuned):latest: layer '\w+': blob sha256:"):
        unpack_archive(path, store=store)
    assert nothing_left(store)


def test_check_writes_nothing_and_needs_no_store(path: Path) -> None:
    before = sorted(path.parent.iterdir())
    checked = check_archive(path)
    assert sorted(path.parent.iterdir()) == before
    members = Parts(path.read_bytes()).members
    blobs = [one for one in members if one.kind not in {Kind.MANIFEST, Kind.SIGNATURE}]
    assert checked.blobs == len(blobs)
    assert checked.size == sum(item.size for item in blobs)
    assert checked.stored == sum(item.stored_size for item in blobs)
    assert checked.references == tuple(map(Reference.parse, FAMILY))


def test_requires_free_space_for_all_blobs(path: Path, tmp_path: Path) -> None:
    with sandbox.small_disk(tmp_path / "disk", 2**16) as disk:
        store = LocalStore(disk / "store")
        with pytest.raises(
            StoreError, match="not enough space for the store .* are needed, and .* are free"
        ):
            unpack_archive(path, store=store)
        assert nothing_left(store)


def test_a_full_disk_leaves_no_name(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sandbox.small_disk(tmp_path / "disk", 2**16) as disk:
        store = LocalStore(disk / "store")

        usage = shutil.disk_usage("/")._replace(free=2**40)  # other processes fill the disk later
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
        with pytest.raises(StoreError, match="no space left"):
            unpack_archive(path, store=store)
        assert names(store) == []
        assert nothing_left(store)


@pytest.mark.parametrize("is_new", [True, False])
def test_a_name_that_cannot_be_published_restores_the_others(
    path: Path, store: LocalStore, *, is_new: bool
) -> None:
    put(store, "other", {"x": 50})
    if not is_new:
        put(store, "base", {"x": 51})
    before = {item: store.read_manifest(item) for item in store.references()}
    inside = store.manifest_path(Reference.parse("tuned")) / "folder"
    inside.mkdir(parents=True)  # where the manifest should go
    with pytest.raises(StoreError, match="failed"):
        unpack_archive(path, store=store, force=True)
    assert {item: store.read_manifest(item) for item in store.references()} == before
    assert inside.is_dir()


@pytest.mark.parametrize("jobs", [1, 3])
def test_an_interrupt_leaves_nothing(path: Path, store: LocalStore, jobs: int) -> None:
    def stop(what: str, done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        unpack_archive(path, store=store, jobs=jobs, progress=stop)
    assert names(store) == []
    assert nothing_left(store)


@pytest.mark.parametrize("work", [unpack_archive, check_archive])
def test_progress_ends_at_the_total(
    path: Path, store: LocalStore, work: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOBSTORE_HOME", str(store.root))
    reports: list[tuple[int, int]] = []
    work(path, progress=lambda _, done, total: reports.append((done, total)))
    assert reports[-1][0] == reports[-1][1]
    assert reports == sorted(reports)


def test_rejects_invalid_arguments(path: Path, store: LocalStore) -> None:
    with pytest.raises(ModelNotFound, match="no model 'other:latest' in the archive"):
        unpack_archive(path, ["base", "other"], store=store)
    with pytest.raises(NotFound, match="there is no archive"):
        unpack_archive(path.with_name("none.bsar"), store=store)
    with pytest.raises(BlobstoreError, match="is not a regular file"):
        unpack_archive(path.parent, store=store)
    assert not store.root.exists()


@pytest.mark.slow
def test_unpacks_frozen_models_hot(store: LocalStore, tmp_path: Path) -> None:
    other = LocalStore(tmp_path / "other")
    packed_family(other, tmp_path / "hot.bsar")
    freeze_models(FAMILY, store=other)
    pack_models(FAMILY, tmp_path / "cold.bsar", store=other)
    unpack_archive(tmp_path / "cold.bsar", store=store)
    for name in FAMILY:
        assert all(store.has_hot(item.digest) for item in layers(store, name).values())
    flip(store.blob_path(layers(store, "base")["l0"].digest))
    assert len(verify_models(store=store).faults) == 1


@pytest.mark.parametrize("jobs", [1, 3])
def test_decodes_each_member_of_a_chain_once(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    origin, path = LocalStore(tmp_path / "run"), tmp_path / "run.bsar"
    for number, data in enumerate(steps(5, 1, 6)):
        add_blobs(origin, f"run:{number}", {"x": layer("x", data)})
    run = [f"run:{number}" for number in range(6)]
    assert pack_models(run, path, store=origin).deltas == 5
    decoded: list[int] = []
    real = chunks.decode_chunk

    def counted(*arguments: Any) -> None:
        decoded.append(1)
        real(*arguments)

    monkeypatch.setattr("blobstore.compression.decoder.decode_chunk", counted)
    unpack_archive(path, store=store, jobs=jobs)
    assert len(decoded) == 6 * 2  # of each, the header and the weights
    before = os.listdir(tmp_path)
    check_archive(path, jobs=jobs)
    assert len(decoded) == 2 * 6 * 2
    assert os.listdir(tmp_path) == before
    for name in run:
        for blob in store.resolve(name).blobs:
            store.check_digest(*blob.id)


def test_a_chain_is_checked_where_nothing_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin, path = LocalStore(tmp_path / "run"), tmp_path / "run.bsar"
    for number, data in enumerate(steps(5, 1, 3)):
        add_blobs(origin, f"run:{number}", {"x": layer("x", data)})
    pack_models([f"run:{number}" for number in range(3)], path, store=origin)

    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for place, name in ((tempfile, "TemporaryFile"), (unpack, "write_all")):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, refused)
            assert check_archive(path).blobs == 4  # the models share a config


def test_a_chain_whose_decoded_files_cannot_be_mapped_is_unpacked(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin, path = LocalStore(tmp_path / "run"), tmp_path / "run.bsar"
    for number, data in enumerate(steps(5, 1, 3)):
        add_blobs(origin, f"run:{number}", {"x": layer("x", data)})
    pack_models([f"run:{number}" for number in range(3)], path, store=origin)

    def refused(*_: object) -> None:
        raise TooManyMaps("no maps are left")

    monkeypatch.setattr(unpack, "map_file", refused)
    unpack_archive(path, store=store)
    assert not verify_models(store=store).faults
