from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from blobstore.core.digest import Digest
from blobstore.core.workers import Cancelled
from blobstore.operations.archive import ordered_writer
from blobstore.operations.archive.ordered_writer import OrderedSlot, OrderedWriter

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield descriptor
    os.close(descriptor)


def content(descriptor: int) -> bytes:
    return os.pread(descriptor, 1 << 20, 0)


def test_what_is_written_stands_in_order(descriptor: int) -> None:
    line = OrderedWriter(descriptor, b"begin ")
    first_may_go = threading.Event()

    def write(number: int) -> OrderedSlot:
        with OrderedSlot(line, number) as entry:
            if number == 0:
                first_may_go.wait()
            entry.write(f"{number}".encode())
            if number == 3:
                first_may_go.set()
            entry.write(memoryview(b" "))
        return entry

    with ThreadPoolExecutor(4) as pool:
        entries = list(pool.map(write, range(4)))
    assert content(descriptor) == b"begin 0 1 2 3 "
    assert [bytes(entry.read_back()) for entry in entries] == [b"0 ", b"1 ", b"2 ", b"3 "]
    assert [entry.digest for entry in entries] == [
        Digest.of(b"%d " % number) for number in range(4)
    ]


@pytest.mark.parametrize("room", [0, 3, 100])
def test_what_finds_no_room_waits_for_its_turn(
    descriptor: int, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ordered_writer, "_MAX_BUFFERED", room)
    line = OrderedWriter(descriptor, b"")

    def write(number: int) -> None:
        with OrderedSlot(line, number) as entry:
            for _ in range(5):
                entry.write(b"%02d" % number)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(write, range(30)))
    assert content(descriptor) == b"".join(b"%02d" % number * 5 for number in range(30))
    assert line.reserve(room)  # all has been given back
    assert not line.reserve(1)


@pytest.mark.parametrize("room", [0, 100])
def test_what_was_written_can_be_taken_back(
    descriptor: int, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ordered_writer, "_MAX_BUFFERED", room)
    line = OrderedWriter(descriptor, b"begin ")
    with OrderedSlot(line, 0) as first:
        first.write(b"first ")
    with OrderedSlot(line, 1) as entry:
        entry.write(b"a longer text")
        entry.clear()
        assert entry.size == 0
        entry.write(b"second")
    assert content(descriptor) == b"begin first second"
    assert entry.digest == Digest.of(b"second")
    assert line.reserve(room)


def test_nothing_is_a_turn_too(descriptor: int) -> None:
    line = OrderedWriter(descriptor, b"begin")
    for number in range(2):
        with OrderedSlot(line, number) as entry:
            pass
        assert bytes(entry.read_back()) == b""
    assert content(descriptor) == b"begin"


def test_an_error_ends_the_line(descriptor: int) -> None:
    line = OrderedWriter(descriptor, b"")
    waiting = threading.Event()

    def wait() -> None:
        with OrderedSlot(line, 1):
            waiting.set()

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(wait)
        waiting.wait()
        with pytest.raises(ValueError, match="wrong"), OrderedSlot(line, 0):
            message = "wrong"
            raise ValueError(message)
        with pytest.raises(Cancelled):
            future.result()
    assert content(descriptor) == b""
