from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blobstore.core import interrupts
from blobstore.core.digest import Digest
from blobstore.errors import (
    DamagedSource,
    ModelNotFound,
    SourceNotFound,
    StoreBusy,
    StoreError,
    UsageError,
)
from blobstore.manifests import media_types
from blobstore.manifests.descriptor import Descriptor
from blobstore.manifests.reference import Reference
from blobstore.models.header_index import load_index, rewrite_indexes, write_index
from blobstore.operations.create.create import create
from blobstore.operations.maintenance.gc import collect_garbage
from blobstore.operations.maintenance.names import remove_models
from blobstore.operations.maintenance.repair import Repaired, _Repair, repair_models
from blobstore.operations.maintenance.verify import verify_models
from blobstore.operations.open import open_model
from blobstore.planning.plan import QuantizeOptions, plan_source
from blobstore.sources.base import SourceOptions
from blobstore.store.local import LocalStore
from tests.support.damage import DAMAGES, blob_path, flip, flip_header, truncate, write_manifest
from tests.support.models import (
    Arrays,
    add_blobs,
    blob,
    dense_tensors,
    moe_tensors,
    quantizable_tensors,
    write_folder,
)
from tests.support.options import grouped

NAME = Reference.parse("m")
PLAIN = "model.embed_tokens.weight"
EXPERTS = "model.layers.0.mlp.experts"
FILES = {"tokenizer.json": b"{}", "merges.txt": b"a b\n"}
ROOT = Path(__file__).parents[4]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "source", dense_tensors() | moe_tensors(), files=FILES)


@pytest.fixture
def store(folder: Path, tmp_path: Path) -> LocalStore:
    """Return a store with model ``m``: dense tensors, packed experts and small files."""
    store = LocalStore(tmp_path / "store", lock_timeout=10)
    create(folder, NAME, store=store)
    return store


@pytest.fixture
def other(folder: Path, tmp_path: Path) -> LocalStore:
    """Return another store that has model ``m``."""
    other = LocalStore(tmp_path / "other")
    create(folder, NAME, store=other)
    return other


def is_whole(store: LocalStore) -> bool:
    return not verify_models(store=store).faults


def quarantined(store: LocalStore) -> list[Path]:
    if not store.folder("quarantine").exists():
        return []
    return sorted(store.folder("quarantine").iterdir())


def left_over(store: LocalStore) -> list[Path]:
    return [*store.folder("temporary").iterdir(), *store.folder("leases").iterdir()]


def layers(repaired: Repaired) -> set[str]:
    return {item.layer for item in repaired.repaired}


# Each damage of each kind of blob


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("layer", [PLAIN, EXPERTS, "config.json", "merges.txt", ""])
@pytest.mark.parametrize("from_store", [False, True], ids=["source", "store"])
def test_repairs_every_damage(
    from_store: bool,
    layer: str,
    damage: Callable[[Path], object],
    store: LocalStore,
    folder: Path,
    tmp_path: Path,
) -> None:
    other = tmp_path / "other"
    if from_store:
        create(folder, "copy", store=LocalStore(other))
    path = blob_path(store, layer)
    right = path.read_bytes()
    damage(path)
    wrong = path.read_bytes() if os.path.lexists(path) else None

    repaired = repair_models([NAME], other if from_store else folder, store=store)

    assert repaired.faults == ()
    (item,) = repaired.repaired
    assert (item.digest, item.size) == (Digest.of(right), len(right))
    assert path.read_bytes() == right
    assert not path.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o444
    assert is_whole(store)
    assert left_over(store) == []
    assert quarantined(store) == ([] if wrong is None else [item.quarantined])
    if wrong is not None and not quarantined(store)[0].is_symlink():
        assert quarantined(store)[0].read_bytes() == wrong


@pytest.mark.slow
@pytest.mark.parametrize("experts", ["packed", "stacked"])
@pytest.mark.parametrize("quantize", [None, "int4"])
def test_repairs_a_complete_model_however_it_was_created(
    quantize: str | None, experts: Any, tmp_path: Path
) -> None:
    store = LocalStore(tmp_path / "store")
    folder = write_folder(tmp_path / "source", quantizable_tensors(), shards=3)
    create(folder, NAME, store=store, quantize=QuantizeOptions(quantize), experts=experts)
    paths = sorted(store.folder("blobs").iterdir())
    right = [path.read_bytes() for path in paths]
    for number, path in enumerate(paths):
        DAMAGES[number % len(DAMAGES)](path)
    repaired = repair_models(source=folder, store=store)
    assert repaired.faults == ()
    assert len(repaired.repaired) == len(paths)
    assert [path.read_bytes() for path in paths] == right


