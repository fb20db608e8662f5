from __future__ import annotations

import errno
import gc
import os
import resource
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import blobstore
from blobstore.cold_blobs.blob_encoder import BlobEncoder
from blobstore.cold_blobs.builder import BLOCK, ColdBlobBuilder, EncodedBlob
from blobstore.compression.level import Level
from blobstore.core.digest import Digest
from blobstore.errors import (
    BlobDamaged,
    InvalidManifest,
    ModelNotFound,
    StoreError,
    UsageError,
)
from blobstore.manifests.descriptor import Descriptor
from blobstore.manifests.reference import Reference
from blobstore.manifests.step_record import step_of
from blobstore.operations.describe.disk_usage import Space, measure_usage
from blobstore.operations.export.export import export_model
from blobstore.operations.freeze import freeze
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.operations.freeze.thaw import thaw_models
from blobstore.operations.maintenance.collected import Removed
from blobstore.operations.maintenance.gc import _Candidate, _Collection, collect_garbage
from blobstore.operations.maintenance.names import remove_models
from blobstore.operations.maintenance.repair import repair_models
from blobstore.operations.maintenance.verify import verify_models
from blobstore.store.cold import ColdBlob
from blobstore.store.cold_index import ColdIndex
from blobstore.store.local import LocalStore
from tests.support import sandbox
from tests.support.adapted import COLUMNS, ROWS, matrix, merged
from tests.support.damage import forget_manifests
from tests.support.frozen import (
    COUNT,
    flip,
    flip_in_place,
    forms,
    forms_of,
    layer,
    layers,
    put,
    tuned,
    weights,
)
from tests.support.models import add_blobs, blob
from tests.support.options import grouped


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store", lock_timeout=0.05)


def outcomes(frozen: freeze.Frozen) -> dict[str, str]:
    return {item.name: item.outcome for item in frozen.blobs}


def assert_whole(store: LocalStore, name: str, seeds: dict[str, int]) -> None:
    for options in ({}, {"read": "pread"}, {"verify": "none"}, {"verify": "rehash"}):
        with blobstore.open(name, store=store, **options) as model:  # type: ignore[call-overload]
            assert {key: model[key].tobytes() for key in model} == {
                key: weights(seed) for key, seed in seeds.items()
            }


@pytest.mark.slow
def test_frozen_models_take_less_space_and_read_the_same(store: LocalStore) -> None:
    put(store, "a", {"x": 1, "y": 2})
    frozen = freeze_models(["a"], store=store)
    assert outcomes(frozen) == {"x": "frozen", "y": "frozen"}
    assert forms_of(store, "a") == {"x": "cold", "y": "cold"}
    assert frozen.faults == ()
    on_disk = sum(path.stat().st_size for path in store.folder("cold").iterdir())
    assert (frozen.size, frozen.stored) == (2 * len(layer("x", weights(1))), on_disk)
    assert on_disk < 0.7 * frozen.size
    assert_whole(store, "a", {"x": 1, "y": 2})
    assert list(store.folder("temporary").iterdir()) == []
    assert list(store.folder("leases").iterdir()) == []


@pytest.mark.slow
def test_many_frozen_blobs_need_few_descriptors(store: LocalStore) -> None:
    put(store, "a", {f"t{number}": number for number in range(100)})
    freeze_models(["a"], store=store)

    def run() -> int:
        with blobstore.open("a", store=store) as model:
            return len(model.state_dict())

    limits = {resource.RLIMIT_NOFILE: len(os.listdir("/dev/fd")) + 20}
    assert sandbox.call(run, limits=limits) == "100"


def test_names_the_layer_of_a_damaged_cold_blob(store: LocalStore) -> None:
    put(store, "a", {"x": 1, "y": 2})
    freeze_models(["a"], store=store)
    flip(store.cold_path(layers(store, "a")["y"].digest), 5000)
    with pytest.raises(BlobDamaged, match="^a:latest: layer 'y': cold blob '.*' is damaged: "):
        blobstore.open("a", store=store).state_dict()


def test_freezing_again_has_nothing_to_do(store: LocalStore) -> None:
    put(store, "a", {"x": 1})
    first = freeze_models(["a"], store=store)
    again = freeze_models(["a"], store=store)
    assert outcomes(again) == {"x": "cold"}
    assert again.stored == first.stored


def test_a_blob_that_another_process_has_just_thawed_is_in_use(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "a", {"x": 1})
    freeze_models(["a"], store=store)
    open_cold = LocalStore.open_cold

    def late(self: LocalStore, *arguments: Any) -> Any:
        monkeypatch.undo()
        thaw_models(["a"], store=LocalStore(store.root))
        return open_cold(self, *arguments)

    monkeypatch.setattr(LocalStore, "open_cold", late)
    frozen = freeze_models(["a"], store=store)
    assert (outcomes(frozen), frozen.faults) == ({"x": "in use"}, ())
    assert forms_of(store, "a") == {"x": "hot"}


def test_incompressible_blobs_stay_hot(store: LocalStore) -> None:
    noise = os.urandom(50_000)
    add_blobs(store, "a", {"n": blob(("n", "U8", (50_000,), noise)), "t": layer("t", b"12")})
    assert outcomes(freeze_models(["a"], store=store)) == {"n": "no gain", "t": "no gain"}
    assert forms_of(store, "a") == {"n": "hot", "t": "hot"}
    assert list(store.folder("cold").iterdir()) == []


