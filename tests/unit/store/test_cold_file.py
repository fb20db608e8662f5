from __future__ import annotations

import errno
import fcntl
import mmap
import os
import resource
from pathlib import Path

import pytest

from blobstore.core.mmap import MappedRegion
from blobstore.errors import BlobDamaged, BlobMissing, BlobstoreError, ColdDamaged, StoreError
from blobstore.store.cold_file import ColdFile, buffer_size
from tests.support import sandbox
from tests.support.page_cache import dropped

DATA = os.urandom(40 * mmap.PAGESIZE + 123)


@pytest.fixture
def tmp_path(disk_path: Path) -> Path:
    """Return a folder on a disk, whose files leave the page cache."""
    return disk_path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(DATA)
    return path


def memory(size: int) -> memoryview:
    region = MappedRegion([size], filled=True)
    return region.slot_view(0, 0, size)


def descriptors() -> int:
    return len(os.listdir("/dev/fd"))


def test_maps_the_file(path: Path) -> None:
    file = ColdFile(str(path))
    assert file.size == len(DATA)
    assert file.data.readonly
    assert file.data == DATA


def test_the_map_outlives_the_descriptor(path: Path) -> None:
    before = descriptors()
    files = [ColdFile(str(path)) for _ in range(3)]
    assert descriptors() == before + 3
    files[0].close()
    files[0].close()
    assert descriptors() == before + 2
    data = files.pop().data
    assert descriptors() == before + 1
    assert data == files[0].data == DATA


@pytest.mark.parametrize("is_direct", [False, True])
@pytest.mark.parametrize(
    ("begin", "end"), [(0, 1), (1, 5000), (4096, 8192), (4095, 8193), (100_000, len(DATA)), (0, 0)]
)
def test_the_view_has_the_bytes_in_the_buffer(
    path: Path, begin: int, end: int, is_direct: bool
) -> None:
    file = ColdFile(str(path))
    if is_direct:
        dropped(path)
        file.pass_cache()
    buffer = memory(buffer_size(end - begin))
    source = file.read(begin, end, buffer)
    assert len(source) == len(DATA)
    assert source[begin:end] == DATA[begin:end]
    buffer[:] = bytes(len(buffer))
    assert bytes(source[begin:end]) == bytes(end - begin)
    around = slice(max(begin - 5000, 0), end + 5000)
    assert source[around] == DATA[around]


def test_a_file_that_fits_is_read_completely(path: Path) -> None:
    file = ColdFile(str(path))
    buffer = memory(buffer_size(len(DATA)))
    assert file.fits(buffer)
    assert not file.fits(buffer[:-1])
    source = file.read_ends(buffer)
    assert source[:] == DATA
    buffer[:] = bytes(len(buffer))
    assert bytes(source[:]) == bytes(len(DATA))


@pytest.mark.parametrize("size", [len(DATA), 20 * mmap.PAGESIZE, 10_000])
def test_only_the_ends_of_a_large_file_are_read(path: Path, size: int) -> None:
    os.truncate(path, size)
    file = ColdFile(str(path))
    buffer = memory(18 * mmap.PAGESIZE)
    source = file.read_ends(buffer[: buffer_size(size) - 1] if size == 10_000 else buffer)
    assert source[:] == DATA[:size]
    assert source[:8] == DATA[:8]
    assert source[-9000:] == DATA[:size][-9000:]
    buffer[:] = bytes(len(buffer))
    assert bytes(source[:8]) == bytes(8)
    assert bytes(source[-5000:]) == bytes(5000)


def test_reads_that_bypass_the_page_cache_leave_nothing_in_it(path: Path) -> None:
    if not dropped(path):
        pytest.skip("the file system keeps its files in memory")
    file = ColdFile(str(path))
    assert not file.is_cached()
    file.pass_cache()
    assert file.read(0, len(DATA), memory(buffer_size(len(DATA))))[:] == DATA
    assert not file.is_cached()
    other = ColdFile(str(path))
    assert other.read(0, len(DATA), memory(buffer_size(len(DATA))))[:] == DATA
    assert other.is_cached()


def test_reads_if_the_page_cache_cannot_be_bypassed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, direct = os.preadv, os.O_DIRECT
    refused: list[int] = []

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        is_direct = fcntl.fcntl(descriptor, fcntl.F_GETFL) & direct
        if is_direct or not refused:
            refused.append(offset)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return read(descriptor, buffers, offset)

    file = ColdFile(str(path))
    file.pass_cache()
    monkeypatch.setattr(os, "preadv", preadv)
    assert file.read(5, 20_000, memory(buffer_size(20_000)))[5:20_000] == DATA[5:20_000]
    assert refused
    monkeypatch.delattr(os, "O_DIRECT")
    ColdFile(str(path)).pass_cache()


def test_a_file_that_became_shorter_is_damaged(path: Path) -> None:
    file = ColdFile(str(path))
    os.truncate(path, 5000)
    assert file.read(0, 5000, memory(buffer_size(5000)))[:5000] == DATA[:5000]
    with pytest.raises(ColdDamaged, match=f"it ended at byte 5000 of {len(DATA)} while it was"):
        file.read(4097, 5001, memory(buffer_size(5000)))


def test_anything_but_a_regular_file_is_an_error(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(path)
    for wrong in (link, tmp_path):
        with pytest.raises(BlobDamaged, match="it is a link, folder or device and not a file"):
            ColdFile(str(wrong))
    for gone in (tmp_path / "nothing", path / "below"):
        with pytest.raises(BlobMissing, match="is missing"):
            ColdFile(str(gone))
    with pytest.raises(StoreError, match="cannot be read: File name too long"):
        ColdFile(str(tmp_path / ("x" * 300)))


def test_a_lack_of_addresses_is_not_reported_as_damage(path: Path) -> None:
    def open_it() -> str:
        before = descriptors()
        try:
            ColdFile(str(path))
        except BlobstoreError as error:  # keeping the error must not keep the file open
            return f"{type(error).__name__}: {error}; {descriptors() - before} stay open"
        return "opened"

    outcome = sandbox.call(open_it, limits={resource.RLIMIT_AS: 2**20})
    assert outcome.startswith("BlobstoreError: cannot reserve ")
    assert outcome.endswith("; 0 stay open")
