"""Commands on the steps of a training run, which are deltas against each other: three deep in an archive."""

from __future__ import annotations

import functools
from pathlib import Path

import ml_dtypes
import numpy as np

from blobstore.archives.reader import open_archive
from tests.faults.invariants import Expected, Findings, check_store, forget
from tests.faults.known import Known
from tests.faults.operations import Operation, Scene
from tests.faults.processes import Ended
from tests.support.frozen import steps
from tests.support.models import write_folder

_DEPTH = 3
_COUNT = 20_000
"""Elements of a tensor."""


@functools.cache
def _run(folder: Path) -> list[Known]:
    """Write a model after each of some steps."""
    many = 2 * _DEPTH + 1  # chains begin with the step in the middle
    tensors = [steps(number, number, many, _COUNT) for number in range(2)]
    found = []
    for number, versions in enumerate(zip(*tensors, strict=True)):
        arrays = {
            f"t{at}": np.frombuffer(data, ml_dtypes.bfloat16) for at, data in enumerate(versions)
        }
        name = f"step{number}"
        write_folder(folder / name, arrays)
        known = {key: array.tobytes() for key, array in arrays.items()}
        found.append(Known(name, folder / name, known))
    return found


def _steps(scene: Scene) -> list[Known]:
    return _run(scene.folder / "run")


def _create(scene: Scene) -> list[str]:
    for model in _steps(scene):
        scene.must("create", model.folder, model.name)
    return [model.name for model in _steps(scene)]


def _before_freeze(scene: Scene) -> list[object]:
    """Let steps be hot, and some of them frozen."""
    names = _create(scene)
    scene.must("thaw", *names)
    if scene.chance.random() < 0.3:
        scene.must("freeze", *scene.chance.sample(names, 2))
    return ["freeze", *names, "--store", scene.store]


def _after_freeze(scene: Scene, ended: Ended) -> Findings:
    del ended  # the models are there whatever became of it
    return check_store(scene.store, Expected([*scene.kept, *_steps(scene)]), scene.spare)


def _before_unpack(scene: Scene) -> list[object]:
    """Let an archive have steps that the store has not; sometimes it has their blobs."""
    archive = scene.folder / "run.bsar"
    if not archive.exists():
        scene.must("pack", *_create(scene), archive)
        with open_archive(archive) as opened:
            depths = [len(list(opened.bases_of(number))) for number in opened.blobs.values()]
        assert max(depths) == _DEPTH
    forget(scene.store, *_steps(scene))
    if scene.chance.random() < 0.7:
        scene.must("gc", "--force", "--older-than", "0s")
    return ["unpack", archive, "--force", "--store", scene.store]


def _after_unpack(scene: Scene, ended: Ended) -> Findings:
    run = _steps(scene)
    present = [*scene.kept, *(run if ended.code == 0 else [])]
    return check_store(scene.store, Expected(present, run), scene.spare)


OPERATIONS = (
    Operation("freeze of steps", _before_freeze, _after_freeze),
    Operation("unpack of a chain", _before_unpack, _after_unpack),
)
