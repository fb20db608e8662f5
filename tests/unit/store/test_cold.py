from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blobstore.compression.chunks import decode_chunk
from blobstore.core.digest import Digest
from blobstore.core.files import FileState
from blobstore.core.mmap import MappedRegion
from blobstore.errors import BlobDamaged, BlobMissing, StoreError
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.operations.freeze.thaw import thaw_models
from blobstore.store import cold
from blobstore.store.local import LocalStore
from tests.support import sandbox
from tests.support.frozen import flip, layer, layers, put, tuned, weights
from tests.support.models import add_blobs

DATA = layer("x", weights(1))


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """A store with the frozen blob ``x``, of :data:`DATA`, and another."""
    store = LocalStore(tmp_path / "store", lock_timeout=0.05)
    put(store, "a", {"x": 1, "y": 2})
    freeze_models(["a"], store=store)
    return store


@pytest.fixture
def digest(store: LocalStore) -> Digest:
    return layers(store, "a")["x"].digest


def region(store: LocalStore, digest: Digest) -> bytes:
    region = MappedRegion([len(DATA)])
    store.map_blob(digest, len(DATA), 0, region)
    return bytes(memoryview(region.memory)[: len(DATA)])


def into(store: LocalStore, digest: Digest) -> bytes:
    buffer = bytearray(len(DATA))
    store.read_into(digest, len(DATA), 0, memoryview(buffer))
    return bytes(buffer)


def described(store: LocalStore, digest: Digest) -> bytes:
    descriptor = store.open_blob(digest, len(DATA))
    try:
        return os.read(descriptor, len(DATA) + 1)
    finally:
        os.close(descriptor)


WAYS: list[Callable[[LocalStore, Digest], bytes]] = [
    region,
    into,
    described,
    lambda store, digest: store.read_blob(digest, len(DATA)),
    lambda store, digest: b"".join(map(bytes, store.read_pieces(digest, len(DATA)))),
]


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_read_decodes(
    store: LocalStore, digest: Digest, way: Callable[[LocalStore, Digest], bytes]
) -> None:
    assert way(store, digest) == DATA
    Path(store.cold_path(digest)).unlink()
    with pytest.raises(BlobMissing, match=r"blobs/sha256-.*' is missing"):
        way(store, digest)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_read_finds_damage(
    store: LocalStore, digest: Digest, way: Callable[[LocalStore, Digest], bytes]
) -> None:
    flip(store.cold_path(digest), 500)
    with pytest.raises(BlobDamaged, match=r"cold/sha256-.*' is damaged: .*repair"):
        way(store, digest)


def test_a_part_is_decoded_by_itself(store: LocalStore, digest: Digest) -> None:
    buffer = bytearray(1000)
    store.read_into(digest, len(DATA), 33_333, memoryview(buffer))
    assert buffer == DATA[33_333:34_333]
    flip(store.cold_path(digest), 500)
    with pytest.raises(BlobDamaged):
        store.read_into(digest, len(DATA), 33_333, memoryview(buffer))


def test_reading_past_the_end_is_an_error(store: LocalStore, digest: Digest) -> None:
    blob = store.open_cold(digest)
    with pytest.raises(BlobDamaged, match="it ends at byte"):
        blob.read_into(len(DATA) - 10, memoryview(bytearray(11)))


def test_cold_blobs_are_found_and_checked_like_hot_ones(store: LocalStore, digest: Digest) -> None:
    size = len(DATA)
    assert store.exists(digest, size)
    assert store.has(digest)
    assert store.is_cold(digest)
    store.check_size(digest, size)
    store.check_digest(digest, size)
    store.check_cold(digest, size)
    assert list(store.read_blob_header(digest, size).tensors) == ["x"]
    for wrong in (size - 1, size + 1):
        with pytest.raises(BlobDamaged, match=f"it decodes to {size} bytes, expected {wrong}"):
            store.check_size(digest, wrong)


def test_the_cold_form_is_not_read_if_there_is_a_hot_one(store: LocalStore, digest: Digest) -> None:
    thaw_models(["a"], store=store, keep_cold=True)
    Path(store.cold_path(digest)).unlink()
    Path(store.cold_path(digest)).write_bytes(b"no cold blob at all")
    store.check_size(digest, len(DATA))
    store.check_digest(digest, len(DATA))
    with pytest.raises(BlobDamaged, match="not a cold blob"):
        store.check_cold(digest, len(DATA))


def test_the_cold_blob_of_another_is_damage(store: LocalStore, digest: Digest) -> None:
    other = layers(store, "a")["y"].digest
    Path(store.cold_path(other)).rename(store.cold_path(digest))
    with pytest.raises(BlobDamaged, match=f"it is that of {other}"):
        store.check_size(digest, len(DATA))


