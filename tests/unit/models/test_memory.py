from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from blobstore.core.digest import Digest
from blobstore.core.system import MapCounts, map_counts
from blobstore.errors import BlobDamaged, BlobMissing, BlobstoreError, TooManyMaps
from blobstore.models import memory as memory_module
from blobstore.models.memory import _REQUEST, ModelMemory
from blobstore.models.small_files import ModelFiles
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.operations.freeze.thaw import thaw_models
from blobstore.store.local import LocalStore
from tests.support import sandbox
from tests.support.descriptors import open_files
from tests.support.frozen import forms_of, layer, layers, put, weights
from tests.support.maps import use_up_maps
from tests.support.models import add_blobs
from tests.support.page_cache import dropped

Blobs = list[tuple[Digest, int]]
SIZES = [5, 0, 4096, _REQUEST + 3, 70_000]


@pytest.fixture
def tmp_path(disk_path: Path) -> Path:
    """Return a folder on a disk, whose files leave the page cache."""
    return disk_path


@pytest.fixture
def contents() -> list[bytes]:
    return [os.urandom(size) for size in SIZES]


@pytest.fixture
def blobs(store: LocalStore, contents: list[bytes]) -> Blobs:
    add_blobs(store, "m", {f"layer {slot}": data for slot, data in enumerate(contents)})
    found = [(Digest.of(data), len(data)) for data in contents]
    for digest, _ in found:
        Path(store.blob_path(digest)).chmod(0o600)
    return found


def memory_of(store: LocalStore, blobs: Blobs, **options: Any) -> ModelMemory:
    return ModelMemory(ModelFiles.of("m", store), blobs, **options)


WAYS = ["mmap", "populate", "pread"]


@pytest.mark.parametrize("read", WAYS)
@pytest.mark.parametrize("is_writable", [True, False])
def test_loads_all_blobs(
    store: LocalStore,
    blobs: Blobs,
    contents: list[bytes],
    read: str,
    is_writable: bool,
) -> None:
    memory = memory_of(store, blobs, read=read, is_writable=is_writable)
    region = memory.load(range(len(blobs)))
    for data, offset in zip(contents, region.offsets, strict=False):
        assert bytes(region.memory[offset : offset + len(data)]) == data
    assert memoryview(region.memory).readonly is not is_writable


@pytest.mark.parametrize("read", ["mmap", "pread"])
def test_loads_only_what_is_needed(
    store: LocalStore, blobs: Blobs, contents: list[bytes], read: str
) -> None:
    memory = memory_of(store, blobs, read=read)
    region = memory.load([4])
    assert bytes(memoryview(region.memory)[region.offsets[4] :][:70_000]) == contents[4]
    assert bytes(region.memory[:5]) == bytes(5)
    assert memory.load([0]) is region
    assert bytes(region.memory[:5]) == contents[0]


@pytest.mark.parametrize("read", ["mmap", "pread"])
def test_a_blob_is_loaded_once_and_keeps_what_was_written_to_it(
    store: LocalStore, blobs: Blobs, contents: list[bytes], read: str
) -> None:
    memory = memory_of(store, blobs, read=read, is_writable=True)
    region = memory.load([0])
    memoryview(region.memory)[:1] = b"!"
    memory.load([0, 1])
    assert bytes(region.memory[:5]) == b"!" + contents[0][1:]
    assert Path(store.blob_path(blobs[0][0])).read_bytes() == contents[0]


@pytest.mark.parametrize("read", WAYS)
def test_a_missing_blob_is_an_error(store: LocalStore, blobs: Blobs, read: str) -> None:
    for slot in (1, 3):
        Path(store.blob_path(blobs[slot][0])).unlink()
        memory = memory_of(store, blobs, read=read)
        with pytest.raises(BlobMissing):
            memory.load([slot])


@pytest.mark.parametrize("read", WAYS)
def test_a_blob_of_another_size_is_an_error(store: LocalStore, blobs: Blobs, read: str) -> None:
    os.truncate(store.blob_path(blobs[3][0]), _REQUEST)
    memory = memory_of(store, blobs, read=read)
    with pytest.raises(BlobDamaged, match=f"it has {_REQUEST} bytes, expected {_REQUEST + 3}"):
        memory.load(range(len(blobs)))


def test_a_blob_that_was_read_survives_truncation(
    store: LocalStore, blobs: Blobs, contents: list[bytes]
) -> None:
    memory = memory_of(store, blobs, read="pread")
    region = memory.load(range(len(blobs)))
    os.truncate(store.blob_path(blobs[4][0]), 0)
    assert bytes(memoryview(region.memory)[region.offsets[4] :][:70_000]) == contents[4]


