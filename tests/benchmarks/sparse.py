"""Deltas of a step of reinforcement learning: bytes and speed, compared with the bound and with slime.

The weights are those of all-MiniLM-L6-v2. A step of Adam's kind moves 32-bit masters, so that a given
share of the bf16 weights changes. The bound is the entropy of what changes, and of the differences, if the
exponents of the base are known. slime publishes the exclusive or of each tensor, compressed by zstd 1.
Speeds are GB/s of bf16 in processor time of one thread: the best of the rounds, in each of which all
codecs take turns.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import zstandard
from safetensors.numpy import load_file

from blobstore.compression.base import BaseBlob
from blobstore.compression.decoder import ColdBlobDecoder
from blobstore.compression.encoder import encode
from blobstore.compression.spans import Span, merge_small
from blobstore.core.digest import Digest
from blobstore.core.tensor import DType
from blobstore.safetensors.numpy import BF16, as_bytes
from tests.benchmarks.common import arguments
from tests.benchmarks.fine_tunes import floats, pretrained

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from blobstore.compression.level import Level

    Array = np.ndarray[Any, Any]

RATES = (0.005, 0.02, 0.05)
_SPREAD = 0.35
"""Of Adam's step, which is at most 1 before it is multiplied by the rate."""
_ANY_DIGEST = Digest("0" * 64)


def masters(scale: float = 1.0) -> list[Array]:
    """Return the tensors of the model in 32 bits, the largest ones cut by ``scale``."""
    tensors = floats(load_file(pretrained() / "model.safetensors"))
    return [tensor.ravel()[: max(int(tensor.size * scale), 1)] for tensor in tensors.values()]


def step(tensors: Sequence[Array], share: float) -> list[Array]:
    """Return the weights in bf16 after a step that changes about a share of them."""
    random = np.random.default_rng(0)
    moves = [
        random.normal(0, _SPREAD, tensor.size).clip(-1, 1).astype(np.float32) for tensor in tensors
    ]
    before = [bits(tensor) for tensor in tensors]
    low, high = 1e-9, 1e-2
    for _ in range(20):
        rate = (low * high) ** 0.5
        after = [
            bits(tensor + np.float32(rate) * move)
            for tensor, move in zip(tensors, moves, strict=True)
        ]
        if changed(before, after) > share:
            high = rate
        else:
            low = rate
    return after


def joined(tensors: Sequence[Array]) -> list[Array]:
    """Return copies of tensors, one behind the other in memory."""
    ends = np.cumsum([tensor.size for tensor in tensors])
    return np.split(np.concatenate(list(tensors)), ends[:-1])


def whole(tensors: Sequence[Array]) -> memoryview:
    """Return the memory of all tensors that :func:`joined` returned."""
    memory = tensors[0].base
    assert isinstance(memory, np.ndarray)
    return memory.data.cast("B")


def bits(tensor: Array) -> Array:
    """Return the bits of a tensor in bf16."""
    return np.frombuffer(as_bytes(tensor.astype(BF16)), np.uint16).copy()


def changed(before: Sequence[Array], after: Sequence[Array]) -> float:
    """Return the share of the elements that differ."""
    differ = sum(int(np.count_nonzero(one != two)) for one, two in zip(before, after, strict=True))
    return differ / sum(one.size for one in before)


def bound(before: Sequence[Array], after: Sequence[Array]) -> float:
    """Return the entropy in bytes of which elements change, and of how, given the base's exponents."""
    base, tensor = np.concatenate(before), np.concatenate(after)
    exponents, differences = base >> 7 & 0xFF, tensor - base
    total = 0.0
    for exponent in np.unique(exponents):
        mine = differences[exponents == exponent]
        moved = mine[mine != 0]
        total += _entropy(np.array([len(moved), len(mine) - len(moved)]))
        total += _entropy(np.bincount(moved)) if len(moved) else 0.0
    return total / 8


def _entropy(counts: Array) -> float:
    counts = counts[counts > 0]
    return float((counts * np.log2(counts.sum() / counts)).sum())


class Codec(Protocol):
    """A way to store tensors whose base is known."""

    def encode(self, before: Sequence[Array], after: Sequence[Array]) -> list[bytes]:
        """Return what is stored."""

    def decode(self, stored: list[bytes], before: Sequence[Array], outs: Sequence[Array]) -> None:
        """Write the tensors, from what is stored and the base."""


