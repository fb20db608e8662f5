"""System calls that fail: the n-th of every kind, for every n, during every command that writes.

A fault may not be swallowed. The command fails with one clear line, or, where the call was for a cache,
a look, or could be made again, it succeeds; the store is whole in both cases. Where the fault is the
death of the process, it strikes at the boundary of every call that changes something.
"""

from __future__ import annotations

import random
import re
from collections.abc import Container, Sequence

from tests.faults import tracing
from tests.faults.operations import OPERATIONS, Operation, Scene
from tests.faults.outcomes import EVERY, Effort, Outcome
from tests.faults.processes import Ended, workspace
from tests.faults.tracing import Fault

_FULL, _BROKEN, _AGAIN = "error=ENOSPC", "error=EIO", "error=EINTR"
_QUOTA = "error=EDQUOT"
"""As ENOSPC; network file systems report it only when the bytes are synced, or the file is closed."""
_DEATH = "signal=KILL"
FAULTS = {
    "fsync": (_BROKEN, _FULL, _QUOTA, _AGAIN, _DEATH),
    "fdatasync": (_BROKEN, _FULL, _QUOTA, _AGAIN, _DEATH),
    "write": (_FULL, _QUOTA, _BROKEN, _AGAIN, "retval=0", _DEATH),
    "pwrite64": (_FULL, _QUOTA, _BROKEN, _AGAIN, _DEATH),
    "rename": (_FULL, _QUOTA, _BROKEN, _AGAIN, _DEATH),
    "renameat": (_FULL, _QUOTA, _BROKEN, _AGAIN, _DEATH),
    "renameat2": (_FULL, _QUOTA, _BROKEN, _AGAIN, _DEATH),
    "link": (_FULL, _QUOTA, _BROKEN, _DEATH),
    "linkat": (_FULL, _QUOTA, _BROKEN, _DEATH),
    "unlink": (_BROKEN, "error=EBUSY", _DEATH),
    "unlinkat": (_BROKEN, "error=EBUSY", _DEATH),
    "rmdir": (_BROKEN, _DEATH),
    "mkdir": (_FULL, _QUOTA, _BROKEN, _DEATH),
    "mkdirat": (_FULL, _QUOTA, _BROKEN, _DEATH),
    "ftruncate": (_FULL, _QUOTA, _BROKEN, _AGAIN, _DEATH),
    "fallocate": (_FULL, _QUOTA, _BROKEN, _AGAIN, _DEATH),
    "fchmod": (_BROKEN, _DEATH),
    "openat": (_FULL, _QUOTA, _BROKEN, _AGAIN, "error=EMFILE", _DEATH),
    "flock": (_BROKEN, _AGAIN, "error=ENOLCK", _DEATH),
    "close": (_BROKEN, _AGAIN),
    "mmap": ("error=ENOMEM",),
    "read": (_BROKEN, _AGAIN),
    "pread64": (_BROKEN, _AGAIN, "retval=0"),
    "preadv": (_BROKEN, _AGAIN, "retval=0"),
    "preadv2": (_BROKEN, _AGAIN, "retval=0"),
    "getdents64": (_BROKEN,),
    "newfstatat": (_BROKEN,),
}
"""What happens to each kind of call. Those that a command does not make are left out."""
_CHANGES = re.compile(r"O_CREAT|O_WRONLY|O_RDWR")
_CACHE = re.compile(r"/\.blobstore/(headers|remotes|references-|verified-|\.\d+-\w+\.tmp)")
_CODE = re.compile(r"\.(py|so)\b|__pycache__")
"""Modules that Python loads when they are needed first."""
_LEASE = re.compile(r"/\.blobstore/(lock|leases/)")
_READERS = {"export", "link", "pack"}
"""Commands that take a lease only if they can, because reading a store needs no permission to write."""
_RETRIED = re.compile(r"/\.blobstore/(tmp/|cold-index)")
_RETRYING = {"freeze", "thaw"}
"""Commands that retry a file that did not fit, after they have freed some space."""
_MUST_FAIL = {
    *("fsync", "fdatasync", "write", "pwrite64", "rename", "renameat", "renameat2"),
    *("ftruncate", "flock", "openat"),
}
"""Calls without which nothing is kept. The rest may fail unnoticed, if the store is whole: a folder
that could not be made may be there already, and what could not be linked is renamed."""


