"""Many small models: 200 fine-tunes of a model of 0.4 M parameters, each with two changed tensors.

Prints the time to list, measure, verify, freeze and pack all of them, with a base that is searched for,
with a given base and without bases, and the bytes that they take then.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

import blobstore
from blobstore.core.tensor import DTYPES, TensorSpec
from tests.benchmarks.common import arguments, workspace, write_model

if TYPE_CHECKING:
    from collections.abc import Callable

_MODELS = 200
_LAYERS, _WIDTH = 4, 96
_CHANGED = ("model.layers.1.self_attn.o_proj.weight", "model.layers.3.self_attn.o_proj.weight")
_SHAPES = {
    "self_attn.q_proj": (_WIDTH, _WIDTH),
    "self_attn.o_proj": (_WIDTH, _WIDTH),
    "mlp.up_proj": (4 * _WIDTH, _WIDTH),
    "mlp.down_proj": (_WIDTH, 4 * _WIDTH),
    "input_layernorm": (_WIDTH,),
}


def fill(store: blobstore.LocalStore, folder: Path, models: int) -> list[str]:
    """Create the models, and return their names."""
    random = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (128, _WIDTH)} | {
        f"model.layers.{layer}.{name}.weight": shape
        for layer in range(_LAYERS)
        for name, shape in _SHAPES.items()
    }
    specs = [TensorSpec(name, DTYPES["BF16"], shape) for name, shape in shapes.items()]
    base = {
        name: random.standard_normal(shape, np.float32) * np.float32(0.02)
        for name, shape in shapes.items()
    }
    names = []
    for model in range(models):
        tensors: dict[str, Any] = dict(base)
        for name in _CHANGED:
            step = random.standard_normal(base[name].shape, np.float32) * np.float32(2e-5)
            tensors[name] = base[name] + step
        source = write_model(
            folder / str(model),
            specs,
            lambda name, of=tensors: [of[name].astype(ml_dtypes.bfloat16).tobytes()],  # type: ignore[misc]
        )
        names.append(f"team{model % 3}/tuned-{model:03}:v1")
        blobstore.create(source, names[-1], store=store)
    return names


def timed(what: str, work: Callable[[], object], size: Callable[[], int] | None = None) -> None:
    """Print a row of the table."""
    started = time.perf_counter()
    work()
    seconds = time.perf_counter() - started
    taken = f"{size() / 1e6:.2f} MB" if size is not None else ""
    print(f"| {what} | {seconds:.2f} | {taken} |", flush=True)


def main() -> None:
    """Print the table."""
    options = arguments(__doc__)
    models = int(_MODELS * options.scale)
    with workspace(options.folder) as folder:
        store = blobstore.LocalStore(folder / "store")
        names = fill(store, folder / "sources", models)
        archive = folder / "models.bsar"

        def stored() -> int:
            usage = blobstore.du(store=store)
            return usage.referenced.size

        def pack() -> None:
            blobstore.pack(names, archive, store=store, force=True)

        print(f"| {models} models | s | bytes |\n| --- | --- | --- |")
        timed("list", lambda: blobstore.list(store=store))
        timed("du", stored, stored)
        timed("verify", lambda: blobstore.verify(store=store))
        timed("pack", pack, lambda: os.path.getsize(archive))  # noqa: PTH202
        cases: dict[str, dict[str, Any]] = {
            "freeze": {},
            "freeze --base": {"base": names[0]},
            "freeze --no-base": {"find_base": False},
        }
        for what, how in cases.items():
            timed(what, lambda how=how: blobstore.freeze(names, store=store, **how), stored)  # type: ignore[misc]
            blobstore.thaw(names, store=store)


if __name__ == "__main__":
    main()
