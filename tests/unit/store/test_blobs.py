from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from blobstore.core.digest import Digest
from blobstore.core.interrupts import Stopped
from blobstore.core.mmap import MappedRegion
from blobstore.core.tensor import DType, TensorSpec
from blobstore.errors import BlobDamaged, BlobMissing, StoreError
from blobstore.safetensors.header import Header, encode_header
from blobstore.store.local import LocalStore
from tests.support import sandbox
from tests.support.descriptors import ANYWHERE, open_files

DATA = encode_header([TensorSpec("a", DType.U8, (4,))]) + b"data"
DIGEST = Digest.of(DATA)
SIZE = len(DATA)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    store = LocalStore(tmp_path / "store")
    store.folder("blobs").mkdir(parents=True)
    descriptors = open_files(ANYWHERE)
    yield store
    assert open_files(ANYWHERE) == descriptors


@pytest.fixture
def path(store: LocalStore) -> Path:
    path = Path(store.blob_path(DIGEST))
    path.write_bytes(DATA)
    return path


def open_and_close(store: LocalStore, digest: Digest, size: int) -> None:
    os.close(store.open_blob(digest, size))


def map_one(store: LocalStore, digest: Digest, size: int) -> None:
    region = MappedRegion([size])
    store.map_blob(digest, size, 0, region)


READERS: list[Callable[[LocalStore, Digest, int], object]] = [
    LocalStore.check_size,
    LocalStore.read_blob,
    LocalStore.read_blob_header,
    LocalStore.check_digest,
    open_and_close,
    map_one,
]
every_reader = pytest.mark.parametrize("reader", READERS)


@pytest.mark.usefixtures("path", "requested")
@pytest.mark.parametrize("look", [*READERS, lambda store, digest, _: store.has(digest)])
def test_a_request_to_end_the_program_stops_whatever_looks_at_blobs(
    store: LocalStore, look: Callable[[LocalStore, Digest, int], object]
) -> None:
    with pytest.raises(Stopped):
        look(store, DIGEST, SIZE)


@pytest.mark.usefixtures("path")
def test_an_intact_blob_is_read(store: LocalStore) -> None:
    store.check_size(DIGEST, SIZE)
    store.check_digest(DIGEST, SIZE)
    assert store.read_blob(DIGEST, SIZE) == DATA
    assert list(store.read_blob_header(DIGEST, SIZE).tensors) == ["a"]
    with os.fdopen(store.open_blob(DIGEST, SIZE), "rb") as file:
        assert file.read() == DATA
    region = MappedRegion([SIZE])
    store.map_blob(DIGEST, SIZE, 0, region)
    assert region.memory[:SIZE] == DATA


@every_reader
def test_a_missing_blob_is_reported(store: LocalStore, reader: Callable[..., object]) -> None:
    with pytest.raises(BlobMissing, match=f"^blob '.*{DIGEST.hex}' is missing$"):
        reader(store, DIGEST, SIZE)


@every_reader
@pytest.mark.parametrize("change", [-1, 1, -SIZE])
def test_a_blob_of_another_size_is_reported(
    store: LocalStore, path: Path, reader: Callable[..., object], change: int
) -> None:
    path.write_bytes((DATA + b"x")[: SIZE + change])
    with pytest.raises(
        BlobDamaged,
        match=f"{DIGEST.hex}' is damaged: it has {SIZE + change} bytes, expected {SIZE}",
    ):
        reader(store, DIGEST, SIZE)


def link(path: Path) -> None:
    path.with_name("target").write_bytes(DATA)
    path.symlink_to("target")


def bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made, contextlib.chdir(path.parent):
        made.bind(path.name)  # a whole path may be too long


@every_reader
@pytest.mark.parametrize("make", [link, Path.mkdir, os.mkfifo, bind])
def test_a_blob_must_be_a_regular_file(
    store: LocalStore, path: Path, reader: Callable[..., object], make: Callable[[Path], None]
) -> None:
    path.unlink()
    make(path)
    with pytest.raises(
        BlobDamaged, match=f"{DIGEST.hex}' is damaged: it is a link, folder or device"
    ):
        reader(store, DIGEST, SIZE)


