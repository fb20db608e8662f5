from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import FrameType

import pytest

from blobstore.core.digest import Digest
from blobstore.core.mmap import MappedRegion
from blobstore.errors import BlobDamaged
from blobstore.models import decompress as decoding
from blobstore.models.decompress import ColdSlot, ParallelDecoder
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.operations.freeze.thaw import thaw_models
from blobstore.store.cold_file import ColdFile
from blobstore.store.local import LocalStore
from tests.faults.processes import workspace
from tests.support.descriptors import open_files
from tests.support.frozen import flip, layer, layers, tuned, weights
from tests.support.models import add_blobs
from tests.support.page_cache import dropped

BLOBS = {
    "small": layer("small", weights(1)),
    "whole": layer("whole", weights(2, 1 << 20)),
    "large": layer("large", weights(3, 5 << 20)),
    "fine": layer("fine", tuned(4, of=5, count=2 << 20)),
    "tiny": layer("tiny", weights(6, 8000)),
}
"""Blobs of each kind: decoded in a batch, whole, in pieces, and against a base."""


@pytest.fixture(scope="module")
def frozen() -> Iterator[LocalStore]:
    with workspace(in_memory=False) as folder:
        store = LocalStore(folder / "store")
        add_blobs(store, "base", {"fine": layer("fine", weights(5, 2 << 20))})
        add_blobs(store, "m", BLOBS)
        freeze_models(["m"], store=store, base="base")
        assert store.open_cold(layers(store, "m")["fine"].digest).base is not None
        yield store


def chill(store: LocalStore, names: list[str]) -> None:
    for name in names:
        dropped(store.cold_path(layers(store, "m")[name].digest))


def decode(
    store: LocalStore, names: list[str], *, past_cache: bool = False
) -> tuple[MappedRegion, list[int], list[int]]:
    """Decode blobs; return the memory, the slots of thawed blobs, and the reported bytes."""
    found = [layers(store, "m")[name] for name in names]
    region = MappedRegion([item.size for item in found])
    reported: list[int] = []
    missing = ParallelDecoder(store, region, past_cache=past_cache, report=reported.append).run(
        [ColdSlot(slot, item.digest, item.size) for slot, item in enumerate(found)]
    )
    return region, missing, reported


def content(region: MappedRegion, slot: int, size: int) -> bytes:
    begin = region.offsets[slot]
    return bytes(memoryview(region.memory)[begin : begin + size])


@pytest.mark.slow
@pytest.mark.parametrize("past_cache", [False, True])
@pytest.mark.parametrize("is_cached", [False, True])
def test_decodes_blobs_of_every_size(frozen: LocalStore, past_cache: bool, is_cached: bool) -> None:
    names = list(BLOBS)
    if not is_cached:
        chill(frozen, names)
    region, missing, reported = decode(frozen, names, past_cache=past_cache)
    for slot, name in enumerate(names):
        assert content(region, slot, len(BLOBS[name])) == BLOBS[name], name
    assert missing == []
    assert sum(reported) == sum(map(len, BLOBS.values()))
    assert region.present == set(range(len(names)))


@pytest.mark.slow
def test_large_blobs_bypass_the_page_cache_on_request(frozen: LocalStore) -> None:
    path = frozen.cold_path(layers(frozen, "m")["large"].digest)
    for past_cache in (True, False):
        if not dropped(path):
            pytest.skip("the file system keeps its files in memory")
        decode(frozen, ["large"], past_cache=past_cache)
        assert ColdFile(path).is_cached() is not past_cache


@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize("name", ["small", "whole"])
def test_a_single_blob_is_decoded_in_the_calling_thread(
    frozen: LocalStore, name: str, is_cached: bool
) -> None:
    if not is_cached:
        chill(frozen, [name])
    item = layers(frozen, "m")[name]
    threads: list[threading.Thread] = []
    region = MappedRegion([item.size])
    work = ParallelDecoder(
        frozen,
        region,
        past_cache=False,
        report=lambda _: threads.append(threading.current_thread()),
    )
    assert work.run([ColdSlot(0, item.digest, item.size)]) == []
    assert content(region, 0, item.size) == BLOBS[name]
    assert threads == [threading.main_thread()]
    assert region.present == {0}


def test_returns_the_slots_of_thawed_blobs(store: LocalStore) -> None:
    add_blobs(store, "m", {name: BLOBS[name] for name in ("whole", "small", "tiny")})
    freeze_models(["m"], store=store)
    names = ["whole", "small", "tiny"]
    for name in ("whole", "tiny"):
        Path(store.cold_path(layers(store, "m")[name].digest)).unlink()
    region, missing, _ = decode(store, names)
    assert sorted(missing) == [0, 2]
    assert content(region, 1, len(BLOBS["small"])) == BLOBS["small"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["small", "whole", "large"])
