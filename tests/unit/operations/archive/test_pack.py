from __future__ import annotations

import errno
import gc
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typing_extensions import Buffer

from blobstore.archives import ordered_writer
from blobstore.archives.plan import plan_members
from blobstore.archives.reader import open_archive
from blobstore.archives.table import Kind
from blobstore.cold_blobs.blob_encoder import BlobEncoder
from blobstore.compression.base import BaseBlob
from blobstore.compression.encoder import Encoded
from blobstore.compression.level import Level
from blobstore.compression.spans import Span
from blobstore.core.digest import Digest
from blobstore.core.files import write_all
from blobstore.core.tensor import DType
from blobstore.errors import (
    BlobDamaged,
    BlobMissing,
    BlobstoreError,
    ModelNotFound,
    NameConflict,
    StoreError,
    UsageError,
)
from blobstore.manifests.reference import Reference
from blobstore.operations.archive.pack import pack_models
from blobstore.operations.archive.unpack import check_archive, unpack_archive
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.operations.freeze.thaw import thaw_models
from blobstore.operations.maintenance.gc import collect_garbage
from blobstore.operations.maintenance.names import copy_model, remove_models
from blobstore.store.local import LocalStore
from tests.readers.archives import read_archive
from tests.support import sandbox
from tests.support.archives import Parts, put_family
from tests.support.cold import cold, noise
from tests.support.frozen import (
    flip,
    layer,
    layers,
    mixed_steps,
    spoil_deltas,
    steps,
    tuned,
    weights,
)
from tests.support.models import add_blobs, dense_tensors, write_folder

CHILDREN = ("one", "two", "three")
EVERYONE = ("base", *CHILDREN)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "store", lock_timeout=1)
    put_family(store, children=CHILDREN)
    return store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out" / "family.bsar"


@pytest.fixture(autouse=True)
def _folder(path: Path) -> None:
    path.parent.mkdir()


def left(path: Path) -> list[str]:
    return sorted(os.listdir(path.parent))


@pytest.mark.slow
def test_packs_everything_that_the_models_need_once(store: LocalStore, path: Path) -> None:
    packed = pack_models(EVERYONE, path, store=store)
    wanted = {
        blob.digest: blob.size
        for name in EVERYONE
        for blob in store.resolve(Reference.parse(name)).blobs
    }
    with open_archive(path) as reader:
        assert reader.blobs.keys() == wanted.keys()
        for digest, number in reader.blobs.items():
            assert Digest.of(reader.read(number)) == digest
        for model in reader.models():
            assert model.data == store.read_manifest(model.reference)
    assert packed.path == path
    assert [reference.model for reference in packed.references] == sorted(EVERYONE)
    assert (packed.blobs, packed.size) == (len(wanted), sum(wanted.values()))
    assert (packed.deltas, packed.fallbacks) == (9, 0)
    assert packed.stored == path.stat().st_size < 0.5 * packed.size
    assert left(path) == ["family.bsar"]
    assert list(store.folder("temporary").iterdir()) == []
    assert list(store.folder("leases").iterdir()) == []


@pytest.mark.slow
def test_a_second_reader_reads_it(store: LocalStore, path: Path) -> None:
    pack_models(EVERYONE, path, store=store)
    read = read_archive(path.read_bytes())
    assert sorted(read.names) == [
        f"registry.ollama.ai/library/{n}:latest" for n in sorted(EVERYONE)
    ]
    for name, digest in read.names.items():
        assert read.manifests[digest] == store.read_manifest(Reference.parse(name))
    alone = {digest: data for digest, data in read.blobs.items() if digest not in read.bases}
    assert len(alone) == 5
    for digest, data in alone.items():
        assert data == Path(store.blob_path(Digest(digest))).read_bytes()
    assert len(read.bases) == 9
    assert set(read.bases.values()) <= alone.keys()


