"""Code run in a child process: without privileges, under a umask or limits, to its end or killed.

Tests may run as root, whom no permission stops, so what is about permissions runs as ``nobody``.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOBODY = 65534


def call(
    function: Callable[[], object],
    *,
    unprivileged: bool = False,
    umask: int | None = None,
    limits: Mapping[int, int] | None = None,
) -> str:
    """Run ``function`` in a forked child; return its result as text, or ``Error: message``.

    The child has what is imported already, so that an unprivileged one need not read the code.
    """
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Later Pythons warn of threads that a fork leaves behind; the child waits for none of them.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            _restrict(unprivileged=unprivileged, umask=umask, limits=limits or {})
            outcome = str(function())
        except BaseException as error:  # noqa: BLE001 - whatever it is, the parent wants to know
            outcome = f"{type(error).__name__}: {error}"
        os.write(writer, outcome.encode()[:60_000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as stream:
        outcome = stream.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the child ended with wait status {status}"
    return outcome


def _restrict(*, unprivileged: bool, umask: int | None, limits: Mapping[int, int]) -> None:
    if umask is not None:
        os.umask(umask)
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))
    if unprivileged and os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    """Start a fresh interpreter on ``script``, with pipes to and from it."""
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextlib.contextmanager
def common_folder() -> Iterator[Path]:
    """Give a new folder that every user may use; pytest's own are closed to others."""
    folder = Path(tempfile.mkdtemp(prefix="blobstore-test-"))
    folder.chmod(0o777)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path]:
    """Give ``folder`` as a file system of ``size`` bytes; skip the test where none can be mounted."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = shutil.which("mount")
    done = mount and subprocess.run(
        [mount, "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)],
        capture_output=True,
        check=False,
    )
    if not done or done.returncode:
        pytest.skip("mounting a small file system takes privileges that this process has not")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@contextlib.contextmanager
def read_only(disk: Path) -> Iterator[None]:
    """Make a :func:`small_disk` read-only, for root too."""
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    try:
        yield
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)


def fill(disk: Path) -> Path:
    """Fill a :func:`small_disk` to its last byte; return the file that takes the space."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as stream, contextlib.suppress(OSError):
        while True:
            stream.write(bytes(4096))
    return filler
