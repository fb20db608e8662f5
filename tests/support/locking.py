"""Stores whose locks and leases are tested: other processes that hold them, and descriptors that must not leak."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from blobstore.store.local import LocalStore
from tests.support import sandbox

_HOLD = """
import sys, time
from blobstore.core.digest import Digest
from blobstore.store.local import LocalStore
store = LocalStore(sys.argv[1])
with getattr(store if sys.argv[2] == "lease" else store._locks, sys.argv[2])() as lease:
    if lease is not None:
        lease.hold([Digest.of(b"a"), Digest.of(b"b")])
    print("held", flush=True)
    time.sleep(60)
"""


@contextlib.contextmanager
def closing_store(path: Path) -> Iterator[LocalStore]:
    """Yield a store that waits for no lock; check that all files are closed at the end."""
    gc.collect()  # objects of earlier tests
    gc.freeze()  # of which no later collection has to look at any
    descriptors = len(os.listdir("/dev/fd"))
    yield LocalStore(path, lock_timeout=0.05)
    until = time.monotonic() + 10
    while len(os.listdir("/dev/fd")) > descriptors and time.monotonic() < until:
        gc.collect()  # threads of other tests may have one open for a moment
    assert len(os.listdir("/dev/fd")) <= descriptors


@contextlib.contextmanager
def holder(store: LocalStore, way: str) -> Iterator[subprocess.Popen[str]]:
    """Yield a process that holds a lock, or a lease of the digests of "a" and "b"; kill it at the end."""
    command = [sys.executable, "-c", _HOLD, str(store.root), way]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=sandbox.ROOT) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()
