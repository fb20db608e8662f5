"""Models whose every byte is known, sharing blobs with one another, and how to look at what came of them."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from blobstore.manifests.reference import Reference
from blobstore.models.model import Model
from tests.support.models import Arrays, write_folder

_FILES = {"config.json": b'{"model_type": "known"}\n', "tokenizer.json": b'{"version": "1.0"}'}


_STEP = 101


@dataclass(frozen=True, slots=True)
class Known:
    """A model: its name in stores, its folder, and the bytes of its tensors."""

    name: str
    folder: Path
    tensors: dict[str, bytes]

    @property
    def reference(self) -> Reference:
        """Return its name as stores spell it."""
        return Reference.parse(self.name)

    @property
    def size(self) -> int:
        """Return the bytes of its tensors."""
        return sum(map(len, self.tensors.values()))

    def called(self, name: str) -> Known:
        """Return the same model under another name."""
        return replace(self, name=name)

    def differences(self, opened: Model) -> list[str]:
        """Return what an open model has otherwise, every byte of it read."""
        found = [] if set(opened) == set(self.tensors) else [f"it has the tensors {sorted(opened)}"]
        return found + [
            f"tensor {name} has other bytes"
            for name, data in self.tensors.items()
            if name in opened and opened[name].tobytes() != data
        ]


def write_models(folder: Path, count: int, *, size: int = 24_000) -> list[Known]:
    """Write models to folders. All share a third of the tensors, neighbours share one more.

    The rest are so similar to the neighbour's that deltas against those are the smallest form.

    ``size`` is about the bytes of the largest tensors, half of which compression saves.
    """
    return [_write(folder / f"m{number}", number, size) for number in range(count)]


def _write(folder: Path, number: int, size: int) -> Known:
    arrays: Arrays = {}
    for layer in range(3):
        common, own = np.random.default_rng(layer), np.random.default_rng([number // 2, layer])
        pair = np.random.default_rng([number // 2, layer, 7])
        up = own.integers(0, 16, (size // (layer + 1), 1), np.uint8)
        up[layer::_STEP] += number % 2
        arrays |= {
            f"layers.{layer}.norm.weight": common.standard_normal(16, dtype=np.float32),
            f"layers.{layer}.up.weight": up,
            f"layers.{layer}.down.weight": pair.integers(0, 16, size // 4, np.uint8),
        }
    write_folder(folder, arrays, files=_FILES)
    return Known(folder.name, folder, {name: array.tobytes() for name, array in arrays.items()})


def read_models(sources: Path) -> list[Known]:
    """Return the models that another process has written."""
    return [
        Known(folder.name, folder, _read(folder / "model.safetensors"))
        for folder in sorted(sources.iterdir())
    ]


def _read(path: Path) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in load_file(path).items()}


def command(*arguments: object) -> tuple[int, str, str]:
    """Run a command in this process; return its exit code and what it printed."""
    from blobstore.cli.main import program

    output, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(output), redirect_stderr(errors):
        try:
            program(list(map(str, arguments)), prog_name="blobstore", standalone_mode=True)
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
    return code, output.getvalue(), errors.getvalue()