@pytest.mark.slow
@pytest.mark.parametrize("level", ["fast", "small"])
def test_the_steps_of_a_run_are_deltas_against_their_neighbours(
    tmp_path: Path, path: Path, level: Level
) -> None:
    store, target = LocalStore(tmp_path / "run"), LocalStore(tmp_path / "target")
    run = steps(5, 1, 10)
    for number, data in enumerate(run):
        add_blobs(store, f"run:{number}", {"x": layer("x", data)})
    names = [f"run:{number}" for number in range(10)]
    freeze_models(["run:8"], store=store, base="run:5")
    packed = pack_models(names, path, store=store, level=level)
    assert (packed.deltas, packed.fallbacks) == (9, 0)
    numbers = {store.resolve(name).layers[0].digest.hex: n for n, name in enumerate(names)}
    read = read_archive(path.read_bytes())
    found = {numbers[one]: numbers[base] for one, base in read.bases.items()}
    assert found.pop(8) == 5  # as it is frozen
    assert all(abs(one - base) == 1 for one, base in found.items())
    assert packed.stored < 1.2 * len(run[0])
    unpack_archive(path, store=target, jobs=2)
    for name in names:
        for blob in target.resolve(name).blobs:
            target.check_digest(*blob.id)


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [(), ("one",), EVERYONE])
def test_equal_models_give_equal_bytes(
    store: LocalStore, path: Path, frozen: tuple[str, ...]
) -> None:
    if frozen:
        freeze_models(frozen, store=store)
    pack_models(EVERYONE, path, store=store, jobs=1)
    again = path.with_name("again.bsar")
    pack_models((*EVERYONE[::-1], "one"), again, store=store, jobs=4)
    assert again.read_bytes() == path.read_bytes()


def test_levels_differ_in_size(store: LocalStore, path: Path) -> None:
    fast = pack_models(["base"], path, store=store)
    small = pack_models(["base"], path.with_name("small.bsar"), store=store, level="small")
    assert small.stored <= fast.stored < fast.size
    check_archive(path.with_name("small.bsar"))


def test_names_of_one_model_share_its_manifest(store: LocalStore, path: Path) -> None:
    copy_model("base", "copy", store=store)
    pack_models(["base", "copy"], path, store=store)
    parts = Parts(path.read_bytes())
    assert [number for _, number in parts.names] == [0, 0]
    assert [item.kind for item in parts.members].count(Kind.MANIFEST) == 1


def test_stores_small_and_random_blobs_uncompressed(store: LocalStore, path: Path) -> None:
    blobs = {"noise": noise(100_000), "small": bytes(4096), "empty": b"", "zeros": bytes(4097)}
    add_blobs(store, "odd", blobs)
    pack_models(["odd"], path, store=store)
    kinds = {item.digest: item.kind for item in Parts(path.read_bytes()).members}
    assert {key: kinds[Digest.of(data)] for key, data in blobs.items()} == {
        "noise": Kind.RAW,
        "small": Kind.RAW,
        "empty": Kind.RAW,
        "zeros": Kind.COLD,
    }
    assert check_archive(path).blobs == 5


