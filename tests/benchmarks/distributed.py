"""Import of a folder of ``torch.distributed.checkpoint``, compared with that of a safetensors file.

The same bf16 weights of 2 GiB in 300 tensors, in pieces of rows and in pieces of columns, as four processes
would save them.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import blobstore
from blobstore.safetensors.torch import load_file
from tests.benchmarks import common
from tests.benchmarks.create import make_model
from tests.support.distributed_folders import grid, write_folder

_RANKS = 4
_THREADS = 2
_FIRST = "safetensors"


def main() -> None:
    """Print the table."""
    options = common.arguments(__doc__)
    with common.workspace(options.folder) as folder:
        nbytes = int(2 * common.GIB * options.scale)
        sources = {_FIRST: make_model(folder / "model", nbytes)}
        weights = load_file(sources[_FIRST] / "model.safetensors")
        for what, counts in (("rows", (_RANKS,)), ("columns", (1, _RANKS))):
            tensors = {
                ("model", name): (tensor, grid(tensor.shape, *counts))
                for name, tensor in weights.items()
            }
            sources[f"pieces of {what}"] = write_folder(folder / what, tensors, ranks=_RANKS)
        del weights

        def create(source: Path) -> float:
            store = blobstore.LocalStore(folder / "store")
            taken = common.timed(
                lambda: blobstore.create(source, "model", store=store, jobs=_THREADS)
            )
            shutil.rmtree(folder / "store")
            return taken

        def prepare() -> None:
            os.sync()  # do not measure the writeback of other processes
            for source in sources.values():
                common.warm(source)

        cases = {name: lambda source=source: create(source) for name, source in sources.items()}
        print(
            f"{nbytes / common.GIB:.2f} GiB bf16, 300 tensors, {_RANKS} files, {_THREADS} threads\n"
        )
        common.table(common.rounds(cases, options.rounds, prepare), _FIRST, nbytes)
        script = (
            "from blobstore.sources.open import open_source\n"
            "begin()\n"
            "source = open_source(sys.argv[1])\n"
            "buffer = memoryview(bytearray(1 << 20))\n"
            "for name in source.specs:\n"
            "    for _ in source.read(name, buffer): pass"
        )
        for name, source in sources.items():
            used = common.private_memory(script, str(source))
            print(f"private memory of reading {name}: {used / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
