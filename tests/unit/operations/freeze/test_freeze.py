from __future__ import annotations

import gc
import os
import resource
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import blobstore
from blobstore.errors import BlobDamaged, InvalidManifest, ModelNotFound, StoreError, UsageError
from blobstore.manifests.reference import Reference
from blobstore.operations.freeze import freeze as freezing
from blobstore.operations.freeze.blob_encoder import BlobEncoder
from blobstore.operations.freeze.compress import ColdBlobBuilder, EncodedBlob
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.operations.freeze.thaw import thaw_models
from blobstore.operations.maintenance.gc import collect_garbage
from blobstore.store.local import LocalStore
from tests.support import sandbox
from tests.support.frozen import flip, forms, forms_of, layer, layers, put, weights
from tests.support.models import add_blobs, blob

if TYPE_CHECKING:
    from collections.abc import Sequence


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store", lock_timeout=0.05)


def outcomes(frozen: freezing.Frozen) -> dict[str, str]:
    return {item.name: item.outcome for item in frozen.blobs}


def assert_whole(store: LocalStore, name: str, seeds: dict[str, int]) -> None:
    for options in ({}, {"copy": True}, {"verify": "none"}, {"verify": "rehash"}):
        with blobstore.open(name, store=store, **options) as model:  # type: ignore[arg-type]
            assert {key: model[key].tobytes() for key in model} == {
                key: weights(seed) for key, seed in seeds.items()
            }


def test_frozen_models_take_less_and_are_read_as_before(store: LocalStore) -> None:
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


def test_many_frozen_blobs_need_few_descriptors(store: LocalStore) -> None:
    put(store, "a", {f"t{number}": number for number in range(100)})
    freeze_models(["a"], store=store)

    def run() -> int:
        with blobstore.open("a", store=store) as model:
            return len(model.state_dict())

    limits = {resource.RLIMIT_NOFILE: len(os.listdir("/dev/fd")) + 20}
    assert sandbox.call(run, limits=limits) == "100"


def test_a_damaged_cold_blob_is_told_with_its_layer(store: LocalStore) -> None:
    put(store, "a", {"x": 1, "y": 2})
    freeze_models(["a"], store=store)
    flip(store.cold_path(layers(store, "a")["y"].digest), 5000)
    with pytest.raises(BlobDamaged, match="^a:latest: layer 'y': cold blob '.*' is damaged: "):
        blobstore.open("a", store=store).state_dict()


def test_freezing_again_finds_that_it_is_done(store: LocalStore) -> None:
    put(store, "a", {"x": 1})
    first = freeze_models(["a"], store=store)
    again = freeze_models(["a"], store=store)
    assert outcomes(again) == {"x": "cold"}
    assert again.stored == first.stored


def test_what_would_take_as_much_room_stays(store: LocalStore) -> None:
    noise = os.urandom(50_000)
    add_blobs(store, "a", {"n": blob(("n", "U8", (50_000,), noise)), "t": layer("t", b"12")})
    assert outcomes(freeze_models(["a"], store=store)) == {"n": "no gain", "t": "no gain"}
    assert forms_of(store, "a") == {"n": "hot", "t": "hot"}
    assert list(store.folder("cold").iterdir()) == []


