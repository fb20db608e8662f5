"""Commands that are asked to end, by SIGINT, SIGTERM or both, at random instants of the time that they take."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Container, Sequence
from pathlib import Path
from statistics import median

from tests.faults.operations import Operation, Scene
from tests.faults.outcomes import EVERY, Effort, Outcome
from tests.faults.processes import Child, Ended, nursery, workspace
from tests.faults.stoppable import OUT, SERVER, operations

_MEASURED = 3
_ATTEMPTS = 20
"""How many commands are started at most, for each that is struck before it ends."""
_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
_WAYS = ([signal.SIGINT], [signal.SIGTERM], [signal.SIGINT, signal.SIGTERM])
_JSON = "--json"
_PAUSE = 0.0005
_PRINTS = {SERVER: "serving http://", "ingest by threads": "[", "ingest by processes": "["}
"""How the output begins of commands that print while they run."""
_SERVED = 1.5
"""Seconds within which a server is stopped; it has begun to serve by then, or not."""
_NOTE = "note: interrupted; the same command continues where this one stopped"


def run(effort: Effort, only: Container[str] = EVERY) -> list[Outcome]:
    """Signal every command ``effort.count`` times while it runs."""
    chosen = [item for item in operations() if item.name in only]
    during = ", ".join(item.name for item in chosen)
    outcome = Outcome(f"SIGINT, SIGTERM or both during {during}")
    with workspace() as folder:
        for number, operation in enumerate(chosen):
            scene = Scene(folder / operation.name.replace(" ", "-"), effort.seed)
            _Runs(operation, scene, outcome).stop(effort.share(len(chosen) - number))
    return [outcome]


def names() -> list[str]:
    """Return the commands that are stopped."""
    return [operation.name for operation in operations()]


def finish(name: str) -> Ended | None:
    """Ask a command to end just after it has changed its last name; return None if it changes none."""
    (operation,) = (item for item in operations() if item.name == name)
    with workspace() as folder:
        log = folder / "log"
        count = 0
        for number in range(2):  # with one seed, both do the same
            scene = Scene(folder / str(number))
            arguments = operation.prepare(scene)
            ended = nursery().run(
                "blobstore", *arguments, hooks={"signal_after": [str(log), count]}
            )
            if not log.exists():
                return None
            count = count or len(log.read_text("utf-8").splitlines())
        assert not operation.judge(scene, ended)
    return ended


class _Runs:
    """Runs of one command."""

    def __init__(self, operation: Operation, scene: Scene, outcome: Outcome) -> None:
        self._operation = operation
        self._scene = scene
        self._outcome = outcome
        self._durations: list[float] = []

    def stop(self, effort: Effort) -> None:
        """Send signals at ``effort.count`` instants, or until the time is over."""
        self._measure(min(effort.count, _MEASURED))
        stopped = late = 0
        slowest = 0.0
        for number in range(effort.count * _ATTEMPTS):
            if stopped + late == effort.count or (stopped + late and effort.is_spent):
                break
            ended, seconds = self._strike(_WAYS[number % len(_WAYS)], as_json=number % 2 == 0)
            if seconds is None:
                continue
            if ended.code in self._operation.codes:
                late += 1
            else:
                stopped += 1
            slowest = max(slowest, seconds)
        self._outcome.injected += stopped + late
        self._outcome.notes.append(
            f"{self._operation.name}: stopped {stopped} times, finished {late} times, "
            f"at most {slowest:.2f} s after the signal"
        )

    def _measure(self, times: int) -> None:
        if self._operation.name == SERVER:
            self._durations.append(_SERVED)
            return
        for _ in range(times):
            ended = nursery().run("blobstore", *self._arguments(as_json=True))
            self._durations.append(ended.seconds)
            if ended.code not in self._operation.codes:
                self._outcome.violate(f"{self._operation.name}: {ended}")
            self._judge(ended, f"{self._operation.name} without any signal")

    def _strike(
        self, way: Sequence[signal.Signals], *, as_json: bool
    ) -> tuple[Ended, float | None]:
        """Run the command and signal it; return the seconds that it took to end, None if it had ended."""
        arguments = self._arguments(as_json=as_json)
        delay = self._scene.chance.uniform(0, median(self._durations[-_MEASURED:]))
        child = nursery().start("blobstore", *arguments)
        _wait_for_handler(child)
        time.sleep(delay)
        is_struck = not _has_ended(child)
        for signum in way:
            child.send(signum)
        began = time.monotonic()
        ended = child.wait()
        seconds = time.monotonic() - began
        how = f"blobstore {' '.join(map(str, arguments))}, {way} after {delay:.4f} s"
        if ended.code in self._operation.codes:
            self._durations.append(ended.seconds)
        else:
            codes = {_CODES[signum] for signum in way}
            for problem in self._problems(ended, codes, is_json=_JSON in arguments):
                self._outcome.violate(f"{how}: {problem}")
        self._judge(ended, how)
        return ended, seconds if is_struck else None

    def _arguments(self, *, as_json: bool) -> list[object]:
        arguments = self._operation.prepare(self._scene)
        has_json = as_json and self._operation.name != SERVER
        return [*arguments, _JSON] if has_json else arguments

    def _judge(self, ended: Ended, how: str) -> None:
        self._outcome.add(self._operation.judge(self._scene, ended), how)

    def _problems(self, ended: Ended, codes: set[int], *, is_json: bool) -> list[str]:
        """Return what is wrong with a command that was stopped."""
        if ended.code not in codes:
            return [f"exit code {ended.code}: {ended.complaint} {ended.stderr[-700:]!r}"]
        problems = []
        lines = [line for line in ended.stderr.splitlines() if line != _NOTE]
        if lines != ["blobstore: interrupted"]:
            problems.append(f"standard error is {ended.stderr[-700:]!r}")
        error = {"kind": "Interrupted", "message": "interrupted", "exit_code": ended.code}
        if is_json:
            is_right = ended.stdout == json.dumps({"error": error}) + "\n"
        else:
            begin = _PRINTS.get(self._operation.name)
            is_right = not ended.stdout or (begin is not None and ended.stdout.startswith(begin))
        if not is_right:
            problems.append(f"standard output is {ended.stdout[-300:]!r}")
        scene = self._scene
        left = [*scene.folder.glob(".*.tmp"), *(scene.store / ".blobstore" / "tmp").glob("*")]
        left += (scene.store / ".blobstore" / "leases").glob("*")
        left += [path for path in (scene.target, *scene.folder.glob(f"*{OUT}*")) if path.exists()]
        if left:
            problems.append(f"it left {sorted(map(str, left))}")
        return problems


def _wait_for_handler(child: Child) -> None:
    """Wait until the command records signals: before that, they are the interpreter's."""
    status = Path(f"/proc/{child.pid}/status")
    bit = 1 << (signal.SIGTERM - 1)
    while True:
        try:
            lines = status.read_text("ascii").splitlines()
        except OSError:  # it has ended, or there is no /proc
            return
        caught = next((line for line in lines if line.startswith("SigCgt:")), None)
        if caught is None or int(caught.split()[1], 16) & bit:
            return
        time.sleep(_PAUSE)


def _has_ended(child: Child) -> bool:
    try:
        status = Path(f"/proc/{child.pid}/stat").read_text("utf-8", "replace")
    except OSError:  # there is no /proc
        return False
    return status.rpartition(")")[2].split()[0] == "Z"
