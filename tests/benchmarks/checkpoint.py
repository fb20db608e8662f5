"""Opening a PyTorch checkpoint compared with ``torch.load``, and importing it compared with safetensors.

``torch.load`` maps the file and reads it with its restricted pickle reader, its fastest safe way. Both
sides end with a view of every tensor.
"""

from __future__ import annotations

import gc
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file

import blobstore
from blobstore.sources.pytorch.checkpoint import open_checkpoint
from tests.benchmarks import common
from tests.benchmarks.create import make_model

_PEER = "torch.load, mmap, weights_only"
_THREADS = 2
_SMALL = 20_000


def _collect() -> None:
    gc.collect()


def compare_opening(path: Path, count: int) -> None:
    """Print the common.table of one checkpoint."""

    def view_all() -> object:
        with open_checkpoint(path) as checkpoint:
            return checkpoint.views()

    cases = {
        _PEER: lambda: common.timed(lambda: torch.load(path, mmap=True, weights_only=True)),
        "open_checkpoint, all views": lambda: common.timed(view_all),
    }
    common.warm(path)
    # Collect garbage first, so that no case pays for that of another.
    common.table(common.rounds(cases, count, _collect), _PEER)


def compare_creating(folder: Path, sources: dict[str, Path], count: int, nbytes: int) -> None:
    """Print the tables of imports, into an empty store and into one that has it all."""
    full = blobstore.LocalStore(folder / "full")

    def present(source: Path) -> float:
        return common.timed(lambda: blobstore.create(source, "model", store=full, jobs=_THREADS))

    def new(source: Path) -> float:
        store = blobstore.LocalStore(folder / "new")
        taken = common.timed(lambda: blobstore.create(source, "model", store=store, jobs=_THREADS))
        shutil.rmtree(folder / "new")
        return taken

    def prepare() -> None:
        os.sync()  # do not measure the writeback of other processes
        for source in sources.values():
            common.warm(source)

    for source in sources.values():
        present(source)
    first = next(iter(sources))
    for what, work in (("new", new), ("all present", present)):
        cases = {
            f"create from {name}, {what}": lambda source=source, work=work: work(source)
            for name, source in sources.items()
        }
        common.table(common.rounds(cases, count, prepare), f"create from {first}, {what}", nbytes)


def main() -> None:
    """Print the tables."""
    options = common.arguments(__doc__)
    with common.workspace(options.folder) as folder:
        nbytes = int(2 * common.GIB * options.scale)
        model = make_model(folder / "model", nbytes)
        path = folder / "model.pth"
        torch.save(load_file(model / "model.safetensors"), path)
        print(f"{nbytes / common.GIB:.2f} GiB bf16, 300 tensors\n")
        compare_opening(path, options.rounds * 3)
        compare_creating(folder, {"safetensors": model, ".pth": path}, options.rounds, nbytes)
        used = common.private_memory(
            "from blobstore.sources.pytorch.checkpoint import open_checkpoint\n"
            "import numpy\n"
            "begin()\n"
            "with open_checkpoint(sys.argv[1]) as checkpoint:\n"
            "    total = sum(int(numpy.frombuffer(view.data, 'u2').max())\n"
            "                for view in checkpoint.views().values())",
            str(path),
        )
        print(f"private memory of opening it and reading it all: {used / 2**20:.1f} MiB\n")
        small = {f"layers.{index}.weight": torch.randn(256) for index in range(_SMALL)}
        torch.save(small, folder / "small.pth")
        print(f"{_SMALL:,} f32 tensors of 1 KiB\n")
        compare_opening(folder / "small.pth", options.rounds)


if __name__ == "__main__":
    main()
