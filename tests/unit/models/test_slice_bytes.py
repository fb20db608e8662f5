"""Parts of tensors, read from files and from memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import save_file

import blobstore
from blobstore.core.digest import Digest
from blobstore.core.slicing import select
from blobstore.core.tensor import DType, TensorSpec
from blobstore.errors import BlobDamaged, BlobMissing, StoreError
from blobstore.manifests import media_types
from blobstore.manifests.reference import Reference
from blobstore.models import slice_bytes
from blobstore.models.header_index import TensorLocation
from blobstore.models.slice_bytes import read_slice, view_slice
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.safetensors.numpy import as_array
from blobstore.store.blob_ranges import LoadedRanges
from blobstore.store.local import LocalStore
from tests.support import sandbox
from tests.support.descriptors import open_files

BEGIN = 100
Reads = list[tuple[int, int]]


@pytest.fixture
def file_store(tmp_path: Path) -> Iterator[LocalStore]:
    """Return a store, and check that no file below it stays open."""
    store = LocalStore(tmp_path / "store")
    store.folder("blobs").mkdir(parents=True)
    yield store
    assert open_files(tmp_path) == []


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """Record the begin and end of each request for bytes of a file."""
    found: Reads = []
    real = os.preadv

    def preadv(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        assert len(buffers) <= 1024
        count = real(descriptor, buffers, offset)
        found.append((offset, offset + count))
        return count

    monkeypatch.setattr(os, "preadv", preadv)
    return found


class StoredArray(NamedTuple):
    """An array in a blob, with the arguments that read_slice() needs."""

    blob: tuple[Digest, int]
    location: TensorLocation

    @property
    def spec(self) -> TensorSpec:
        return self.location.spec


def store_array(file_store: LocalStore, array: Any) -> StoredArray:
    data = bytes(range(BEGIN)) + array.tobytes() + b"rest"
    digest = Digest.of(data)
    Path(file_store.blob_path(digest)).write_bytes(data)
    spec = TensorSpec("x", DType.U8, array.shape)
    return StoredArray((digest, len(data)), TensorLocation(spec, 0, BEGIN))


def random(*shape: int) -> Any:
    return np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)


FILE_INDEXES: list[Any] = [
    ...,
    slice(2, 5),
    3,
    (slice(None), slice(1, 4)),
    (slice(1, 3), slice(2, 2)),
    (..., slice(5, 900)),
    (slice(None), slice(1, 3), slice(17, 900)),
    (0, 0, 0),
]


@pytest.mark.parametrize("index", FILE_INDEXES)
@pytest.mark.parametrize("size", [1000, 100_000])
def test_reads_a_part(file_store: LocalStore, index: Any, size: int) -> None:
    array = random(6, 5, size)
    stored = store_array(file_store, array)
    for loaded in (None, LoadedRanges({})):  # of other blobs, which are not local
        data, spec = read_slice(file_store, *stored, select(stored.spec, index), loaded)
        assert spec.shape == array[index].shape
        np.testing.assert_array_equal(as_array(data, 0, spec), array[index])


def test_adjacent_rows_are_one_request(file_store: LocalStore, reads: Reads) -> None:
    stored = store_array(file_store, random(8, 1000))
    read_slice(file_store, *stored, select(stored.spec, slice(2, 4)))
    assert reads == [(BEGIN + 2000, BEGIN + 4000)]


def test_large_parts_are_several_requests(file_store: LocalStore, reads: Reads) -> None:
    array = random(3, slice_bytes._REQUEST)
    stored = store_array(file_store, array)
    data, _ = read_slice(file_store, *stored, select(stored.spec, slice(1, 3)))
    assert bytes(data) == array[1:].tobytes()
    begin = BEGIN + slice_bytes._REQUEST
    middle = begin + slice_bytes._REQUEST
    assert sorted(reads) == [(begin, middle), (middle, middle + slice_bytes._REQUEST)]


def test_distant_runs_are_read_separately(file_store: LocalStore, reads: Reads) -> None:
    row = 3 * slice_bytes._GAP
    stored = store_array(file_store, random(5, row))
    read_slice(file_store, *stored, select(stored.spec, (slice(1, 4), slice(10, 20))))
    assert sorted(reads) == [
        (BEGIN + number * row + 10, BEGIN + number * row + 20) for number in range(1, 4)
    ]


def test_close_runs_are_read_with_few_requests(file_store: LocalStore, reads: Reads) -> None:
    array = random(3000, 64)
    stored = store_array(file_store, array)
    data, _ = read_slice(file_store, *stored, select(stored.spec, (..., slice(32, None))))
    assert bytes(data) == array[:, 32:].tobytes()
    assert len(reads) == 6
    assert min(reads)[0] == BEGIN + 32


def test_requests_with_gaps_are_not_too_long(file_store: LocalStore, reads: Reads) -> None:
    array = random(1000, slice_bytes._GAP)
    stored = store_array(file_store, array)
    data, _ = read_slice(file_store, *stored, select(stored.spec, (..., slice(0, 7))))
    assert bytes(data) == array[:, :7].tobytes()
    assert max(end - begin for begin, end in reads) <= slice_bytes._REQUEST
    assert len(reads) == 4


def test_an_empty_part_reads_nothing(file_store: LocalStore, reads: Reads) -> None:
    stored = store_array(file_store, random(4, 4))
    data, spec = read_slice(file_store, *stored, select(stored.spec, slice(2, 2)))
    assert (bytes(data), spec.shape, reads) == (b"", (0, 4), [])


def test_short_reads_are_continued(file_store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv

    def some(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        return real(descriptor, [buffers[0][:5]], offset)

    array = random(7, 13)
    stored = store_array(file_store, array)
    monkeypatch.setattr(os, "preadv", some)
    data, _ = read_slice(file_store, *stored, select(stored.spec, (..., slice(3, 12))))
    assert bytes(data) == array[:, 3:12].tobytes()


def test_a_part_does_not_share_memory(file_store: LocalStore) -> None:
    for rows in (1, 3):
        stored = store_array(file_store, random(3, 1 << 20))
        before = Path(file_store.blob_path(stored.blob[0])).read_bytes()
        data, _ = read_slice(file_store, *stored, select(stored.spec, slice(0, rows)))
        data[0] ^= 1
        assert Path(file_store.blob_path(stored.blob[0])).read_bytes() == before


def test_a_missing_or_truncated_blob_is_reported(file_store: LocalStore) -> None:
    stored = store_array(file_store, random(4, 4))
    part = select(stored.spec, 0)
    path = Path(file_store.blob_path(stored.blob[0]))
    os.truncate(path, 50)
    with pytest.raises(BlobDamaged, match="has 50 bytes, expected"):
        read_slice(file_store, *stored, part)
    path.unlink()
    with pytest.raises(BlobMissing, match="is missing"):
        read_slice(file_store, *stored, part)


def test_a_blob_that_shrinks_while_it_is_read_is_reported(
    file_store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = store_array(file_store, random(4, 4))
    real = file_store._hot.open

    def shrinking(digest: Digest, size: int) -> int:
        descriptor = real(digest, size)
        os.truncate(file_store.blob_path(digest), 50)
        return descriptor

    monkeypatch.setattr(file_store._hot, "open", shrinking)
    with pytest.raises(BlobDamaged, match=r"blob '.*' ended before its last byte of 120"):
        read_slice(file_store, *stored, select(stored.spec, 0))


@pytest.mark.parametrize("rows", [1, 40])
def test_a_failing_disk_is_reported(
    file_store: LocalStore, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    stored = store_array(file_store, random(40, 3 * slice_bytes._GAP))

    def failing(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(StoreError, match=r"blob '.*' cannot be read: Input/output error"):
        read_slice(file_store, *stored, select(stored.spec, (slice(0, rows), slice(0, 9))))


def test_a_blob_without_permission_is_reported(file_store: LocalStore) -> None:
    stored = store_array(file_store, random(4, 4))
    Path(file_store.blob_path(stored.blob[0])).chmod(0)
    part = select(stored.spec, 0)
    outcome = sandbox.call(lambda: read_slice(file_store, *stored, part), unprivileged=True)
    assert outcome.startswith("StoreError: blob ")


# Memory


@pytest.mark.parametrize("index", FILE_INDEXES)
@pytest.mark.parametrize("has_views", [True, False])
def test_a_part_of_memory_equals_the_part_of_the_array(index: Any, *, has_views: bool) -> None:
    array = random(6, 5, 1000)
    spec = TensorSpec("x", DType.U8, array.shape)
    memory = memoryview(bytes(BEGIN) + array.tobytes())
    found = view_slice(as_array, memory, BEGIN, spec, select(spec, index), has_views=has_views)
    assert isinstance(found, np.ndarray)
    np.testing.assert_array_equal(found, array[index], strict=not isinstance(index, tuple))
    is_view = np.shares_memory(found, np.frombuffer(memory, np.uint8))
    lies_together = array[index].flags.c_contiguous
    assert is_view is bool(found.size and (has_views or lies_together))


def test_a_part_of_a_cold_blob_is_decoded(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    array = (np.arange(200 * 300, dtype=np.int32) % 7).reshape(200, 300)
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"x": array}, folder / "model.safetensors")
    blobstore.create(folder, "a", store=store)
    freeze_models(["a"], store=store)
    with blobstore.open("a", store=store, read="pread", verify="none") as model:
        part = model.get_slice("x")
        assert np.array_equal(part[3:7], array[3:7])
        assert np.array_equal(part[:, 10:20], array[:, 10:20])
        assert np.array_equal(part[199:, 299:], array[199:, 299:])
        assert part[5:5].shape == (0, 300)
    (layer,) = store.resolve(Reference.parse("a")).layers_of(media_types.TENSOR)
    Path(store.cold_path(layer.digest)).unlink()
    with (
        blobstore.open("a", store=store, read="pread", verify="none") as model,
        pytest.raises(BlobMissing),
    ):
        model.get_slice("x")[3:7]
