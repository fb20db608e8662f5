"""Power cuts: a disk as it is at a random instant, mounted again and looked at.

The store lies on ext4 in a file. A process creates, removes, freezes, thaws and collects there without end. At an instant
it is stopped, with all that it told before; the file is copied, which is what a disk holds when the power
goes: nothing that was still in memory. The copy is mounted, and its store checked. What was acknowledged
must be there; what was being done may be there or not, but not in part.
"""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tests.faults import disks
from tests.faults.invariants import Expected, check_store
from tests.faults.known import Known, write_models
from tests.faults.outcomes import Effort, Outcome
from tests.faults.processes import Child, nursery, workspace

_MEBIBYTES = 48
_STOPPED = {"T", "t", "Z"}
_POLL = 0.001
_LONGEST = 0.6
"""Seconds between two cuts at most: several commands."""


def run(effort: Effort, *, unsynced: str = "") -> list[Outcome]:
    """Cut the power ``effort.count`` times; with ``unsynced`` files or folders the test tests itself."""
    outcome = Outcome("power cut during create, rm, freeze, thaw and gc")
    if reason := disks.why_not(in_file=True):
        outcome.skipped = reason
        return [outcome]
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(workspace())
        disks.make_disk(folder / "disk", _MEBIBYTES)
        place = stack.enter_context(disks.mounted(folder / "disk", folder / "mount"))
        _Cuts(folder, place / "store", outcome).run(effort, unsynced)
    return [outcome]


class _Cuts:
    def __init__(self, folder: Path, store: Path, outcome: Outcome) -> None:
        self._folder = folder
        self._store = store
        self._outcome = outcome
        self._read = 0
        """Lines of the workload that were looked at."""
        *self._models, self._spare = write_models(folder / "sources", 5)
        self._spare.folder.rename(folder / "spare")  # the workload takes all folders of the sources
        self._spare = replace(self._spare, name="spare", folder=folder / "spare")

    def run(self, effort: Effort, unsynced: str) -> None:
        chance = random.Random(effort.seed)
        hooks = {"unsynced": unsynced} if unsynced else {}
        arguments = ("churn", self._folder / "sources", self._store, effort.seed)
        child = nursery().start(*arguments, hooks=hooks)
        try:
            for _ in effort:
                time.sleep(chance.uniform(0, _LONGEST))
                child.send(signal.SIGSTOP)
                self._cut(child)
                child.send(signal.SIGCONT)
        finally:
            child.kill()
            child.wait()

    def _cut(self, child: Child) -> None:
        _await_stop(child.pid)
        told = child.stdout.read_text("utf-8").splitlines()
        copy = self._folder / "copy"
        disks.copy_as_it_is(self._folder / "disk", copy)
        self._outcome.injected += 1
        how = f"cut after {told[-3:]}"
        for line in told[self._read :]:
            if line.startswith("done ") and not line.startswith("done 0 "):
                self._outcome.violate(f"{how}: {line}")
        self._read = len(told)
        with disks.mounted(copy, self._folder / "copied") as place:
            expected = _expected(told, self._models)
            self._outcome.add(check_store(place / "store", expected, self._spare), how)


def _await_stop(pid: int) -> None:
    """Wait until every thread is stopped; a call that cannot be interrupted ends before."""
    while not set(_states(pid)) <= _STOPPED:
        time.sleep(_POLL)


def _states(pid: int) -> Iterator[str]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            yield (task / "stat").read_text("ascii").rpartition(")")[2].split()[0]


def _expected(told: Sequence[str], models: Sequence[Known]) -> Expected:
    """Return what a store must hold after a workload has told this."""
    there: set[str] = set()
    pending = ""
    for line in told:
        if line.startswith("done "):
            what, _, name = pending.partition(" ")
            if what == "create":
                there.add(name)
            elif what == "rm":
                there.discard(name)
            pending = ""
        else:
            pending = line
    doubtful = pending.partition(" ")[2]
    present = [model for model in models if model.name in there and pending != f"rm {model.name}"]
    return Expected(present, [model for model in models if model.name == doubtful])