@pytest.mark.parametrize("read", ["populate", "pread"])
def test_reports_the_bytes_that_were_waited_for(store: LocalStore, blobs: Blobs, read: str) -> None:
    steps: list[tuple[str, int, int]] = []
    memory = memory_of(store, blobs, read=read, progress=lambda *step: steps.append(step))
    memory.load(range(len(blobs)))
    assert steps[-1] == ("reading", sum(SIZES), sum(SIZES))
    reported = len(steps)
    memory.load(range(len(blobs)))
    assert len(steps) == reported


def test_prefetched_pages_are_in_memory(store: LocalStore, blobs: Blobs) -> None:
    def faults() -> int:
        import resource

        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt

    region = memory_of(store, blobs, read="populate").load(range(len(blobs)))
    view = memoryview(region.memory)[region.offsets[3] :][: _REQUEST + 3]
    before = faults()
    assert len(bytes(view[::4096])) == 1025
    assert faults() - before < 100


@pytest.mark.parametrize("read", WAYS)
def test_loads_what_is_not_in_the_page_cache(
    store: LocalStore, blobs: Blobs, contents: list[bytes], read: str
) -> None:
    for digest, _ in blobs:
        dropped(store.blob_path(digest))
    region = memory_of(store, blobs, read=read).load(range(len(blobs)))
    for data, offset in zip(contents, region.offsets, strict=False):
        assert bytes(region.memory[offset : offset + len(data)]) == data


def test_pread_does_not_fill_the_page_cache(
    store: LocalStore, blobs: Blobs, contents: list[bytes]
) -> None:
    if not all(dropped(store.blob_path(digest)) for digest, size in blobs if size):
        pytest.skip("the file system keeps its files in memory")
    memory_of(store, blobs, read="pread").load(range(len(blobs)))
    assert not store.is_cached(*blobs[3])
    memory_of(store, blobs, read="populate").load(range(len(blobs)))
    assert store.is_cached(*blobs[3])


def test_reads_if_the_page_cache_cannot_be_bypassed(
    store: LocalStore, blobs: Blobs, contents: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "O_DIRECT")
    for digest, _ in blobs:
        dropped(store.blob_path(digest))
    region = memory_of(store, blobs, read="pread").load(range(len(blobs)))
    assert bytes(memoryview(region.memory)[region.offsets[3] :][: SIZES[3]]) == contents[3]


def test_prefetching_a_truncated_blob_is_an_error(store: LocalStore, blobs: Blobs) -> None:
    region = memory_of(store, blobs).load(range(len(blobs)))
    os.truncate(store.blob_path(blobs[3][0]), 4096)
    memory = memory_of(store, blobs, region=region, read="populate")
    with pytest.raises(BlobDamaged, match="it has 4096 bytes, expected"):
        memory.load(range(len(blobs)))


def test_keeps_no_file_open(store: LocalStore, blobs: Blobs) -> None:
    memory = memory_of(store, blobs, read="pread")
    memory.load(range(len(blobs)))
    assert open_files(store.root) == []


def test_threads_share_one_region(store: LocalStore, blobs: Blobs) -> None:
    memory = memory_of(store, blobs, read="pread")
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: memory.load(range(5)), range(8)))
    assert len(set(map(id, found))) == 1


def test_a_closed_model_loads_nothing(store: LocalStore, blobs: Blobs) -> None:
    memory = memory_of(store, blobs)
    memory.close()
    with pytest.raises(BlobstoreError, match="model m:latest is closed"):
        memory.load([0])


