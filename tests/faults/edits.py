"""Edits in place of safetensors files that are killed: what a reader accepts has old or new bytes.

A file that has another name, such as that of a blob, is replaced: the other name keeps its bytes, and the
edited one is wholly old or wholly new.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable, Container
from pathlib import Path
from statistics import median

import numpy as np
import safetensors
from safetensors.numpy import load_file as load_as_reference

from blobstore.errors import SafetensorError
from blobstore.safetensors.numpy import load_file, save_file
from tests.faults.known import command, write_models
from tests.faults.outcomes import EVERY, Effort, Outcome
from tests.faults.processes import Ended, nursery, workspace
from tests.faults.workloads import ALIGNMENT, changes_of

_ATTEMPTS = 50
_MEASURED = 3
_SIZE = 2**20


class Case:
    """A file that is edited, and the file that has its other name, if any."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder / "files"
        self.path = self.folder / "model.safetensors"
        self.other: Path | None = None
        self.store = folder / "store"
        self.chance = random.Random(seed)
        (self.model,) = write_models(folder / "sources", 1, size=_SIZE)
        create = ("create", self.model.folder, self.model.name, "--store", self.store)
        assert command(*create)[0] == 0

    def write(self) -> None:
        """Write a file that has no other name."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        tensors = {f"t{number}": np.full(_SIZE, number, np.uint8) for number in range(4)}
        save_file(tensors, self.path, alignment=ALIGNMENT)

    def write_link(self) -> None:
        """Give the file another name, or let it be a link."""
        self.write()
        self.other = self.folder / "other"
        if self.chance.random() < 0.5:
            self.other.hardlink_to(self.path)
        else:
            self.path.rename(self.other)
            self.path.symlink_to(self.other)

    def link_blob(self) -> None:
        """Let the file be a link to a blob of a store."""
        shutil.rmtree(self.folder, ignore_errors=True)
        how = ["--hard"] if self.chance.random() < 0.5 else []
        link = ("link", self.model.name, self.folder, *how, "--store", self.store)
        code, _, errors = command(*link)
        assert code == 0, errors
        self.path = self.chance.choice(sorted(self.folder.glob("*.safetensors")))
        (self.other,) = (
            path for path in (self.store / "blobs").iterdir() if path.samefile(self.path)
        )


CASES: dict[str, Callable[[Case], None]] = {
    "kill -9 during an edit in place": Case.write,
    "kill -9 during an edit in place of a file with two names": Case.write_link,
    "kill -9 during an edit in place of a link to a blob": Case.link_blob,
}


def run(effort: Effort, only: Container[str] = EVERY) -> list[Outcome]:
    """Kill every kind of edit ``effort.count`` times."""
    chosen = {fault: prepare for fault, prepare in CASES.items() if fault in only}
    outcomes = []
    for number, (fault, prepare) in enumerate(chosen.items()):
        outcome = Outcome(fault)
        outcomes.append(outcome)
        with workspace() as folder:
            case = Case(folder, effort.seed)
            _run(case, prepare, effort.share(len(chosen) - number), outcome)
    return outcomes


def _run(case: Case, prepare: Callable[[Case], None], effort: Effort, outcome: Outcome) -> None:
    durations: list[float] = []
    states: dict[str, int] = {}
    for number in range(effort.count * _ATTEMPTS):
        if outcome.injected == effort.count or (outcome.injected and effort.is_spent):
            break
        prepare(case)
        before = _Before(case, number)
        child = nursery().start("edit", case.path, number, hooks={"paced": number})
        delay = 0.0
        if len(durations) >= _MEASURED:
            delay = case.chance.uniform(0, median(durations[-_MEASURED:]))
            time.sleep(delay)
            child.kill()
        ended = child.wait()
        if ended.is_killed:
            outcome.injected += 1
        else:
            durations.append(ended.seconds)
        state, problem = before.judge(ended)
        states[state] = states.get(state, 0) + 1
        if problem:
            outcome.bytes_lost += before.size
            outcome.violate(f"edit {number}, killed after {delay:.4f} s: {problem}")
    outcome.notes.append(f"{outcome.fault}: {states}")


class _Before:
    """A file before it is edited, and what it is to become."""

    def __init__(self, case: Case, number: int) -> None:
        self._path = case.path
        self._other = case.other
        self._data = case.path.read_bytes()
        self._old = {name: array.tobytes() for name, array in load_file(case.path).items()}
        changes = changes_of(str(case.path), str(number))
        self._new = self._old | {name: array.tobytes() for name, array in changes.items()}
        self.size = len(self._data)

    def judge(self, ended: Ended) -> tuple[str, str]:
        """Return what the file is now, and what is wrong with that, if anything."""
        if self._other is not None and self._other.read_bytes() != self._data:
            return "", "the file of the other name has changed"
        if ended.code and not ended.is_killed:
            return "", f"exit code {ended.code}: {ended.stderr[-500:]}"
        try:
            found = self._read()
        except SafetensorError as error:
            if self._other is not None or not ended.is_killed or not self._has_more_bytes():
                return "refused", f"the file is refused: {error}"
            os.truncate(self._path, self.size)
            found = self._read()
            return "refused until it is cut", self._wrong(found)
        if found == self._new:
            return "new", ""
        if not ended.is_killed:
            return "", "it was not killed, and has not all of the new bytes"
        if found == self._old:
            return "old", ""
        return "mixed", "the file was replaced by another" if self._other else self._wrong(found)

    def _has_more_bytes(self) -> bool:
        return self._path.stat().st_size > self.size

    def _read(self) -> dict[str, bytes]:
        """Return the bytes of the tensors; both readers agree about them."""
        try:
            arrays = load_as_reference(self._path)
            found = {name: array.tobytes() for name, array in arrays.items()}
        except safetensors.SafetensorError:
            found = None
        try:
            ours = {name: array.tobytes() for name, array in load_file(self._path).items()}
        except SafetensorError:
            assert found is None, "only blobstore refuses the file"
            raise
        assert ours == found, "the readers disagree"
        return ours

    def _wrong(self, found: dict[str, bytes]) -> str:
        """Return which tensor has bytes that are neither old nor new."""
        if found.keys() not in (self._old.keys(), self._new.keys()):
            return f"the file has the tensors {sorted(found)}"
        for name, data in found.items():
            new = self._new[name]
            old = self._old.get(name, new)
            if len(data) != len(new) or not _are_mixed(data, old, new):
                return f"tensor {name} has bytes that are neither old nor new"
        return ""


def _are_mixed(data: bytes, old: bytes, new: bytes) -> bool:
    now, before, after = (np.frombuffer(part, np.uint8) for part in (data, old, new))
    return bool(np.all((now == before) | (now == after)))