def test_small_files_and_configs_stay_hot(store: LocalStore, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(layer("x", weights(1)))
    (folder / "vocab.txt").write_bytes(b"a word\n" * 10_000)
    blobstore.create(folder, "a", store=store)
    freeze_models(["a"], store=store)
    assert forms_of(store, "a") == {"x": "cold", "vocab.txt": "hot", "": "hot"}
    assert store.has_hot(store.resolve(Reference.parse("a")).config.digest)


def test_a_blob_that_is_a_small_file_of_another_model_stays_hot(
    store: LocalStore, tmp_path: Path
) -> None:
    put(store, "a", {"x": 1})
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(layer("y", weights(2)))
    (folder / "odd.txt").write_bytes(layer("x", weights(1)))
    blobstore.create(folder, "b", store=store)
    frozen = freeze_models(["a", "b"], store=store)
    assert outcomes(frozen) == {"x": "shared", "y": "frozen"}


def test_blobs_shared_with_a_hot_model_stay_hot(store: LocalStore) -> None:
    put(store, "a", {"x": 1, "y": 2})
    put(store, "b", {"x": 1, "z": 3})
    assert outcomes(freeze_models(["a"], store=store)) == {"x": "shared", "y": "frozen"}
    assert forms_of(store, "a") == {"x": "hot", "y": "cold"}
    assert not store.has_cold(layers(store, "a")["x"].digest)


@pytest.mark.slow
def test_shared_blobs_are_frozen_with_the_last_model(store: LocalStore) -> None:
    put(store, "a", {"x": 1, "y": 2})
    put(store, "b", {"x": 1, "z": 3})
    freeze_models(["a"], store=store)
    freeze_models(["b"], store=store)
    assert forms_of(store, "a") == {"x": "cold", "y": "cold"}
    assert forms_of(store, "b") == {"x": "cold", "z": "cold"}
    assert_whole(store, "a", {"x": 1, "y": 2})


def test_freezes_several_models_and_their_shared_blobs(store: LocalStore) -> None:
    put(store, "a", {"x": 1, "y": 2})
    put(store, "b", {"x": 1, "z": 3})
    frozen = freeze_models(["a", "b", "a"], store=store)
    assert outcomes(frozen) == dict.fromkeys("xyz", "frozen")
    assert list(map(str, frozen.references)) == ["a:latest", "b:latest"]


def test_keep_hot_keeps_both_forms(store: LocalStore) -> None:
    put(store, "a", {"x": 1})
    assert outcomes(freeze_models(["a"], store=store, keep_hot=True)) == {"x": "frozen"}
    assert forms_of(store, "a") == {"x": "both"}
    before = Path(store.cold_path(layers(store, "a")["x"].digest)).stat()
    freeze_models(["a"], store=store)  # without encoding it again
    after = Path(store.cold_path(layers(store, "a")["x"].digest)).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert forms_of(store, "a") == {"x": "cold"}


def test_leased_blobs_stay_hot(store: LocalStore) -> None:
    put(store, "a", {"x": 1, "y": 2})
    with store.lease() as lease:
        lease.hold([layers(store, "a")["x"].digest])
        assert outcomes(freeze_models(["a"], store=store)) == {"x": "in use", "y": "frozen"}
        assert forms_of(store, "a") == {"x": "hot", "y": "cold"}
    assert outcomes(freeze_models(["a"], store=store)) == {"x": "frozen", "y": "cold"}


def test_an_open_model_stays_readable(store: LocalStore) -> None:
    put(store, "a", {"x": 1})
    with blobstore.open("a", store=store) as model:
        freeze_models(["a"], store=store)
        assert forms_of(store, "a") == {"x": "cold"}
        assert model["x"].tobytes() == weights(1)
    with blobstore.open("a", store=store) as model:
        thaw_models(["a"], store=store)
        assert model["x"].tobytes() == weights(1)


def test_a_damaged_blob_is_not_frozen(store: LocalStore) -> None:
    put(store, "a", {"x": 1, "y": 2})
    path = store.blob_path(layers(store, "a")["x"].digest)
    flip(path)
    frozen = freeze_models(["a"], store=store)
    assert outcomes(frozen) == {"x": "damaged", "y": "frozen"}
    assert forms_of(store, "a") == {"x": "hot", "y": "cold"}
    (fault,) = frozen.faults
    assert "layer 'x'" in str(fault)
    assert isinstance(fault, BlobDamaged)


def test_reports_a_missing_blob(store: LocalStore) -> None:
    put(store, "a", {"x": 1, "y": 2})
    Path(store.blob_path(layers(store, "a")["x"].digest)).unlink()
    for is_dry in (True, False):
        frozen = freeze_models(["a"], store=store, dry_run=is_dry)
        assert outcomes(frozen) == {"x": "missing", "y": "frozen"}
        assert len(frozen.faults) == 1


@pytest.mark.slow
def test_replaces_a_damaged_cold_blob_if_the_hot_one_is_intact(store: LocalStore) -> None:
    put(store, "a", {"x": 1})
    freeze_models(["a"], store=store, keep_hot=True)
    flip(store.cold_path(layers(store, "a")["x"].digest), 500)
    assert outcomes(freeze_models(["a"], store=store)) == {"x": "frozen"}
    assert forms_of(store, "a") == {"x": "cold"}
    assert_whole(store, "a", {"x": 1})


def test_reports_a_damaged_cold_blob_and_leaves_it_unchanged(store: LocalStore) -> None:
    put(store, "a", {"x": 1})
    freeze_models(["a"], store=store)
    path = Path(store.cold_path(layers(store, "a")["x"].digest))
    flip(str(path), -1)
    frozen = freeze_models(["a"], store=store)
    assert outcomes(frozen) == {"x": "damaged"}
    assert path.exists()


def test_rejects_a_cold_blob_that_decodes_to_other_bytes(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "a", {"x": 1, "y": 2})
    real = BlobEncoder.write

    def wrong(self: BlobEncoder, write: Any, tell: Any) -> None:
        """Encode other bytes with the right digest and valid checksums."""
        self._data = memoryview(layer("x", weights(7)))
        real(self, write, tell)

    monkeypatch.setattr(BlobEncoder, "write", wrong)
    frozen = freeze_models(["a"], store=store)
    assert outcomes(frozen) == {"x": "damaged", "y": "damaged"}
    assert forms_of(store, "a") == {"x": "hot", "y": "hot"}
    assert "it decodes to a blob with digest" in str(frozen.faults[0])


def test_keeps_the_hot_file_if_another_file_is_in_the_place_of_the_cold_one(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "a", {"x": 1, "y": 2})
    wrong = store.cold_path(layers(store, "a")["x"].digest)
    really_replace = Path.replace

    def replace(self: Path, target: str) -> None:
        really_replace(self, target)
        if target == wrong:  # another program
            Path(wrong).unlink()
            Path(wrong).write_bytes(b"something else")

    monkeypatch.setattr(Path, "replace", replace)
    assert outcomes(freeze_models(["a"], store=store)) == {"x": "in use", "y": "frozen"}
    assert forms_of(store, "a") == {"x": "both", "y": "cold"}


def test_keeps_the_hot_file_if_the_verified_cold_blob_was_removed(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "a", {"x": 1})
    digest = layers(store, "a")["x"].digest
    freeze_models(["a"], store=store, keep_hot=True)
    real = freeze._Run._commit

    def later(self: Any, batch: Sequence[Any], lease: str) -> Any:
        Path(store.cold_path(digest)).unlink()  # as another process does that thaws it
        return real(self, batch, lease)

    monkeypatch.setattr(freeze._Run, "_commit", later)
    assert outcomes(freeze_models(["a"], store=store)) == {"x": "in use"}
    assert forms_of(store, "a") == {"x": "hot"}


def test_blobs_of_a_model_created_while_freezing_stay_hot(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "a", {"x": 1, "y": 2})
    real = ColdBlobBuilder.build

    def build(self: ColdBlobBuilder, blob: Any, **options: Any) -> EncodedBlob:
        encoded = real(self, blob, **options)
        if blob.name == "x":
            put(store, "b", {"x": 1})
        return encoded

    monkeypatch.setattr(ColdBlobBuilder, "build", build)
    assert outcomes(freeze_models(["a"], store=store)) == {"x": "shared", "y": "frozen"}
    assert forms_of(store, "a") == {"x": "hot", "y": "cold"}


def test_blobs_of_a_model_replaced_while_freezing_stay_hot(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "a", {"x": 1, "y": 2})
    digests = [item.digest for item in layers(store, "a").values()]
    real = freeze._Run._commit

    def later(self: Any, batch: Sequence[Any], lease: str) -> Any:
        put(store, "a", {"x": 1})
        return real(self, batch, lease)

    monkeypatch.setattr(freeze._Run, "_commit", later)
    freeze_models(["a"], store=store)
    assert forms(store, digests[0]) == "hot"
    assert_whole(store, "a", {"x": 1})


def test_an_unreadable_manifest_stops_freezing(store: LocalStore) -> None:
    put(store, "a", {"x": 1})
    put(store, "b", {"z": 1})
    store.manifest_path(Reference.parse("b")).write_bytes(b"{}")
    with pytest.raises(InvalidManifest, match="cannot tell which blobs"):
        freeze_models(["a"], store=store)
    assert forms_of(store, "a") == {"x": "hot"}


def test_freezes_on_a_disk_without_space_for_the_index_which_gets_its_entries_afterwards(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "a", {"x": 1, "y": 2})
    append = ColdIndex.append
    refused: list[bool] = []

    def without_space(self: ColdIndex, blobs: Any) -> None:
        if not refused and any(store.has_hot(digest) for digest, *_ in blobs):
            refused.append(True)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(self, blobs)

    monkeypatch.setattr(ColdIndex, "append", without_space)
    freeze_models(["a"], store=store)
    assert refused
    assert set(forms_of(store, "a").values()) == {"cold"}
    assert all(store.cold_index.has(*item) for item in store.cold_files().items())


@pytest.mark.slow
def test_a_full_disk_leaves_all_blobs_intact(tmp_path: Path) -> None:
    with sandbox.small_disk(tmp_path / "disk", 2 * 2**20) as disk:
        store = LocalStore(disk / "store")
        seeds = {f"x{number}": number for number in range(20)}
        put(store, "a", seeds)
        with pytest.raises(StoreError, match="no space left"):
            freeze_models(["a"], store=store, keep_hot=True)
        gc.collect()  # the traceback has the maps of blobs
        assert_whole(store, "a", seeds)
        assert list(store.folder("temporary").iterdir()) == []
        freeze_models(["a"], store=store)
        assert set(forms_of(store, "a").values()) == {"cold"}
        assert_whole(store, "a", seeds)


def test_a_limit_of_file_size_is_an_error(store: LocalStore) -> None:
    put(store, "a", {"x": 1})
    outcome = sandbox.call(
        lambda: freeze_models(["a"], store=store), limits={resource.RLIMIT_FSIZE: 20_000}
    )
    assert outcome.startswith("StoreError: writing to the store")
    assert forms_of(store, "a") == {"x": "hot"}


def test_an_interrupt_leaves_every_blob_intact(store: LocalStore) -> None:
    put(store, "a", {f"x{number}": number for number in range(6)})

    def stop(what: str, done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        freeze_models(["a"], store=store, jobs=1, progress=stop)
    assert "neither" not in forms_of(store, "a").values()
    assert list(store.folder("temporary").iterdir()) == []
    assert_whole(store, "a", {f"x{number}": number for number in range(6)})


def test_a_dry_run_writes_nothing_and_estimates_the_outcome(store: LocalStore) -> None:
    put(store, "a", {"x": 1, "y": 2})
    put(store, "b", {"y": 2})
    before = set(store.root.rglob("*"))
    dry = freeze_models(["a"], store=store, dry_run=True)
    assert set(store.root.rglob("*")) == before
    real = freeze_models(["a"], store=store)
    assert outcomes(dry) == outcomes(real) == {"x": "frozen", "y": "shared"}
    assert abs(dry.stored - real.stored) < 0.02 * real.size


def test_a_dry_run_promises_no_gain_below_a_block(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "a", {"x": 1})
    size = layers(store, "a")["x"].size
    block = (size - 1) // BLOCK * BLOCK  # what is behind it takes a block too
    for stored, outcome in ((block + 1, "no gain"), (block, "frozen")):
        monkeypatch.setattr(ColdBlobBuilder, "estimate", lambda *_, stored=stored: (stored, None))
        assert outcomes(freeze_models(["a"], store=store, dry_run=True)) == {"x": outcome}


@pytest.mark.slow
def test_a_dry_run_of_large_blobs_reads_samples(store: LocalStore) -> None:
    data = weights(1, 4_000_000)
    add_blobs(store, "a", {"x": layer("x", data)})
    dry, real = (freeze_models(["a"], store=store, dry_run=is_dry) for is_dry in (True, False))
    assert abs(dry.stored - real.stored) < 0.01 * real.size


def test_older_than_skips_young_models(store: LocalStore) -> None:
    put(store, "a", {"x": 1})
    put(store, "b", {"y": 2})
    then = time.time() - 1000
    for path in (
        store.manifest_path(Reference.parse("a")),
        store.blob_path(layers(store, "a")["x"].digest),
    ):
        os.utime(path, (then, then))
    assert freeze_models(store=store, older_than=2000).references == ()
    assert list(map(str, freeze_models(store=store, older_than=500).references)) == ["a:latest"]
    assert forms_of(store, "b") == {"y": "hot"}
    thaw_models(["a"], store=store)
    assert freeze_models(["a"], store=store, older_than=500).references == ()


def test_progress_reaches_the_total(store: LocalStore) -> None:
    put(store, "a", {"x": 1, "y": 2})
    put(store, "b", {"y": 2})
    reports: list[tuple[int, int]] = []
    freeze_models(["a"], store=store, progress=lambda _, done, total: reports.append((done, total)))
    size = len(layer("x", weights(1)))
    assert reports[-1] == (2 * size, 2 * size)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": "tiny"}, "level must be fast or small"),
        ({"references": ()}, "name the models"),
    ],
)
def test_rejects_invalid_arguments(
    store: LocalStore, options: dict[str, Any], message: str
) -> None:
    put(store, "a", {"x": 1})
    arguments: dict[str, Any] = {"references": ["a"], "store": store}
    with pytest.raises(UsageError, match=message):
        freeze_models(**(arguments | options))


