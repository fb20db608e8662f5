"""Commands that are asked to end, by SIGINT, SIGTERM or both, at random instants of the time that they take."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Container
from pathlib import Path
from statistics import median

from tests.faults.operations import Operation, Scene, operations
from tests.faults.outcomes import EVERY, Effort, Outcome
from tests.faults.processes import Child, Ended, nursery, workspace

_MEASURED = 3
_ATTEMPTS = 20
"""How many commands are started at most, for each that is to be stopped before it ends."""
_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
_WAYS = ([signal.SIGINT], [signal.SIGTERM], [signal.SIGINT, signal.SIGTERM])
_PAUSE = 0.0005
_NOTE = "note: interrupted; the same command continues where this one stopped"


def run(effort: Effort, only: Container[str] = EVERY) -> list[Outcome]:
    """Stop every command ``effort.count`` times."""
    chosen = [item for item in (*operations(), *_OTHERS) if item.name in only]
    outcomes = []
    with workspace() as folder:
        for number, operation in enumerate(chosen):
            scene = Scene(folder / operation.name, effort.seed)
            outcomes.append(_run(operation, scene, effort.share(len(chosen) - number)))
    return outcomes


def names() -> list[str]:
    """Return the commands that are stopped."""
    return [operation.name for operation in (*operations(), *_OTHERS)]


def _run(operation: Operation, scene: Scene, effort: Effort) -> Outcome:
    outcome = Outcome(f"SIGINT, SIGTERM or both during {operation.name}")
    durations: list[float] = []
    for _ in range(_MEASURED):
        ended = nursery().run("blobstore", *operation.prepare(scene), "--json")
        durations.append(ended.seconds)
        outcome.add(operation.judge(scene, ended), "without any signal")
    stopped, slowest = 0, 0.0
    for number in range(effort.count * _ATTEMPTS):
        if stopped == effort.count or (stopped and effort.is_spent):
            break
        way = _WAYS[number % len(_WAYS)]
        arguments = [*operation.prepare(scene), "--json"]
        delay = scene.chance.uniform(0, median(durations[-_MEASURED:]))
        child = nursery().start("blobstore", *arguments)
        _wait_for_handler(child)
        time.sleep(delay)
        for signum in way:
            child.send(signum)
        began = time.monotonic()
        ended = child.wait()
        how = f"blobstore {' '.join(map(str, arguments))}, {way} after {delay:.4f} s"
        if ended.code:
            stopped += 1
            slowest = max(slowest, time.monotonic() - began)
            for problem in _problems(scene, ended, {_CODES[signum] for signum in way}):
                outcome.violate(f"{how}: {problem}")
        else:
            durations.append(ended.seconds)
        outcome.add(operation.judge(scene, ended), how)
    outcome.injected = stopped
    outcome.notes.append(f"{operation.name}: ended at most {slowest:.2f} s after the signal")
    return outcome


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


def _problems(scene: Scene, ended: Ended, codes: set[int]) -> list[str]:
    """Return what is wrong with a command that did not end with success."""
    if ended.code not in codes:
        return [f"exit code {ended.code}: {ended.complaint} {ended.stderr[-700:]!r}"]
    problems = []
    lines = [line for line in ended.stderr.splitlines() if line != _NOTE]
    if lines != ["blobstore: interrupted"]:
        problems.append(f"standard error is {ended.stderr[-700:]!r}")
    error = {"kind": "Interrupted", "message": "interrupted", "exit_code": ended.code}
    if ended.stdout != json.dumps({"error": error}) + "\n":
        problems.append(f"standard output is {ended.stdout[-300:]!r}")
    left = [*scene.folder.glob(".*.tmp"), *(scene.store / ".blobstore" / "tmp").glob("*")]
    left += (scene.store / ".blobstore" / "leases").glob("*")
    left += [path for path in (scene.target, *scene.folder.glob("*.out")) if path.exists()]
    if left:
        problems.append(f"it left {sorted(map(str, left))}")
    return problems


def _simple(name: str, *arguments: str) -> Operation:
    """Return a command that changes no model; a file that it writes ends in ``.out``."""
    stopped_first = next(item for item in operations() if item.name == "verify")

    def prepare(scene: Scene) -> list[object]:
        for path in scene.folder.glob("*.out"):
            path.unlink()
        words = [word.replace("FOLDER", str(scene.folder)) for word in arguments]
        return [name, *words, "--store", scene.store]

    return Operation(name, prepare, stopped_first.judge)


_OTHERS = (
    _simple("list"),
    _simple("show", "m0"),
    _simple("du"),
    _simple("page", "FOLDER/page.out"),
)
