"""Import many small models on Dask workers of this machine.

    python -m tests.benchmarks.ingest [--folder DIR] [--scale X] [--rounds N]

Each worker is a process with one thread. The models are on a disk of this machine and in the page cache, and
share a third of their tensors. The time is that of all imports; the cluster runs already.
"""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed import LocalCluster

from blobstore.operations.ingest.ingest import Item, ingest
from blobstore.store.local import LocalStore
from tests.benchmarks import common
from tests.support.models import write_folder

if TYPE_CHECKING:
    from collections.abc import Sequence

_MODELS = 50


def make_models(folder: Path, scale: float) -> list[Item]:
    """Write models of 24 MB each, a third of which they share."""
    random = np.random.default_rng(0)
    count = max(1, int(scale * 2**20))
    shared: dict[str, Any] = {
        f"shared.{part}": random.standard_normal(count, np.float32) for part in range(2)
    }
    found = []
    for number in range(_MODELS):
        own = {f"own.{part}": random.standard_normal(count, np.float32) for part in range(4)}
        path = write_folder(folder / f"model-{number}", shared | own)
        found.append(Item(str(path), f"model-{number}:latest"))
    return found


def run(items: Sequence[Item], target: Path, address: str) -> float:
    """Return the seconds of importing all models into a new store."""
    shutil.rmtree(target, ignore_errors=True)
    os.sync()
    executor = address.replace("tcp://", "dask://")
    seconds = common.timed(lambda: _check(ingest(items, target, executor=executor)))
    assert len(list(LocalStore(target).references())) == _MODELS
    return seconds


def _check(models: Sequence[Any]) -> None:
    assert not [model.error for model in models if model.error]


def main() -> None:
    """Print the table."""
    options = common.arguments(__doc__)
    settings: dict[str, Any] = {
        "threads_per_worker": 1,
        "dashboard_address": None,
        "host": "127.0.0.1",
    }
    with common.workspace(options.folder) as folder:
        items = make_models(folder / "models", options.scale)
        common.warm(folder / "models")
        size = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
        with (
            LocalCluster(n_workers=1, local_directory=folder / "one", **settings) as one,
            LocalCluster(n_workers=2, local_directory=folder / "two", **settings) as two,
        ):
            cases = {
                f"{len(cluster.workers)} workers": partial(
                    run, items, folder / "store", cluster.scheduler_address
                )
                for cluster in (one, two)
            }
            common.table(common.rounds(cases, options.rounds), "1 workers", size)


if __name__ == "__main__":
    main()