def test_rejects_models_that_do_not_exist(store: LocalStore) -> None:
    put(store, "a", {"x": 1})
    with pytest.raises(ModelNotFound):
        freeze_models(["a", "b"], store=store)
    assert forms_of(store, "a") == {"x": "hot"}


def test_both_levels_are_lossless(store: LocalStore) -> None:
    put(store, "a", {"x": 1})
    put(store, "b", {"y": 1})
    fast = freeze_models(["a"], store=store, level="fast", find_base=False)
    small = freeze_models(["b"], store=store, level="small", find_base=False)
    assert small.stored <= fast.stored
    assert_whole(store, "b", {"y": 1})


def test_gc_removes_unreferenced_frozen_blobs(store: LocalStore) -> None:
    put(store, "a", {"x": 1})
    put(store, "b", {"y": 2})
    freeze_models(["a", "b"], store=store)
    gone = layers(store, "a")["x"].digest
    store.manifest_path(Reference.parse("a")).unlink()
    assert [item.path.name for item in collect_garbage(store=store).blobs] == []  # too young
    (removed,) = (
        item
        for item in collect_garbage(store=store, older_than=0, force=True).blobs
        if "cold" in str(item.path)
    )
    assert removed.path == Path(".blobstore", "cold", gone.file_name)
    assert_whole(store, "b", {"y": 2})


