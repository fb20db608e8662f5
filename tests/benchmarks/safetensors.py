"""Saving and loading safetensors files, compared with the reference library and its newest pre-release.

1 GiB of 200 bf16 tensors, and 256 MiB of 20,000 small ones. Each library runs in a process of its own, and
each round runs every case in all of them. The bytes are in memory or in the page cache, and a folder in
memory (``--folder /dev/shm``) leaves out the disk, where this library also waits for the bytes to be
durable. For the pre-release, install it with ``pip install --pre --target FOLDER safetensors`` and name the
folder in ``SAFETENSORS_PEER``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from blobstore.core.tensor import DType, TensorSpec
from blobstore.safetensors.table import _recent
from tests.benchmarks.common import arguments, rounds, table, timed, workspace
from tests.support.models import write_safetensors

_FILES = {"large": (200, (1280, 2048)), "many": (20_000, (64, 105))}
_FRAMEWORKS = ("numpy", "torch", "mlx")
_ROW_SHAPE = (8192, 4096)
_WORKER = "--worker"
_AGAIN = ", of a file opened before"


def write_inputs(folder: Path, scale: float) -> None:
    """Write the files: large tensors, many small ones, and one of 64 MiB."""
    random = np.random.default_rng(1)
    rows = {"row": (1, _ROW_SHAPE)}
    for name, (count, shape) in {**_FILES, **rows}.items():
        number = max(1, int(count * scale))
        specs = [TensorSpec(f"layers.{i}.weight", DType.BF16, shape) for i in range(number)]
        data = random.integers(0, 15_000, shape, np.uint16).tobytes()
        write_safetensors(folder / name, specs, lambda _, data=data: [data])  # type: ignore[misc]


def cases(package: str, folder: Path) -> dict[str, Callable[[], object]]:
    """Return what is measured of a library."""
    library = import_module(package)
    found: dict[str, Callable[[], object]] = {}
    for file in _FILES:
        path = str(folder / file)
        found[f"{file}: header"] = lambda path=path: library.safe_open(path, "np").metadata()  # type: ignore[misc]
        for framework in _FRAMEWORKS:
            module = import_module(f"{package}.{framework}")

            def load(module: Any = module, path: str = path) -> object:
                return module.load_file(path)

            def one(framework: str = framework, path: str = path) -> object:
                with library.safe_open(path, framework) as opened:
                    return opened.get_tensor("layers.0.weight")

            found[f"{file}: load_file, {framework}"] = load
            found[f"{file}: one tensor, {framework}"] = one
            found[f"{file}: one tensor, {framework}{_AGAIN}"] = one
            if framework != "mlx":  # the reference cannot save bf16 of MLX
                target = str(folder / f"written-{package}")
                tensors = import_module(f"blobstore.safetensors.{framework}").load_file(path)
                if framework == "numpy":  # 0.8 knows no bf16 unless ml_dtypes was imported
                    tensors = {name: array.view(np.uint16) for name, array in tensors.items()}

                def save(
                    module: Any = module, target: str = target, tensors: Any = tensors
                ) -> None:
                    module.save_file(tensors, target)

                found[f"{file}: save_file, {framework}"] = save
    for framework in _FRAMEWORKS:

        def row(framework: str = framework) -> object:
            with library.safe_open(str(folder / "row"), framework) as opened:
                return opened.get_slice("layers.0.weight")[77]

        found[f"row of 64 MiB: {framework}"] = row
    return found


def serve(package: str, folder: Path) -> None:
    """Run the cases whose names arrive, and print the seconds that each takes."""
    import ml_dtypes  # noqa: F401 - then the reference reads bf16 into numpy

    found = cases(package, folder)
    print(*found, sep="\t", flush=True)
    for line in sys.stdin:
        if not line.strip().endswith(_AGAIN):
            _recent.clear()
        try:
            print(timed(found[line.strip()]), flush=True)
        except Exception as error:  # noqa: BLE001 - a case that a library does not have
            print("nan", type(error).__name__, flush=True)


class Worker:
    """A library in a process of its own."""

    def __init__(self, package: str, folder: Path, place: str | None = None) -> None:
        paths = [place, os.environ.get("PYTHONPATH")]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.benchmarks.safetensors", _WORKER, package, str(folder)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.cases = self._answer().split("\t")

    def run(self, case: str) -> float:
        """Return the seconds that a case takes."""
        assert self._process.stdin is not None
        self._process.stdin.write(case + "\n")
        self._process.stdin.flush()
        return float(self._answer().split()[0])

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def main() -> None:
    """Measure every case with every library."""
    options = arguments(__doc__)
    peer = os.environ.get("SAFETENSORS_PEER")
    with workspace(options.folder) as folder, ExitStack() as stack:
        write_inputs(folder, options.scale)
        workers = {"blobstore": Worker("blobstore.safetensors", folder)}
        workers["safetensors"] = Worker("safetensors", folder)
        if peer:
            workers["pre-release"] = Worker("safetensors", folder, peer)
        for worker in workers.values():
            stack.callback(worker.close)
        for case in workers["blobstore"].cases:
            print(f"\n### {case}\n")
            runs = {
                name: (lambda worker=worker, case=case: worker.run(case))  # type: ignore[misc]
                for name, worker in workers.items()
            }
            table(rounds(runs, options.rounds), "safetensors")


if __name__ == "__main__":
    if _WORKER in sys.argv:
        serve(sys.argv[2], Path(sys.argv[3]))
    else:
        main()