def test_reads_of_small_blobs_check_the_digest(store: LocalStore, path: Path) -> None:
    assert store.read_blob(DIGEST, SIZE) == DATA
    path.write_bytes(b"\0" * SIZE)
    with pytest.raises(
        BlobDamaged,
        match=f"{DIGEST.hex}' is damaged: its bytes have digest {Digest.of(bytes(SIZE))}",
    ):
        store.read_blob(DIGEST, SIZE)


def test_a_huge_blob_is_not_read_as_a_small_one(store: LocalStore) -> None:
    with pytest.raises(BlobDamaged, match="too large to be read as a small file"):
        store.read_blob(DIGEST, 2**40)


@pytest.mark.parametrize("place", [0, 8, SIZE // 2, SIZE - 1])
def test_a_flipped_bit_is_found(store: LocalStore, path: Path, place: int) -> None:
    store.check_digest(DIGEST, SIZE)
    damaged = bytearray(DATA)
    damaged[place] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(BlobDamaged, match="its bytes have digest"):
        store.check_digest(DIGEST, SIZE)


def test_checking_reports_every_byte(store: LocalStore) -> None:
    data = bytes(3 * 2**20 + 5)
    Path(store.blob_path(Digest.of(data))).write_bytes(data)
    counts: list[int] = []
    store.check_digest(Digest.of(data), len(data), counts.append)
    assert sum(counts) == len(data)
    assert len(counts) == 4


def test_an_empty_blob_has_a_digest(store: LocalStore) -> None:
    Path(store.blob_path(Digest.of(b""))).touch()
    store.check_digest(Digest.of(b""), 0)
    assert store.read_blob(Digest.of(b""), 0) == b""


@pytest.mark.parametrize("data", [b"", b"not a header", bytes(100), b"\xff" * 50])
def test_a_tensor_blob_that_is_not_safetensors_is_damaged(store: LocalStore, data: bytes) -> None:
    digest = Digest.of(data)
    Path(store.blob_path(digest)).write_bytes(data)
    with pytest.raises(BlobDamaged, match=rf"^blob '.*{digest.hex}': "):
        store.read_blob_header(digest, len(data))


@pytest.mark.usefixtures("path")
def test_headers_are_read_and_the_blobs_mapped_in_one_pass(store: LocalStore) -> None:
    missing = Digest.of(b"missing")
    region = MappedRegion([1, SIZE])
    fault, header = store.read_headers([(missing, 1), (DIGEST, SIZE)], region)
    assert isinstance(fault, BlobMissing)
    assert isinstance(header, Header)
    assert list(header.tensors) == ["a"]
    start = region.offsets[1] + header.data_start
    assert region.memory[start : start + 4] == b"data"


@pytest.mark.slow
def test_unreadable_blobs_are_not_reported_as_damaged() -> None:
    with sandbox.common_folder() as folder:
        store = LocalStore(folder)
        store.folder("blobs").mkdir()
        path = Path(store.blob_path(DIGEST))
        path.write_bytes(DATA)
        path.chmod(0)
        outcome = sandbox.call(lambda: store.read_blob(DIGEST, SIZE), unprivileged=True)
    assert outcome == f"StoreError: blob '{path}' cannot be read: Permission denied"


def test_lists_the_sizes_of_all_blobs(store: LocalStore, path: Path) -> None:
    path.with_name("foreign").write_bytes(b"abc")
    assert store.blob_sizes() == {SIZE, 3}
    assert LocalStore(store.root / "none").blob_sizes() == set()


@pytest.mark.usefixtures("path")  # and the store's fixture looks for open files
def test_a_blob_whose_status_cannot_be_read_is_closed(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: int) -> os.stat_result:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", fails)
        with pytest.raises(StoreError, match="Input/output error"):
            store.open_blob(DIGEST, SIZE)
