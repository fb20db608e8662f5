"""Shared parts of the benchmarks: inputs, interleaved rounds, and tables.

Each round runs every case of a table once, so that a slow phase of the machine affects all of them.
Quote the ratios of medians; milliseconds differ from day to day.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from typing_extensions import Buffer

from blobstore.core.tensor import TensorSpec
from tests.support.models import write_safetensors

GIB = 2**30


def arguments(
    doc: str | None, add: Callable[[argparse.ArgumentParser], object] = lambda _: None
) -> argparse.Namespace:
    """Parse the options that every benchmark takes, and those that ``add`` adds."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument(
        "--rounds", type=int, default=5, help="rounds to count, after a warm-up round"
    )
    parser.add_argument("--folder", type=Path, help="folder for the files; needs space")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="size of the inputs, for a quick try"
    )
    add(parser)
    return parser.parse_args()


@contextmanager
def workspace(folder: Path | None) -> Iterator[Path]:
    """Yield a folder for the inputs, and remove it afterwards."""
    with tempfile.TemporaryDirectory(prefix="blobstore-bench-", dir=folder) as name:
        yield Path(name)


def write_model(
    folder: Path,
    specs: Iterable[TensorSpec],
    read: Callable[[str], Iterable[Buffer]],
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write a model folder whose tensors have the bytes that ``read`` returns by name."""
    folder.mkdir(parents=True)
    write_safetensors(folder / "model.safetensors", specs, read)
    (folder / "config.json").write_text(json.dumps(config or {}))
    return folder


def warm(path: Path) -> None:
    """Read a file or all files below a folder into the page cache."""
    files = [path] if path.is_file() else [item for item in path.rglob("*") if item.is_file()]
    for file in files:
        with file.open("rb", buffering=0) as stream:
            buffer = bytearray(1 << 22)
            while stream.readinto(buffer):
                pass


def rounds(
    cases: Mapping[str, Callable[[], float]], count: int, before: Callable[[], None] | None = None
) -> dict[str, list[float]]:
    """Return the seconds of every case in ``count`` rounds; each case times itself."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(count + 1):
        for name, case in cases.items():
            if before is not None:
                before()
            taken = case()
            if number:
                seconds[name].append(taken)
    return seconds


def borrow_memory(nbytes: int) -> None:
    """Allocate and free memory, so that the system has it ready for the next case.

    A virtual machine may return freed memory to its host. Getting it back takes up to 2 s/GiB, which
    only the first case would pay.
    """
    # Shared memory, which is what Python makes otherwise, comes in small pages.
    with mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        memory[:: mmap.PAGESIZE] = bytes(len(range(0, nbytes, mmap.PAGESIZE)))


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that ``work`` takes. Its result is freed after the measurement."""
    started = time.perf_counter()
    result = work()
    taken = time.perf_counter() - started
    del result
    return taken


def table(seconds: Mapping[str, list[float]], limit: str, nbytes: int = 0) -> None:
    """Print a Markdown table with ratios to the case ``limit``."""
    base = statistics.median(seconds[limit])
    rate = "| GB/s " if nbytes else ""
    print(f"| case | median s | min | max {rate}| of `{limit}` |")
    print(f"| --- | --- | --- | --- {'| --- ' if nbytes else ''}| --- |")
    for name, samples in seconds.items():
        middle = statistics.median(samples)
        speed = f"| {nbytes / middle / 1e9:.2f} " if nbytes else ""
        print(
            f"| {name} | {middle:.4f} | {min(samples):.4f} | {max(samples):.4f} {speed}"
            f"| {middle / base:.2f} |"
        )
    print()


def private_memory(script: str, *args: str) -> int:
    """Return the most private memory that a fresh interpreter needs for ``script``, in bytes.

    This is the peak of anonymous memory, without the memory in use when ``script`` calls ``begin()``.
    """
    code = f"{_PRIVATE_MEMORY}\n{script}\nreport()"
    result = subprocess.run(
        [sys.executable, "-c", code, *args],
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"PYTHONPATH": "."},
    )
    return int(result.stdout.split()[-1])


# RssAnon has no high-water mark of its own, so a thread samples it.
_PRIVATE_MEMORY = """
import re, sys, threading, time
def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
peak = base = 0
def sample():
    global peak
    while True:
        peak = max(peak, anonymous())
        time.sleep(0.002)
def begin():
    global base, peak
    base = peak = anonymous()
    threading.Thread(target=sample, daemon=True).start()
def report():
    print(max(peak, anonymous()) - base)
"""
