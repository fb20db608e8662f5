"""Loading a bf16 model of 8 GiB from the page cache onto a CUDA device, compared with other loaders.

The limit is a copy from pinned memory to the card in the same run. Every round first frees torch's unused
memory, on the device and pinned on the host, so that each loader allocates its own, as in a server that
starts. The pinned memory of the limit is allocated before.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import blobstore
from blobstore.core.tensor import DTYPES, TensorSpec
from tests.benchmarks import common

_BLOCKS = 32
_BLOCK = {
    "q_proj": 4096,
    "k_proj": 1024,
    "v_proj": 1024,
    "o_proj": 4096,
    "gate_proj": 8192,
    "up_proj": 8192,
    "down_proj": 8192,
    "norm": 1,
}
"""Rows of 4096 elements."""
_ROW = 4096 * 2
_PINNED = 256 << 20
_LIMIT = "pinned memory to the device"


def make_model(folder: Path, nbytes: int) -> Path:
    """Write a model folder of about ``nbytes``, with the shapes of a Llama."""
    scale = nbytes / (_BLOCKS * sum(_BLOCK.values()) * _ROW)
    specs = [
        TensorSpec(
            f"model.layers.{block}.{name}.weight", DTYPES["BF16"], (max(int(rows * scale), 1), 4096)
        )
        for block in range(_BLOCKS)
        for name, rows in _BLOCK.items()
    ]
    rows = {spec.name: spec.shape[0] for spec in specs}
    return common.write_model(
        folder, specs, lambda name: (os.urandom(_ROW) for _ in range(rows[name]))
    )


def free_unused_memory() -> None:
    """Free the memory that torch caches."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    if hasattr(torch._C, "_host_emptyCache"):  # there is no public way
        torch._C._host_emptyCache()


def finished(work: Callable[[], Any]) -> float:
    """Return the seconds until the device has done ``work``."""

    def both() -> Any:
        result = work()
        torch.cuda.synchronize()
        return result

    return common.timed(both)


def pinned_copies(nbytes: int) -> Callable[[], object]:
    """Return copies of as many bytes, the limit."""
    size = min(_PINNED, nbytes)
    source = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device="cuda", pin_memory=False)

    def work() -> None:
        left = nbytes
        while left:
            count = min(size, left)
            target[:count].copy_(source[:count], non_blocking=True)
            left -= count

    return work


def with_fastsafetensors(file: Path) -> object:
    """Load by fastsafetensors, without direct storage; its tensors share one allocation."""
    from fastsafetensors import fastsafe_open

    with fastsafe_open([str(file)], device="cuda:0", nogds=True) as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping


def main() -> None:
    """Print the tables."""
    options = common.arguments(__doc__)
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device, and torch sees none here")
    with common.workspace(options.folder) as folder:
        source = make_model(folder / "model", int(8 * common.GIB * options.scale))
        file = source / "model.safetensors"
        nbytes = file.stat().st_size
        store = blobstore.LocalStore(folder / "store")
        blobstore.create(source, "m", store=store)

        def ours(**how: Any) -> object:
            with blobstore.open("m", store=store, framework="torch", device="cuda", **how) as model:
                return model.state_dict()

        def one_by_one() -> object:
            with blobstore.open("m", store=store, framework="torch", device="cuda") as model:
                return {name: model[name] for name in model}

        loaders: dict[str, Callable[[], object]] = {
            _LIMIT: pinned_copies(nbytes),
            "safetensors, one file": lambda: load_file(file, device="cuda"),
            "blobstore": ours,
            "blobstore, one look-up a tensor": one_by_one,
        }
        if importlib.util.find_spec("fastsafetensors") is not None:
            loaders["fastsafetensors"] = lambda: with_fastsafetensors(file)
        else:
            print("fastsafetensors is not installed\n")
        expected: Any = load_file(file)
        found: Any = ours()
        for name, tensor in expected.items():
            assert torch.equal(found[name].cpu(), tensor), name
        del expected, found
        common.warm(folder)
        print(
            f"{nbytes / common.GIB:.2f} GiB bf16, {_BLOCKS * len(_BLOCK)} tensors, from the page cache"
        )
        print(f"to {torch.cuda.get_device_name()}; torch {torch.__version__}\n")
        cases = {name: lambda load=load: finished(load) for name, load in loaders.items()}
        common.table(common.rounds(cases, options.rounds, free_unused_memory), _LIMIT, nbytes)


if __name__ == "__main__":
    main()
