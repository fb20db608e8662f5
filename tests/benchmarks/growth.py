"""The cost of commands as a store grows: one model alone, then 100, 1,000 and 10,000 more of 100 blobs each.

The stores are written directly. Of the blobs of a model, 73 are those of its family of twenty. Each command runs
in a process of its own. Times are seconds of the processor, which depend less on what else a machine does. The last
columns say what the largest store adds to the time and memory in the store of one model, and the exponent with which
the added time grows.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import blobstore
from blobstore.core.digest import Digest
from blobstore.manifests import media_types
from blobstore.manifests.descriptor import Descriptor
from blobstore.manifests.layers_digest import layers_digest
from blobstore.manifests.model import Manifest, ModelConfig
from blobstore.operations.maintenance.names import copy_model
from blobstore.safetensors.numpy import save_file
from blobstore.store.local import LocalStore
from tests.benchmarks import common

_MODELS = (0, 100, 1_000, 10_000)
_LAYERS = 100
_OWN = 27
_FAMILY = 20
_ONE = "one/model"
_COMMANDS = {
    "create": ["create", "{source}", "new/model"],
    "cp": ["cp", _ONE, "new/copy"],
    "show": ["show", _ONE],
    "verify NAME": ["verify", _ONE],
    "list NAME": ["list", _ONE],
    "info NAME": ["info", _ONE],
    "du NAME": ["du", _ONE],
    "freeze NAME": ["freeze", "new/copy"],
    "rm NAME": ["rm", "new/copy"],
    "list": ["list"],
    "du": ["du"],
    "gc --dry-run": ["gc", "--dry-run"],
    "page": ["page", "{folder}/page.html"],
}
_SAVES = """
import sys, time
import numpy as np
import blobstore
store, first, count = blobstore.LocalStore(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
for step in range(first, first + count):
    values = np.random.default_rng(step).standard_normal((12, 16), "f4")
    begin = time.process_time()
    blobstore.save({f"{i}.weight": row for i, row in enumerate(values)}, f"saved/run:{step}", store=store)
    print(time.process_time() - begin)
"""
"""Prints the seconds of each of several saves of a model of twelve tensors."""


def _blob(seed: str) -> bytes:
    """Return a blob of one small tensor."""
    values = Digest.of(seed.encode()).hex[:16].encode()
    header = b'{"t":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + values


def grow(store: LocalStore, first: int, last: int) -> None:
    """Add the models of these numbers to a store."""

    def add(data: bytes) -> Digest:
        digest = Digest.of(data)
        path = Path(store.blob_path(digest))
        if not path.exists():
            path.write_bytes(data)
        return digest

    for number in range(first, last):
        family = f"family.{number // _FAMILY}"
        seeds = [f"{number}.{layer}" for layer in range(_OWN)]
        seeds += [f"{family}.{layer}" for layer in range(_LAYERS - _OWN)]
        blobs = {f"t.{layer:03}": _blob(seed) for layer, seed in enumerate(seeds)}
        layers = tuple(
            Descriptor(media_types.TENSOR, add(data), len(data), name)
            for name, data in sorted(blobs.items())
        )
        config = ModelConfig(layers_digest=layers_digest(layers)).to_bytes()
        described = Descriptor(media_types.CONFIG, add(config), len(config))
        path = store.manifest_path(f"org{number % 50}/model{number}")
        path.parent.mkdir(parents=True)
        path.write_bytes(Manifest(config=described, layers=layers).to_bytes())


def _run(arguments: list[str]) -> tuple[float, int]:
    """Return the seconds of the processor and the MiB of a process."""
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss >> 10


def _scan(store: LocalStore) -> float:
    """Return the seconds of a loop that lists all files of blobs and manifests with their status."""
    code = """
import os, sys
folders = sys.argv[1:]
for folder in folders:
    for entry in os.scandir(folder):
        if entry.is_dir(): folders.append(entry.path)
        else: entry.stat()
"""
    folders = [str(store.folder("blobs")), str(store.folder("manifests"))]
    return _run([sys.executable, "-c", code, *folders])[0]


def _measure(folder: Path, store: LocalStore, rounds: int) -> Iterator[tuple[str, float, int]]:
    """Yield the name of each case with its least seconds, and its MiB."""
    source = folder / "source"
    for name, arguments in _COMMANDS.items():
        filled = [part.format(folder=folder, source=source) for part in arguments]
        command = [sys.executable, "-m", "blobstore", "--store", str(store.root), "-q", *filled]
        runs = []
        for _ in range(rounds):
            runs.append(_run(command))
            if name.startswith("rm"):
                copy_model(_ONE, "new/copy", store=store)
        yield name, min(run[0] for run in runs), max(run[1] for run in runs)
    yield "scandir and stat", min(_scan(store) for _ in range(rounds)), 0
    done = len(list(store.references()))
    script = [sys.executable, "-c", _SAVES, str(store.root), str(done), "50"]
    saves = subprocess.run(script, check=True, capture_output=True, text=True).stdout.split()
    yield "save in one process", sorted(map(float, saves))[len(saves) // 2], 0


def main() -> None:
    """Print the table."""

    options = common.arguments(__doc__)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # compiling modules takes longer than a command
    with common.workspace(options.folder) as folder:
        store = LocalStore(folder / "store")
        for name in ("blobs", "manifests"):
            store.folder(name).mkdir(parents=True, exist_ok=True)
        values = np.arange(12 * 16, dtype="f4").reshape(12, 16)
        tensors = {f"{number}.weight": row for number, row in enumerate(values)}
        source = folder / "source"
        source.mkdir()
        save_file(tensors, source / "model.safetensors")
        blobstore.save(tensors, _ONE, store=store, files={"config.json": {}})
        results: dict[str, list[tuple[float, int]]] = {}
        done = 0
        counts = [int(count * options.scale) for count in _MODELS]
        for count in counts:
            grow(store, done, count)
            done = count
            for name, seconds, memory in _measure(folder, store, options.rounds):
                results.setdefault(name, []).append((seconds, memory))
                print(
                    f"{count:,} {name}: {seconds:.3f} s, {memory} MiB", file=sys.stderr, flush=True
                )
    print(
        "| command |", " | ".join(f"{count:,} models" for count in counts), "| added | exponent |"
    )
    print("| --- |", " | ".join("---" for _ in counts), "| --- | --- |")
    for name, found in results.items():
        cells = [
            f"{seconds:.3f} s" + (f", {memory} MiB" if memory else "") for seconds, memory in found
        ]
        (first, least), (last, most) = found[0], found[-1]
        cells.append(f"{last - first:.3f} s" + (f", {most - least} MiB" if most else ""))
        print(f"| {name} | {' | '.join(cells)} | {_exponent([seconds for seconds, _ in found])} |")


def _exponent(seconds: list[float]) -> str:
    """Return the exponent with which what is added to the first time grows from the last store but one to the last."""
    added = [one - seconds[0] for one in seconds[1:]]
    if len(added) < 2 or min(added[-2:]) < 0.02:
        return "flat" if max(added, default=0) < 0.05 else "-"
    return f"{math.log10(added[-1] / added[-2]):.2f}"


if __name__ == "__main__":
    main()
