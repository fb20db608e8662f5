"""Many processes at once in one store: creating, removing, collecting, verifying and loading.

Nothing that is reachable may ever be missing: models that are there throughout can be opened at any time,
and every tensor has the bytes that it must have.
"""

from __future__ import annotations

import re

from tests.faults.invariants import Expected, Findings, check_store, forget
from tests.faults.known import command, write_models
from tests.faults.outcomes import Effort, Outcome
from tests.faults.processes import LIMIT, nursery, workspace
from tests.faults.workloads import SWAPPED

_PROCESSES = 8
_MODELS = 6
_DONE = re.compile(r"done (\d+)")


def run(effort: Effort) -> list[Outcome]:
    """Let them work for ``effort.count`` seconds in all."""
    outcome = Outcome(f"{_PROCESSES} processes at once (operations)")
    seconds = min(effort.count, effort.seconds)
    with workspace() as folder:
        sources, store = folder / "sources", folder / "store"
        models = write_models(sources, _MODELS)
        swapped = models[0].called(SWAPPED)
        for model in (*models, swapped):
            command("create", model.folder, model.name, "--store", store)
        children = [
            nursery().start(
                *("mingle", sources, store, effort.seed + number, seconds),
                hooks={"slow": effort.seed + number},
            )
            for number in range(_PROCESSES)
        ]
        for number, child in enumerate(children):
            ended = child.wait(seconds + LIMIT)
            seed = effort.seed + number
            if ended.code:
                outcome.violate(f"process of seed {seed}: exit code {ended.code}: {ended.stderr}")
            for line in ended.stdout.splitlines():
                if match := _DONE.fullmatch(line):
                    outcome.injected += int(match[1])
                else:
                    _tell(outcome, f"process of seed {seed}: {line}")
        forget(store, swapped)
        outcome.add(check_store(store, Expected(models[::2], models[1::2])), "at the end")
    return [outcome]


def _tell(outcome: Outcome, line: str) -> None:
    """Count what a process has told."""
    if "BlobMissing" in line or "BlobDamaged" in line or "other bytes" in line:
        outcome.add(Findings(names_lost={line: "while others worked"}), "at random")
    else:
        outcome.violate(line)
