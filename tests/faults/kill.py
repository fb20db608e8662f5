"""Commands killed with SIGKILL at random instants, uniformly over the time that they take."""

from __future__ import annotations

import time
from collections.abc import Container
from statistics import median

from tests.faults import chains
from tests.faults.operations import OPERATIONS, Operation, Scene
from tests.faults.outcomes import EVERY, Effort, Outcome
from tests.faults.processes import nursery, workspace

_MEASURED = 3
_ATTEMPTS = 50
"""How many commands are started at most, for each that is to be killed before it ends. On a busy machine,
most of the fast ones end first."""


def victims() -> list[Operation]:
    """Return the commands that are killed."""
    return [*OPERATIONS, *chains.OPERATIONS]


def run(effort: Effort, only: Container[str] = EVERY) -> list[Outcome]:
    """Kill every command ``effort.count`` times."""
    chosen = [item for item in victims() if item.name in only]
    outcomes = []
    with workspace() as folder:
        for number, operation in enumerate(chosen):
            scene = Scene(folder / operation.name, effort.seed)
            outcomes.append(_run(operation, scene, effort.share(len(chosen) - number)))
    return outcomes


def _run(operation: Operation, scene: Scene, effort: Effort) -> Outcome:
    outcome = Outcome(f"kill -9 during {operation.name}")
    durations = _durations(operation, scene, outcome)
    for _ in range(effort.count * _ATTEMPTS):
        if outcome.injected == effort.count or (outcome.injected and effort.is_spent):
            break
        arguments = operation.prepare(scene)
        delay = scene.chance.uniform(0, median(durations[-_MEASURED:]))
        child = nursery().start("blobstore", *arguments)
        time.sleep(delay)
        child.kill()
        ended = child.wait()
        if ended.is_killed:
            outcome.injected += 1
        else:  # the machine may be less busy than before
            durations.append(ended.seconds)
        how = f"blobstore {' '.join(map(str, arguments))}, killed after {delay:.4f} s"
        if not ended.is_killed and (ended.complaint or ended.code):
            outcome.violate(f"{how}: exit code {ended.code}: {ended.stderr[-500:]}")
        outcome.add(operation.judge(scene, ended), how)
    return outcome


def _durations(operation: Operation, scene: Scene, outcome: Outcome) -> list[float]:
    """Return how long the command takes here and now, in seconds."""
    times = []
    for _ in range(_MEASURED):
        ended = nursery().run("blobstore", *operation.prepare(scene))
        times.append(ended.seconds)
        if ended.code:
            outcome.violate(f"exit code {ended.code} without any fault: {ended.stderr[-500:]}")
        outcome.add(operation.judge(scene, ended), "without any fault")
    return times
