"""Fuzz the reader of folders of ``torch.distributed.checkpoint``: it may refuse an input, but not crash or hang.

In an environment with this package, torch and ``atheris``, from the root of the repository::

    python tests/fuzz/fuzz_distributed_folders.py

runs for five minutes. Options of libFuzzer and folders with more inputs may follow; new inputs are kept
in the first folder. An input that fails is written to ``crash-*``, ``timeout-*`` or ``oom-*``, and is run
again if it is given as the only argument.

The first byte of an input states what the rest is: the metadata, or a data file of a small checkpoint.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris  # type: ignore[import-not-found, import-untyped, unused-ignore]

sys.path.insert(0, str(Path(__file__).parents[2]))

with atheris.instrument_imports(include=["blobstore"]):
    from blobstore.errors import DamagedSource, SourceError, UsageError
    from blobstore.sources.base import SourceOptions
    from blobstore.sources.distributed.metadata import _ALLOWED
    from blobstore.sources.distributed.torch_folder import TorchFolder

import torch

from tests.fuzz.harness import run_in_folder
from tests.support.distributed_folders import data_name, grid, write_folder

NAMES = (".metadata", data_name(0), data_name(1))
_ORIGINALS: dict[str, bytes] = {}


def write_original(folder: Path) -> None:
    """Write the checkpoint of which an input replaces one file."""
    matrix = torch.arange(24.0).reshape(4, 6)
    tensors = {
        ("model", "rows"): (matrix, grid((4, 6), 2)),
        ("model", "columns"): (matrix.half(), grid((4, 6), 1, 3)),
        ("model", "turned"): (torch.arange(6).reshape(2, 3).t(), grid((3, 2))),
    }
    write_folder(folder, tensors, {("step",): 3})
    _ORIGINALS.update({name: (folder / name).read_bytes() for name in NAMES})


def read_one(data: bytes, folder: Path) -> None:
    """Read all tensors of the checkpoint with an input as one of its files."""
    if not data:
        return
    name = NAMES[data[0] % len(NAMES)]
    (folder / name).write_bytes(data[1:])
    try:
        source = TorchFolder(folder, options=SourceOptions(subtree="."))
        for tensor, spec in source.specs.items():
            whole, small = (
                b"".join(map(bytes, source.read(tensor, memoryview(bytearray(size)))))
                for size in (1 << 16, 16)
            )
            assert whole == small, tensor
            assert len(whole) == spec.nbytes, tensor
    except (DamagedSource, SourceError, UsageError) as error:
        assert str(error).isprintable(), str(error)
        assert len(str(error)) < 4000, str(error)
    finally:
        (folder / name).write_bytes(_ORIGINALS[name])


def write_seeds(folder: Path) -> None:
    """Write the files of the checkpoint as inputs."""
    for number, (name, content) in enumerate(_ORIGINALS.items()):
        (folder / f"seed-{name.strip('._')}").write_bytes(bytes([number]) + content)


def main() -> None:
    """Run libFuzzer; it ends the process."""
    words = [f"c{module}\n{name}\n" for module, name in sorted(_ALLOWED)]
    words += ["ctorch\nfloat32\n", "relative_path", "offsets", "sizes", "chunks", "storage_data"]
    run_in_folder(write_original, read_one, write_seeds, words)


if __name__ == "__main__":
    main()