def test_stops_searching_when_everything_is_repaired(
    store: LocalStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def counting(*arguments: Any, **options: Any) -> Any:
        calls.append(options["experts"])
        return plan_source(*arguments, **options)

    flip(blob_path(store, EXPERTS))
    monkeypatch.setattr("blobstore.operations.maintenance.repair_sources.plan_source", counting)
    assert repair_models(source=folder, store=store).faults == ()
    assert calls == ["packed"]


def test_repairs_a_shared_blob_once(store: LocalStore, folder: Path) -> None:
    create(folder, "other", store=store)
    flip(blob_path(store, PLAIN))
    assert len(verify_models(store=store).faults) == 2
    repaired = repair_models(source=folder, store=store)
    assert layers(repaired) == {PLAIN}
    assert repaired.faults == ()


def test_repairs_only_the_named_models(store: LocalStore, folder: Path, tmp_path: Path) -> None:
    create(write_folder(tmp_path / "b", {"w": np.zeros(3, np.uint8)}), "b", store=store)
    flip(blob_path(store, PLAIN))
    repaired = repair_models([Reference.parse("b")], folder, store=store)
    assert (repaired.repaired, repaired.faults) == ((), ())
    assert not is_whole(store)


def test_creates_a_missing_folder_of_blobs(store: LocalStore, folder: Path) -> None:
    for path in store.folder("blobs").iterdir():
        path.unlink()
    store.folder("blobs").rmdir()
    assert repair_models(source=folder, store=store).faults == ()
    assert is_whole(store)


def test_does_not_change_an_intact_store(store: LocalStore, folder: Path) -> None:
    def states() -> dict[str, tuple[int, int]]:
        found = {path.name: path.stat() for path in store.folder("blobs").iterdir()}
        return {name: (item.st_ino, item.st_mtime_ns) for name, item in found.items()}

    before = states()
    repaired = repair_models(source=folder, store=store)
    assert (repaired.repaired, repaired.faults) == ((), ())
    assert states() == before
    assert not store.folder("quarantine").exists()


def test_a_map_of_a_damaged_file_stays_as_it_is(store: LocalStore, folder: Path) -> None:
    path = blob_path(store, PLAIN)
    flip(path)
    wrong = path.read_bytes()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        repair_models(source=folder, store=store)
        assert mapped[:] == wrong
        assert path.read_bytes() != wrong


def test_repairs_a_blob_that_is_damaged_again(store: LocalStore, folder: Path) -> None:
    path = blob_path(store, PLAIN)
    wrong = []
    for damage in (flip, truncate):
        damage(path)
        wrong.append(path.read_bytes())
        assert len(repair_models(source=folder, store=store).repaired) == 1
    assert sorted(item.read_bytes() for item in quarantined(store)) == sorted(wrong)


# Without a source, and without changes


def test_without_a_source_only_verifies(store: LocalStore) -> None:
    flip(blob_path(store, PLAIN))
    repaired = repair_models(store=store)
    assert repaired.repaired == ()
    assert repaired.faults == repaired.verified.faults == verify_models(store=store).faults
    assert quarantined(store) == []


def test_a_dry_run_reports_and_changes_nothing(
    store: LocalStore, folder: Path, tmp_path: Path
) -> None:
    flip(blob_path(store, EXPERTS))
    flip(blob_path(store, "merges.txt"))
    (folder / "merges.txt").write_bytes(b"c d\n")
    before = {path: path.read_bytes() for path in store.folder("blobs").iterdir()}
    repaired = repair_models(source=folder, store=store, dry_run=True)
    assert layers(repaired) == {EXPERTS}
    assert [item.quarantined for item in repaired.repaired] == [None]
    assert [fault.layer for fault in repaired.faults] == ["merges.txt"]
    assert {path: path.read_bytes() for path in store.folder("blobs").iterdir()} == before
    assert quarantined(store) == left_over(store) == []


def test_a_dry_run_needs_no_lock(store: LocalStore, folder: Path) -> None:
    flip(blob_path(store, EXPERTS))
    shutil.rmtree(store._layout.lock.parent)
    assert layers(repair_models(source=folder, store=store, dry_run=True)) == {EXPERTS}
    assert not store._layout.lock.exists()


# What cannot be repaired


def changed(tensors: Arrays) -> Arrays:
    return tensors | {PLAIN: tensors[PLAIN] + 1, "mask": tensors["mask"][:2]}


def test_reports_what_a_changed_source_cannot_repair(
    store: LocalStore, folder: Path, tmp_path: Path
) -> None:
    for layer in (PLAIN, "mask", "scalar", "merges.txt"):
        flip(blob_path(store, layer))
    wrong = blob_path(store, PLAIN).read_bytes()
    other = write_folder(tmp_path / "other", changed(dense_tensors()))

    repaired = repair_models(source=other, store=store)

    assert layers(repaired) == {"scalar"}
    why = {fault.layer: fault.message for fault in repaired.faults}
    assert why[PLAIN].endswith(f"the data rebuilt from '{other}' does not match its digest")
    assert why["mask"].endswith(f"nothing in '{other}' has its name and size")
    assert why["merges.txt"].endswith(f"nothing in '{other}' has its name and size")
    assert len(why) == 3
    assert blob_path(store, PLAIN).read_bytes() == wrong
    assert [item.quarantined for item in repaired.repaired] == quarantined(store)
    assert left_over(store) == []

    assert repair_models(source=folder, store=store).faults == ()
    assert is_whole(store)


def test_a_source_that_changes_while_it_is_read_is_an_error(
    store: LocalStore, folder: Path
) -> None:
    flip(blob_path(store, PLAIN))
    weights = folder / "model.safetensors"

    def save_again(_: str, done: int, __: int) -> None:
        if done:
            weights.write_bytes(bytes(weights.stat().st_size))

    with pytest.raises(DamagedSource, match=r"model\.safetensors' changed while it was read"):
        repair_models([NAME], folder, store=store, progress=save_again)
    assert not is_whole(store)
    assert not quarantined(store)


def test_does_not_use_blobs_that_are_damaged_in_the_other_store_too(
    store: LocalStore, other: LocalStore
) -> None:
    for layer in (PLAIN, "mask", "scalar"):
        flip(blob_path(store, layer))
    flip(blob_path(other, PLAIN))
    truncate(blob_path(other, "mask"))
    repaired = repair_models(source=other.root, store=store)
    assert layers(repaired) == {"scalar"}
    assert [fault.layer for fault in repaired.faults] == ["mask", PLAIN]
    assert quarantined(other) == []


def test_a_blob_that_cannot_be_read_does_not_stop_the_others(
    store: LocalStore, other: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for layer in (PLAIN, "scalar"):
        flip(blob_path(store, layer))
    lost = blob_path(other, PLAIN)
    check_size = LocalStore.check_size

    def losing(self: LocalStore, digest: Digest, size: int, *, as_base: bool = False) -> None:
        check_size(self, digest, size, as_base=as_base)
        if self.root == other.root and digest.file_name == lost.name:
            lost.unlink(missing_ok=True)

    monkeypatch.setattr(LocalStore, "check_size", losing)
    repaired = repair_models(source=other.root, store=store)
    assert layers(repaired) == {"scalar"}
    (fault,) = repaired.faults
    assert "cannot be read" in fault.message
    assert fault.message.endswith("is missing")


def test_stops_reading_a_file_that_grows(
    store: LocalStore, other: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(blob_path(store, PLAIN))
    read_pieces = LocalStore.read_pieces

    def growing(self: LocalStore, *arguments: Any) -> Iterable[bytes | memoryview]:
        if self.root != other.root:
            yield from read_pieces(self, *arguments)
            return
        while True:
            yield b"x"

    monkeypatch.setattr(LocalStore, "read_pieces", growing)
    repaired = repair_models(source=other.root, store=store)
    assert repaired.repaired == ()
    assert "does not match its digest" in repaired.faults[0].message


def test_reports_an_unreadable_manifest(store: LocalStore, folder: Path) -> None:
    flip(blob_path(store, PLAIN))
    write_manifest(store, "broken", b"{}")
    repaired = repair_models(source=folder, store=store)
    assert layers(repaired) == {PLAIN}
    (fault,) = repaired.faults
    assert fault.reference == "broken:latest"
    assert "only a store or a remote that has the model can restore a manifest" in fault.message


def test_reports_an_empty_manifest(store: LocalStore, tmp_path: Path) -> None:
    other = LocalStore(shutil.copytree(store.root, tmp_path / "other"))
    store.manifest_path(NAME).write_bytes(b"")
    (fault,) = repair_models(source=other.root, store=store).faults
    assert f"; '{other.root}' has no manifest that is certainly the same; " in fault.message


@pytest.mark.parametrize(("old", "new"), [(PLAIN.encode(), b"x" * len(PLAIN)), (b'e":2', b'e":3')])
def test_a_dry_run_reports_what_the_manifest_would_repair(
    old: bytes, new: bytes, store: LocalStore, tmp_path: Path
) -> None:
    other = shutil.copytree(store.root, tmp_path / "other")
    path = store.manifest_path(NAME)
    path.write_bytes(path.read_bytes().replace(old, new, 1))  # a layer's name; a config's size
    for dry_run in (True, False):
        repaired = repair_models([NAME], other, store=store, dry_run=dry_run)
        assert len(repaired.restored) == 1
        assert repaired.faults == ()


def test_a_missing_manifest_cannot_be_repaired(store: LocalStore, folder: Path) -> None:
    with pytest.raises(ModelNotFound, match="has a model of this name can restore its manifest"):
        repair_models([Reference.parse("gone")], folder, store=store)


def test_leaves_an_invalid_blob_whose_digest_is_right(store: LocalStore, folder: Path) -> None:
    add_blobs(store, "odd", {"x": b"no header"})
    repaired = repair_models(source=folder, store=store)
    assert repaired.repaired == ()
    (fault,) = repaired.faults
    assert fault.layer == "x"


def test_a_wrong_size_in_a_manifest_harms_no_blob(store: LocalStore, folder: Path) -> None:
    manifest = store.resolve(NAME)
    data = manifest.to_bytes()
    layer = next(item for item in manifest.layers if item.name == PLAIN)
    wrong = data.replace(f'"size":{layer.size}'.encode(), f'"size":{layer.size + 1}'.encode())
    write_manifest(store, "wrong", wrong)
    shutil.rmtree(store.folder("published"))  # or the manifest would be that of its other name

    repaired = repair_models(source=folder, store=store)
    assert repaired.repaired == ()
    assert {fault.reference for fault in repaired.faults} == {"wrong:latest"}

    flip(blob_path(store, PLAIN))
    repaired = repair_models(source=folder, store=store)
    assert layers(repaired) == {PLAIN}
    assert {fault.reference for fault in repaired.faults} == {"wrong:latest"}
    assert not verify_models([NAME], store=store).faults


def test_reports_a_fault_that_damage_had_hidden(store: LocalStore, folder: Path) -> None:
    data = blob(("y", "U8", (1,), b"1"))
    other = LocalStore(folder.parent / "other")
    for holder in (store, other):
        add_blobs(holder, "odd", {"x": data})
    truncate(blob_path(store, "x", "odd"))
    repaired = repair_models(source=other.root, store=store)
    assert layers(repaired) == {"x"}
    (fault,) = repaired.faults
    assert "which is not of this layer" in fault.message


@pytest.mark.parametrize("source", ["nowhere", "hf://"])
def test_a_missing_source_fails_at_once(source: str, store: LocalStore) -> None:
    with pytest.raises(SourceNotFound):
        repair_models(source=source, store=store)


def test_a_store_cannot_be_repaired_from_itself(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(store.root)
    with pytest.raises(UsageError, match="is the store itself"):
        repair_models(source=tmp_path / "alias", store=store)


def test_a_full_disk_leaves_the_damaged_blob(
    store: LocalStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(blob_path(store, PLAIN))
    wrong = blob_path(store, PLAIN).read_bytes()

    fsync = os.fsync

    def fail(descriptor: int) -> None:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(28, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StoreError, match="no space left"):
        repair_models(source=folder, store=store)
    monkeypatch.undo()
    assert blob_path(store, PLAIN).read_bytes() == wrong
    assert left_over(store) == []


# A request to stop


def test_a_request_after_the_last_blob_is_in_place_reports_success(
    store: LocalStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rewrite(*arguments: Any) -> None:  # the first step after the threads have renamed all blobs
        monkeypatch.setattr(interrupts._State, "number", signal.SIGTERM)
        rewrite_indexes(*arguments)

    monkeypatch.setattr(interrupts, "_thread", interrupts._Thread())
    monkeypatch.setattr("blobstore.operations.maintenance.repair.rewrite_indexes", rewrite)
    flip(blob_path(store, PLAIN))
    assert layers(repair_models(["m"], folder, store=store)) == {PLAIN}
    with pytest.raises(interrupts.Stopped):
        interrupts.check()
    monkeypatch.undo()
    assert is_whole(store)


# The header index


def test_rebuilds_an_index_that_comes_from_a_damaged_header(
    store: LocalStore, folder: Path
) -> None:
    path = blob_path(store, "position_ids")
    data = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(data.replace(b'"I64"', b'"U64"'))
    data = store.read_manifest(NAME)
    write_index(store, data, load_index(store, data, use_index=False))
    with open_model(NAME, store=store) as model:
        assert model["position_ids"].dtype == np.uint64
    repair_models(source=folder, store=store)
    with open_model(NAME, store=store) as model:
        assert model["position_ids"].dtype == np.int64


# Other processes at the same time


def test_a_rebuilt_blob_is_not_garbage(
    store: LocalStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(blob_path(store, PLAIN))
    place = _Repair._place
    ready: list[Path] = []

    def collecting(self: _Repair, item: Descriptor, path: Path) -> None:
        collect_garbage(store=LocalStore(store.root), older_than=0, force=True)
        ready.append(path)
        place(self, item, path)

    monkeypatch.setattr(_Repair, "_place", collecting)
    assert repair_models(source=folder, store=store).faults == ()
    assert len(ready) == 1
    assert is_whole(store)


def test_a_blob_of_a_model_that_is_removed_during_the_repair_becomes_garbage(
    store: LocalStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(blob_path(store, PLAIN))
    place = _Repair._place

    def removing(self: _Repair, item: Descriptor, path: Path) -> None:
        remove_models([NAME], store=store)
        place(self, item, path)

    monkeypatch.setattr(_Repair, "_place", removing)
    assert repair_models(source=folder, store=store).faults == ()
    assert is_whole(store)
    collect_garbage(store=store, older_than=0, force=True)
    assert list(store.folder("blobs").iterdir()) == []


def test_an_interrupt_leaves_no_temporary_files(
    store: LocalStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in store.folder("blobs").iterdir():
        flip(path)

    def interrupt(what: str, done: int, total: int) -> None:
        if list(store.folder("temporary").iterdir()):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        repair_models(source=folder, store=store, progress=interrupt, jobs=3)
    assert left_over(store) == []
    assert repair_models(source=folder, store=store).faults == ()


def test_an_interrupt_does_not_wait_for_blobs_that_are_being_read(
    store: LocalStore, other: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for layer in (PLAIN, "mask"):
        flip(blob_path(store, layer))
    read_pieces = LocalStore.read_pieces
    begun = threading.Semaphore(0)

    def growing(self: LocalStore, digest: Digest, size: int) -> Iterable[bytes | memoryview]:
        if self.root != other.root:
            yield from read_pieces(self, digest, size)
            return
        begun.release()
        if digest == Digest.of(blob_path(other, "mask").read_bytes()):
            for _ in range(2):
                begun.acquire()
            raise KeyboardInterrupt
        while True:
            yield b""

    monkeypatch.setattr(LocalStore, "read_pieces", growing)
    with pytest.raises(KeyboardInterrupt):
        repair_models(source=other.root, store=store, jobs=2)
    assert left_over(store) == []


def test_skips_a_blob_that_another_repair_has_repaired(
    store: LocalStore, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(blob_path(store, PLAIN))
    found = verify_models(store=store)
    repair_models(source=folder, store=store)
    inode = blob_path(store, PLAIN).stat().st_ino
    monkeypatch.setattr(
        "blobstore.operations.maintenance.repair.verify_models", lambda *_, **__: found
    )
    repaired = repair_models(source=folder, store=store)
    assert repaired.repaired == ()
    assert blob_path(store, PLAIN).stat().st_ino == inode
    assert len(quarantined(store)) == 1
    assert left_over(store) == []


def test_checks_a_blob_again_that_changes_before_the_lock_is_acquired(
    store: LocalStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = blob_path(store, PLAIN)
    right = path.read_bytes()
    flip(path)
    check_digest = LocalStore.check_digest
    calls = itertools.count()

    def racing(self: LocalStore, digest: Digest, *arguments: Any) -> None:
        try:
            check_digest(self, digest, *arguments)
        finally:
            # The second check is the one before the lock; another process repairs the blob right after it.
            if digest == Digest.of(right) and next(calls) == 1:
                path.unlink()
                path.write_bytes(right)

    monkeypatch.setattr(LocalStore, "check_digest", racing)
    repaired = repair_models(source=folder, store=store)
    assert repaired.repaired == ()
    assert repaired.faults == ()
    assert quarantined(store) == []
    assert path.read_bytes() == right


def test_reports_a_busy_store(store: LocalStore, folder: Path) -> None:
    flip(blob_path(store, PLAIN))
    wrong = blob_path(store, PLAIN).read_bytes()
    hurried = LocalStore(store.root, lock_timeout=0)
    with store._locks.shared(), pytest.raises(StoreBusy):
        repair_models(source=folder, store=hurried)
    assert blob_path(store, PLAIN).read_bytes() == wrong
    assert left_over(store) == []


def damage_some(store: LocalStore, seed: int) -> None:
    """Damage some blobs in one of several ways."""
    choice = random.Random(seed)
    for path in choice.sample(sorted(store.folder("blobs").iterdir()), 6):
        choice.choice((flip, truncate, flip_header, Path.unlink))(path)


def test_repairs_and_collections_do_not_harm_each_other(
    store: LocalStore, folder: Path, tmp_path: Path
) -> None:
    failures: list[BaseException] = []
    stop = threading.Event()

    def repeat(work: Callable[[], object]) -> None:
        try:
            while not stop.is_set():
                work()
        except BaseException as error:  # noqa: BLE001 - the test reports it
            failures.append(error)

    def repair() -> object:
        return repair_models(source=folder, store=LocalStore(store.root), jobs=2)

    def collect() -> object:
        return collect_garbage(store=LocalStore(store.root), older_than=0, force=True)

    works: Iterable[Callable[[], object]] = (repair, repair, collect)
    threads = [threading.Thread(target=repeat, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for _ in range(3):
        damage_some(store, 1)
        repair()
    stop.set()
    for thread in threads:
        thread.join()

    assert failures == []
    assert is_whole(store)


# Killed at any moment

_REPAIR = """
import sys
from blobstore.operations.maintenance.repair import repair_models
from blobstore.store.local import LocalStore
print("ready", flush=True)
repair_models(source=sys.argv[2], store=LocalStore(sys.argv[1]), jobs=2)
"""
# For each line with a number n, a child is killed in place of its nth system call; prints its exit code.
_STEPS = """
import os, signal, sys
from pathlib import Path
from blobstore.operations.maintenance.repair import repair_models
from blobstore.store.local import LocalStore
def counting(call):
    def step(*arguments, **options):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **options)
    return step
for line in sys.stdin:
    left = int(line)
    child = os.fork()
    if not child:
        for name in ("write", "fsync", "link", "rename", "unlink", "close"):
            setattr(os, name, counting(getattr(os, name)))
        Path.replace, Path.unlink = counting(Path.replace), counting(Path.unlink)
        repair_models(source=sys.argv[2], store=LocalStore(sys.argv[1]), jobs=1)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def start(program: str, store: LocalStore, source: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, store.root, source],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def check_after_a_crash(store: LocalStore, right: dict[Path, bytes], folder: Path) -> None:
    """Check that another repair succeeds, and that nothing is lost or left behind."""
    assert repair_models(source=folder, store=store).faults == ()
    assert {path: path.read_bytes() for path in right} == right
    collect_garbage(store=store, older_than=0, force=True)
    assert left_over(store) == []
    assert set(store.folder("blobs").iterdir()) == set(right)


def test_survives_a_kill_before_every_step(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    folder = write_folder(tmp_path / "source", {"w": np.arange(99), "v": np.arange(9)})
    create(folder, NAME, store=store)
    right = {path: path.read_bytes() for path in store.folder("blobs").iterdir()}
    damaged, missing = blob_path(store, "w"), blob_path(store, "v")
    flip(damaged)
    wrong = damaged.read_bytes()
    killed = 0
    with start(_STEPS, store, folder) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for step in itertools.count(1):
            damaged.unlink()
            missing.unlink(missing_ok=True)
            damaged.write_bytes(wrong)
            print(step, file=process.stdin, flush=True)
            end = int(process.stdout.readline())
            if end == 0:
                break
            assert end == -signal.SIGKILL
            killed += 1
            # The blob is right, or as damaged as before; and the damaged bytes are never lost.
            assert damaged.read_bytes() in (wrong, right[damaged])
            if damaged.read_bytes() != wrong:
                assert wrong in [path.read_bytes() for path in quarantined(store)]
            assert not missing.exists() or missing.read_bytes() == right[missing]
            check_after_a_crash(store, right, folder)
        process.stdin.close()
    assert killed > 15


@pytest.mark.parametrize("seed", range(12))
def test_survives_a_kill_at_any_moment(seed: int, store: LocalStore, folder: Path) -> None:
    right = {path: path.read_bytes() for path in store.folder("blobs").iterdir()}
    damage_some(store, seed)
    with start(_REPAIR, store, folder) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.01 * seed)
        process.kill()
    check_after_a_crash(store, right, folder)


# Every layer, with the options of create


def _write_source(folder: Path, kind: str) -> Path:
    """Write one of the sources; return what to import."""
    write_folder(folder, moe_tensors(), files={"config.json": b"{}", "README.md": b"text"})
    (weights,) = folder.glob("*.safetensors")
    if kind == "pytorch":
        import torch

        for path in folder.iterdir():
            path.unlink()
        content = {key: {"a": torch.full((4, 4), ord(key[0]))} for key in ("model", "ema")}
        torch.save(content | {"epoch": 3}, folder / "model.pt")
        return folder / "model.pt"
    if kind == "several":
        shutil.copy(weights, folder / "other.safetensors")
    if kind == "unindexed":
        (folder / f"{weights.name}.index.json").write_text(
            json.dumps({"weight_map": {min(moe_tensors()): weights.name}})
        )
    if kind == "others":
        (folder / "x").mkdir()
        (folder / "x" / "a.onnx").write_bytes(b"onnx")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("plain", {}),
        (
            "plain",
            {"experts": "stacked", "quantize": "int4", "group_size": 64, "policy": "uniform"},
        ),
        ("plain", {"exclude": ["READ*"]}),
        ("several", {"weights": "other.safetensors"}),
        ("unindexed", {"ignore_unindexed": True}),
        ("others", {"keep": ["*.onnx"]}),
        ("pytorch", {}),
        ("pytorch", {"subtree": "ema", "skip_unreadable": True}),
    ],
)
def test_every_layer_is_repaired_from_the_source(
    kind: str, options: dict[str, Any], store: LocalStore, tmp_path: Path
) -> None:
    source = _write_source(tmp_path / "source", kind)
    create(source, "m", store=store, **grouped(options))
    manifest = store.resolve("m")
    for layer in manifest.blobs:
        is_record = layer.media_type == media_types.SOURCE
        given = {key: options[key] for key in options if key in _GIVEN and is_record}
        flip(Path(store.blob_path(layer.digest)), -1)
        repaired = repair_models(["m"], source, store=store, **given)
        assert [blob.digest for blob in repaired.repaired] == [layer.digest]
        assert repaired.faults == ()
    assert verify_models(store=store).faults == ()


_GIVEN = {"exclude", "keep", "weights", "ignore_unindexed", "subtree", "skip_unreadable"}
"""Options that a damaged record does not say."""


@pytest.mark.slow
def test_a_damaged_record_needs_the_options_of_create(store: LocalStore, tmp_path: Path) -> None:
    source = _write_source(tmp_path / "source", "plain")
    create(source, "m", store=store, source_options=SourceOptions(exclude=("READ*",)))
    (layer,) = store.resolve("m").layers_of(media_types.SOURCE)
    Path(store.blob_path(layer.digest)).unlink()
    (fault,) = repair_models(["m"], source, store=store).faults
    assert "it has the options of create, so give them again" in fault.message