@pytest.mark.parametrize("kind", ["link", "folder", "empty", "short"])
def test_a_file_that_is_not_a_cold_blob_is_damaged(
    store: LocalStore, digest: Digest, kind: str
) -> None:
    path = Path(store.cold_path(digest))
    data = path.read_bytes()
    path.unlink()
    if kind == "link":
        path.with_name("real").write_bytes(data)
        path.symlink_to("real")
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_bytes(b"" if kind == "empty" else data[:-1])
    with pytest.raises(BlobDamaged):
        store.check_size(digest, len(DATA))


def test_a_blob_that_is_thawed_between_two_looks_is_found(
    store: LocalStore, digest: Digest, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = store._cold.open

    def thawing(*arguments: Any) -> Any:
        monkeypatch.setattr(store._cold, "open", real)
        thaw_models(["a"], store=LocalStore(store.root))
        return real(*arguments)

    monkeypatch.setattr(store._cold, "open", thawing)
    assert into(store, digest) == DATA
    assert not store.has_cold(digest)


def test_no_cold_form_is_looked_for_if_there_is_a_hot_one(
    store: LocalStore, digest: Digest, monkeypatch: pytest.MonkeyPatch
) -> None:
    thaw_models(["a"], store=store)
    monkeypatch.setattr(store, "_cold", None)
    for way in WAYS:
        assert way(store, digest) == DATA
    store.check_size(digest, len(DATA))


def test_all_cold_blobs_are_listed(store: LocalStore, digest: Digest) -> None:
    Path(store.folder("cold"), "foreign").write_bytes(b"")
    files = store.cold_files()
    assert files.keys() == {item.digest for item in layers(store, "a").values()}
    assert files[digest].st_size == os.stat(store.cold_path(digest)).st_size
    assert LocalStore(store.root / "none").cold_files() == {}


def test_a_broken_link_to_the_cold_folder_is_an_error(store: LocalStore) -> None:
    store.folder("cold").rename(store.root / "elsewhere")
    store.folder("cold").symlink_to("nothing")
    with pytest.raises(StoreError, match="cannot list"):
        store.cold_files()


def test_the_state_of_a_file_distinguishes_it_from_others(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert FileState.of(str(path)) is None
    path.write_bytes(b"a")
    first = FileState.of(str(path))
    assert first is not None
    path.rename(tmp_path / "new")
    assert FileState.of(str(tmp_path / "new")) == first
    path.write_bytes(b"a")
    assert FileState.of(str(path)) != first
    path.unlink()
    path.symlink_to("new")
    assert FileState.of(str(path)) is None


def test_cold_blobs_are_decoded_into_temporary_files_without_memfd(
    store: LocalStore, digest: Digest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    assert described(store, digest) == DATA


def test_a_fork_waits_for_threads_that_import_the_codecs(store: LocalStore, digest: Digest) -> None:
    is_held, is_forking = threading.Event(), threading.Event()

    def hold() -> None:
        with cold._IMPORTING:
            is_held.set()
            is_forking.wait()

    def read() -> bool:
        signal.alarm(60)  # a deadlock must not hang the test
        return into(store, digest) == DATA

    os.register_at_fork(before=is_forking.set)
    holder = threading.Thread(target=hold)
    holder.start()
    is_held.wait()
    assert sandbox.call(read) == "True"
    holder.join()


@pytest.mark.slow
def test_checking_a_blob_decodes_each_chunk_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large, store = layer("x", weights(1, 2_400_000)), LocalStore(tmp_path)
    add_blobs(store, "a", {"x": large})
    freeze_models(["a"], store=store)
    blob = store.open_cold(Digest.of(large), len(large))
    decoded: list[object] = []

    def decode(entry: object, *rest: Any) -> None:
        decoded.append(entry)
        decode_chunk(entry, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr("blobstore.compression.decoder.decode_chunk", decode)
    blob.check()
    assert len(decoded) == len(blob.container.table.chunks) > 4


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports lost pages of a map")
@pytest.mark.parametrize("lost", ["cold", "cold base", "hot base"])
def test_pages_that_are_lost_while_a_blob_is_decoded_are_damage(
    lost: str, store: LocalStore
) -> None:
    """A disk that cannot read a mapped page and a file that is cut do the same to a process: SIGBUS."""
    tune = layer("x", tuned(2, of=1))
    add_blobs(store, "tune", {"x": tune})
    freeze_models(["tune"], store=store, base="a")
    if lost == "hot base":
        thaw_models(["a"], store=store)
    cold = store.open_cold(layers(store, "tune")["x"].digest)
    assert cold.base is not None
    whole = memoryview(bytearray(len(tune)))
    cold.read_into(0, whole)
    assert whole == tune
    path_of = store.blob_path if lost == "hot base" else store.cold_path
    path = path_of(cold.digest if lost == "cold" else cold.base)
    Path(path).chmod(0o600)
    os.truncate(path, 0)
    found = sandbox.call(lambda: cold.read_into(0, whole))
    assert found.startswith("BlobDamaged: ")
    assert "cannot be read: Input/output error" in found
