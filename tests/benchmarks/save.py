"""Saving a state dict of 1 GiB in 300 bf16 tensors, compared with the limits of the machine.

The limit is that of an import: two threads hash the bytes, write them to a file each, and sync it as they go.
A save in the background, after a first one, is compared with one copy of the tensors to memory that is there.
"""

from __future__ import annotations

import os
import shutil

import torch

import blobstore
from blobstore.safetensors.torch import load_file
from tests.benchmarks import common
from tests.benchmarks.create import hash_and_write, make_model


def main() -> None:
    """Print the tables."""
    options = common.arguments(__doc__)
    with common.workspace(options.folder) as folder:
        nbytes = int(common.GIB * options.scale)
        weights = make_model(folder / "model", nbytes) / "model.safetensors"
        tensors = load_file(weights)
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}

        def limit() -> float:
            taken = common.timed(lambda: hash_and_write(weights, folder / "limit", sync_early=True))
            for number in range(2):
                (folder / f"limit{number}").unlink()
            return taken

        def save() -> float:
            store = blobstore.LocalStore(folder / "new")
            taken = common.timed(lambda: blobstore.save(tensors, "model", store=store, jobs=2))
            shutil.rmtree(folder / "new")
            return taken

        def in_background() -> float:
            saves = []
            store = blobstore.LocalStore(folder / "new")
            taken = common.timed(
                lambda: saves.append(blobstore.save(tensors, "m", store=store, background=True))
            )
            saves[0].result()
            shutil.rmtree(folder / "new")
            return taken

        buffers = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}

        def copy() -> float:
            return common.timed(
                lambda: [buffers[name].copy_(tensor) for name, tensor in tensors.items()]
            )

        def prepare() -> None:
            os.sync()
            common.warm(weights)

        print(f"{nbytes / common.GIB:.2f} GiB bf16, {len(tensors)} tensors, 2 threads\n")
        best = "sha256 + write + sync concurrently"
        common.table(
            common.rounds({best: limit, "save, new": save}, options.rounds, prepare), best, nbytes
        )
        best = "copy each tensor"
        copies = {best: copy, "save in the background, until it returns": in_background}
        common.table(common.rounds(copies, options.rounds, prepare), best, nbytes)


if __name__ == "__main__":
    main()
