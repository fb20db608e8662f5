from __future__ import annotations

import os
import random
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from blobstore.errors import DamagedSource
from blobstore.sources.pytorch import storages as torch_storages
from blobstore.sources.pytorch.legacy import LegacyStream
from blobstore.sources.pytorch.storages import Container, StorageReader
from blobstore.sources.pytorch.zip import ZipCheckpoint
from blobstore.sources.pytorch.zip_entries import ZipEntry, read_entry
from tests.checkpoints import legacy_file, mapping, pickled, tensor, zip_file
from tests.zip_files import deflated, opened

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CONTENT = random.Random(1).randbytes(3 << 20)
"""More than the reader takes at once."""
BEFORE = b"before it"


class File:
    """A file with one storage in it, and a reader of it."""

    def __init__(self, descriptor: int, entry: ZipEntry) -> None:
        self.descriptor = descriptor
        self.entry = entry
        self.reader = StorageReader(descriptor)

    def read(self, begin: int, end: int, size: int = 1 << 16) -> bytes:
        buffer = memoryview(bytearray(size))
        return b"".join(map(bytes, self.reader.read(self.entry, begin, end, buffer)))

    def copy(self, begin: int, end: int) -> bytes:
        return bytes(self.reader.copy(self.entry, begin, end))


@contextmanager
def stored(
    content: bytes = CONTENT, *, crc: int | None = None, is_deflated: bool = False
) -> Iterator[File]:
    """Give a file of a storage; ``crc`` replaces its check sum."""
    data = deflated(content) if is_deflated else content
    found = zlib.crc32(content) if crc is None else crc
    with opened(BEFORE + data + b"behind it") as (descriptor, _):
        entry = ZipEntry("0", len(BEFORE), len(data), len(content), found, is_deflated)
        yield File(descriptor, entry)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return where the reader has read, and how much, as it goes on."""
    found: list[tuple[int, int]] = []
    preadv = os.preadv

    def noted(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        count = preadv(descriptor, buffers, offset)
        found.append((offset - len(BEFORE), count))
        return count

    monkeypatch.setattr(os, "preadv", noted)
    return found


PARTS = [(0, 1), (0, 0), (1, 1), (5, 6), (1000, 2_000_001), (1, len(CONTENT)), (0, len(CONTENT))]


@pytest.mark.parametrize("is_deflated", [False, True])
@pytest.mark.parametrize(("begin", "end"), PARTS)
def test_reads_parts(begin: int, end: int, is_deflated: bool) -> None:
    with stored(is_deflated=is_deflated) as file:
        assert file.read(begin, end) == CONTENT[begin:end]
        assert file.copy(begin, end) == CONTENT[begin:end]


@pytest.mark.parametrize("size", [1, 7, 100])
def test_reads_by_way_of_buffers_of_any_size(size: int) -> None:
    with stored(CONTENT[:1000]) as file:
        for begin, end in ((0, 1000), (3, 990)):
            assert file.read(begin, end, size) == CONTENT[begin:end]


def test_pieces_are_in_the_buffer() -> None:
    with stored() as file:
        for begin, end in ((0, len(CONTENT)), (7, 100_000)):
            buffer = memoryview(bytearray(1 << 14))
            for piece in file.reader.read(file.entry, begin, end, buffer):
                assert piece.obj is buffer.obj
                assert len(piece) <= len(buffer)


@pytest.mark.parametrize("is_deflated", [False, True])
def test_an_empty_storage_has_no_bytes(is_deflated: bool) -> None:
    with stored(b"", is_deflated=is_deflated) as file:
        assert file.read(0, 0) == file.copy(0, 0) == b""


# Check sums


@pytest.mark.parametrize("is_deflated", [False, True])
@pytest.mark.parametrize(("begin", "end"), [(0, len(CONTENT)), (5, 9), (0, 4), (9, len(CONTENT))])
def test_rejects_a_wrong_check_sum(begin: int, end: int, is_deflated: bool) -> None:
    with stored(crc=1, is_deflated=is_deflated) as file:
        for _ in range(2):  # the first time teaches it nothing
            with pytest.raises(DamagedSource, match=r"has the CRC [0-9a-f]{8}, not 00000001"):
                file.read(begin, end)
            with pytest.raises(DamagedSource, match="its bytes have been changed"):
                file.copy(begin, end)


def test_gives_no_byte_of_a_part_before_it_is_checked() -> None:
    with stored(crc=1) as file:
        pieces = file.reader.read(file.entry, 5, 9, memoryview(bytearray(4)))
        with pytest.raises(DamagedSource):
            next(pieces)


def test_no_check_sum_is_checked_where_there_is_none(asked: list[tuple[int, int]]) -> None:
    with stored(crc=0) as file:
        assert file.read(10, 20) == CONTENT[10:20]
    assert asked == [(10, 10)]


def read_part(file: File) -> None:
    assert file.read(10, 20) == CONTENT[10:20]


def read_all(file: File) -> None:
    assert file.read(0, len(CONTENT)) == CONTENT


@pytest.mark.parametrize("first", [read_part, read_all])
def test_reads_a_storage_for_its_check_sum_once(
    first: Callable[[File], None], asked: list[tuple[int, int]]
) -> None:
    with stored() as file:
        first(file)
        before = sum(count for _, count in asked)
        assert before >= len(CONTENT)
        for begin in range(0, 1000, 100):
            assert file.read(begin, begin + 50) == CONTENT[begin : begin + 50]
        assert sum(count for _, count in asked) == before + 10 * 50


def test_a_storage_that_was_not_read_to_its_end_is_not_checked() -> None:
    with stored(crc=1) as file:
        pieces = file.reader.read(file.entry, 0, len(CONTENT), memoryview(bytearray(100)))
        next(pieces)
        pieces.close()  # type: ignore[attr-defined]
        with pytest.raises(DamagedSource):
            file.read(10, 20)


def test_storages_are_checked_one_by_one() -> None:
    with stored() as file:
        read_all(file)
        file.entry = file.entry._replace(name="1", crc=1)
        with pytest.raises(DamagedSource):
            file.read(10, 20)


# Compressed storages


def test_unpacks_a_storage_for_all_its_parts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    unpacked = []

    def noted(descriptor: int, place: ZipEntry, buffer: memoryview) -> Iterator[memoryview]:
        unpacked.append(place.name)
        return read_entry(descriptor, place, buffer)

    monkeypatch.setattr(torch_storages, "read_entry", noted)
    with stored(is_deflated=True) as file:
        other = file.entry._replace(name="1")
        for place in (file.entry, file.entry, other, other, file.entry):
            piece = memoryview(bytearray(5))
            assert b"".join(file.reader.read(place, 5, 10, piece)) == CONTENT[5:10]
    assert unpacked == ["0", "1", "0"]


def test_a_compressed_storage_can_be_cut_short() -> None:
    with stored(is_deflated=True) as file:
        file.entry = file.entry._replace(stored_size=file.entry.stored_size - 100)
        for begin, end in ((0, len(CONTENT)), (5, 9)):
            with pytest.raises(DamagedSource, match="entry '0' at byte 9 is cut short"):
                file.read(begin, end)


# Files that change


@pytest.mark.parametrize("crc", [None, 0])
def test_a_file_can_be_cut_short(crc: int | None) -> None:
    with stored(crc=crc) as file:
        os.truncate(file.descriptor, 1000)
        for begin, end in ((0, len(CONTENT)), (500, 1500), (5000, 5001)):
            with pytest.raises(DamagedSource, match=r"cut short|it was cut short while"):
                file.read(begin, end)
            with pytest.raises(DamagedSource):
                file.copy(begin, end)


def test_a_file_can_be_cut_short_after_it_was_checked() -> None:
    with stored() as file:
        read_part(file)
        os.truncate(file.descriptor, 1000)
        assert file.read(0, 900) == CONTENT[:900]
        with pytest.raises(DamagedSource, match="the file ended at byte 1000: it was cut short"):
            file.read(900, 1100)


def test_pieces_can_come_short() -> None:
    with stored(CONTENT[:1000]) as file, pytest.MonkeyPatch.context() as patch:
        preadv = os.preadv
        patch.setattr(os, "preadv", lambda fd, into, at: preadv(fd, [into[0][:3]], at))
        assert file.read(10, 900) == CONTENT[10:900]
        assert file.copy(0, 1000) == CONTENT[:1000]


# Threads


@pytest.mark.parametrize("is_deflated", [False, True])
def test_any_number_of_threads_can_read(is_deflated: bool) -> None:
    start = threading.Barrier(8)

    def part(number: int) -> bool:
        start.wait()
        begin = number * 1000
        return file.read(begin, begin + 70_000, 999) == CONTENT[begin : begin + 70_000]

    with stored(is_deflated=is_deflated) as file, ThreadPoolExecutor(8) as pool:
        assert all(pool.map(part, range(8)))


def test_threads_check_a_storage_once(asked: list[tuple[int, int]]) -> None:
    start = threading.Barrier(6)

    def part(number: int) -> None:
        start.wait()
        file.read(number * 10, number * 10 + 10)

    with stored() as file, ThreadPoolExecutor(6) as pool:
        list(pool.map(part, range(6)))
    assert sum(count for _, count in asked) == len(CONTENT) + 60


# What a container is


@pytest.mark.parametrize(("kind", "form"), [(ZipCheckpoint, zip_file), (LegacyStream, legacy_file)])
def test_both_containers_are_containers(
    kind: Callable[[int, int], Container], form: Callable[[bytes], bytes]
) -> None:
    with opened(form(pickled(mapping(a=tensor())))) as (descriptor, size):
        container = kind(descriptor, size)
    assert container.kind
    assert container.pickle_size < torch_storages.MAX_PICKLE_SIZE
    assert not container.is_swapped
    assert [item.identifier[2] for item in container.result.persistents] == ["0"]
