"""Fuzz the reader of folders of DeepSpeed ZeRO: it may refuse an input, but not crash or hang.

In an environment with this package, torch and ``atheris``, from the root of the repository::

    python tests/fuzz/fuzz_zero_folders.py

runs for five minutes. Options of libFuzzer and folders with more inputs may follow; new inputs are kept
in the first folder. An input that fails is written to ``crash-*``, ``timeout-*`` or ``oom-*``, and is run
again if it is given as the only argument.

The first byte of an input states what the rest is: the pickle in a file of a small checkpoint of stage 2
or 3, or such a file as a whole.
"""

from __future__ import annotations

import io
import sys
import zipfile
from pathlib import Path

import atheris  # type: ignore[import-not-found, import-untyped, unused-ignore]

sys.path.insert(0, str(Path(__file__).parents[2]))

with atheris.instrument_imports(include=["blobstore"]):
    from blobstore.errors import DamagedSource, SourceError, UsageError
    from blobstore.sources.base import SourceOptions
    from blobstore.sources.distributed.layout import open_distributed
    from blobstore.sources.distributed.zero_folder import ZeroFolder

import torch

from tests.fuzz.harness import run_in_folder
from tests.support.zero_folders import write_zero

WORDS = [
    "module",
    "param_shapes",
    "buffer_names",
    "frozen_param_shapes",
    "frozen_param_fragments",
    "shared_params",
    "optimizer_state_dict",
    "zero_stage",
    "partition_count",
    "param_alignment_paddings",
    "fp32_flat_groups",
    "single_partition_of_fp32_groups",
    "ctorch\nSize\n",
    "ctorch\nHalfStorage\n",
    "ctorch\nFloatStorage\n",
    "ctorch._utils\n_rebuild_tensor_v2\n",
]
"""Keys and globals of the checkpoints."""
_PICKLE = "data.pkl"
_ORIGINALS: dict[Path, bytes] = {}


def write_originals(folder: Path) -> None:
    """Write the checkpoints of which an input replaces one file."""
    groups = [{"a": torch.arange(12.0).reshape(4, 3), "b": torch.ones(5)}, {"c": torch.ones(3)}]
    for stage in (2, 3):
        write_zero(folder / str(stage), stage, 2, groups, frozen={"f": torch.ones(4).half()})
        paths = sorted((folder / str(stage)).rglob("*.pt"))
        _ORIGINALS.update({path: path.read_bytes() for path in paths})


def with_pickle(archive: bytes, pickle: bytes) -> bytes:
    """Return a file of torch with another pickle, and checksums that fit."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(file, "w") as new:
        for item in old.infolist():
            is_pickle = item.filename.endswith(f"/{_PICKLE}")
            new.writestr(item.filename, pickle if is_pickle else old.read(item))
    return file.getvalue()


def read_one(data: bytes, folder: Path) -> None:
    """Read all tensors of a checkpoint with an input as one of its files."""
    if not data:
        return
    is_pickle, number = data[0] & 1, data[0] >> 1
    path = [*_ORIGINALS][number % len(_ORIGINALS)]
    original, content = _ORIGINALS[path], data[1:]
    path.write_bytes(with_pickle(original, content) if is_pickle else content)
    try:
        source = open_distributed(folder / path.relative_to(folder).parts[0], SourceOptions())
        assert isinstance(source, ZeroFolder)
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
        path.write_bytes(original)


def write_seeds(folder: Path) -> None:
    """Write the files of the checkpoints, and their pickles, as inputs."""
    for number, (path, content) in enumerate(_ORIGINALS.items()):
        (folder / f"file{number}").write_bytes(bytes([2 * number]) + content)
        with zipfile.ZipFile(path) as archive:
            name = next(it for it in archive.namelist() if it.endswith(f"/{_PICKLE}"))
            pickle = bytes([2 * number + 1]) + archive.read(name)
            (folder / f"pickle{number}").write_bytes(pickle)


def main() -> None:
    """Run libFuzzer; it ends the process."""
    run_in_folder(write_originals, read_one, write_seeds, WORDS)


if __name__ == "__main__":
    main()
