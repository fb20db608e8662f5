"""Opening a model and viewing all of its tensors in torch, compared with safetensors' own loader.

300 tensors in 300 blobs, and 20,000 tensors in packed expert groups; safetensors reads the same tensors
from one file. Both return views of mapped memory, so no tensor's bytes are read.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
from safetensors.torch import load_file

import blobstore
from blobstore.core.tensor import DTYPES, TensorSpec
from tests.benchmarks import common

_PEER = "safetensors, one file"


def make_model(folder: Path, names: list[str], shape: tuple[int, int]) -> Path:
    """Write a model folder of bf16 tensors."""
    data = np.random.default_rng(0).integers(0, 2**16, shape, np.uint16).tobytes()
    specs = [TensorSpec(name, DTYPES["BF16"], shape) for name in names]
    return common.write_model(
        folder, specs, lambda _: [data], {"architectures": ["LlamaForCausalLM"]}
    )


def compare(folder: Path, source: Path, count: int) -> None:
    """Print the common.table of one model."""
    store = blobstore.LocalStore(folder / "store")
    blobstore.create(source, source.name, store=store)
    file = source / "model.safetensors"

    def open_all() -> object:
        # The model is returned too, as a server keeps it: closing must not be measured.
        model = blobstore.open(source.name, store=store, framework="torch")
        return model, model.state_dict()

    def view_all(*, index: bool) -> float:
        if not index:
            for file in store.folder("headers").iterdir():  # readers write files, but no folder
                file.unlink()
        return common.timed(open_all)

    common.warm(folder)
    cases = {
        _PEER: lambda: common.timed(lambda: load_file(file)),
        "blobstore, no header index": lambda: view_all(index=False),
        "blobstore, header index": lambda: view_all(index=True),
    }
    common.table(common.rounds(cases, count), _PEER)


def show(folder: Path, count: int) -> None:
    """Print the common.table of the whole process of ``blobstore show``."""

    def run(*command: str) -> float:
        return common.timed(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL))

    python = sys.executable
    main = (python, "-m", "blobstore.cli")
    cases = {
        "python -c pass": lambda: run(python, "-c", "pass"),
        "import blobstore": lambda: run(python, "-c", "import blobstore"),
        "blobstore --help": lambda: run(*main, "--help"),
        "blobstore show, 300 blobs": lambda: run(
            *main, "show", "dense", "--store", str(folder / "store")
        ),
    }
    common.table(common.rounds(cases, count), "python -c pass")


def main() -> None:
    """Print the tables."""
    options = common.arguments(__doc__)
    with common.workspace(options.folder) as folder:
        print("300 tensors of 2 MiB, 300 blobs\n")
        names = [f"model.layers.{i // 10}.mlp.p{i % 10}_proj.weight" for i in range(300)]
        dense = make_model(folder / "dense", names, (1024, 1024))
        compare(folder, dense, options.rounds * 3)
        print("20,000 tensors of 6.7 kB, 25 packed groups\n")
        names = [
            f"model.layers.{i // 800}.mlp.experts.{i % 800 // 4}.p{i % 4}_proj.weight"
            for i in range(20_000)
        ]
        compare(folder, make_model(folder / "experts", names, (55, 61)), options.rounds)
        print("Whole processes\n")
        show(folder, options.rounds)
        used = common.private_memory(
            "import blobstore, torch, blobstore.safetensors.torch\n"
            "torch.ones(1000).max()\n"
            "begin()\n"
            "model = blobstore.open('dense', store=blobstore.LocalStore(sys.argv[1]),\n"
            "                       framework='torch')\n"
            "largest = max(int(t.view(torch.int16).max()) for t in model.state_dict().values())",
            str(folder / "store"),
        )
        print(f"private memory of opening 600 MiB and reading it all: {used / 2**20:.1f} MiB\n")


if __name__ == "__main__":
    main()
