"""A model of 70,000 blobs, more than Linux lets a process map: create, open in every mode, gc.

The tensors are small and have names that ``create`` does not pack, as those of unknown mixtures of
experts have. Opening includes a view of every tensor. ``gc`` finds nothing to delete.
"""

from __future__ import annotations

import os
import resource
from functools import partial
from pathlib import Path
from typing import Any

import blobstore
from blobstore.core.tensor import DTYPES, TensorSpec
from blobstore.models.checks import Verify
from blobstore.models.read_strategy import Read
from blobstore.operations.maintenance.gc import collect_garbage
from blobstore.store.local import LocalStore
from tests.benchmarks import common

_COUNT = 70_000
_SHAPE = (8, 8)
_MODES: tuple[Read, ...] = ("auto", "mmap", "populate", "pread")
_LEVELS: tuple[Verify, ...] = ("size", "none")


def make_model(folder: Path, count: int) -> Path:
    """Write the model's folder."""
    specs = [TensorSpec(f"unit.{number}.weight", DTYPES["F32"], _SHAPE) for number in range(count)]
    return common.write_model(folder, specs, lambda _: [os.urandom(specs[0].nbytes)])


def _load(store: LocalStore, **options: Any) -> object:
    with blobstore.open("m", store=store, **options) as model:
        return model.state_dict()


def main() -> None:
    """Print the table."""
    options = common.arguments(__doc__)
    count = int(_COUNT * options.scale)
    with common.workspace(options.folder) as folder:
        source = make_model(folder / "model", count)
        store = LocalStore(folder / "store")
        seconds = {
            "create": [common.timed(lambda: blobstore.create(source, "m", store=store))],
            "gc": [common.timed(lambda: collect_garbage(store=store, older_than=0, force=True))],
        }
        for read in _MODES:
            for verify in _LEVELS:
                load = partial(_load, store, read=read, verify=verify)
                name = f"open, {read}, {verify}"
                seconds[name] = [common.timed(load) for _ in range(options.rounds)]
        print(f"{count:,} blobs\n")
        common.table(seconds, "create")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(f"peak memory: {peak >> 10} MiB\n")


if __name__ == "__main__":
    main()