def run(
    effort: Effort, only: Container[str] = EVERY, calls: Container[str] = EVERY
) -> list[Outcome]:
    """Let calls fail: all of them, or ``effort.count`` of each command, chosen at random."""
    if reason := tracing.why_not():
        return [Outcome("failing system calls", skipped=reason)]
    chosen = [item for item in OPERATIONS if item.name in only]
    rows: dict[str, Outcome] = {}
    with workspace() as folder:
        for number, operation in enumerate(chosen):
            sweep = _Sweep(operation, Scene(folder / operation.name, effort.seed), calls, rows)
            sweep.run(effort.share(len(chosen) - number))
    names = ", ".join(operation.name for operation in chosen)
    for row in rows.values():
        row.fault += f" during {names}"
    return [rows[kind] for kind in sorted(rows)]


class _Sweep:
    """All faults of one command."""

    def __init__(
        self, operation: Operation, scene: Scene, calls: Container[str], rows: dict[str, Outcome]
    ) -> None:
        self._operation = operation
        self._scene = scene
        self._calls = calls
        self._log = scene.folder / "calls"
        self._rows = rows

    def run(self, effort: Effort) -> None:
        """Inject as many as there is time for, in an order that finds most soon."""
        tried = 0
        faults = self._faults()
        random.Random(effort.seed).shuffle(faults)
        for number in effort:
            if number == len(faults):
                break
            self._try(faults[number])
            tried = number + 1
        self._row("EIO").notes.append(f"{self._operation.name}: {tried} of {len(faults)} faults")

    def _faults(self) -> list[Fault]:
        """Return all faults; a run of the command without faults shows how many there are."""
        row = self._row("EIO")
        ended = self._command(None)
        if ended.code:
            row.violate(f"exit code {ended.code} without any fault: {ended.stderr[-500:]}")
        made = tracing.occurrences(self._log)
        row.add(self._operation.judge(self._scene, ended), "without any fault")
        return [
            tracing.Fault(call, what, when)
            for call, kinds in FAULTS.items()
            if call in self._calls
            for what in kinds
            for when in made.get(call, ())
        ]

    def _try(self, fault: Fault) -> None:
        ended = self._command(fault)
        struck = tracing.struck(self._log)
        row = self._row(_kind(fault))
        if any(_CODE.search(line) for line in struck):
            # The command did not start, but what was prepared for it must not meet the next one.
            row.add(self._operation.judge(self._scene, ended), f"{self._operation.name}, {fault}")
            return
        row.injected += bool(struck)
        where = "; ".join(line.partition(" ")[2] for line in struck)[:400]
        how = f"{self._operation.name}, {fault}: {where}: exit code {ended.code}"
        if self._operation.name in _RETRYING and fault.what in {_FULL, _QUOTA}:
            struck = [line for line in struck if not _RETRIED.search(line)]
        if self._operation.name in _READERS:
            struck = [line for line in struck if not _LEASE.search(line)]
        if problem := _problem(fault, ended, struck):
            row.violate(f"{how}: {problem}")
        row.add(self._operation.judge(self._scene, ended), how)

    def _command(self, fault: Fault | None) -> Ended:
        arguments = self._operation.prepare(self._scene)
        if self._operation.name in {
            "create",
            "verify",
            "repair",
            "freeze",
            "thaw",
            "pack",
            "unpack",
        }:
            arguments += ["--jobs", 1]
        return tracing.traced(
            "blobstore",
            *arguments,
            calls=fault.call if fault else ",".join(FAULTS),
            log=self._log,
            fault=fault,
        )

    def _row(self, kind: str) -> Outcome:
        return self._rows.setdefault(kind, Outcome(kind))


def _kind(fault: Fault) -> str:
    if fault.what == _DEATH:
        return "death at a system call"
    return fault.what.replace("error=", "").replace("retval=0", "nothing read or written")


def _problem(fault: Fault, ended: Ended, struck: Sequence[str]) -> str:
    """Return how the command's end does not fit the fault."""
    if fault.what == _DEATH:
        return "" if ended.is_killed or not struck else "it has survived SIGKILL"
    is_mute = any("write(2<" in line for line in struck)
    if is_mute and ended.code and ended.code > 0:
        return ""
    if ended.complaint:
        return ended.complaint
    harms = [line for line in struck if _is_harm(fault, line)]
    if "the disk is full, so" in ended.stderr:  # the command says what it went on without
        return ""
    return "the fault was swallowed" if harms and not ended.code else ""


def _is_harm(fault: Fault, line: str) -> bool:
    if fault.what in {_AGAIN, "retval=0"} or fault.call not in _MUST_FAIL or _CACHE.search(line):
        return False
    if fault.call == "flock":
        return "LOCK_UN" not in line  # closing the file unlocks it too
    return fault.call != "openat" or _CHANGES.search(line) is not None
