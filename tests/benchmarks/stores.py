"""Import five models of one family into blobstore and into stores that other projects make; print a table.

The family is all-MiniLM-L6-v2, the same files under another name, the same weights in two shards, and two
stand-ins for fine-tunes: every element of the upper half of the layers, or of all matrices, is moved by a
random step of about 2e-5, the size of some dozens of steps of training. DVC, tensorfs, hexz and lmz are
measured if they are installed; give the folder of their programs in PATH::

    python -m tests.benchmarks.stores FOLDER

``FOLDER`` should be on a disk. The time includes syncing where a store syncs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.benchmarks.fine_tunes import pretrained

if TYPE_CHECKING:
    from collections.abc import Callable

_UPPER_LAYERS = ("encoder.layer.3.", "encoder.layer.4.", "encoder.layer.5.", "pooler.")


def write_family(folder: Path) -> dict[str, Path]:
    """Return the folders of the models, which are written if they are not there."""
    base = load_file(pretrained() / "model.safetensors")
    noise = np.random.default_rng(0)
    every = {
        name: array + noise.normal(scale=2e-5, size=array.shape).astype(array.dtype)
        if array.dtype == np.float32
        else array
        for name, array in base.items()
    }
    upper = {
        name: every[name] if name.startswith(_UPPER_LAYERS) else array
        for name, array in base.items()
    }
    models = {name: folder / "models" / name for name in ("base", "copy", "shards", "upper", "all")}
    for name, path in models.items():
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(pretrained(), path)
        if name in ("upper", "all"):
            save_file(upper if name == "upper" else every, path / "model.safetensors")
    (models["shards"] / "model.safetensors").unlink()
    index: dict[str, str] = {}
    for number in (1, 2):
        part = dict(list(base.items())[number - 1 :: 2])
        file = f"model-0000{number}-of-00002.safetensors"
        save_file(part, models["shards"] / file)
        index |= dict.fromkeys(part, file)
    text = json.dumps({"metadata": {}, "weight_map": index})
    (models["shards"] / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    return models


def run(folder: Path, *command: str) -> int:
    """Run a program that may fail, in a folder; return its exit status."""
    environment = {**os.environ, "TENSORFS_HOME": str(folder / "tensorfs")}
    done = subprocess.run(
        command, capture_output=True, check=False, cwd=folder, env=environment, text=True
    )
    return done.returncode


def add_to_blobstore(folder: Path, models: dict[str, Path]) -> Callable[[], int]:
    for name, path in models.items():
        program = (sys.executable, "-m", "blobstore", "create", str(path), name)
        assert run(folder, *program, "--store", "store") == 0
    return lambda: run(folder, sys.executable, "-m", "blobstore", "verify", "--store", "store")


def freeze(folder: Path, models: dict[str, Path]) -> Callable[[], int]:
    check = add_to_blobstore(folder, models)
    program = (sys.executable, "-m", "blobstore", "freeze", *models, "--store", "store")
    assert run(folder, *program) == 0
    return check


def copy_files(folder: Path, models: dict[str, Path]) -> Callable[[], int]:
    for name, path in models.items():
        shutil.copytree(path, folder / name)
    return lambda: 0  # nothing can be checked


def add_to_dvc(folder: Path, models: dict[str, Path]) -> Callable[[], int]:
    work = folder.parent / f"{folder.name}-work"  # the files themselves are not DVC's
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    for command in ("git init -q", "dvc init -q", f"dvc cache dir {folder}"):
        assert run(work, *command.split()) == 0
    for name, path in models.items():
        shutil.copytree(path, work / name)
    assert run(work, "dvc", "add", "-q", *models) == 0
    return lambda: run(work, "dvc", "status", "-q")


def add_to_tensorfs(folder: Path, models: dict[str, Path]) -> Callable[[], int]:
    for name, path in models.items():
        assert run(folder, "tfs", "import", str(path), "--name", f"local/{name}") == 0
    return lambda: max(run(folder, "tfs", "verify", f"local/{name}") for name in models)


def pack_with_hexz(folder: Path, models: dict[str, Path]) -> Callable[[], int]:
    python = Path(shutil.which("tfs") or sys.executable).with_name("python")
    pack = "import hexz, sys; hexz.pack(*sys.argv[1:3], base=(sys.argv[3:] or [None])[0])"
    for name, path in models.items():
        base = () if name == "base" else ("base.hxz",)
        assert run(folder, str(python), "-c", pack, str(path), f"{name}.hxz", *base) == 0
    read = (
        "import hexz, sys\nfor f in sys.argv[1:]:\n a = hexz.Archive(f)\n"
        " [a.read(n) for n in a.namelist()]"
    )
    return lambda: run(folder, str(python), "-c", read, *(f"{name}.hxz" for name in models))


def add_to_lmz(folder: Path, models: dict[str, Path]) -> Callable[[], int]:
    for name, path in models.items():
        assert run(folder, "lmz", "add", str(path), "--name", name, "--store", ".") == 0
    return lambda: max(run(folder, "lmz", "verify", f"models/{name}.lmz") for name in models)


STORES = {
    "files in folders": copy_files,
    "DVC": add_to_dvc,
    "tensorfs": add_to_tensorfs,
    "hexz, against the base": pack_with_hexz,
    "lmz": add_to_lmz,
    "blobstore": add_to_blobstore,
    "blobstore, frozen": freeze,
}


def flip_a_byte(folder: Path) -> None:
    """Change a byte in the middle of the largest file."""
    largest = max(
        (path for path in folder.rglob("*") if path.is_file()), key=lambda p: p.stat().st_size
    )
    largest.chmod(0o644)
    with largest.open("r+b") as file:
        file.seek(largest.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def main(folder: Path) -> None:
    models = write_family(folder)
    total = sum(p.stat().st_size for m in models.values() for p in m.rglob("*") if p.is_file())
    print(f"{len(models)} models, {total / 1e6:.0f} MB\n")
    print("| store | on disk | import | a changed byte is found by its own check |")
    print("| --- | ---: | ---: | --- |")
    for name, add in STORES.items():
        place = folder / "stores" / name.split(",", maxsplit=1)[0].replace(" ", "-")
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        began = time.perf_counter()
        try:
            check = add(place, models)
        except (AssertionError, FileNotFoundError) as error:
            print(f"| {name} | not measured: {error!r} | | |")
            continue
        seconds = time.perf_counter() - began
        used = sum(p.lstat().st_blocks * 512 for p in place.rglob("*"))
        was_intact = check() == 0
        flip_a_byte(place)
        found = "yes" if was_intact and check() != 0 else "no"
        print(f"| {name} | {used / 1e6:.0f} MB | {seconds:.1f} s | {found} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