def test_small_files_and_configs_stay(store: LocalStore, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(layer("x", weights(1)))
    (folder / "vocab.txt").write_bytes(b"a word\n" * 10_000)
    blobstore.create(folder, "a", store=store)
    freeze_models(["a"], store=store)
    assert forms_of(store, "a") == {"x": "cold", "vocab.txt": "hot"}
    assert store.has_hot(store.resolve(Reference.parse("a")).config.digest)


def test_a_blob_that_is_a_file_of_another_model_stays(store: LocalStore, tmp_path: Path) -> None:
    put(store, "a", {"x": 1})
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(layer("y", weights(2)))
    (folder / "odd.txt").write_bytes(layer("x", weights(1)))
    blobstore.create(folder, "b", store=store)
    frozen = freeze_models(["a", "b"], store=store)
    assert outcomes(frozen) == {"x": "shared", "y": "frozen"}


def test_what_a_hot_model_shares_stays_hot(store: LocalStore) -> None:
    put(store, "a", {"x": 1, "y": 2})
    put(store, "b", {"x": 1, "z": 3})
    assert outcomes(freeze_models(["a"], store=store)) == {"x": "shared", "y": "frozen"}
    assert forms_of(store, "a") == {"x": "hot", "y": "cold"}
    assert not store.has_cold(layers(store, "a")["x"].digest)


def test_the_last_model_that_is_frozen_takes_what_they_shared(store: LocalStore) -> None:
    put(store, "a", {"x": 1, "y": 2})
    put(store, "b", {"x": 1, "z": 3})
    freeze_models(["a"], store=store)
    freeze_models(["b"], store=store)
    assert forms_of(store, "a") == {"x": "cold", "y": "cold"}
    assert forms_of(store, "b") == {"x": "cold", "z": "cold"}
    assert_whole(store, "a", {"x": 1, "y": 2})


def test_models_are_frozen_together(store: LocalStore) -> None:
    put(store, "a", {"x": 1, "y": 2})
    put(store, "b", {"x": 1, "z": 3})
    frozen = freeze_models(["a", "b", "a"], store=store)
    assert outcomes(frozen) == dict.fromkeys("xyz", "frozen")
    assert list(map(str, frozen.references)) == ["a:latest", "b:latest"]


def test_hot_files_can_be_kept(store: LocalStore) -> None:
    put(store, "a", {"x": 1})
    assert outcomes(freeze_models(["a"], store=store, keep_hot=True)) == {"x": "frozen"}
    assert forms_of(store, "a") == {"x": "both"}
    before = Path(store.cold_path(layers(store, "a")["x"].digest)).stat()
    freeze_models(["a"], store=store)  # without coding it again
    after = Path(store.cold_path(layers(store, "a")["x"].digest)).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert forms_of(store, "a") == {"x": "cold"}


def test_what_another_process_holds_stays_hot(store: LocalStore) -> None:
    put(store, "a", {"x": 1, "y": 2})
    with store.lease() as lease:
        lease.hold([layers(store, "a")["x"].digest])
        assert outcomes(freeze_models(["a"], store=store)) == {"x": "in use", "y": "frozen"}
        assert forms_of(store, "a") == {"x": "hot", "y": "cold"}
    assert outcomes(freeze_models(["a"], store=store)) == {"x": "frozen", "y": "cold"}


def test_a_model_that_is_open_stays_readable(store: LocalStore) -> None:
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


def test_a_missing_blob_is_told(store: LocalStore) -> None:
    put(store, "a", {"x": 1, "y": 2})
    Path(store.blob_path(layers(store, "a")["x"].digest)).unlink()
    for is_dry in (True, False):
        frozen = freeze_models(["a"], store=store, dry_run=is_dry)
        assert outcomes(frozen) == {"x": "missing", "y": "frozen"}
        assert len(frozen.faults) == 1


def test_a_damaged_cold_blob_beside_a_hot_one_is_made_anew(store: LocalStore) -> None:
    put(store, "a", {"x": 1})
    freeze_models(["a"], store=store, keep_hot=True)
    flip(store.cold_path(layers(store, "a")["x"].digest), 500)
    assert outcomes(freeze_models(["a"], store=store)) == {"x": "frozen"}
    assert forms_of(store, "a") == {"x": "cold"}
    assert_whole(store, "a", {"x": 1})


def test_a_damaged_cold_blob_alone_is_told_and_left(store: LocalStore) -> None:
    put(store, "a", {"x": 1})
    freeze_models(["a"], store=store)
    path = Path(store.cold_path(layers(store, "a")["x"].digest))
    flip(str(path), -1)
    frozen = freeze_models(["a"], store=store)
    assert outcomes(frozen) == {"x": "damaged"}
    assert path.exists()


def test_what_does_not_decode_to_itself_is_never_trusted(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "a", {"x": 1, "y": 2})
    real = BlobEncoder.write

    def wrong(self: BlobEncoder, write: Any, tell: Any) -> None:
        """Code other bytes, under the right name and with sound check sums."""
        self._data = memoryview(layer("x", weights(7)))
        real(self, write, tell)

    monkeypatch.setattr(BlobEncoder, "write", wrong)
    frozen = freeze_models(["a"], store=store)
    assert outcomes(frozen) == {"x": "damaged", "y": "damaged"}
    assert forms_of(store, "a") == {"x": "hot", "y": "hot"}
    assert "it decodes to a blob with digest" in str(frozen.faults[0])


def test_a_cold_blob_that_changes_after_it_was_checked_is_not_trusted(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "a", {"x": 1})
    digest = layers(store, "a")["x"].digest
    freeze_models(["a"], store=store, keep_hot=True)
    real = freezing._Run._commit

    def later(self: Any, batch: Sequence[Any], lease: str) -> Any:
        Path(store.cold_path(digest)).unlink()  # as thaw does in another process
        return real(self, batch, lease)

    monkeypatch.setattr(freezing._Run, "_commit", later)
    assert outcomes(freeze_models(["a"], store=store)) == {"x": "in use"}
    assert forms_of(store, "a") == {"x": "hot"}


def test_a_name_that_comes_meanwhile_keeps_its_blobs_hot(
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


def test_a_model_that_is_replaced_meanwhile_is_another(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "a", {"x": 1, "y": 2})
    digests = [item.digest for item in layers(store, "a").values()]
    real = freezing._Run._commit

    def later(self: Any, batch: Sequence[Any], lease: str) -> Any:
        put(store, "a", {"x": 1})
        return real(self, batch, lease)

    monkeypatch.setattr(freezing._Run, "_commit", later)
    freeze_models(["a"], store=store)
    assert forms(store, digests[0]) == "hot"
    assert_whole(store, "a", {"x": 1})


def test_a_manifest_that_nobody_can_read_stops_it(store: LocalStore) -> None:
    put(store, "a", {"x": 1})
    put(store, "b", {"z": 1})
    store.manifest_path(Reference.parse("b")).write_bytes(b"{}")
    with pytest.raises(InvalidManifest, match="cannot tell which blobs"):
        freeze_models(["a"], store=store)
    assert forms_of(store, "a") == {"x": "hot"}


def test_a_full_disk_leaves_all_as_it_was(tmp_path: Path) -> None:
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


def test_an_interrupt_leaves_nothing_half(store: LocalStore) -> None:
    put(store, "a", {f"x{number}": number for number in range(6)})

    def stop(what: str, done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        freeze_models(["a"], store=store, jobs=1, progress=stop)
    assert "neither" not in forms_of(store, "a").values()
    assert list(store.folder("temporary").iterdir()) == []
    assert_whole(store, "a", {f"x{number}": number for number in range(6)})


def test_a_dry_run_tells_about_what_would_be(store: LocalStore) -> None:
    put(store, "a", {"x": 1, "y": 2})
    put(store, "b", {"y": 2})
    before = set(store.root.rglob("*"))
    dry = freeze_models(["a"], store=store, dry_run=True)
    assert set(store.root.rglob("*")) == before
    real = freeze_models(["a"], store=store)
    assert outcomes(dry) == outcomes(real) == {"x": "frozen", "y": "shared"}
    assert abs(dry.stored - real.stored) < 0.02 * real.size


def test_a_dry_run_of_large_blobs_reads_samples(store: LocalStore) -> None:
    data = weights(1, 4_000_000)
    add_blobs(store, "a", {"x": layer("x", data)})
    dry, real = (freeze_models(["a"], store=store, dry_run=is_dry) for is_dry in (True, False))
    assert abs(dry.stored - real.stored) < 0.01 * real.size


def test_young_models_are_left_out(store: LocalStore) -> None:
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


def test_progress_reaches_the_whole(store: LocalStore) -> None:
    put(store, "a", {"x": 1, "y": 2})
    put(store, "b", {"y": 2})
    told: list[tuple[int, int]] = []
    freeze_models(["a"], store=store, progress=lambda _, done, total: told.append((done, total)))
    size = len(layer("x", weights(1)))
    assert told[-1] == (4 * size, 4 * size)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": "tiny"}, "level must be fast or small"),
        ({"jobs": 0}, "jobs must be at least 1"),
        ({"references": ()}, "name the models"),
    ],
)
def test_rejects_what_means_nothing(
    store: LocalStore, options: dict[str, Any], message: str
) -> None:
    put(store, "a", {"x": 1})
    arguments: dict[str, Any] = {"references": ["a"], "store": store}
    with pytest.raises(UsageError, match=message):
        freeze_models(**(arguments | options))


def test_rejects_names_that_are_not_there(store: LocalStore) -> None:
    put(store, "a", {"x": 1})
    with pytest.raises(ModelNotFound):
        freeze_models(["a", "b"], store=store)
    assert forms_of(store, "a") == {"x": "hot"}


def test_levels_both_come_back(store: LocalStore) -> None:
    put(store, "a", {"x": 1})
    put(store, "b", {"y": 1})
    fast = freeze_models(["a"], store=store, level="fast", find_base=False)
    small = freeze_models(["b"], store=store, level="small", find_base=False)
    assert small.stored <= fast.stored
    assert_whole(store, "b", {"y": 1})


def test_frozen_blobs_are_collected_like_others(store: LocalStore) -> None:
    put(store, "a", {"x": 1})
    put(store, "b", {"y": 2})
    freeze_models(["a", "b"], store=store)
    gone = layers(store, "a")["x"].digest
    store.manifest_path(Reference.parse("a")).unlink()
    assert [item.path.name for item in collect_garbage(store).blobs] == []  # too young
    (removed,) = (
        item for item in collect_garbage(store, older_than=0).blobs if "cold" in str(item.path)
    )
    assert removed.path == Path(".blobstore", "cold", gone.file_name)
    assert_whole(store, "b", {"y": 2})


def test_a_frozen_blob_counts_as_there_when_a_model_is_created(
    store: LocalStore, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(layer("x", weights(1)))
    blobstore.create(folder, "a", store=store)
    freeze_models(["a"], store=store)
    for options in ({}, {"paranoid": True}):
        created = blobstore.create(folder, "b", store=store, **options)  # type: ignore[arg-type]
        assert created.bytes_written == 0
    assert forms_of(store, "b") == {"x": "cold"}
    assert_whole(store, "b", {"x": 1})
    flip(store.cold_path(layers(store, "a")["x"].digest), 500)
    with pytest.raises(BlobDamaged, match="run blobstore repair a:latest"):
        blobstore.create(folder, "c", store=store, paranoid=True)


def test_a_store_that_only_has_cold_blobs_can_be_copied_elsewhere(
    store: LocalStore, tmp_path: Path
) -> None:
    put(store, "a", {"x": 1})
    freeze_models(["a"], store=store)
    shutil.copytree(store.root, tmp_path / "other")
    assert_whole(LocalStore(tmp_path / "other"), "a", {"x": 1})
