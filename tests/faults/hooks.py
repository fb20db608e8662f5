"""What the system does otherwise in a child process: its clock, how much a call takes."""

from __future__ import annotations

import errno
import fcntl
import functools
import importlib
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_CACHE = re.compile(r"/\.blobstore/(claims|cold-index|headers|remotes|references-|verified-)")
_INTERRUPTIONS = 0.02
"""How many calls another process comes before."""
_LONGEST = 0.05
"""Seconds: several commands of another process."""

_PAGE = 4096
_PACE = 0.002
"""Seconds of a write."""


def install(hooks: Mapping[str, Any]) -> None:
    """Change this process as the hooks say, for its life."""
    for name, value in hooks.items():
        _HOOKS[name](value)


def _clock(seconds: float) -> None:
    """Set the clock forwards or backwards; the times of files stay those of the system."""
    now, now_ns = time.time, time.time_ns
    time.time = lambda: now() + seconds
    time.time_ns = lambda: now_ns() + int(seconds * 10**9)


def _short(seed: int) -> None:
    """Let every read and write take only a part, which a system may do at any time."""
    chance = random.Random(seed)
    write, read, pread, preadv = os.write, os.read, os.pread, os.preadv

    def part(size: int) -> int:
        return chance.randint(1, size) if size else 0

    def preadv_part(descriptor: int, buffers: Any, offset: int, *flags: int) -> int:
        first = memoryview(buffers[0]).cast("B")
        return preadv(descriptor, [first[: part(len(first))]], offset, *flags)

    os.write = (
        lambda descriptor, data: write(  # type: ignore[assignment]
            descriptor, memoryview(data).cast("B")[: part(memoryview(data).nbytes)]
        )
    )
    os.read = lambda descriptor, size: read(descriptor, part(size))
    os.pread = lambda descriptor, size, offset: pread(descriptor, part(size), offset)
    os.preadv = preadv_part


def _paced(seed: int) -> None:
    """Let writes at offsets take some pages each, and some time: a system may end a process after any page."""
    chance = random.Random(seed)
    pwrite = os.pwrite

    def part(descriptor: int, data: Any, offset: int) -> int:
        view = memoryview(data).cast("B")
        pages = len(view) // _PAGE
        time.sleep(_PACE)
        return pwrite(
            descriptor, view[: chance.randint(1, pages) * _PAGE] if pages else view, offset
        )

    os.pwrite = part


def _no_locks(_: object) -> None:
    """Let no file be locked, as on some network file systems."""

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    fcntl.flock = flock  # type: ignore[assignment]


def _vain_locks(_: object) -> None:
    """Let every process have every lock, as on some other network file systems."""
    fcntl.flock = lambda descriptor, operation: None  # type: ignore[assignment]


def _sync_threads(count: int) -> None:
    """Sync blobs by so many threads: with one, the n-th call is the same each time."""
    from blobstore.store import ingest

    ingest._SYNC_THREADS = count  # type: ignore[misc]


def _part(size: int) -> None:
    """Send uploads in parts of so many bytes."""
    from blobstore.registry import upload

    vars(upload)["PART"] = size


def _impatience(seconds: float) -> None:
    """Let a registry that fails be asked again after so many seconds for the first time."""
    from blobstore.http.retry import Patience
    from blobstore.registry import client

    client.Patience = functools.partial(Patience, first=seconds)  # type: ignore[misc,assignment,attr-defined]


def _constants(values: Mapping[str, float]) -> None:
    """Let constants have other values, by module and name."""
    for name, value in values.items():
        module, _, constant = name.rpartition(".")
        assert hasattr(importlib.import_module(module), constant)
        setattr(importlib.import_module(module), constant, value)


def _slow(seed: int) -> None:
    """Let the process be interrupted before and after calls, so that others come between them."""
    chance = random.Random(seed)

    def interrupted(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def later(*arguments: Any, **options: Any) -> Any:
            if chance.random() < _INTERRUPTIONS:
                time.sleep(chance.uniform(0, _LONGEST))
            return call(*arguments, **options)

        return later

    for name in (
        "open",
        "lstat",
        "stat",
        "unlink",
        "replace",
        "rename",
        "link",
        "scandir",
        "fsync",
    ):
        setattr(os, name, interrupted(getattr(os, name)))


def _signal_after(what: tuple[str, int]) -> None:
    """Log the paths that the main thread names, or removes from the manifests, and end it after so many.

    Those of caches do not count.
    """
    log, count = what
    done = 0

    def noted(call: Callable[..., Any], target: int, kind: re.Pattern[str]) -> Callable[..., Any]:
        @functools.wraps(call)
        def noting(*arguments: Any, **options: Any) -> Any:
            nonlocal done
            result = call(*arguments, **options)
            path = str(arguments[target])
            is_main = threading.current_thread() is threading.main_thread()
            if is_main and kind.search(path) and not _CACHE.search(path):
                done += 1
                with Path(log).open("a", encoding="utf-8") as file:
                    file.write(f"{path}\n")
                if done == count:
                    os.kill(os.getpid(), signal.SIGTERM)
            return result

        return noting

    for name in ("replace", "rename", "link"):
        setattr(os, name, noted(getattr(os, name), 1, re.compile("")))
    os.unlink = noted(os.unlink, 0, re.compile("/manifests/"))


_HOOKS: dict[str, Callable[[Any], None]] = {
    "slow": _slow,
    "clock": _clock,
    "short": _short,
    "paced": _paced,
    "no_locks": _no_locks,
    "vain_locks": _vain_locks,
    "sync_threads": _sync_threads,
    "part": _part,
    "impatience": _impatience,
    "constants": _constants,
    "signal_after": _signal_after,
}