@pytest.mark.parametrize("is_cached", [False, True])
def test_damage_is_reported_and_ends_the_work(
    store: LocalStore, name: str, is_cached: bool
) -> None:
    names = ["small", "whole", "large"]
    add_blobs(store, "m", {name: BLOBS[name] for name in names})
    freeze_models(["m"], store=store)
    path = store.cold_path(layers(store, "m")[name].digest)
    flip(path, 20_000)
    if not is_cached:
        chill(store, names)
    before = threading.active_count()
    with pytest.raises(BlobDamaged, match=f"{Path(path).name}.*checksum"):
        decode(store, names)
    assert threading.active_count() == before
    assert open_files(store.root) == []


def test_no_file_stays_open(frozen: LocalStore) -> None:
    chill(frozen, list(BLOBS))
    region, _, _ = decode(frozen, list(BLOBS))
    assert open_files(frozen.root) == []
    assert region.present


@pytest.mark.slow
def test_more_blobs_than_buffers_are_decoded(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "_REQUESTS", 2)
    monkeypatch.setattr(decoding, "_BUFFERS", 4)
    monkeypatch.setattr(decoding, "_SMALL", 20_000)
    monkeypatch.setattr(decoding, "_BATCH", 3)
    add_blobs(
        store,
        "m",
        {f"t{number}": layer(f"t{number}", weights(number)) for number in range(20)}
        | {f"s{number}": layer(f"s{number}", weights(number, 8000)) for number in range(10)}
        | {f"l{number}": layer(f"l{number}", weights(number, 4 << 20)) for number in range(2)},
    )
    freeze_models(["m"], store=store)
    names = list(layers(store, "m"))
    chill(store, names)
    region, _, _ = decode(store, names)
    for slot, name in enumerate(names):
        item = layers(store, "m")[name]
        assert Digest.of(content(region, slot, item.size)) == item.digest


@pytest.mark.slow
@pytest.mark.parametrize("count", [20_000, 2 << 20])
@pytest.mark.parametrize("is_frozen_again", [False, True])
def test_a_base_may_be_removed_while_its_blob_is_decoded(
    store: LocalStore, count: int, is_frozen_again: bool
) -> None:
    add_blobs(store, "base", {"fine": layer("fine", weights(5, count))})
    add_blobs(store, "m", {"fine": layer("fine", tuned(4, of=5, count=count))})
    freeze_models(["m"], store=store, base="base")
    fine, base = layers(store, "m")["fine"], layers(store, "base")["fine"]

    class Changing(MappedRegion):
        @contextlib.contextmanager
        def writable_slot(self, slot: int, size: int) -> Iterator[memoryview]:
            """Remove the base of a blob that is already open, and return the blob's memory."""
            assert store.open_cold(fine.digest).base == base.digest
            thaw_models(["m"], store=store)
            for path in (store.blob_path(base.digest), store.base_path(base.digest)):
                Path(path).unlink(missing_ok=True)
            if is_frozen_again:
                freeze_models(["m"], store=store, find_base=False)
            with super().writable_slot(slot, size) as view:
                yield view

    region = Changing([fine.size])
    work = ParallelDecoder(store, region, past_cache=False, report=lambda _: None)
    assert work.run([ColdSlot(0, fine.digest, fine.size)]) == []
    assert Digest.of(content(region, 0, fine.size)) == fine.digest
    assert store.is_cold(fine.digest) is is_frozen_again


def test_a_second_ctrl_c_leaves_no_thread_at_work() -> None:
    is_interrupted, is_ending, is_done = threading.Event(), threading.Event(), threading.Event()

    def interrupt(_: int, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code is not ThreadPoolExecutor.shutdown.__code__:
            frame = frame.f_back
        if frame is not None:  # the main thread waits for the other
            is_interrupted.set()
            raise KeyboardInterrupt

    def work() -> None:
        is_ending.wait()
        while not is_interrupted.wait(0.01):
            os.kill(os.getpid(), signal.SIGINT)
        sum(range(1_000_000))
        is_done.set()

    works: list[Future[None]] = []
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with (
            pytest.raises(KeyboardInterrupt),
            decoding._completed(works),
            decoding._threads(1) as pool,
        ):
            works.append(pool.submit(work))
            is_ending.set()
            raise ValueError
    finally:
        signal.signal(signal.SIGINT, before)
    assert is_done.is_set()
