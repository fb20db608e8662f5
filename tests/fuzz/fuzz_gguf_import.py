"""Fuzz the import of GGUF files: a file is refused in one line, or comes back byte for byte.

In an environment with this package and ``atheris``, from the root of the repository::

    python tests/fuzz/fuzz_gguf_import.py

runs for five minutes. Options of libFuzzer and folders with more inputs may follow; new inputs are kept in
the first folder. An input that fails is written to ``crash-*``, ``timeout-*`` or ``oom-*``, and is run again
if it is given as the only argument.

Each input is a file that ``create`` reads, and also a layer of Ollama's that is opened where it lies: both
accept it, or neither. Nothing is synced.
"""

from __future__ import annotations

import os
import shutil
import struct
import sys
import tempfile
from pathlib import Path
from unittest import mock

import atheris  # type: ignore[import-not-found, import-untyped, unused-ignore]

sys.path.insert(0, str(Path(__file__).parents[2]))

with atheris.instrument_imports(include=["blobstore"]):
    import blobstore
    from blobstore.errors import BlobstoreError, UnsupportedSource
    from blobstore.sources import versions
    from blobstore.store.local import LocalStore

from tests.fuzz.harness import run
from tests.readers.gguf_models import read_header
from tests.support.gguf_files import ARRAY, TEXT, U32, gguf_file, text, texts

SEEDS = [
    gguf_file([("general.architecture", TEXT, text("llama"))]),
    gguf_file([("general.architecture", TEXT, text("llama"))], [("a", 0, [4], bytes(16))]),
    gguf_file(
        [("general.alignment", U32, struct.pack("<I", 8)), ("tokens", ARRAY, texts(["a", "bc"]))],
        [("a", 8, [32, 2], bytes(68)), ("b", 142, [3], bytes(8)), ("c", 24, [3], b"abc")],
        alignment=8,
    )
    + b"a tail",
]


def read_one(data: bytes, folder: Path) -> None:
    """Import a file, write it again, and open it."""
    path, root = folder / "x.gguf", folder / "store"
    path.write_bytes(data)
    store = LocalStore(root)
    try:
        blobstore.create(path, "m", store=store, jobs=1)
        is_imported = True
    except BlobstoreError as error:
        _check_message(error)
        is_imported = isinstance(error, UnsupportedSource)  # names that no blob can have
    else:
        assert read_header(data).tensors.keys() == set(blobstore.open("m", store=store))
        blobstore.export("m", folder / "out", store=store, jobs=1)
        assert (folder / "out" / "x.gguf").read_bytes() == data
    try:
        with blobstore.open(path) as model:
            for name in model:
                assert model[name].nbytes <= len(data)
        assert is_imported
    except BlobstoreError as error:
        _check_message(error)
        assert not is_imported or isinstance(error, UnsupportedSource), error
    finally:
        for used in (root, folder / "out"):
            shutil.rmtree(used, ignore_errors=True)


def _check_message(error: BlobstoreError) -> None:
    assert str(error).isprintable(), str(error)
    assert len(str(error)) < 4000, str(error)


def write_seeds(folder: Path) -> None:
    """Write files that are imported."""
    for number, data in enumerate(SEEDS):
        (folder / str(number)).write_bytes(data)


def main() -> None:
    """Run libFuzzer; it ends the process."""
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with (
        tempfile.TemporaryDirectory(dir=memory) as name,
        mock.patch.object(os, "fsync", int),  # a mock would keep each call
        mock.patch.object(versions, "_TICK", 0),  # no input waits until the clock has moved on
    ):
        run(lambda data: read_one(data, Path(name)), write_seeds, "-timeout=10")


if __name__ == "__main__":
    main()
