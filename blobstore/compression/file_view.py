"""A mapped file of which some ranges are also in other memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable


class Window(NamedTuple):
    """A range of a file, read into memory."""

    begin: int
    """Its offset in the file."""
    data: memoryview


class FileView:
    """The bytes of a file; a slice comes from a window if one contains it completely."""

    def __init__(
        self, data: memoryview, *windows: Window, touch: Callable[[int, int], object] | None = None
    ) -> None:
        """Take a map of the file; ``touch`` is called with each range of it before that is used."""
        self._data = data
        self._windows = windows
        self._touch = touch

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, wanted: slice) -> memoryview:
        begin, end, _ = wanted.indices(len(self._data))
        for first, data in self._windows:
            if first <= begin and end <= first + len(data):
                return data[begin - first : end - first]
        if self._touch is not None:
            self._touch(begin, end)
        return self._data[begin:end]


FileBytes = memoryview | FileView
