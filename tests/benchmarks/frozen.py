"""Models frozen in a store: size of a family, time to freeze it, and time to load a model again.

The family is all-MiniLM-L6-v2 in bf16 with four fine-tunes of all its parameters; the loaded model
has 1 GiB of normally distributed bf16 numbers in 200 tensors, hot and frozen, not in the page cache. The
limit is direct reads of the hot blobs, eight requests of 4 MiB at a time. The slow disk is the same one,
throttled by the system. Use --folder to train only once. With --peers, only loads of the large model are
measured, in the page cache, next to zipnn and lmz (``pip install --no-deps zipnn lmzip``).
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from safetensors.torch import load_file

import blobstore
from blobstore.compression.level import Level
from blobstore.core.tensor import DTYPES, TensorSpec
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.operations.freeze.thaw import thaw_models
from tests.benchmarks import common
from tests.benchmarks.fine_tunes import pairs
from tests.benchmarks.loading import drop, read_directly, touch
from tests.benchmarks.slow_disk import slow_disk

_TUNED = ("light", "medium", "heavy", "contrastive")
_TENSORS = 200
_SLOW = 800_000_000
"""Bytes per second of a disk that is typical of rented machines."""
_LEVELS: tuple[Level, ...] = ("fast", "small")


def write_bf16(folder: Path, tensors: Mapping[str, Any]) -> Path:
    """Write a model folder of tensors in bf16."""
    specs = [TensorSpec(name, DTYPES["BF16"], tensor.shape) for name, tensor in tensors.items()]
    return common.write_model(
        folder, specs, lambda name: [tensors[name].astype(ml_dtypes.bfloat16).tobytes()]
    )


def make_family(folder: Path, kept: Path) -> blobstore.LocalStore:
    """Return a store with the base and its fine-tunes; what was trained is kept."""
    store = blobstore.LocalStore(folder / "family")
    found = pairs(kept)
    models = {"base": found["medium"][0]} | {name: found[name][1] for name in _TUNED}
    for name, tensors in models.items():
        blobstore.create(write_bf16(folder / "models" / name, tensors), name, store=store)
    return store


def freeze_family(store: blobstore.LocalStore, level: Level) -> None:
    """Freeze all models and thaw them again, and print what that took."""
    names = ("base", *_TUNED)
    frozen = freeze_models(names, store=store, level=level)
    thawed = thaw_models(names, store=store)
    assert not frozen.faults
    assert not thawed.faults
    print(
        f"| {level} | {frozen.size / 1e6:.0f} MB | {frozen.stored / 1e6:.0f} MB "
        f"| {1 - frozen.stored / frozen.size:.1%} | {frozen.size / frozen.seconds / 1e9:.2f} "
        f"| {frozen.size / thawed.seconds / 1e9:.2f} |",
        flush=True,
    )


def make_large(folder: Path, nbytes: int) -> tuple[blobstore.LocalStore, blobstore.LocalStore]:
    """Return two stores with one model, hot and frozen."""
    rows = nbytes // (_TENSORS * 2 * 1024)
    random = np.random.default_rng(0)
    tensors = {
        f"model.layers.{number // 10}.p{number % 10}.weight": random.standard_normal(
            (rows, 1024), np.float32
        )
        * np.float32(0.02)
        for number in range(_TENSORS)
    }
    source = write_bf16(folder / "large", tensors)
    stores = blobstore.LocalStore(folder / "hot"), blobstore.LocalStore(folder / "cold")
    for store in stores:
        blobstore.create(source, "m", store=store)
    frozen = freeze_models(["m"], store=stores[1])
    print(
        f"freeze, fast, {frozen.size / 1e9:.2f} GB of bf16 alone: {frozen.stored / frozen.size:.4f}, "
        f"{frozen.size / frozen.seconds / 1e9:.2f} GB/s\n"
    )
    return stores


def load_large(stores: tuple[blobstore.LocalStore, blobstore.LocalStore], count: int) -> None:
    """Print the time to read every byte of a model from the disk."""

    def load(store: blobstore.LocalStore, **how: Any) -> Callable[[], object]:
        def work() -> object:
            model = blobstore.open("m", store=store, framework="torch", **how)
            tensors = model.state_dict()
            touch(tensors.values())
            return model, tensors

        return lambda: common.timed(work)

    files = [path for store in stores for path in store.root.rglob("sha256-*") if path.is_file()]
    nbytes = sum(path.stat().st_size for path in stores[0].folder("blobs").iterdir())

    def chill() -> None:
        drop(files)
        common.borrow_memory(nbytes * 9 // 4)

    blobs = [path for path in stores[0].folder("blobs").iterdir() if path.stat().st_size > _TENSORS]
    limit = "8 requests of 4 MiB, past the page cache"
    cases: dict[str, Callable[[], Any]] = {
        "hot": load(stores[0]),
        "hot, read=pread": load(stores[0], read="pread"),
        "frozen": load(stores[1]),
        "frozen, read=pread": load(stores[1], read="pread"),
    }
    of_disk = cases | {limit: lambda: common.timed(lambda: read_directly(blobs))}
    print("From the disk, every byte touched\n")
    common.table(common.rounds(of_disk, count, chill), limit, nbytes)
    with slow_disk(files[0], _SLOW) as is_slow:
        if is_slow:
            print(f"From a disk of {_SLOW / 1e9} GB/s, every byte touched\n")
            common.table(common.rounds(of_disk, count, chill), limit, nbytes)
        else:
            print("The disk cannot be throttled here: that requires root and control groups\n")
    print("From the page cache, every byte touched\n")
    common.table(
        common.rounds(cases, count, lambda: common.borrow_memory(nbytes * 9 // 4)),
        "hot, read=pread",
        nbytes,
    )


def compare_with_peers(store: blobstore.LocalStore, file: Path, folder: Path, count: int) -> None:
    """Print the time of the clock and of the processors to load a frozen model, and the file as peers keep it.

    zipnn decodes into new memory, and lmz into a file in memory, which is then mapped.
    """
    zipnn, lmz = import_module("zipnn").ZipNN, import_module("lmz")
    threads = len(os.sched_getaffinity(0))
    coder = zipnn(input_format="byte", bytearray_dtype="bfloat16", threads=threads)
    packed, archive, restored = folder / "m.zipnn", folder / "m.lmz", Path("/dev/shm/lmz.bench")
    packed.write_bytes(coder.compress(bytearray(file.read_bytes())))
    lmz.compress(str(file), str(archive))
    sizes = {path.suffix: path.stat().st_size / file.stat().st_size for path in (packed, archive)}

    def ours(**how: Any) -> None:
        with blobstore.open("m", store=store, framework="torch", **how) as model:
            touch(model.state_dict().values())

    def by_zipnn() -> None:
        data = coder.decompress(packed.read_bytes())
        touch([torch.frombuffer(data, dtype=torch.uint8)[: len(data) // 8 * 8]])

    def by_lmz() -> None:
        try:
            lmz.decompress(str(archive), str(restored), workers=threads)
            touch(load_file(restored).values())
        finally:
            restored.unlink(missing_ok=True)

    cases = {"blobstore": ours, "zipnn": by_zipnn, "lmz": by_lmz}
    nbytes = file.stat().st_size
    common.warm(folder)
    print(", ".join(f"{name[1:]}: {size:.4f}" for name, size in sizes.items()), "of the file\n")
    for title, clock in (("The clock", time.perf_counter), ("Processors", time.process_time)):
        print(f"{title}, every byte touched\n")
        timed = {name: partial(_taken, clock, work) for name, work in cases.items()}
        before = partial(common.borrow_memory, nbytes * 9 // 4)
        common.table(common.rounds(timed, count, before), "zipnn", nbytes)


def _taken(clock: Callable[[], float], work: Callable[[], object]) -> float:
    started = clock()
    work()
    return clock() - started


def add_peers(parser: argparse.ArgumentParser) -> None:
    """Add the option that compares with peers alone."""
    parser.add_argument("--peers", action="store_true", help="compare loads with peers alone")


def tables(options: argparse.Namespace) -> None:
    """Print the tables."""
    with common.workspace(options.folder) as folder:
        if options.peers:
            stores = make_large(folder, int(common.GIB * options.scale))
            file = folder / "large" / "model.safetensors"
            compare_with_peers(stores[1], file, folder, options.rounds)
            return
        kept = folder if options.folder is None else options.folder / "fine-tunes"
        store = make_family(folder, kept)
        print("| family | size | frozen | saved | freeze GB/s | thaw GB/s |")
        print("| --- | --- | --- | --- | --- | --- |")
        for level in _LEVELS:
            freeze_family(store, level)
        print()
        os.sync()
        load_large(make_large(folder, int(common.GIB * options.scale)), options.rounds)


if __name__ == "__main__":
    tables(common.arguments(__doc__, add_peers))