def test_create_reuses_frozen_blobs(store: LocalStore, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(layer("x", weights(1)))
    blobstore.create(folder, "a", store=store)
    freeze_models(["a"], store=store)
    for options in ({}, {"paranoid": True}):
        created = blobstore.create(folder, "b", store=store, **grouped(options))  # type: ignore[call-overload]
        assert created.bytes_written == 0
    assert forms_of(store, "b") == {"x": "cold", "": "hot"}
    assert_whole(store, "b", {"x": 1})
    flip(store.cold_path(layers(store, "a")["x"].digest), 500)
    assert blobstore.create(folder, "c", store=store, paranoid=True).blobs_repaired == 1
    assert_whole(store, "a", {"x": 1})


@pytest.mark.slow
def test_a_store_with_frozen_models_can_be_copied(store: LocalStore, tmp_path: Path) -> None:
    put(store, "a", {"x": 1})
    freeze_models(["a"], store=store)
    shutil.copytree(store.root, tmp_path / "other")
    assert_whole(LocalStore(tmp_path / "other"), "a", {"x": 1})


# Models with a base

BASE = {"x": 1, "y": 2}
CHILD, SIBLING = "child", "sibling"


def put_child(family: LocalStore, name: str, step: int) -> None:
    """Add a model that is ``base`` after a little training."""
    data = {key: layer(key, tuned(step, seed)) for key, seed in BASE.items()}
    add_blobs(family, name, data)


@pytest.fixture
def family(tmp_path: Path) -> LocalStore:
    """A store with a model, a fine-tune of it and another model."""
    store = LocalStore(tmp_path / "store", lock_timeout=0.05)
    put(store, "base", BASE)
    put_child(store, CHILD, 10)
    put(store, "stays", {"z": 3})  # keeps the config that all models share
    return store


def base_of(family: LocalStore, name: str, key: str) -> Digest | None:
    return family.open_cold(layers(family, name)[key].digest).base


def assert_child_intact(family: LocalStore, name: str = CHILD, step: int = 10) -> None:
    for options in ({}, {"read": "pread"}, {"verify": "rehash"}):
        with blobstore.open(name, store=family, **options) as model:  # type: ignore[call-overload]
            for key, seed in BASE.items():
                assert model[key].tobytes() == tuned(step, seed)


@pytest.mark.slow
def test_a_fine_tune_is_stored_as_deltas_against_its_base_model(family: LocalStore) -> None:
    alone = freeze_models([CHILD], store=family, find_base=False, dry_run=True)
    frozen = freeze_models([CHILD], store=family)
    assert frozen.bases == ((Reference.parse(CHILD), Reference.parse("base")),)
    assert frozen.stored < 0.7 * alone.stored
    for key in BASE:
        assert base_of(family, CHILD, key) == layers(family, "base")[key].digest
    assert_child_intact(family)
    assert verify_models(store=family).faults == ()


@pytest.mark.slow
@pytest.mark.parametrize("order", [["base", CHILD], [CHILD, "base"]])
def test_freezes_a_family_of_models_together(family: LocalStore, order: list[str]) -> None:
    put_child(family, SIBLING, 11)
    frozen = freeze_models([*order, SIBLING], store=family)
    assert {item.outcome for item in frozen.blobs} == {"frozen"}
    assert len(frozen.bases) == 2
    coded = {str(name) for name, _ in frozen.bases}
    assert not coded & {str(base) for _, base in frozen.bases}  # one deep
    assert_child_intact(family)
    assert_child_intact(family, SIBLING, 11)
    thaw_models(["base"], store=family)
    assert_child_intact(family)
    freeze_models(["base"], store=family)
    thaw_models([CHILD, SIBLING], store=family)
    assert_child_intact(family)
    assert set(forms_of(family, CHILD).values()) == {"hot"}


@pytest.mark.slow
def test_a_base_never_becomes_a_delta(family: LocalStore) -> None:
    freeze_models([CHILD], store=family, base="base")
    frozen = freeze_models(["base"], store=family, base=CHILD)
    assert [item.base for item in frozen.blobs] == [None, None]
    assert forms_of(family, "base") == dict.fromkeys(BASE, "cold")
    assert_child_intact(family)


@pytest.mark.slow
def test_a_delta_never_becomes_a_base(family: LocalStore) -> None:
    freeze_models([CHILD], store=family, base="base")
    put_child(family, SIBLING, 11)
    freeze_models([SIBLING], store=family, base=CHILD)
    assert [base_of(family, SIBLING, key) for key in BASE] == [None, None]
    assert_child_intact(family, SIBLING, 11)


def while_building(monkeypatch: pytest.MonkeyPatch, key: str, act: Callable[[], object]) -> None:
    """Let another process act once, between the encoding of a blob and the commit."""
    build = ColdBlobBuilder.build

    def and_then(self: ColdBlobBuilder, blob: Any, **options: Any) -> EncodedBlob:
        encoded = build(self, blob, **options)
        if blob.name == key:
            monkeypatch.undo()
            act()
        return encoded

    monkeypatch.setattr(ColdBlobBuilder, "build", and_then)


def test_a_blob_that_becomes_a_base_while_it_is_frozen_does_not_become_a_delta(
    family: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_child(family, SIBLING, 11)
    while_building(
        monkeypatch, "x", lambda: freeze_models([SIBLING], store=family, base=CHILD, keep_hot=True)
    )
    assert outcomes(freeze_models([CHILD], store=family, base="base"))["x"] == "in use"
    assert base_of(family, SIBLING, "x") == layers(family, CHILD)["x"].digest
    assert forms_of(family, CHILD)["x"] == "hot"
    assert_child_intact(family)
    assert_child_intact(family, SIBLING, 11)


@pytest.mark.slow
def test_a_base_that_becomes_a_delta_while_it_is_used_gets_no_delta(
    family: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_child(family, SIBLING, 11)
    while_building(
        monkeypatch, "x", lambda: freeze_models(["base"], store=family, base=SIBLING, keep_hot=True)
    )
    assert outcomes(freeze_models([CHILD], store=family, base="base"))["x"] == "in use"
    assert base_of(family, "base", "x") == layers(family, SIBLING)["x"].digest
    assert forms_of(family, CHILD)["x"] == "hot"
    assert_child_intact(family)


def test_a_base_that_is_lost_while_it_is_used_gets_no_delta(
    family: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = Path(family.blob_path(layers(family, "base")["x"].digest))
    while_building(monkeypatch, "x", base.unlink)
    assert outcomes(freeze_models([CHILD], store=family, base="base"))["x"] == "in use"
    assert forms_of(family, CHILD)["x"] == "hot"
    assert_child_intact(family)


def test_blobs_and_bases_are_leased_while_they_are_frozen(family: LocalStore) -> None:
    leased: list[set[Digest]] = []
    freeze_models(
        [CHILD],
        store=family,
        base="base",
        progress=lambda *_: leased.append(family.read_leases().digests),
    )
    used = {item.digest for name in (CHILD, "base") for item in layers(family, name).values()}
    assert all(digests >= used for digests in leased if digests)
    assert leased[-1] >= used


def test_dissimilar_models_are_compressed_on_their_own(family: LocalStore) -> None:
    put(family, "other", {"x": 5, "y": 6})
    assert freeze_models(["other"], store=family).bases == ()
    frozen = freeze_models([CHILD], store=family, base="other")
    assert [item.base for item in frozen.blobs] == [None, None]


def test_the_search_for_a_base_can_be_turned_off(family: LocalStore) -> None:
    frozen = freeze_models([CHILD], store=family, find_base=False)
    assert frozen.bases == ()
    assert [item.base for item in frozen.blobs] == [None, None]


def test_rejects_a_base_model_that_does_not_exist(family: LocalStore) -> None:
    with pytest.raises(ModelNotFound):
        freeze_models([CHILD], store=family, base="none")


@pytest.mark.slow
@pytest.mark.parametrize("is_frozen", [False, True])
def test_the_blobs_of_a_base_outlive_its_name(family: LocalStore, is_frozen: bool) -> None:
    freeze_models([CHILD, "base"] if is_frozen else [CHILD], store=family, base="base")
    removed = remove_models(["base"], store=family)
    assert (removed.blobs, removed.size) == (0, 0)
    assert removed.bases == 2
    assert removed.bases_size > 0
    assert collect_garbage(store=family, older_than=0, force=True).blobs == ()
    assert_child_intact(family)
    thaw_models([CHILD], store=family)
    assert len(collect_garbage(store=family, older_than=0, force=True).blobs) == 2
    assert_child_intact(family)


def test_gc_removes_unreferenced_deltas_with_their_bases(family: LocalStore) -> None:
    freeze_models([CHILD, "base"], store=family, base="base")
    removed = remove_models([CHILD, "base"], store=family)
    assert (removed.blobs, removed.bases) == (4, 0)
    found = collect_garbage(store=family, older_than=0, force=True)
    names = [item.path.name for item in found.blobs]
    assert len(names) == 4
    assert list(family.folder("cold").iterdir()) == []


def test_gc_keeps_the_bases_of_leased_and_young_deltas(family: LocalStore) -> None:
    freeze_models([CHILD], store=family, base="base")
    child = [item.digest for item in layers(family, CHILD).values()]
    with family.lease() as lease:
        lease.hold(child)
        remove_models([CHILD, "base"], store=family)
        assert collect_garbage(store=family, older_than=0, force=True).blobs == ()
    old = [Path(family.blob_path(item)) for item in map(_base, map(family._cold.open, child))]
    for path in old:
        os.utime(path, (1, 1))
    assert collect_garbage(store=family, older_than=1000).blobs == ()  # the deltas are young
    assert len(collect_garbage(store=family, older_than=0, force=True).blobs) == 4


def _base(blob: ColdBlob) -> Digest:
    base = blob.base
    assert base is not None
    return base


def test_an_unreadable_referenced_cold_blob_stops_gc(family: LocalStore) -> None:
    freeze_models([CHILD], store=family, base="base")
    remove_models(["base"], store=family)
    path = family.cold_path(layers(family, CHILD)["x"].digest)
    whole = Path(path).read_bytes()
    flip(path, -1)
    with pytest.raises(BlobDamaged):
        collect_garbage(store=family, older_than=0, force=True)
    Path(path).write_bytes(whole)
    assert collect_garbage(store=family, older_than=0, force=True).blobs == ()
    assert_child_intact(family)


def test_a_damaged_base_of_unreferenced_deltas_does_not_stop_gc(family: LocalStore) -> None:
    freeze_models(["base", CHILD], store=family, base="base")
    child = layers(family, CHILD)["x"].digest
    bases = [item.digest for item in layers(family, "base").values()]
    remove_models([CHILD, "base"], store=family)
    for base in bases:
        flip(family.cold_path(base), -1)
        os.utime(family.cold_path(base), (1, 1))
    assert (
        collect_garbage(store=family, older_than=1000).blobs == ()
    )  # because their deltas are young
    assert family.has_cold(child)
    assert len(collect_garbage(store=family, older_than=0, force=True).blobs) == 4


def test_a_dry_run_of_gc_reports_deltas_and_their_bases(family: LocalStore) -> None:
    freeze_models([CHILD, "base"], store=family, base="base")
    remove_models([CHILD, "base"], store=family)
    dry, real = (
        collect_garbage(store=family, older_than=0, force=True, dry_run=is_dry)
        for is_dry in (True, False)
    )
    assert set(dry.blobs) == set(real.blobs)
    assert len(real.blobs) == 4
    assert dry.kept_blobs == real.kept_blobs == ()


def test_usage_counts_bases_without_a_model_separately_from_garbage(family: LocalStore) -> None:
    freeze_models([CHILD], store=family, base="base")
    sizes = [layers(family, "base")[key].size for key in BASE]
    assert measure_usage(store=family).bases == Space()
    remove_models(["base"], store=family)
    usage = measure_usage(store=family)
    assert (usage.bases, usage.unreferenced) == (Space(2, sum(sizes)), Space())
    remove_models([CHILD], store=family)
    usage = measure_usage(store=family)
    assert (usage.bases, usage.unreferenced.files) == (Space(), 4)
    put_child(family, CHILD, 10)
    thaw_models([CHILD], store=family)
    usage = measure_usage(store=family)
    assert (usage.bases.files, usage.unreferenced.files) == (0, 2)


def test_verify_finds_a_missing_base(family: LocalStore) -> None:
    freeze_models([CHILD], store=family, base="base")
    digest = layers(family, "base")["x"].digest
    Path(family.blob_path(digest)).unlink()
    Path(family.base_path(digest)).unlink()
    faults = [fault for fault in verify_models(store=family).faults if "child" in fault.reference]
    assert [fault.layer for fault in faults] == ["x"]
    quick = verify_models(store=family, quick=True).faults
    assert {fault.reference for fault in quick} == {"base:latest", "child:latest"}
    with pytest.raises(BlobDamaged, match=f"{digest.file_name}.* is missing"):
        blobstore.open(CHILD, store=family)["x"]
    child = layers(family, CHILD)["x"]
    with pytest.raises(BlobDamaged, match=f"its base {digest} is missing"):
        family.exists(child.digest, child.size)


def test_a_base_removed_while_its_deltas_are_thawed_is_not_a_fault(
    family: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    freeze_models([CHILD], store=family, base="base")
    base = layers(family, "base")["x"].digest
    remove_models(["base"], store=family)
    check_digest = LocalStore.check_digest

    def racing(self: LocalStore, digest: Digest, *arguments: Any) -> None:
        if digest == base:
            thaw_models([CHILD], store=family)
            collect_garbage(store=family, older_than=0, force=True)
        check_digest(self, digest, *arguments)

    monkeypatch.setattr(LocalStore, "check_digest", racing)
    assert verify_models([Reference.parse(CHILD)], store=family).faults == ()
    assert not family.has(base)


def test_verify_reports_a_damaged_base_in_its_deltas(family: LocalStore) -> None:
    freeze_models([CHILD], store=family, base="base")
    digest = layers(family, "base")["x"].digest
    flip_in_place(family.blob_path(digest))  # and with it the second link
    faults = verify_models(store=family).faults
    assert {fault.reference for fault in faults} == {"base:latest", "child:latest"}
    (fault,) = (fault for fault in faults if fault.reference == "child:latest")
    assert f"its base is at fault: blob '{family.blob_path(digest)}' is damaged" in fault.message
    assert fault.message.count(digest.hex) == 1
    assert fault.blob == str(layers(family, CHILD)["x"].digest)


def test_a_base_that_is_damaged_in_one_form_is_a_fault_of_its_own_model_only(
    family: LocalStore,
) -> None:
    freeze_models([CHILD], store=family, base="base")
    flip(family.blob_path(layers(family, "base")["x"].digest))
    assert_child_intact(family)  # from the second link
    faults = verify_models(store=family).faults
    assert [(fault.reference, fault.layer) for fault in faults] == [("base:latest", "x")]


def test_repairs_a_base_from_its_second_link(family: LocalStore) -> None:
    freeze_models([CHILD], store=family, base="base")
    digest = layers(family, "base")["x"].digest
    flip(family.blob_path(digest))  # a new file
    repaired = repair_models(store=family)
    assert [blob.digest for blob in repaired.repaired] == [digest]
    assert repaired.faults == ()
    assert Path(family.base_path(digest)).samefile(family.blob_path(digest))
    assert_child_intact(family)


def damage_lost_base(family: LocalStore, form: str) -> Descriptor:
    """Freeze the child, remove the base model, and damage a blob of it in one form."""
    item = layers(family, "base")["x"]
    freeze_models([CHILD, "base"], store=family, base="base")
    if form != "cold":
        thaw_models(["base"], store=family, keep_cold=form == "hot and cold")
    hot, cold = family.blob_path(item.digest), family.cold_path(item.digest)
    if form == "pinned":
        lose_like_ollama(family, "base")
        flip_in_place(family.base_path(item.digest))
    else:
        remove_models(["base"], store=family)
        flip_in_place(cold if form == "cold" else hot)
    return item


@pytest.mark.slow
@pytest.mark.parametrize("form", ["hot", "cold", "pinned", "hot and cold"])
@pytest.mark.parametrize("origin", ["folder", "store", "nothing"])
def test_verify_finds_and_repair_repairs_a_damaged_base_without_a_model(
    family: LocalStore, tmp_path: Path, form: str, origin: str
) -> None:
    source = None if origin == "nothing" else tmp_path / "source"
    if origin == "folder":
        export_model("base", tmp_path / "source", store=family)
    elif origin == "store":
        put(LocalStore(tmp_path / "source"), "other", BASE)
    item = damage_lost_base(family, form)
    has_other = form == "hot and cold"
    found = verify_models([Reference.parse(CHILD)], store=family)
    assert {fault.layer for fault in found.faults} == {"x"}
    of_base = [fault for fault in found.faults if fault.blob == str(item.digest)]
    place = {"cold": family._layout.cold_blob, "pinned": family._layout.base_blob}
    path = place.get(form, family._layout.blob)(item.digest)
    assert [f"'{path}' is damaged" in fault.message for fault in of_base] == [True]
    assert len(found.faults) == (1 if has_other else 2)
    repaired = repair_models(source=source, store=family)
    if source is None and not has_other:
        assert repaired.repaired == ()
        assert repaired.faults == verify_models(store=family).faults
        return
    assert [blob.digest for blob in repaired.repaired] == [item.digest]
    assert repaired.faults == ()
    assert verify_models(store=family).faults == ()
    assert_child_intact(family)
    collect_garbage(store=family, older_than=0, force=True)
    assert_child_intact(family)


def test_quick_verify_finds_a_truncated_base_without_a_model(family: LocalStore) -> None:
    freeze_models([CHILD], store=family, base="base")
    lose_like_ollama(family, "base")
    assert verify_models(store=family, quick=True).faults == ()
    bases = [family.open_cold(item.digest).base for item in layers(family, CHILD).values()]
    path = Path(family.base_path(next(base for base in bases if base)))
    path.chmod(0o600)
    os.truncate(path, 100)
    faults = verify_models(store=family, quick=True).faults
    assert any("expected" in fault.message and path.name in fault.message for fault in faults)


def test_uses_the_base_that_the_model_card_names(family: LocalStore, tmp_path: Path) -> None:
    put_child(family, SIBLING, 11)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(layer("x", tuned(12, 1)))
    (folder / "README.md").write_text("---\nlicense: mit\nbase_model:\n- org/Sib-ling\n---\n# A\n")
    blobstore.create(folder, "mine", store=family)
    frozen = freeze_models(["mine"], store=family)
    assert frozen.bases == ((Reference.parse("mine"), Reference.parse(SIBLING)),)


@pytest.mark.slow
def test_a_fine_tune_can_be_created_again_after_its_base_was_removed(family: LocalStore) -> None:
    """No unusable cold blob is left over."""
    freeze_models([CHILD], store=family, base="base")
    remove_models(["base", CHILD], store=family)
    collect_garbage(store=family, older_than=0, force=True)
    put_child(family, CHILD, 10)
    assert_child_intact(family)
    assert len(tuned(10, 1)) == 2 * COUNT
    assert tuned(10, 1) != weights(1)


def pins(family: LocalStore) -> set[str]:
    folder = family.folder("bases")
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def lose_like_ollama(family: LocalStore, name: str) -> None:
    """Remove a name and its hot blobs, as programs do that do not know cold blobs."""
    files = [family.blob_path(item.digest) for item in layers(family, name).values()]
    forget_manifests(family, name)
    for file in files:
        Path(file).unlink(missing_ok=True)


@pytest.mark.slow
def test_a_base_survives_a_program_that_removes_unreferenced_blobs(family: LocalStore) -> None:
    freeze_models([CHILD], store=family, base="base")
    assert pins(family) == {item.digest.file_name for item in layers(family, "base").values()}
    lose_like_ollama(family, "base")
    assert_child_intact(family)
    assert verify_models(store=family).faults == ()
    assert collect_garbage(store=family, older_than=0, force=True).blobs == ()
    thaw_models([CHILD], store=family)
    assert_child_intact(family)
    collect_garbage(store=family, older_than=0, force=True)
    assert pins(family) == set()
    assert_child_intact(family)


@pytest.mark.slow
def test_a_thawed_base_survives_such_a_program_too(family: LocalStore) -> None:
    freeze_models([CHILD, "base"], store=family, base="base")
    assert pins(family) == set()
    thaw_models(["base"], store=family)
    assert set(forms_of(family, "base").values()) == {"hot"}
    assert len(pins(family)) == 2
    lose_like_ollama(family, "base")
    assert_child_intact(family)


@pytest.mark.slow
def test_freezing_a_base_removes_its_second_link(family: LocalStore) -> None:
    freeze_models([CHILD], store=family, base="base")
    freeze_models(["base"], store=family)
    assert pins(family) == set()
    assert set(forms_of(family, "base").values()) == {"cold"}
    assert_child_intact(family)


@pytest.mark.slow
def test_without_hard_links_only_cold_blobs_are_bases(
    family: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "no links")

    monkeypatch.setattr(os, "link", refuse)
    frozen = freeze_models([CHILD], store=family, base="base")
    assert {(item.outcome, item.base) for item in frozen.blobs} == {("frozen", None)}
    assert set(forms_of(family, CHILD).values()) == {"cold"}
    assert pins(family) == set()
    thaw_models([CHILD], store=family)
    freeze_models(["base"], store=family, find_base=False)
    freeze_models([CHILD], store=family, base="base")
    assert base_of(family, CHILD, "x") == layers(family, "base")["x"].digest
    thaw_models(["base"], store=family)
    assert set(forms_of(family, "base").values()) == {"both"}
    lose_like_ollama(family, "base")
    assert_child_intact(family)


@pytest.mark.slow
def test_a_damaged_base_is_not_used(family: LocalStore) -> None:
    """Once the base is repaired, a delta against the wrong bytes would be lost."""
    path = family.blob_path(layers(family, "base")["x"].digest)
    whole = Path(path).read_bytes()
    flip(path)
    frozen = freeze_models([CHILD], store=family, base="base")
    assert {item.name: item.base is None for item in frozen.blobs} == {"x": True, "y": False}
    Path(path).unlink()
    Path(path).write_bytes(whole)
    assert_child_intact(family)


@pytest.mark.slow
def test_repairing_a_base_restores_its_second_link(family: LocalStore, tmp_path: Path) -> None:
    freeze_models([CHILD], store=family, base="base")
    export_model("base", tmp_path / "source", store=family)
    digest = layers(family, "base")["x"].digest
    whole = Path(family.blob_path(digest)).read_bytes()
    Path(family.blob_path(digest)).chmod(0o644)
    Path(family.blob_path(digest)).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert verify_models(store=family).faults
    repaired = repair_models(source=tmp_path / "source", store=family)
    assert repaired.faults == ()
    assert Path(family.base_path(digest)).read_bytes() == whole
    assert Path(family.base_path(digest)).samefile(family.blob_path(digest))
    lose_like_ollama(family, "base")
    assert_child_intact(family)


@pytest.mark.slow
def test_gc_keeps_the_base_of_a_model_that_is_frozen_again_between_batches(
    family: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    freeze_models([CHILD], store=family, base="base")
    remove_models([CHILD, "base"], store=family)
    sweep = _Collection.sweep
    swept: list[object] = []

    def and_then(self: _Collection, candidates: list[_Candidate]) -> list[Removed]:
        removed = sweep(self, candidates)
        if not swept:  # others act between two batches
            put(family, "base", BASE)
            put_child(family, CHILD, 10)
            freeze_models([CHILD], store=family, base="base")
            remove_models(["base"], store=family)
        swept.append(candidates)
        return removed

    monkeypatch.setattr(_Collection, "sweep", and_then)
    collect_garbage(store=family, older_than=0, force=True)
    assert len(swept) == 2
    assert_child_intact(family)


def test_gc_keeps_bases_while_the_cold_folder_is_missing(family: LocalStore) -> None:
    freeze_models([CHILD], store=family, base="base")
    remove_models(["base"], store=family)
    away = family.folder("cold").rename(family.folder("cold").with_name("away"))
    collect_garbage(store=family, older_than=0, force=True)
    away.rename(family.folder("cold"))
    assert_child_intact(family)
    remove_models([CHILD], store=family)
    collect_garbage(store=family, older_than=0, force=True)
    assert pins(family) == set()


# Models with a merged adapter

NAMES = ("q", "v")


def put_family(store: LocalStore, code: str) -> dict[str, bytes]:
    """Add a model and the same model with a merged adapter; return the blobs of the latter."""
    shape = ROWS, COLUMNS
    base = {name: matrix(seed, code) for seed, name in enumerate(NAMES)}
    tuned = {name: merged(data, 7, rank=8, code=code) for name, data in base.items()}
    add_blobs(store, "base", {name: blob((name, code, shape, base[name])) for name in NAMES})
    made = {name: blob((name, code, shape, tuned[name])) for name in NAMES}
    add_blobs(store, "merged", made)
    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "level", "most"),
    [("BF16", "fast", 0.25), ("BF16", "small", 0.25), ("F32", "fast", 0.6), ("F32", "small", 0.6)],
)
@pytest.mark.parametrize("is_base_cold", [False, True])
def test_a_merged_adapter_compresses_well_against_its_base(
    tmp_path: Path, code: str, level: Level, most: float, *, is_base_cold: bool
) -> None:
    store = LocalStore(tmp_path)
    made = put_family(store, code)
    size = sum(map(len, made.values()))
    if is_base_cold:
        freeze_models(["base"], store=store, find_base=False)
    estimated = freeze_models(["merged"], store=store, level=level, dry_run=True)
    frozen = freeze_models(["merged"], store=store, level=level)
    assert frozen.stored < most * size
    assert estimated.stored < most * size
    with blobstore.open("merged", store=store, read="pread") as model:
        for name, data in made.items():
            assert model[name].tobytes() == data[-model[name].nbytes :]
    thaw_models(["merged"], store=store)
    assert set(forms_of(store, "merged").values()) == {"hot"}
    for name, item in layers(store, "merged").items():
        assert store.read_blob(item.digest, item.size) == made[name]


def test_the_steps_of_a_run_have_one_base_with_their_states(store: LocalStore) -> None:
    random = np.random.default_rng(0)
    weights = {f"w{index}": random.standard_normal((64, 64), np.float32) for index in range(3)}
    states = {}
    for number in range(5):
        moments = {key: random.standard_normal((64, 64), np.float32) for key in weights}
        states[f"run:{number}"] = {"model": dict(weights), "moments": moments}
        weights = {key: one + moments[key] * np.float32(1e-5) for key, one in weights.items()}
    *first, last = states
    for name in first:
        blobstore.save(states[name], name, model="model", store=store)
    frozen = freeze_models(list(store.references()), store=store)
    blobstore.save(states[last], last, model="model", store=store)
    later = freeze_models([last, f"{last}.state"], store=store)

    pairs = [pair for pair in (*frozen.bases, *later.bases) if step_of(pair[0]) != step_of(pair[1])]
    (base,) = {step_of(other) for _, other in pairs}
    assert {step_of(name) for name, _ in pairs} == {*map(Reference.parse, states)} - {base}
    with_base = [blob.name for blob in (*frozen.blobs, *later.blobs) if blob.base is not None]
    assert sorted(with_base) == sorted([*weights] * (len(states) - 1))
    for name, state in states.items():
        found = blobstore.load(name, store=store, framework="numpy")
        for part in state:
            for key, array in state[part].items():
                assert np.array_equal(found[part][key], array)


@pytest.mark.slow
def test_gc_counts_the_bytes_that_the_disk_has_afterwards(family: LocalStore) -> None:
    freeze_models([CHILD], store=family)
    thaw_models([CHILD], store=family)  # the second links of its bases stay
    sizes = [space(family)]
    for names in ([], ["base", CHILD]):
        expected = remove_models(names, store=family).size if names else 0
        found = collect_garbage(store=family, older_than=0, force=True)
        sizes.append(space(family))
        assert sum(it.size for it in (*found.blobs, *found.leftovers) if is_blob(it.path)) == (
            sizes[-2] - sizes[-1]
        )
        assert sizes[-2] - sizes[-1] == expected
    assert sizes[-1] < sizes[0]


def is_blob(path: Path) -> bool:
    return path.name.startswith("sha256-")


def space(store: LocalStore) -> int:
    """Return the bytes of the blobs and their links, each file once."""
    found = (p.stat() for p in store.root.rglob("*") if p.is_file() and is_blob(p))
    return sum({status.st_ino: status.st_size for status in found}.values())