def test_discards_a_compressed_form_that_is_not_smaller_even_if_it_is_written(
    store: LocalStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blobstore.archives.ordered_writer._MAX_BUFFERED", 0)
    add_blobs(store, "odd", {f"x{key}": noise(300_000, key) for key in range(6)})
    pack_models(["odd", "base"], path, store=store, jobs=3)
    check_archive(path)
    assert [item.kind for item in Parts(path.read_bytes()).members].count(Kind.RAW) == 7


def test_copies_cold_blobs_unchanged(store: LocalStore, path: Path) -> None:
    freeze_models(["base"], store=store, find_base=False)
    freeze_models(CHILDREN, store=store, base="base")
    packed = pack_models(EVERYONE, path, store=store)
    parts = Parts(path.read_bytes())
    stored = {item.digest: data for item, data in zip(parts.members, parts.stored, strict=True)}
    for digest in store.cold_files():
        assert stored[digest] == Path(store.cold_path(digest)).read_bytes()
    assert packed.deltas == 9
    check_archive(path)


def test_compresses_a_delta_again_if_its_base_is_not_packed(store: LocalStore, path: Path) -> None:
    freeze_models(["one"], store=store, base="base")
    packed = pack_models(["one"], path, store=store)
    assert packed.deltas == 0
    assert packed.stored < 0.9 * packed.size
    remove_models(EVERYONE, store=store)
    assert check_archive(path).size == packed.size
    assert left(path) == ["family.bsar"]


@pytest.mark.slow
def test_packs_the_base_of_several_models_without_a_name(store: LocalStore, path: Path) -> None:
    freeze_models(CHILDREN, store=store, base="base")
    remove_models(["base"], store=store)
    collect_garbage(store=store, older_than=0, force=True)
    packed = pack_models(CHILDREN, path, store=store)
    assert packed.deltas == 9
    checked = check_archive(path)
    assert checked.blobs == packed.blobs == 1 + 1 + 3 + 9
    assert check_archive(path, ["one"]).blobs == 1 + 1 + 3 + 3


def test_a_damaged_blob_stops_packing_and_is_named(store: LocalStore, path: Path) -> None:
    flip(store.blob_path(layers(store, "two")["l1"].digest))
    with pytest.raises(BlobDamaged, match="two:latest: layer 'l1': blob .* is damaged"):
        pack_models(EVERYONE, path, store=store)
    assert left(path) == []


@pytest.mark.parametrize("data", [noise(50_000), b"small"], ids=["noise", "small"])
def test_a_damaged_uncompressed_blob_stops_packing(
    store: LocalStore, path: Path, data: bytes
) -> None:
    add_blobs(store, "odd", {"x": data})
    flip(store.blob_path(Digest.of(data)), -1)
    with pytest.raises(BlobDamaged, match="odd:latest: layer 'x': blob .* is damaged"):
        pack_models(["odd"], path, store=store)
    assert left(path) == []


def test_a_damaged_cold_blob_stops_packing_unless_it_is_hot_too(
    store: LocalStore, path: Path
) -> None:
    freeze_models(["base"], store=store, find_base=False)
    thaw_models(["base"], store=store, keep_cold=True)
    digest = layers(store, "base")["l1"].digest
    flip(store.cold_path(digest), 500)
    pack_models(["base"], path, store=store)
    check_archive(path)
    Path(store.blob_path(digest)).unlink()
    with pytest.raises(BlobDamaged, match="base:latest: layer 'l1': cold blob"):
        pack_models(["base"], path, store=store, force=True)
    assert check_archive(path).blobs == 5  # the old one
    assert left(path) == ["family.bsar"]


def test_a_damaged_config_stops_packing(store: LocalStore, path: Path) -> None:
    config = store.resolve(Reference.parse("base")).config
    flip(store.blob_path(config.digest), -3)
    with pytest.raises(BlobDamaged, match="base:latest: 'application/vnd.docker.container.image"):
        pack_models(["base"], path, store=store)


def test_detects_a_faulty_codec(
    store: LocalStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = BlobEncoder.write

    def spoiled(
        self: BlobEncoder, write: Callable[..., object], tell: Callable[[int], None]
    ) -> Encoded:
        def other(data: bytes) -> None:
            write(bytes(byte ^ (place == 50) for place, byte in enumerate(bytes(data))))

        return real(self, other, tell)

    monkeypatch.setattr(BlobEncoder, "write", spoiled)
    with pytest.raises(BlobDamaged, match="does not match its digest after packing"):
        pack_models(["base"], path, store=store)
    assert left(path) == []


def test_a_delta_that_does_not_decode_is_replaced_and_counted(
    store: LocalStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil_deltas(monkeypatch)
    packed = pack_models(EVERYONE, path, store=store)
    assert (packed.deltas, packed.fallbacks) == (0, 9)
    assert packed.stored < 0.9 * packed.size
    check_archive(path)


def test_detects_a_faulty_disk(
    store: LocalStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = noise(9000)
    add_blobs(store, "odd", {"n": data})

    def spoiled(descriptor: int, written: Buffer) -> None:
        spoils = written == data
        write_all(descriptor, bytes(9000) if spoils else written)

    monkeypatch.setattr(ordered_writer, "write_all", spoiled)
    with pytest.raises(BlobDamaged, match="does not match its digest after packing"):
        pack_models(["odd"], path, store=store)
    assert left(path) == []


def test_a_missing_blob_stops_packing(store: LocalStore, path: Path) -> None:
    Path(store.blob_path(layers(store, "two")["l1"].digest)).unlink()
    with pytest.raises(BlobMissing, match="two:latest: layer 'l1'"):
        pack_models(["two"], path, store=store)
    assert left(path) == []


def test_replaces_an_existing_file_only_if_asked(store: LocalStore, path: Path) -> None:
    path.write_bytes(b"mine")
    with pytest.raises(BlobstoreError, match="exists already; replace it with force=True"):
        pack_models(["base"], path, store=store)
    assert path.read_bytes() == b"mine"
    pack_models(["base"], path, store=store, force=True)
    check_archive(path)
    with pytest.raises(BlobstoreError, match="exists already"):
        pack_models(["base"], path.parent, store=store, force=True)


def test_keeps_a_file_that_appears_while_packing(store: LocalStore, path: Path) -> None:
    def come(what: str, done: int, total: int) -> None:
        path.write_bytes(b"mine")

    with pytest.raises(BlobstoreError, match="exists already"):
        pack_models(["base"], path, store=store, progress=come)
    assert path.read_bytes() == b"mine"
    assert left(path) == [path.name]


def test_rejects_names_that_differ_in_case_only(store: LocalStore, path: Path) -> None:
    folder = store.manifest_path(Reference.parse("base")).parent
    shutil.copy(folder / "latest", folder / "LATEST")  # as another program may
    with pytest.raises(NameConflict, match="differ in case only"):
        pack_models(["base", "base:LATEST"], path, store=store)
    with pytest.raises(NameConflict, match="differ in case only"):
        pack_models(["base", "Base:x"], path, store=store)
    assert left(path) == []


def test_an_interrupt_leaves_nothing(store: LocalStore, path: Path) -> None:
    def stop(what: str, done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack_models(EVERYONE, path, store=store, progress=stop)
    assert left(path) == []
    assert list(store.folder("leases").iterdir()) == []


@pytest.mark.parametrize("names", [("odd", "base"), ("one",), (*EVERYONE, "odd")])
def test_progress_ends_at_the_total(store: LocalStore, path: Path, names: tuple[str, ...]) -> None:
    add_blobs(store, "odd", {"noise": noise(100_000), "small": b"small"})
    freeze_models(["one"], store=store, base="base")
    reports: list[tuple[int, int]] = []
    pack_models(
        names, path, store=store, progress=lambda _, done, total: reports.append((done, total))
    )
    assert reports[-1][0] == reports[-1][1]
    assert reports == sorted(reports)


@pytest.mark.slow
def test_a_lease_keeps_blobs_while_they_are_packed(
    store: LocalStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def removed(*arguments: object) -> object:
        remove_models(EVERYONE, store=store)
        collect_garbage(store=store, older_than=0, force=True)
        return plan_members(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("blobstore.operations.archive.pack.plan_members", removed)
    pack_models(EVERYONE, path, store=store)
    check_archive(path)
    assert collect_garbage(store=store, older_than=0, force=True).blobs


@pytest.mark.slow
def test_compresses_blobs_that_are_thawed_while_packing(
    store: LocalStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    freeze_models(EVERYONE, store=store, base="base")

    def thawed(*arguments: object) -> object:
        blobs = plan_members(*arguments)  # type: ignore[arg-type]
        thaw_models(EVERYONE, store=store)
        return blobs

    monkeypatch.setattr("blobstore.operations.archive.pack.plan_members", thawed)
    assert pack_models(EVERYONE, path, store=store).deltas == 9
    check_archive(path)


def test_writes_no_archive_with_a_base_that_became_unneeded(
    store: LocalStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    freeze_models(CHILDREN, store=store, base="base")

    def alone(*arguments: object) -> object:
        return [item._replace(base=None, cold=None) for item in plan_members(*arguments)]  # type: ignore[arg-type]

    monkeypatch.setattr("blobstore.operations.archive.pack.plan_members", alone)
    with pytest.raises(StoreError, match="thawed while they were packed; pack them again"):
        pack_models(CHILDREN, path, store=store)
    assert left(path) == []


@pytest.mark.slow
def test_packs_from_a_read_only_store(tmp_path: Path, path: Path) -> None:
    with sandbox.small_disk(tmp_path / "disk", 4 * 2**20) as disk:
        store = LocalStore(disk / "store")
        put_family(store, children=CHILDREN)
        with sandbox.read_only(disk):
            pack_models(EVERYONE, path, store=store)
        gc.collect()
    check_archive(path)


def test_reports_a_target_that_cannot_be_written(store: LocalStore, tmp_path: Path) -> None:
    with pytest.raises(BlobstoreError, match=r"cannot write .*x.bsar': No such file"):
        pack_models(["base"], tmp_path / "none" / "x.bsar", store=store)


def test_a_full_disk_leaves_no_file_and_no_waiting_thread(
    store: LocalStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, count = os.write, iter(range(100))

    def full(descriptor: int, data: bytes) -> int:
        if threading.current_thread().name.startswith("blobstore") and next(count) > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data)

    monkeypatch.setattr("blobstore.core.files.os.write", full)
    with pytest.raises(BlobstoreError, match="cannot write .*No space left on device"):
        pack_models(EVERYONE, path, store=store, jobs=4)
    assert left(path) == []


def test_packs_the_files_of_a_model(tmp_path: Path, path: Path) -> None:
    from blobstore.operations.create.create import create

    store = LocalStore(tmp_path / "other")
    files = {"tokenizer.json": b'{"a": 1}' * 3000, "merges.txt": b"a b\n"}
    create(write_folder(tmp_path / "model", dense_tensors(), files=files), "dense", store=store)
    packed = pack_models(["dense"], path, store=store)
    assert check_archive(path).size == packed.size
    kinds = [item.kind for item in Parts(path.read_bytes()).members]
    assert kinds.count(Kind.COLD) == 1  # the tokenizer


def test_rejects_invalid_arguments(store: LocalStore, path: Path) -> None:
    with pytest.raises(UsageError, match="level must be fast or small, got 'best'"):
        pack_models(["base"], path, store=store, level="best")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="name the models"):
        pack_models([], path, store=store)
    with pytest.raises(ModelNotFound):
        pack_models(["base", "none"], path, store=store)
    assert left(path) == []


def test_rejects_a_delta_against_other_bytes_than_its_base_has(
    store: LocalStore, path: Path
) -> None:
    """As if it had been encoded against corrupted bytes, with which the store can decode it."""
    found, base = layers(store, "one")["l1"], layers(store, "base")["l1"]
    freeze_models(["base"], store=store, find_base=False)
    data = b"".join(bytes(piece) for piece in store.read_pieces(base.digest, base.size))
    corrupted = bytearray(data)
    corrupted[-4000:] = bytes(4000)
    run = Span(found.size, DType.BF16, base_begin=0)
    blob = Path(store.blob_path(found.digest)).read_bytes()
    delta = cold(blob, spans=[run], base=BaseBlob.hot(corrupted, base.digest))
    Path(store.cold_path(found.digest)).write_bytes(delta)
    Path(store.blob_path(found.digest)).unlink()
    Path(store.blob_path(base.digest)).write_bytes(corrupted)
    store.check_cold(found.digest, found.size)
    with pytest.raises(BlobDamaged):
        pack_models(["one", "base"], path, store=store)
    assert left(path) == []


def test_rejects_a_manifest_with_two_sizes_of_one_blob(store: LocalStore, path: Path) -> None:
    manifest = store.resolve(Reference.parse("base"))
    first = manifest.layers[0]
    changed = replace(manifest, layers=(first, first._replace(name="again", size=first.size + 1)))
    other = store.manifest_path(Reference.parse("other"))
    other.parent.mkdir(parents=True)
    other.write_bytes(changed.to_bytes())
    with pytest.raises(BlobDamaged, match="other:latest: layer 'again': blob .* expected"):
        pack_models(["other"], path, store=store)


def test_compresses_a_layer_alone_if_the_base_has_another(store: LocalStore, path: Path) -> None:
    keys = range(3)
    add_blobs(store, "a", {f"l{key}": layer(f"l{key}", weights(70 + key)) for key in keys})
    other = {f"l{key}": layer(f"l{key}", tuned(80, 70 + key)) for key in keys}
    add_blobs(store, "b", other | {"l2": layer("l2", weights(90))})
    assert pack_models(["a", "b"], path, store=store).deltas == 2
    check_archive(path)


def test_packs_from_a_store_that_cannot_lease(store: LocalStore, path: Path) -> None:
    """Reading needs only read permission."""
    shutil.rmtree(store.folder("leases"))
    store.folder("leases").write_bytes(b"")
    pack_models(["base"], path, store=store)
    check_archive(path)


def test_a_step_next_to_a_frozen_one_is_a_small_delta(tmp_path: Path, path: Path) -> None:
    store = LocalStore(tmp_path / "run")
    run = ["base", "one", "two"]
    for name, data in zip(run, mixed_steps(), strict=True):
        add_blobs(store, name, {"x": data})
    freeze_models(["one"], store=store, base="base")
    packed = pack_models(run, path, store=store)
    assert (packed.deltas, packed.fallbacks) == (2, 0)
    with open_archive(path) as archive:
        numbers = [archive.blobs[layers(store, name)["x"].digest] for name in run]
        last = archive.members[numbers[2]]
        assert last.base == numbers[1]
        assert last.stored_size < 0.03 * last.size
    check_archive(path)
    read_archive(path.read_bytes())
