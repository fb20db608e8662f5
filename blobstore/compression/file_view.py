"""A mapped file of which some ranges are also in other memory."""

from __future__ import annotations

from typing import NamedTuple


class Window(NamedTuple):
    """A range of a file, read into memory."""

    begin: int
    """Its offset in the file."""
    data: memoryview


class FileView:
    """The bytes of a file; a slice comes from a window if one contains it completely."""

    def __init__(self, data: memoryview, *windows: Window) -> None:
        self._data = data
        self._windows = windows

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, wanted: slice) -> memoryview:
        begin, end, _ = wanted.indices(len(self._data))
        for first, data in self._windows:
            if first <= begin and end <= first + len(data):
                return data[begin - first : end - first]
        return self._data[begin:end]


FileBytes = memoryview | FileView
