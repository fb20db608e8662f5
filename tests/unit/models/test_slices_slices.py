from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import blobstore
from blobstore.core.digest import Digest
from blobstore.core.slicing import cut
from blobstore.core.tensor import DType, TensorSpec
from blobstore.errors import BlobDamaged, BlobMissing, StoreError
from blobstore.freezing import freeze_models
from blobstore.manifests.reference import Reference
from blobstore.models import slices
from blobstore.models.slices import Stored, read_part, view_part
from blobstore.safetensors.numpy import as_array
from blobstore.store.local import LocalStore
from tests import sandbox

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

BEGIN = 100
Reads = list[tuple[int, int]]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    store = LocalStore(tmp_path / "store")
    store.layout.blobs.mkdir(parents=True)
    descriptors = len(os.listdir("/dev/fd"))
    yield store
    assert len(os.listdir("/dev/fd")) == descriptors


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """Return where the requests for bytes of files begin and end, to be filled."""
    found: Reads = []
    real = os.preadv

    def preadv(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        assert len(buffers) <= 1024
        count = real(descriptor, buffers, offset)
        found.append((offset, offset + count))
        return count

    monkeypatch.setattr(os, "preadv", preadv)
    return found


def store_array(store: LocalStore, array: Any) -> Stored:
    data = bytes(range(BEGIN)) + array.tobytes() + b"rest"
    digest = Digest.of(data)
    Path(store.layout.blob(digest)).write_bytes(data)
    spec = TensorSpec("x", DType.U8, array.shape)
    return Stored(spec, (digest, len(data)), BEGIN)


def random(*shape: int) -> Any:
    return np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)


INDEXES: list[Any] = [
    ...,
    slice(2, 5),
    3,
    (slice(None), slice(1, 4)),
    (slice(1, 3), slice(2, 2)),
    (..., slice(5, 900)),
    (slice(None), slice(1, 3), slice(17, 900)),
    (0, 0, 0),
]


@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize("size", [1000, 100_000])
def test_reads_what_a_part_has(store: LocalStore, index: Any, size: int) -> None:
    array = random(6, 5, size)
    stored = store_array(store, array)
    data, spec = read_part(store, stored, cut(stored.spec, index))
    assert spec.shape == array[index].shape
    np.testing.assert_array_equal(as_array(data, 0, spec), array[index])


def test_rows_are_one_request_for_their_bytes_alone(store: LocalStore, reads: Reads) -> None:
    stored = store_array(store, random(8, 1000))
    read_part(store, stored, cut(stored.spec, slice(2, 4)))
    assert reads == [(BEGIN + 2000, BEGIN + 4000)]


def test_many_bytes_are_several_requests(store: LocalStore, reads: Reads) -> None:
    array = random(3, slices._REQUEST)
    stored = store_array(store, array)
    data, _ = read_part(store, stored, cut(stored.spec, slice(1, 3)))
    assert bytes(data) == array[1:].tobytes()
    begin = BEGIN + slices._REQUEST
    middle = begin + slices._REQUEST
    assert sorted(reads) == [(begin, middle), (middle, middle + slices._REQUEST)]


def test_what_lies_far_apart_is_read_alone(store: LocalStore, reads: Reads) -> None:
    row = 3 * slices._GAP
    stored = store_array(store, random(5, row))
    read_part(store, stored, cut(stored.spec, (slice(1, 4), slice(10, 20))))
    assert sorted(reads) == [
        (BEGIN + number * row + 10, BEGIN + number * row + 20) for number in range(1, 4)
    ]


def test_what_lies_near_is_read_with_few_requests(store: LocalStore, reads: Reads) -> None:
    array = random(3000, 64)
    stored = store_array(store, array)
    data, _ = read_part(store, stored, cut(stored.spec, (..., slice(32, None))))
    assert bytes(data) == array[:, 32:].tobytes()
    assert len(reads) == 6
    assert min(reads)[0] == BEGIN + 32


