"""Progress of long operations: the library calls a function, and never prints."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from contextlib import AbstractContextManager

    _Shows = Callable[[], AbstractContextManager["Progress | None"]]

_Item = TypeVar("_Item")
_MANY = 500
Progress = Callable[[str, int, int], None]
"""Called with the current item, bytes done and total bytes; never by two threads at once.

The total is 0 as long as it is not known.
"""


def of_passes(progress: Progress | None, passes: int) -> Progress | None:
    """Return a callback for bytes that are processed several times each, which counts them once."""
    if progress is None:
        return None
    return lambda what, done, total: progress(what, done // passes, total // passes)


def of_items(
    progress: Progress | None,
    noun: str,
    names: Sequence[str],
    sizes: Sequence[int],
    number: int,
) -> Progress | None:
    """Return a callback that reports the progress of one of several items as that of all.

    Args:
        progress: what is called.
        noun: what the items are, in the plural.
        names: of the items.
        sizes: their bytes, whatever each of them reports as its total.
        number: which item it is.
    """
    if progress is None:
        return None
    before, size, total = sum(sizes[:number]), sizes[number], sum(sizes)
    start = f"{number + 1} of {len(names)} {noun}, {names[number]}"
    most = 0.0

    def report(what: str, done: int, own_total: int) -> None:
        nonlocal most
        # An item may count several kinds of work, one after the other.
        most = max(most, min(done / own_total, 1) if own_total else 0)
        progress(f"{start}: {what}", before + int(most * size), total)

    return report


class _Program:
    shows: _Shows | None = None


def listen(shows: _Shows) -> None:
    """Show the progress of work that operations do not expect to take long. Only a program calls this."""
    _Program.shows = shows


def reporting(what: str, items: Collection[_Item]) -> Iterator[_Item]:
    """Yield items; if there are very many, show in a program how many are done."""
    if len(items) < _MANY or _Program.shows is None:
        yield from items
        return
    with _Program.shows() as progress:
        for done, item in enumerate(items):
            if progress is not None:
                progress(f"{what}: {done:,} of {len(items):,}", 0, 0)
            yield item


class Meter:
    """Adds up the bytes that several threads have done, for one :data:`Progress` callback."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0
        self._lock = threading.Lock()

    def add(self, count: int, what: str) -> None:
        """Report ``count`` more bytes done."""
        if self._progress is None:
            return
        with self._lock:
            self._done += count
            self._progress(what, self._done, self._total)
