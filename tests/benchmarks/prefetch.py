"""Prefetching a cold safetensors file of 1 GiB in 200 bf16 tensors, compared with the disk and the reference.

    python -m tests.benchmarks.prefetch [--folder DIR] [--scale X] [--rounds N]

The file is dropped from the page cache before each run. The limit is direct reads, eight requests of 4 MiB
at a time. Every case touches all bytes at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

from blobstore.safetensors import safe_open
from tests.benchmarks import common
from tests.benchmarks.loading import drop, make_model, read_directly, touch


def prefetched(path: Path, backend: str, part: slice | None = None) -> object:
    """Load all tensors, or the same part of each, in the background."""
    with safe_open(path, "pt", backend=backend) as file:
        found = dict(file.prefetch(dict.fromkeys(file, part)))
    touch(tensor.reshape(-1) for tensor in found.values())
    return found


def referenced(path: Path) -> object:
    """Load all tensors with the reference library."""
    found = load_file(path)
    touch(found.values())
    return found


def main() -> None:
    """Print the table."""
    options = common.arguments(__doc__)
    with common.workspace(options.folder) as folder:
        nbytes = int(common.GIB * options.scale)
        make_model(folder / "model", nbytes)
        path = folder / "model" / "model.safetensors"
        half = slice(0, nbytes // (200 * 2 * 1024) // 2)

        def cold(load: Callable[[], object]) -> Callable[[], float]:
            def run() -> float:
                drop([path])
                return common.timed(load)

            return run

        limit = "direct reads"
        runs = {
            limit: cold(lambda: read_directly([path])),
            "prefetch, mmap": cold(lambda: prefetched(path, "mmap")),
            "prefetch, pread": cold(lambda: prefetched(path, "pread")),
            "prefetch of half of the rows, pread": cold(lambda: prefetched(path, "pread", half)),
            "safetensors load_file": cold(lambda: referenced(path)),
        }
        torch.set_num_threads(2)
        common.table(common.rounds(runs, options.rounds), limit, nbytes)


if __name__ == "__main__":
    main()
