"""Fuzz headers of GGUF files: they may be refused, but not crash, hang, grow or describe bytes beyond the file.

In an environment with this package and ``atheris``, from the root of the repository::

    python tests/fuzz/fuzz_gguf.py

runs for five minutes. Options of libFuzzer and folders with more inputs may follow; new inputs are kept in
the first folder. An input that fails is written to ``crash-*``, ``timeout-*`` or ``oom-*``, and is run again
if it is given as the only argument.
"""

from __future__ import annotations

import struct
import sys
from itertools import pairwise
from pathlib import Path

import atheris  # type: ignore[import-not-found, import-untyped, unused-ignore]

sys.path.insert(0, str(Path(__file__).parents[2]))

with atheris.instrument_imports(include=["blobstore"]):
    from blobstore.gguf.header import GgufArray, InvalidGguf, read_header

from tests.fuzz.harness import run
from tests.support.gguf_files import ARRAY, TEXT, U32, gguf_file, text, texts

SEEDS = [
    gguf_file(),
    gguf_file([("general.architecture", TEXT, text("llama"))], [("a", 0, [4], bytes(16))]),
    gguf_file(
        [
            ("general.alignment", U32, struct.pack("<I", 64)),
            ("tokens", ARRAY, texts(["a", "bc"])),
            ("numbers", ARRAY, struct.pack("<IQII", U32, 2, 1, 2)),
        ],
        [("a", 12, [256, 2], bytes(288)), ("b", 142, [3], bytes(64)), ("c", 1, [], bytes(2))],
        alignment=64,
    ),
]


def read_one(data: bytes) -> None:
    """Parse an input, and check what is said about its tensors."""
    try:
        header = read_header(lambda begin, end: data[begin:end], len(data))
    except InvalidGguf as error:
        assert str(error).isprintable(), str(error)
        assert len(str(error)) < 4000, str(error)
        return
    for value in header.metadata.values():
        if isinstance(value, GgufArray):
            assert len(list(value)) == len(value)
    tensors = list(header.tensors.values())
    for before, after in pairwise(tensors):
        assert before.begin + before.size <= after.begin, (before, after)
    for tensor in tensors:
        assert header.data_start <= tensor.begin <= tensor.begin + tensor.size <= len(data), tensor


def write_seeds(folder: Path) -> None:
    """Write files that are parsed."""
    for number, data in enumerate(SEEDS):
        (folder / str(number)).write_bytes(data)


def main() -> None:
    """Run libFuzzer; it ends the process."""
    run(read_one, write_seeds, "-timeout=10")


if __name__ == "__main__":
    main()
