"""Space that ten fine-tunes of one base take: as files, in a store, and frozen.

    python -m tests.benchmarks.family_size --folder DIR

The first run trains the fine-tunes, which takes some minutes.
"""

from __future__ import annotations

import shutil

import numpy as np
import torch
from safetensors.torch import save_file

import blobstore
from tests.benchmarks.common import arguments, workspace
from tests.benchmarks.fine_tunes import family, pretrained

MEGA = 10**6


def stored_bytes(store: blobstore.LocalStore) -> int:
    """Return the bytes of blobs, compressed or not."""
    usage = blobstore.du(store=store)
    return usage.referenced.size


def main() -> None:
    """Print the table."""
    options = arguments(__doc__)
    with workspace(options.folder) as scratch:
        kept = (options.folder or scratch) / "trained"
        store = blobstore.LocalStore(scratch / "store")
        names, files = [], 0
        for name, weights in family(kept).items():
            folder = scratch / name
            folder.mkdir()
            tensors = {
                tensor: torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
                for tensor, values in weights.items()
            }
            save_file(tensors, folder / "model.safetensors")
            shutil.copy(pretrained() / "config.json", folder)
            files += (folder / "model.safetensors").stat().st_size
            blobstore.create(folder, name, store=store)
            names.append(name)
        shared = stored_bytes(store)
        print("| 1 base and 10 fine-tunes, bf16 | MB | of the files |")
        print("| --- | --- | --- |")
        rows = [("files in folders", files), ("in a store", shared)]
        for level in ("fast", "small"):
            blobstore.freeze(names, store=store, level=level)
            rows.append((f"frozen, --level {level}", stored_bytes(store)))
            blobstore.thaw(names, store=store)
        for what, size in rows:
            print(f"| {what} | {size / MEGA:.0f} | {size / files:.0%} |")


if __name__ == "__main__":
    main()
