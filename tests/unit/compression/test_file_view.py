from __future__ import annotations

import pytest

from blobstore.compression.file_view import FileView, Window

FILE = memoryview(b"0123456789")
WINDOWED = FileView(FILE, Window(0, memoryview(b"abc")), Window(6, memoryview(b"wxyz")))


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (slice(0, 3), b"abc"),
        (slice(None, 2), b"ab"),
        (slice(7, 9), b"xy"),
        (slice(-2, None), b"yz"),
        (slice(6, 1000), b"wxyz"),
        (slice(3, 6), b"345"),
        (slice(2, 4), b"23"),
        (slice(0, 10), b"0123456789"),
        (slice(7, 7), b""),
        (slice(9, 3), b""),
    ],
)
def test_bytes_come_from_the_window_that_has_all_of_them(wanted: slice, found: bytes) -> None:
    assert bytes(WINDOWED[wanted]) == found
    assert len(bytes(FILE[wanted])) == len(found)


def test_touches_what_comes_from_the_file_itself() -> None:
    touched: list[tuple[int, int]] = []
    view = FileView(
        FILE,
        Window(0, memoryview(b"abc")),
        touch=lambda begin, end: touched.append((begin, end)),
    )
    assert bytes(view[0:3]) + bytes(view[2:5]) == b"abc234"
    assert touched == [(2, 5)]


def test_has_the_size_of_the_file() -> None:
    assert len(WINDOWED) == 10
    assert bytes(FileView(FILE)[2:4]) == b"23"
