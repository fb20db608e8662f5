"""GGUF files compared with the package gguf and with safetensors files: opening, values, import and export.

    python -m tests.benchmarks.gguf [--folder DIR] [--only open|values|files]

Opening ends with a view of every tensor. Values are float32 in memory that each call allocates. Files have
2 GiB, in 300 tensors.
"""

from __future__ import annotations

import argparse
import os
import shutil
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np

import blobstore
from blobstore.core.tensor import DType, TensorSpec
from blobstore.gguf.dequantize import dequantize
from blobstore.gguf.types import TYPES
from tests.benchmarks import common
from tests.support.gguf_files import ARRAY, TEXT, gguf_header, text, texts
from tests.support.models import write_safetensors

_TENSORS = 300
_VOCABULARY = 150_000
_BF16, _Q8_0 = 30, 8
_I32, _F32 = 5, 6
_COLUMNS = 2048
_ONCE = 1 << 20
"""Weights that are decoded on one thread."""


def write_gguf(path: Path, rows: int, *, vocabulary: int = 0) -> int:
    """Write a file of 300 tensors of Q8_0, ``[rows, 2048]`` each, and return the bytes of one."""
    nbytes = rows * _COLUMNS // 32 * 34
    values = [("general.architecture", TEXT, text("llama"))]
    if vocabulary:
        tokens = [f"Ġtoken{number}" for number in range(vocabulary)]
        merges = [f"Ġto ken{number}" for number in range(vocabulary)]
        kinds = struct.pack("<IQ", _I32, vocabulary) + np.ones(vocabulary, "<i4").tobytes()
        scores = struct.pack("<IQ", _F32, vocabulary) + np.ones(vocabulary, "<f4").tobytes()
        values += [
            ("tokenizer.ggml.tokens", ARRAY, texts(tokens)),
            ("tokenizer.ggml.merges", ARRAY, texts(merges)),
            ("tokenizer.ggml.token_type", ARRAY, kinds),
            ("tokenizer.ggml.scores", ARRAY, scores),
        ]
    tensors = [(_name(index), _Q8_0, (_COLUMNS, rows), nbytes) for index in range(_TENSORS)]
    with path.open("wb") as file:
        file.write(gguf_header(values, tensors))
        for _ in range(_TENSORS):
            file.write(_blocks("Q8_0", nbytes // 34))
            file.write(bytes(-nbytes % 32))
    return nbytes


def _name(index: int) -> str:
    return f"blk.{index // 10}.ffn_{index % 10}.weight"


def _blocks(type_name: str, count: int) -> bytes:
    """Return blocks whose scales are small numbers, not NaN."""
    size = next(kind.size for kind in TYPES.values() if kind.name == type_name)
    random = np.frombuffer(os.urandom(count * size), np.uint8).reshape(count, size) & 0x3F
    return random.tobytes()


def opening(folder: Path, count: int) -> None:
    """Print the tables of a small file, without and with a vocabulary."""
    for title, size in (
        (f"{_TENSORS} tensors", 0),
        (f"{_VOCABULARY} tokens and merges", _VOCABULARY),
    ):
        path = folder / "open.gguf"
        write_gguf(path, 8, vocabulary=size)
        common.warm(path)

        def theirs(path: Path = path) -> object:
            return [tensor.data for tensor in gguf.GGUFReader(path).tensors]

        def ours(path: Path = path) -> object:
            with blobstore.open(path) as model:
                return [model[name] for name in model]

        cases = {
            "gguf.GGUFReader": lambda: common.timed(theirs),
            "blobstore.open": lambda: common.timed(ours),
        }
        print(f"{title}\n")
        common.table(common.rounds(cases, count), "gguf.GGUFReader")


def values(count: int) -> None:
    """Print the tables of one matrix of 4096 x 4096 and each of three types."""
    for name in ("Q4_K", "Q6_K", "Q8_0"):
        kind = next(kind for kind in TYPES.values() if kind.name == name)
        weights = 4096 * 4096
        data = np.frombuffer(_blocks(name, weights // kind.weights), np.uint8)
        blocks: Any = data.reshape(4096, -1)
        rows = _ONCE // 4096

        def one_thread(name: str = name, blocks: Any = blocks, rows: int = rows) -> object:
            out = np.empty((4096, 4096), np.float32)
            for start in range(0, 4096, rows):
                dequantize(name, blocks[start : start + rows], out[start : start + rows])
            return out

        theirs = partial(gguf.dequantize, blocks, gguf.GGMLQuantizationType[name])
        cases: dict[str, Callable[[], float]] = {
            "gguf.dequantize": partial(common.timed, theirs),
            "one thread": partial(common.timed, one_thread),
            f"{os.cpu_count()} threads": partial(common.timed, partial(dequantize, name, blocks)),
        }
        print(f"{name}, 4096 x 4096\n")
        before = partial(common.borrow_memory, weights * 8)
        common.table(common.rounds(cases, count, before), "gguf.dequantize", weights * 4)


def files(folder: Path, count: int, nbytes: int) -> None:
    """Print the tables of import and export, next to a safetensors file of as many bytes."""
    source, out = folder / "model.gguf", folder / "out"
    per_tensor = write_gguf(source, max(nbytes // _TENSORS // (_COLUMNS // 32 * 34), 1))
    other = folder / "model.safetensors"
    specs = [
        TensorSpec(_name(index), DType.U8, (per_tensor // 34, 34)) for index in range(_TENSORS)
    ]
    write_safetensors(other, specs, lambda _: [_blocks("Q8_0", per_tensor // 34)])
    stores = {path: blobstore.LocalStore(folder / f"full{path.suffix}") for path in (source, other)}
    for path, store in stores.items():
        blobstore.create(path, "m", store=store)

    def create(path: Path) -> float:
        store = blobstore.LocalStore(folder / "new")
        taken = common.timed(partial(blobstore.create, path, "m", store=store, jobs=2))
        shutil.rmtree(folder / "new")
        return taken

    def export(path: Path) -> float:
        taken = common.timed(partial(blobstore.export, "m", out, store=stores[path], jobs=2))
        shutil.rmtree(out)
        return taken

    def prepare() -> None:
        os.sync()
        common.warm(source)
        common.warm(other)

    for title, case in (("create", create), ("export", export)):
        cases = {
            "safetensors": partial(case, other),
            "GGUF": partial(case, source),
        }
        print(f"{title}, {per_tensor * _TENSORS / common.GIB:.2f} GiB, {_TENSORS} tensors\n")
        common.table(common.rounds(cases, count, prepare), "safetensors", per_tensor * _TENSORS)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=("open", "values", "files"))


def main() -> None:
    """Print the tables."""
    options = common.arguments(__doc__, _add_options)
    with common.workspace(options.folder) as folder:
        if options.only in (None, "open"):
            opening(folder, options.rounds)
        if options.only in (None, "values"):
            values(options.rounds)
        if options.only in (None, "files"):
            files(folder, options.rounds, int(2 * common.GIB * options.scale))


if __name__ == "__main__":
    main()