def test_cold_blobs_are_decompressed_next_to_mapped_ones(store: LocalStore) -> None:
    put(store, "a", {"x": 1, "y": 2, "z": 3})
    freeze_models(["a"], store=store)
    put(store, "b", {"y": 2})
    thaw_models(["b"], store=store)
    assert forms_of(store, "a") == {"x": "cold", "y": "hot", "z": "cold"}
    blobs = [(item.digest, item.size) for item in layers(store, "a").values()]
    reported: list[tuple[int, int]] = []
    for options in ({}, {"read": "pread"}, {"read": "populate"}, {"is_writable": True}):
        memory = ModelMemory(
            ModelFiles.of("a", store),
            blobs,
            progress=lambda _, done, total: reported.append((done, total)),
            **options,  # type: ignore[arg-type]
        )
        assert memory.map_hot() is False
        region = memory.load(range(3))
        for slot, (name, seed) in enumerate((("x", 1), ("y", 2), ("z", 3))):
            begin = region.offsets[slot]
            data = bytes(memoryview(region.memory)[begin : begin + blobs[slot][1]])
            assert data == layer(name, weights(seed))
        assert memoryview(region.memory).readonly is not bool(options.get("is_writable"))
        assert memory.map_hot() is True
    assert (2 * blobs[0][1], 2 * blobs[0][1]) in reported


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count five blobs as many."""
    monkeypatch.setattr(memory_module, "_FEW", 1)


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("read", WAYS)
@pytest.mark.parametrize("is_writable", [True, False])
def test_small_blobs_of_a_model_of_many_are_read(
    store: LocalStore,
    blobs: Blobs,
    contents: list[bytes],
    read: str,
    is_writable: bool,
) -> None:
    memory = memory_of(store, blobs, read=read, is_writable=is_writable)
    for slots in ([2], range(len(blobs))):
        region = memory.load(slots)
        os.truncate(store.blob_path(blobs[2][0]), 0)
        for slot in slots:
            begin = region.offsets[slot]
            assert bytes(memoryview(region.memory)[begin:][: SIZES[slot]]) == contents[slot]
    assert memory.is_complete


@pytest.mark.usefixtures("many")
def test_small_cold_blobs_of_a_model_of_many_are_decompressed(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_module, "_SMALL", 1 << 20)
    put(store, "a", {"x": 1, "y": 2})
    freeze_models(["a"], store=store)
    blobs = [(item.digest, item.size) for item in layers(store, "a").values()]
    for read in ("mmap", "pread"):
        memory = ModelMemory(ModelFiles.of("a", store), blobs, read=read)
        assert not memory.map_hot()
        region = memory.load(range(2))
        assert region.read_slots == {0, 1}
        for slot, (name, seed) in enumerate((("x", 1), ("y", 2))):
            data = memoryview(region.memory)[region.offsets[slot] :][: blobs[slot][1]]
            assert bytes(data) == layer(name, weights(seed))


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize(
    ("available", "mapped"), [(0, []), (1, [3]), (2, [3, 4]), (3, [3, 4]), (-9, [])]
)
def test_the_largest_blobs_are_mapped_if_not_all_can_be(
    store: LocalStore,
    blobs: Blobs,
    contents: list[bytes],
    available: int,
    mapped: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit = memory_module._SPARE_MAPS + 100
    monkeypatch.setattr(memory_module, "map_counts", lambda: MapCounts(100 - available, limit))
    region = memory_of(store, blobs).load(range(len(blobs)))
    assert set(range(len(blobs))) - set(region.read_slots) == set(mapped)
    for data, offset in zip(contents, region.offsets, strict=False):
        assert bytes(region.memory[offset : offset + len(data)]) == data


@pytest.mark.usefixtures("many")
def test_as_many_blobs_of_one_size_are_mapped_as_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = memory_module._SPARE_MAPS + 100
    monkeypatch.setattr(memory_module, "map_counts", lambda: MapCounts(98, limit))
    assert len(memory_module.reserve([20_000] * 5, writable=False).read_slots) == 3


needs_counts = pytest.mark.skipif(map_counts() is None, reason="the system does not count maps")


@pytest.mark.slow
@needs_counts
def test_blobs_are_read_if_the_process_may_map_no_more_files(store: LocalStore) -> None:
    contents = [f"{number} ".encode() * 5000 for number in range(200)]
    add_blobs(store, "m", {f"layer {slot}": data for slot, data in enumerate(contents)})
    blobs = [(Digest.of(data), len(data)) for data in contents]

    def load(is_hot_first: bool) -> str:
        _kept = use_up_maps(100)
        memory = memory_of(store, blobs)
        if is_hot_first:
            assert not memory.map_hot()
        region = memory.load(range(len(blobs)))
        found = [
            bytes(region.memory[offset : offset + len(data)])
            for data, offset in zip(contents, region.offsets, strict=False)
        ]
        return str(found == contents)

    for is_hot_first in (True, False):
        assert sandbox.call(lambda: load(is_hot_first)) == "True"  # noqa: B023


@pytest.mark.slow
@needs_counts
def test_memory_that_is_in_use_is_not_replaced_if_the_process_may_map_no_more_files(
    store: LocalStore,
) -> None:
    contents = [f"{number} ".encode() * 5000 for number in range(200)]
    add_blobs(store, "m", {f"layer {slot}": data for slot, data in enumerate(contents)})
    blobs = [(Digest.of(data), len(data)) for data in contents]

    def load() -> str:
        _kept = use_up_maps(100)
        memory = memory_of(store, blobs, is_writable=True)
        region = memory.load([0])
        memoryview(region.memory)[:1] = b"!"
        for slot in range(1, len(blobs)):
            try:
                memory.load([slot])
            except TooManyMaps as error:
                return f"{bytes(region.memory[:1])!r} {slot > 10} {error}"
        return "all are mapped"

    outcome = sandbox.call(load)
    assert outcome.startswith("b'!' True m:latest: layer 'layer 101': blob ")
    assert "vm.max_map_count allows" in outcome