def test_requests_with_gaps_are_not_too_long(store: LocalStore, reads: Reads) -> None:
    array = random(1000, slices._GAP)
    stored = store_array(store, array)
    data, _ = read_part(store, stored, cut(stored.spec, (..., slice(0, 7))))
    assert bytes(data) == array[:, :7].tobytes()
    assert max(end - begin for begin, end in reads) <= slices._REQUEST
    assert len(reads) == 4


def test_nothing_is_read_for_nothing(store: LocalStore, reads: Reads) -> None:
    stored = store_array(store, random(4, 4))
    data, spec = read_part(store, stored, cut(stored.spec, slice(2, 2)))
    assert (bytes(data), spec.shape, reads) == (b"", (0, 4), [])


def test_requests_that_are_answered_in_part_are_gone_on_with(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv

    def some(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        return real(descriptor, [buffers[0][:5]], offset)

    array = random(7, 13)
    stored = store_array(store, array)
    monkeypatch.setattr(os, "preadv", some)
    data, _ = read_part(store, stored, cut(stored.spec, (..., slice(3, 12))))
    assert bytes(data) == array[:, 3:12].tobytes()


def test_memory_of_a_part_is_its_own(store: LocalStore) -> None:
    for rows in (1, 3):
        stored = store_array(store, random(3, slices._OWN_MAP))
        before = Path(store.layout.blob(stored.blob[0])).read_bytes()
        data, _ = read_part(store, stored, cut(stored.spec, slice(0, rows)))
        data[0] ^= 1
        assert Path(store.layout.blob(stored.blob[0])).read_bytes() == before


def test_a_blob_that_is_not_whole_is_told(store: LocalStore) -> None:
    stored = store_array(store, random(4, 4))
    part = cut(stored.spec, 0)
    path = Path(store.layout.blob(stored.blob[0]))
    os.truncate(path, 50)
    with pytest.raises(BlobDamaged, match="has 50 bytes, expected"):
        read_part(store, stored, part)
    path.unlink()
    with pytest.raises(BlobMissing, match="is missing"):
        read_part(store, stored, part)


def test_a_blob_that_shrinks_while_it_is_read_is_told(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = store_array(store, random(4, 4))
    real = store.hot.open

    def shrinking(digest: Digest, size: int) -> int:
        descriptor = real(digest, size)
        os.truncate(store.layout.blob(digest), 50)
        return descriptor

    monkeypatch.setattr(store.hot, "open", shrinking)
    with pytest.raises(BlobDamaged, match=r"blob '.*' ended before its last byte of 120"):
        read_part(store, stored, cut(stored.spec, 0))


@pytest.mark.parametrize("rows", [1, 40])
def test_a_disk_that_fails_is_told(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    stored = store_array(store, random(40, 3 * slices._GAP))

    def failing(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(StoreError, match=r"blob '.*' cannot be read: Input/output error"):
        read_part(store, stored, cut(stored.spec, (slice(0, rows), slice(0, 9))))


def test_a_blob_that_must_not_be_read_is_told(store: LocalStore) -> None:
    stored = store_array(store, random(4, 4))
    Path(store.layout.blob(stored.blob[0])).chmod(0)
    part = cut(stored.spec, 0)
    outcome = sandbox.call(lambda: read_part(store, stored, part), unprivileged=True)
    assert outcome.startswith("StoreError: blob ")


# Of memory


@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize("has_views", [True, False])
def test_a_part_of_memory_is_what_it_is_of_the_array(index: Any, *, has_views: bool) -> None:
    array = random(6, 5, 1000)
    spec = TensorSpec("x", DType.U8, array.shape)
    memory = memoryview(bytes(BEGIN) + array.tobytes())
    found = view_part(as_array, memory, BEGIN, spec, cut(spec, index), has_views=has_views)
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
    (layer,) = store.resolve(Reference.parse("a")).layers
    Path(store.layout.cold_blob(layer.digest)).unlink()
    with (
        blobstore.open("a", store=store, read="pread", verify="none") as model,
        pytest.raises(BlobMissing),
    ):
        model.get_slice("x")[3:7]
