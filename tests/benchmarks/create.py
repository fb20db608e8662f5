"""Import of a bf16 model of 2 GiB in 300 tensors, compared with the limits of the machine.

Two limits are measured in the same rounds. Two threads hash the same bytes, write them to one file each
and sync it, as any durable import must: either at the end or, as the import does, while they write. Two
other threads only hash the bytes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import blobstore
from blobstore.core.tensor import DTYPES, TensorSpec
from tests.benchmarks import common

_TENSORS = 300
_CHUNK = 1 << 20
_THREADS = 2
_SYNC_THREADS = 4
_SYNC_EVERY = 32 << 20


def make_model(folder: Path, nbytes: int) -> Path:
    """Write a model folder of random bf16 weights."""
    rows = nbytes // (_TENSORS * 2 * 2048)
    specs = [
        TensorSpec(
            f"model.layers.{i // 10}.mlp.p{i % 10}_proj.weight", DTYPES["BF16"], (rows, 2048)
        )
        for i in range(_TENSORS)
    ]
    random = np.random.default_rng(0)

    def values(_: str) -> list[bytes]:
        numbers = random.standard_normal((rows, 2048), np.float32) * np.float32(0.02)
        return [(numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes()]

    return common.write_model(folder, specs, values, {"model_type": "llama"})


def hash_and_write(source: Path, target: Path | None, *, sync_early: bool = False) -> None:
    """Hash the file in two threads, half each, and with ``target`` write and sync the bytes."""
    size = source.stat().st_size
    syncing = ThreadPoolExecutor(_SYNC_THREADS)

    def half(number: int) -> None:
        digest = hashlib.sha256()
        buffer = memoryview(bytearray(_CHUNK))
        reading = os.open(source, os.O_RDONLY)
        writing = os.open(f"{target}{number}", os.O_WRONLY | os.O_CREAT) if target else None
        offset, end = size * number // _THREADS, size * (number + 1) // _THREADS
        while offset < end:
            count = os.preadv(reading, [buffer[: end - offset]], offset)
            digest.update(buffer[:count])
            if writing is not None:
                os.write(writing, buffer[:count])
                if sync_early and offset // _SYNC_EVERY != (offset + count) // _SYNC_EVERY:
                    syncing.submit(os.fdatasync, writing)
            offset += count
        if writing is not None:
            os.fsync(writing)
            os.close(writing)
        os.close(reading)

    threads = [threading.Thread(target=half, args=(number,)) for number in range(_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    syncing.shutdown(cancel_futures=True)


def main() -> None:
    """Print the tables."""
    options = common.arguments(__doc__)
    with common.workspace(options.folder) as folder:
        nbytes = int(2 * common.GIB * options.scale)
        source = make_model(folder / "model", nbytes)
        weights = source / "model.safetensors"
        full = blobstore.LocalStore(folder / "full")
        blobstore.create(source, "model", store=full)

        def first() -> float:
            store = blobstore.LocalStore(folder / "new")
            taken = common.timed(
                lambda: blobstore.create(source, "model", store=store, jobs=_THREADS)
            )
            shutil.rmtree(folder / "new")
            return taken

        def second() -> float:
            return common.timed(
                lambda: blobstore.create(source, "model", store=full, jobs=_THREADS)
            )

        def limit(*, sync_early: bool) -> float:
            taken = common.timed(
                lambda: hash_and_write(weights, folder / "limit", sync_early=sync_early)
            )
            for number in range(_THREADS):
                (folder / f"limit{number}").unlink()
            return taken

        def prepare() -> None:
            os.sync()  # do not measure the writeback of other processes
            common.warm(weights)

        print(f"{nbytes / common.GIB:.2f} GiB bf16, {_TENSORS} tensors, {_THREADS} threads\n")
        best = "sha256 + write + sync concurrently"
        durable = {
            "sha256 + write, then sync": lambda: limit(sync_early=False),
            best: lambda: limit(sync_early=True),
            "create, new": first,
        }
        common.table(common.rounds(durable, options.rounds, prepare), best, nbytes)
        present = {
            "sha256": lambda: common.timed(lambda: hash_and_write(weights, None)),
            "create, all present": second,
        }
        common.table(common.rounds(present, options.rounds, prepare), "sha256", nbytes)
        used = common.private_memory(
            "import blobstore, blobstore.operations.create.create\n"
            "begin()\n"
            "blobstore.create(sys.argv[1], 'model', store=blobstore.LocalStore(sys.argv[2]), jobs=2)",
            str(source),
            str(folder / "memory"),
        )
        print(f"private memory of create above the interpreter's: {used / 2**20:.0f} MiB\n")


if __name__ == "__main__":
    main()