class Slime:
    """The exclusive or of each tensor, compressed by zstd 1."""

    _compressor = zstandard.ZstdCompressor(level=1)
    _decompressor = zstandard.ZstdDecompressor()

    def encode(self, before: Sequence[Array], after: Sequence[Array]) -> list[bytes]:
        return [
            self._compressor.compress((one ^ two).data)
            for one, two in zip(before, after, strict=True)
        ]

    def decode(self, stored: list[bytes], before: Sequence[Array], outs: Sequence[Array]) -> None:
        for piece, one, out in zip(stored, before, outs, strict=True):
            mixed = np.frombuffer(self._decompressor.decompress(piece), np.uint16)
            np.bitwise_xor(one, mixed, out=out)


class Cold:
    """Ours: one blob with all tensors, against one base. Both directions handle all of it."""

    def __init__(self, level: Level) -> None:
        self._level: Level = level

    def encode(self, before: Sequence[Array], after: Sequence[Array]) -> list[bytes]:
        spans, at = [], 0
        for tensor in after:
            spans.append(Span(tensor.nbytes, DType.BF16, base_begin=at))
            at += tensor.nbytes
        written: list[bytes] = []
        encode(
            [whole(after)],
            merge_small(spans, at),
            lambda piece: written.append(bytes(piece)),
            level=self._level,
            digest=_ANY_DIGEST,
            base=BaseBlob.hot(whole(before), _ANY_DIGEST),
        )
        return [b"".join(written)]

    def decode(self, stored: list[bytes], before: Sequence[Array], outs: Sequence[Array]) -> None:
        blob = ColdBlobDecoder(stored[0])
        blob.give_base(BaseBlob.hot(whole(before), _ANY_DIGEST))
        blob.read_into(whole(outs))


CODECS: Mapping[str, Codec] = {"slime": Slime(), "fast": Cold("fast"), "small": Cold("small")}


class Measured(NamedTuple):
    """A codec on a step."""

    size: int
    encode: float
    decode: float
    """Seconds."""


def measure(codec: Codec, before: Sequence[Array], after: Sequence[Array]) -> Measured:
    """Encode and decode all tensors."""
    started = time.process_time()
    stored = codec.encode(before, after)
    encoded = time.process_time() - started
    outs = joined([np.zeros_like(one) for one in before])
    started = time.process_time()
    codec.decode(stored, before, outs)
    decoded = time.process_time() - started
    assert all(np.array_equal(out, two) for out, two in zip(outs, after, strict=True))
    return Measured(sum(map(len, stored)), encoded, decoded)


def report(before: Sequence[Array], after: Sequence[Array], count: int) -> None:
    """Print the table of a step."""
    before, after = joined(before), joined(after)
    least, nbytes = bound(before, after), sum(one.nbytes for one in before)
    rounds: dict[str, list[Measured]] = {name: [] for name in CODECS}
    for _ in range(count):
        for name, codec in CODECS.items():
            rounds[name].append(measure(codec, before, after))
    print(
        f"\n{nbytes / 1e6:.1f} MB in {len(before)} tensors, "
        f"{changed(before, after):.2%} of the elements differ, bound {least:,.0f} bytes\n"
    )
    print("| codec | bytes | of the bound | of slime | encode GB/s | decode GB/s |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, taken in rounds.items():
        size = taken[0].size
        print(
            f"| {name} | {size:,} | {size / least:.2f} | {size / rounds['slime'][0].size:.2f} "
            f"| {nbytes / min(one.encode for one in taken) / 1e9:.2f} "
            f"| {nbytes / min(one.decode for one in taken) / 1e9:.2f} |",
            flush=True,
        )


def main() -> None:
    """Print the tables of all tensors at each rate, and of the largest one, whose chunks are whole."""
    options = arguments(__doc__)
    tensors = masters(options.scale)
    before = [bits(tensor) for tensor in tensors]
    largest = max(range(len(tensors)), key=lambda number: tensors[number].size)
    for share in RATES:
        after = step(tensors, share)
        report(before, after, options.rounds)
        report([before[largest]], [after[largest]], options.rounds)


if __name__ == "__main__":
    main()
