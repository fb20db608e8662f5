from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from blobstore.archives import ordered_writer
from blobstore.archives.ordered_writer import OrderedSlot, OrderedWriter
from blobstore.core.digest import Digest
from blobstore.core.workers import Cancelled


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield descriptor
    os.close(descriptor)


def content(descriptor: int) -> bytes:
    return os.pread(descriptor, 1 << 20, 0)


def test_writes_slots_in_order(descriptor: int, tmp_path: Path) -> None:
    writer = OrderedWriter(descriptor, tmp_path, b"begin ")
    first_may_go = threading.Event()

    def write(number: int) -> OrderedSlot:
        with OrderedSlot(writer, number) as slot:
            if number == 0:
                first_may_go.wait()
            slot.write(f"{number}".encode())
            if number == 3:
                first_may_go.set()
            slot.write(memoryview(b" "))
        return slot

    with ThreadPoolExecutor(4) as pool:
        slots = list(pool.map(write, range(4)))
    assert content(descriptor) == b"begin 0 1 2 3 "
    assert [bytes(slot.read_back()) for slot in slots] == [b"0 ", b"1 ", b"2 ", b"3 "]
    assert [slot.digest for slot in slots] == [Digest.of(b"%d " % number) for number in range(4)]


@pytest.mark.parametrize("limit", [0, 3, 100])
def test_a_slot_over_the_memory_limit_is_kept_in_a_temporary_file(
    descriptor: int, limit: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ordered_writer, "_MAX_BUFFERED", limit)
    writer = OrderedWriter(descriptor, tmp_path, b"")

    def write(number: int) -> None:
        with OrderedSlot(writer, number) as slot:
            for _ in range(5):
                slot.write(b"%02d" % number)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(write, range(30)))
    assert content(descriptor) == b"".join(b"%02d" % number * 5 for number in range(30))
    assert writer.reserve(limit)  # all memory was released
    assert not writer.reserve(1)
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("limit", [0, 100])
def test_a_slot_can_be_cleared(
    descriptor: int, limit: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ordered_writer, "_MAX_BUFFERED", limit)
    writer = OrderedWriter(descriptor, tmp_path, b"begin ")
    with OrderedSlot(writer, 0) as first:
        first.write(b"first ")
    with OrderedSlot(writer, 1) as slot:
        slot.write(b"a longer text")
        slot.clear()
        assert slot.size == 0
        slot.write(b"second")
    assert content(descriptor) == b"begin first second"
    assert slot.digest == Digest.of(b"second")
    assert writer.reserve(limit)


@pytest.mark.parametrize("limit", [0, 100])
def test_a_slot_can_be_read_before_and_after_its_turn(
    descriptor: int, limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ordered_writer, "_MAX_BUFFERED", limit)
    writer = OrderedWriter(descriptor, tmp_path, b"begin ")
    with OrderedSlot(writer, 0) as slot:
        slot.write(b"first")
        assert bytes(slot.read_back()) == b"first"
        assert content(descriptor) == b"begin "
    assert bytes(slot.read_back()) == b"first"
    assert slot.is_intact()
    os.pwrite(descriptor, b"F", 6)
    assert not slot.is_intact()


def test_a_slot_may_be_empty(descriptor: int, tmp_path: Path) -> None:
    writer = OrderedWriter(descriptor, tmp_path, b"begin")
    for number in range(2):
        with OrderedSlot(writer, number) as slot:
            pass
        assert bytes(slot.read_back()) == b""
    assert content(descriptor) == b"begin"


def test_an_error_stops_the_slots_that_wait(descriptor: int, tmp_path: Path) -> None:
    writer = OrderedWriter(descriptor, tmp_path, b"")
    waiting = threading.Event()

    def wait() -> None:
        with OrderedSlot(writer, 1):
            waiting.set()

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(wait)
        waiting.wait()
        with pytest.raises(ValueError, match="wrong"), OrderedSlot(writer, 0):
            message = "wrong"
            raise ValueError(message)
        with pytest.raises(Cancelled):
            future.result()
    assert content(descriptor) == b""
