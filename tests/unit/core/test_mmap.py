from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import mmap
import os
import re
import resource
import signal
from pathlib import Path

import pytest

from blobstore.core.mmap import MappedRegion, _rounded, is_cached, too_many_maps
from blobstore.core.system import map_counts
from blobstore.errors import BlobstoreError
from tests.support import sandbox
from tests.support.descriptors import ANYWHERE, open_files
from tests.support.maps import use_up_maps
from tests.support.page_cache import dropped

PAGE = mmap.PAGESIZE
LARGE = 2 << 20


@pytest.fixture
def tmp_path(disk_path: Path) -> Path:
    """Return a folder on a disk, whose files leave the page cache."""
    return disk_path


def put(region: MappedRegion, slot: int, path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        region.map(slot, descriptor, path.stat().st_size)
    finally:
        os.close(descriptor)


def file(folder: Path, data: bytes) -> Path:
    path = folder / f"file-{len(data)}"
    path.write_bytes(data)
    return path


def test_maps_files_one_after_another(tmp_path: Path) -> None:
    contents = [b"a", b"", b"b" * PAGE, b"c" * (PAGE + 1), b"dd"]
    region = MappedRegion([len(content) for content in contents])
    assert region.offsets == [0, PAGE, PAGE, 2 * PAGE, 4 * PAGE, 5 * PAGE]
    for slot in (3, 0, 4, 1, 2):  # in any order
        put(region, slot, file(tmp_path, contents[slot]))
    for content, offset in zip(contents, region.offsets, strict=False):
        assert region.memory[offset : offset + len(content)] == content
    assert len(region.memory) == 5 * PAGE


def test_a_slot_holds_zeros_until_its_file_is_mapped(tmp_path: Path) -> None:
    region = MappedRegion([3, 3])
    put(region, 1, file(tmp_path, b"abc"))
    assert region.memory[:3] == bytes(3)
    assert region.memory[PAGE : PAGE + 3] == b"abc"


def test_keeps_no_descriptor_open(tmp_path: Path) -> None:
    before = open_files(ANYWHERE)
    region = MappedRegion([1] * 20)
    for slot in range(20):
        put(region, slot, file(tmp_path, b"x"))
    assert open_files(ANYWHERE) == before
    assert region.memory[0:1] == b"x"


def test_read_only_memory_cannot_be_written(tmp_path: Path) -> None:
    region = MappedRegion([1])
    put(region, 0, file(tmp_path, b"x"))
    assert memoryview(region.memory).readonly
    with pytest.raises(TypeError, match="readonly"):
        region.memory[0] = 1


def test_writes_never_reach_the_file(tmp_path: Path) -> None:
    path = file(tmp_path, b"abc")
    region, other = MappedRegion([3], writable=True), MappedRegion([3])
    put(region, 0, path)
    put(other, 0, path)
    region.memory[0] = 0
    assert region.memory[:3] == b"\0bc"
    assert other.memory[:3] == b"abc"
    assert isinstance(region.memory, mmap.mmap)
    region.memory.flush()
    assert path.read_bytes() == b"abc"


def test_a_view_keeps_the_memory_alive(tmp_path: Path) -> None:
    region = MappedRegion([3])
    put(region, 0, file(tmp_path, b"abc"))
    view = memoryview(region.memory)[:3]
    del region
    gc.collect()
    assert bytes(view) == b"abc"


def test_releases_the_memory(tmp_path: Path) -> None:
    path = file(tmp_path, b"abc")

    def maps() -> int:
        return Path("/proc/self/maps").read_text().count(path.name)

    if not Path("/proc/self/maps").exists():
        pytest.skip("the system does not list a process's maps")
    region = MappedRegion([3])
    put(region, 0, path)
    assert maps() == 1
    del region
    gc.collect()
    assert maps() == 0


def test_accepts_no_files() -> None:
    assert MappedRegion([]).offsets == [0]
    assert MappedRegion([0, 0]).offsets == [0, 0, 0]


@pytest.mark.parametrize("writable", [True, False])
def test_reserves_more_than_the_machine_has(writable: bool, tmp_path: Path) -> None:
    overcommit = Path("/proc/sys/vm/overcommit_memory")
    if writable and overcommit.exists() and overcommit.read_text().strip() == "2":
        pytest.skip("the system counts reserved memory as used")
    region = MappedRegion([2**42, 1], writable=writable)
    put(region, 1, file(tmp_path, b"x"))
    assert region.memory[2**42 : 2**42 + 1] == b"x"


@pytest.mark.parametrize("sizes", [[2**63 - 1], [2**62, 2**62], [2**60]])
def test_rejects_more_bytes_than_addresses(sizes: list[int]) -> None:
    with pytest.raises(BlobstoreError, match="cannot reserve .* bytes of addresses"):
        MappedRegion(sizes)


def test_reports_a_limit_of_memory() -> None:
    # The limit is below what the process has, so that no new map at all is allowed.
    outcome = sandbox.call(lambda: MappedRegion([2**30]), limits={resource.RLIMIT_AS: 2**20})
    assert outcome.startswith("BlobstoreError: cannot reserve 1073741824 bytes of addresses")


def test_raises_an_os_error_for_a_file_that_cannot_be_mapped(tmp_path: Path) -> None:
    region = MappedRegion([PAGE])
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(OSError, match="No such device"):
            region.map(0, descriptor, PAGE)
    finally:
        os.close(descriptor)
    assert region.memory[:1] == b"\0"


def test_files_are_read_into_a_filled_region_which_is_read_only_for_others() -> None:
    region = MappedRegion([3, PAGE + 1], filled=True)
    view = region.slot_view(1, PAGE, PAGE + 1)
    assert len(view) == PAGE
    view[:1] = b"z"
    assert bytes(region.memory[region.offsets[1] + PAGE :][:1]) == b"z"
    assert memoryview(region.memory).readonly
    assert not memoryview(MappedRegion([3], filled=True, writable=True).memory).readonly


def test_large_files_start_at_a_large_page(tmp_path: Path) -> None:
    region = MappedRegion([5, LARGE, PAGE + 1, LARGE + 1, 7])
    assert region.offsets == [*(0, LARGE, 2 * LARGE, 3 * LARGE, 4 * LARGE + PAGE, 5 * LARGE)]
    put(region, 3, file(tmp_path, b"x" * (LARGE + 1)))
    assert region.memory[3 * LARGE : 4 * LARGE + 2] == b"x" * (LARGE + 1) + b"\0"
    assert MappedRegion([5, LARGE], filled=True).offsets == [0, PAGE, PAGE + LARGE]


def test_populates_mapped_files(tmp_path: Path) -> None:
    region = MappedRegion([PAGE * 3, 0])
    put(region, 0, file(tmp_path, b"x" * PAGE * 3))
    for slot, size in ((0, PAGE * 3), (1, 0)):
        region.populate(slot, 0, size)
        assert region.background_populate()(slot, 0, size)
    assert region.memory[: PAGE * 3] == b"x" * PAGE * 3


def test_populating_in_the_background_ends_with_the_memory(tmp_path: Path) -> None:
    region = MappedRegion([PAGE])
    put(region, 0, file(tmp_path, b"x" * PAGE))
    populate, memory = region.background_populate(), region.memory
    del region
    assert populate(0, 0, PAGE)
    del memory
    assert not populate(0, 0, PAGE)


def test_populates_without_support_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from blobstore.core import mmap as mapping

    monkeypatch.setattr(mapping, "MADV_POPULATE_READ", -1)  # as for an old kernel
    region = MappedRegion([PAGE * 3])
    put(region, 0, file(tmp_path, b"x" * PAGE * 3))
    region.populate(0, 0, PAGE * 3)
    assert region.memory[:1] == b"x"


@pytest.mark.parametrize("size", [3, 3 * PAGE, LARGE + 5])
def test_reports_whether_a_file_is_in_the_page_cache(tmp_path: Path, size: int) -> None:
    path = file(tmp_path, b"x" * size)
    region = MappedRegion([size])
    put(region, 0, path)
    descriptor = os.open(path, os.O_RDONLY)
    for is_there in (True, False, True):
        if is_there:
            path.read_bytes()
        elif not dropped(path):
            pytest.skip("the file system keeps its files in memory")
        assert region.is_cached(0, size) is is_there
        assert is_cached(descriptor, size) is is_there
    os.close(descriptor)


def test_an_empty_file_counts_as_cached(tmp_path: Path) -> None:
    descriptor = os.open(file(tmp_path, b""), os.O_RDONLY)
    assert is_cached(descriptor, 0)
    os.close(descriptor)


def test_populating_reads_large_pages_from_the_disk(tmp_path: Path) -> None:
    path = file(tmp_path, os.urandom(2 * LARGE))
    dropped(path)
    region = MappedRegion([2 * LARGE])
    put(region, 0, path)
    region.will_populate(0)
    region.populate(0, 0, LARGE)
    region.populate(0, LARGE, 2 * LARGE)
    assert region.memory[: 2 * LARGE] == path.read_bytes()


def test_populating_a_truncated_file_is_an_error(tmp_path: Path) -> None:
    path = file(tmp_path, b"x" * 3 * PAGE)
    region = MappedRegion([3 * PAGE])
    put(region, 0, path)
    os.truncate(path, PAGE)
    region.populate(0, 0, PAGE)
    with pytest.raises(OSError, match="Input/output error"):
        region.populate(0, PAGE, 3 * PAGE)


@pytest.mark.parametrize("is_writable", [True, False])
@pytest.mark.parametrize("is_filled", [True, False])
def test_a_slot_can_be_written_instead_of_mapped(
    tmp_path: Path, is_writable: bool, is_filled: bool
) -> None:
    sizes = [10, 3 * LARGE + 5, 0, 7]
    region = MappedRegion(sizes, writable=is_writable, filled=is_filled)
    contents = [os.urandom(size) for size in sizes]
    for slot in (1, 2, 3):
        with region.writable_slot(slot, sizes[slot]) as view:
            assert len(view) == sizes[slot]
            assert bytes(view) == bytes(sizes[slot])
            view[:] = contents[slot]
            assert slot not in region.present
    assert region.present == {1, 2, 3}
    if not is_filled:
        put(region, 0, file(tmp_path, contents[0]))
        assert region.present == {0, 1, 2, 3}
        for slot, data in enumerate(contents):
            begin = region.offsets[slot]
            assert bytes(memoryview(region.memory)[begin : begin + len(data)]) == data
    assert memoryview(region.memory).readonly is not is_writable


def test_a_written_slot_becomes_read_only() -> None:
    def write() -> None:
        faulthandler.disable()  # pytest's would print it
        region = MappedRegion([PAGE])
        with region.writable_slot(0, PAGE) as view:
            view[0] = 1
        view[0] = 2

    with pytest.raises(AssertionError, match=f"wait status {signal.SIGSEGV.value}"):
        sandbox.call(write)


def test_a_slot_whose_writing_failed_is_not_present() -> None:
    region = MappedRegion([PAGE])
    with pytest.raises(ValueError, match="half"), region.writable_slot(0, PAGE):
        raise ValueError("half")
    assert region.present == set()


@pytest.mark.slow
def test_a_written_slot_takes_no_more_memory_than_its_bytes() -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[always]" in setting.read_text():
        pytest.skip("the system decides for itself where it gives large pages")
    size = LARGE + PAGE

    def used() -> int:
        region = MappedRegion([size] * 20)
        before = anonymous_memory()
        for slot in range(20):
            with region.writable_slot(slot, size) as view:
                view[:] = bytes(size)
        return anonymous_memory() - before

    assert 19 * size < int(sandbox.call(used)) < 24 * size


def test_small_slots_that_are_written_together_share_large_pages() -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("the system has no large pages")
    size = 16 * PAGE
    region = MappedRegion([size] * 100)
    with contextlib.ExitStack() as making:
        views = [making.enter_context(region.writable_slot(slot, size)) for slot in range(100)]
        first, last = (ctypes.addressof(ctypes.c_char.from_buffer(views[at])) for at in (0, -1))
        maps = Path("/proc/self/smaps").read_text()
    found = re.findall(r"^(\w+)-(\w+) .*\n(?:[A-Z].*\n)*?VmFlags: (.*)$", maps, re.MULTILINE)
    (flags,) = (
        flags for begin, end, flags in found if int(begin, 16) <= first <= last < int(end, 16)
    )
    assert "hg" in flags.split()


def anonymous_memory() -> int:
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


@pytest.mark.parametrize("is_writable", [True, False])
@pytest.mark.parametrize("is_filled", [True, False])
def test_small_files_are_read_into_one_map(
    tmp_path: Path, is_writable: bool, is_filled: bool
) -> None:
    sizes = [10, 70, PAGE, 0, 64, 10, LARGE + 1, 7]
    contents = [os.urandom(size) for size in sizes]
    read_slots = {0, 1, 3, 4, 5, 7}
    region = MappedRegion(sizes, writable=is_writable, filled=is_filled, read_slots=read_slots)
    end = region.offsets[2] + PAGE
    large = region.offsets[6]
    arena = _rounded(large + LARGE + 1, PAGE if is_filled else LARGE)
    assert end <= large
    assert region.offsets == [
        *(arena, arena + 64, 0, arena + 192, arena + 192, arena + 256, large, arena + 320),
        _rounded(arena + 384, PAGE),
    ]
    for slot in (3, 0, 7, 4):
        path = tmp_path / str(slot)
        path.write_bytes(contents[slot])
        put(region, slot, path)
        path.write_bytes(bytes(sizes[slot]))
    with region.writable_slot(1, 70) as view, region.writable_slot(5, 10) as other:
        view[:], other[:] = contents[1], contents[5]
    for slot in read_slots:
        begin = region.offsets[slot]
        assert bytes(memoryview(region.memory)[begin : begin + sizes[slot]]) == contents[slot]
        assert bytes(region.slot_view(slot, 0, sizes[slot])) == contents[slot]
    assert region.present == read_slots
    assert memoryview(region.memory).readonly is not is_writable


def test_files_in_an_arena_are_no_maps_of_the_process(tmp_path: Path) -> None:
    before = map_counts()
    if before is None:
        pytest.skip("the system does not count maps")
    path = file(tmp_path, b"abc")
    region = MappedRegion([3] * 500, read_slots=range(500))
    for slot in range(500):
        put(region, slot, path)
    after = map_counts()
    assert after is not None
    assert after.present < before.present + 50


def test_a_small_file_that_has_become_shorter_is_an_error(tmp_path: Path) -> None:
    region = MappedRegion([30], read_slots=[0])
    descriptor = os.open(file(tmp_path, b"abc"), os.O_RDONLY)
    with pytest.raises(OSError, match="it ended at byte 3 of 30"):
        region.map(0, descriptor, 30)
    os.close(descriptor)
    assert region.present == set()


@pytest.mark.slow
def test_distinguishes_too_many_maps_from_too_little_memory() -> None:
    assert too_many_maps("a file") is None

    def refused() -> str:
        _kept = use_up_maps(0)
        error = too_many_maps("a file")
        return str(error) if error else "none"

    if map_counts() is None:
        pytest.skip("the system does not count maps")
    assert re.fullmatch(
        r"a file cannot be mapped: this process has \d+ maps, and vm\.max_map_count allows \d+; "
        r"raise that limit with sysctl, or, in Python, open the model with read='pread'",
        sandbox.call(refused),
    )
