"""Blobs that change their form, hot to cold or back: made by threads, put in their places in batches.

What is made has a temporary name of a living lease until it is durable and has been checked. It is put in
its place, and its other form removed, with the store's lock alone: whoever reads leases and manifests
then sees what everybody else has said that they need.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import threading
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Generic, TypeVar

from blobstore.core.files import make_folders
from blobstore.core.progress import Meter
from blobstore.core.workers import Cancelled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path
    from typing import Self

    from blobstore.core.digest import Digest
    from blobstore.core.progress import Progress
    from blobstore.store.local import LocalStore

_BATCH = 64
"""Blobs that are put in their places at once."""
_BATCH_BYTES = 256 << 20
"""Bytes of these, about: so much room is needed beside what is there."""
_BATCH_SECONDS = 2.0

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}

Item = TypeVar("Item")
Made = TypeVar("Made")


class BatchRunner:
    """A lease with temporary files, threads, and a way to stop them."""

    def __init__(self, store: LocalStore, progress: Progress | None, total: int) -> None:
        self.store = store
        self._meter = Meter(progress, total)
        self._numbers = itertools.count()
        self._stop = threading.Event()

    def __enter__(self) -> Self:
        for folder in (
            self.store.folder("blobs"),
            self.store.folder("cold"),
            self.store.folder("temporary"),
        ):
            make_folders(folder, self.store.root)
        self._lease = self.store.lease()
        self.lease = self._lease.name
        return self

    def __exit__(self, *_: object) -> None:
        for path in self.store.folder("temporary").glob(f"{self.lease}-*"):
            path.unlink(missing_ok=True)
        self._lease.close()

    def hold(self, digests: Iterable[Digest]) -> None:
        """Keep blobs from being collected meanwhile: those that are there now, and that come."""
        self._lease.hold(digests)

    def tell(self, count: int, what: str) -> None:
        """Report bytes that are done, from any thread.

        Raises:
            Stopped: the work is to end.
        """
        if self._stop.is_set():
            raise Cancelled("stopped")
        self._meter.add(count, what)

    @contextlib.contextmanager
    def temporary(self) -> Iterator[tuple[Path, int]]:
        """Give the path and the descriptor of a new file, which is synced when the block ends.

        On an error it is removed.
        """
        path = self.store.folder("temporary") / f"{self.lease}-{next(self._numbers)}"
        # Read-only from the start: a descriptor opened for writing stays usable.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444)
        try:
            try:
                yield path, descriptor
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def run(
        self,
        items: Sequence[Item],
        make: Callable[[Item], Made],
        size: Callable[[Item], int],
        settle: Callable[[Sequence[Made]], None],
        jobs: int | None,
    ) -> None:
        """Make something of all items on threads; settle it in batches on this one.

        What finds no room is made again when the others are settled, which may have given some back.

        Raises:
            Exception: what ``make`` or ``settle`` raises first. What was settled before stays.
        """
        # The largest first, so that no thread is left with one when the others are done.
        left = sorted(items, key=size, reverse=True)
        while left:
            failed, count = self._round(left, make, size, settle, jobs)
            if failed and not count:
                raise failed[0][1]
            left = [item for item, _ in failed]

    def _round(
        self,
        items: Sequence[Item],
        make: Callable[[Item], Made],
        size: Callable[[Item], int],
        settle: Callable[[Sequence[Made]], None],
        jobs: int | None,
    ) -> tuple[list[tuple[Item, OSError]], int]:
        """Return for which items there was no room, and of how many something was made."""
        failed: list[tuple[Item, OSError]] = []
        count = 0
        pool = ThreadPoolExecutor(jobs or os.cpu_count(), thread_name_prefix="blobstore")
        try:
            running = {pool.submit(make, item): item for item in items}
            batch = _Batch[Made]()
            while running:
                done, _ = wait(running, timeout=_BATCH_SECONDS, return_when=FIRST_COMPLETED)
                for future in done:
                    item = running.pop(future)
                    error = future.exception()
                    if isinstance(error, OSError) and error.errno in _NO_ROOM:
                        failed.append((item, error))
                    else:
                        batch.add(future.result(), size(item))
                    if batch.is_full or failed or not running:
                        count += batch.settle(settle)
                if batch.is_late:
                    count += batch.settle(settle)
        except BaseException:  # also Ctrl-C: stop the threads before their files are removed
            self._stop.set()
            raise
        finally:
            pool.shutdown(cancel_futures=True)
        return failed, count


class _Batch(Generic[Made]):
    """What is made and not settled yet."""

    def __init__(self) -> None:
        self._made: list[Made] = []
        self._size = 0
        self._since = time.monotonic()

    def add(self, made: Made, size: int) -> None:
        self._made.append(made)
        self._size += size

    @property
    def is_full(self) -> bool:
        return len(self._made) >= _BATCH or self._size >= _BATCH_BYTES

    @property
    def is_late(self) -> bool:
        return time.monotonic() - self._since >= _BATCH_SECONDS

    def settle(self, settle: Callable[[Sequence[Made]], None]) -> int:
        """Settle what there is, and return how much that was."""
        count = len(self._made)
        if count:
            settle(self._made)
        self._made, self._size, self._since = [], 0, time.monotonic()
        return count
