"""System calls of a child counted and made to fail by strace.

The child stops itself when all is imported, strace attaches, and the child goes on. So counts begin with
the command's own first call, and only its calls fail: Python's start is not what is tested. strace counts
calls by thread; with one thread of each kind (``--jobs 1``, ``sync_threads``) the n-th is always the same.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from tests.faults.processes import Child, Ended, nursery

_LINE = re.compile(r"(\d+) +(\w+)\(")
_NOWHERE = "MAP_ANONYMOUS"
_PATIENCE = 120.0
_POLL = 0.0005


class Fault(NamedTuple):
    """What happens to the n-th call of each thread: an error's name, a value returned, or a signal."""

    call: str
    what: str
    """As strace spells it: ``error=EIO``, ``retval=0`` or ``signal=KILL``."""
    when: int

    def __str__(self) -> str:
        return f"inject={self.call}:{self.what}:when={self.when}"


def why_not() -> str:
    """Return why system calls cannot be made to fail here, empty if they can."""
    if sys.platform != "linux":
        return "strace is for Linux"
    if shutil.which("strace") is None:
        return "strace is not installed"
    probe = subprocess.run(
        [
            "strace",
            "-qq",
            "-e",
            "trace=mkdir,mkdirat",
            "-e",
            "inject=mkdir,mkdirat:error=EIO",
            "mkdir",
            "/tmp",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if "INJECTED" not in probe.stderr:
        return f"strace may not trace here: {probe.stderr.strip()[-200:]}"
    return ""


def traced(*call: object, calls: str, log: Path, fault: Fault | None = None) -> Ended:
    """Run a command with one fault, or none; ``calls`` of it are logged."""
    child = nursery().start(*call, stopped=True, hooks={"sync_threads": 1})
    _await(child, "State:\tT")
    arguments = ["strace", "-f", "-y", "-qq", "-o", str(log), "-e", f"trace={calls}"]
    if fault is not None:
        arguments += ["-e", str(fault)]
    tracer = subprocess.Popen(
        [*arguments, "-p", str(child.pid)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:
        _await(child, f"TracerPid:\t{tracer.pid}")
        child.send(signal.SIGCONT)
        return child.wait()
    finally:
        child.kill()
        with contextlib.suppress(ProcessLookupError):
            tracer.send_signal(signal.SIGTERM)
        assert tracer.stderr is not None
        tracer.communicate()


def occurrences(log: Path) -> dict[str, list[int]]:
    """Return which calls of each kind are made, counted by the threads that make them.

    Of maps only those of files: an interpreter that has no memory for itself may hang.
    """
    made: dict[tuple[str, str], list[str]] = {}
    for line in log.read_text("utf-8", "replace").splitlines():
        if match := _LINE.match(line):
            made.setdefault((match[1], match[2]), []).append(line)
    found: dict[str, set[int]] = {}
    for (_, call), lines in made.items():
        found.setdefault(call, set()).update(range(1, len(lines) + 1))
    for (_, call), lines in made.items():
        if call == "mmap":
            found[call] -= {number for number, line in enumerate(lines, 1) if _NOWHERE in line}
    return {call: sorted(numbers) for call, numbers in found.items()}


def struck(log: Path) -> list[str]:
    """Return the calls that were made to fail, as strace tells them."""
    return [
        line
        for line in log.read_text("utf-8", "replace").splitlines()
        if "(INJECTED)" in line or "killed by SIGKILL" in line
    ]


def _await(child: Child, line: str) -> None:
    deadline = time.monotonic() + _PATIENCE
    while line not in Path(f"/proc/{child.pid}/status").read_text("ascii", "replace"):
        assert time.monotonic() < deadline, f"process {child.pid} did not come to {line!r}"
        time.sleep(_POLL)
