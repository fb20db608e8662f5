"""Deltas of a step of reinforcement learning: bytes and speed, compared with the bound and with slime.

The weights are those of all-MiniLM-L6-v2. A step of Adam's kind moves 32-bit masters, so that a given
share of the bf16 weights changes. The bound is the entropy of what changes, and of the differences, if the
exponents of the base are known. slime publishes the exclusive or of each tensor, compressed by zstd 1.
Ours is what ``freeze`` writes for a blob with all tensors, and for one with the largest, from the alignment
of the tensors to the table; all map the same files. Speeds are GB/s of bf16 in processor time of one
thread: the best of the rounds, in each of which all codecs take turns.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import zstandard
from safetensors.numpy import load_file

from blobstore.cold_blobs.blob_encoder import BlobEncoder
from blobstore.compression.decoder import ColdBlobDecoder
from blobstore.safetensors.numpy import BF16, as_bytes
from blobstore.store.local import LocalStore
from tests.benchmarks.common import arguments, workspace
from tests.benchmarks.fine_tunes import floats, pretrained
from tests.support.models import add_blob, blob

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from blobstore.compression.level import Level
    from blobstore.core.digest import BlobId

    Array = np.ndarray[Any, Any]

RATES = (0.005, 0.02, 0.05)
_SPREAD = 0.35
"""Of Adam's step, which is at most 1 before it is multiplied by the rate."""


def masters(scale: float = 1.0) -> list[Array]:
    """Return the tensors of the model in 32 bits, cut to a part of their rows."""
    tensors = floats(load_file(pretrained() / "model.safetensors"))
    return [tensor[: max(int(len(tensor) * scale), 1)] for tensor in tensors.values()]


def step(tensors: Sequence[Array], share: float) -> list[Array]:
    """Return the weights in bf16 after a step that changes about a share of them."""
    random = np.random.default_rng(0)
    moves = [
        np.clip(random.normal(0, _SPREAD, tensor.shape), -1, 1).astype(np.float32)
        for tensor in tensors
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


def bits(tensor: Array) -> Array:
    """Return the bits of a tensor in bf16."""
    found = np.frombuffer(as_bytes(tensor.astype(BF16)), np.uint16).copy()
    return found.reshape(tensor.shape)


def changed(before: Sequence[Array], after: Sequence[Array]) -> float:
    """Return the share of the elements that differ."""
    differ = sum(int(np.count_nonzero(one != two)) for one, two in zip(before, after, strict=True))
    return differ / sum(one.size for one in before)


def bound(before: Sequence[Array], after: Sequence[Array]) -> float:
    """Return the entropy in bytes of which elements change, and of how, given the base's exponents."""
    base, tensor = (np.concatenate([one.ravel() for one in side]) for side in (before, after))
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


class Model(NamedTuple):
    """A blob of tensors in a store."""

    store: LocalStore
    blob: BlobId
    tensors: Sequence[Array]

    @classmethod
    def of(cls, store: LocalStore, tensors: Sequence[Array]) -> Model:
        """Add a blob of the tensors to a store."""
        named = ((f"{n:03}", "BF16", one.shape, one.tobytes()) for n, one in enumerate(tensors))
        return cls(store, add_blob(store, blob(*named)), tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(one.nbytes for one in self.tensors)

    def mapped(self) -> list[Array]:
        """Map the file of the blob, as reading it begins, and return its tensors."""
        data = self.store.mmap_hot(*self.blob)
        ends = np.cumsum([one.size for one in self.tensors])
        return np.split(np.frombuffer(data[-self.nbytes :], np.uint16), ends[:-1])


class Codec(Protocol):
    """A way to store tensors whose base is known."""

    def encode(self, before: Model, after: Model) -> list[bytes]:
        """Return what is stored."""

    def decode(self, stored: list[bytes], before: Model, out: Array) -> None:
        """Write the blob, from what is stored and the base."""


class Slime:
    """The exclusive or of each tensor, compressed by zstd 1."""

    _compressor = zstandard.ZstdCompressor(level=1)
    _decompressor = zstandard.ZstdDecompressor()

    def encode(self, before: Model, after: Model) -> list[bytes]:
        return [
            self._compressor.compress((one ^ two).data)
            for one, two in zip(before.mapped(), after.mapped(), strict=True)
        ]

    def decode(self, stored: list[bytes], before: Model, out: Array) -> None:
        at = len(out) - before.nbytes
        for piece, one in zip(stored, before.mapped(), strict=True):
            mixed = np.frombuffer(self._decompressor.decompress(piece), np.uint16)
            np.bitwise_xor(one, mixed, out=out[at : at + one.nbytes].view(np.uint16))
            at += one.nbytes


class Cold:
    """Ours: what ``freeze`` writes."""

    def __init__(self, level: Level) -> None:
        self._level: Level = level

    def encode(self, before: Model, after: Model) -> list[bytes]:
        written: list[bytes] = []
        encoder = BlobEncoder(after.store, after.blob, self._level, before.blob)
        encoder.write(lambda piece: written.append(bytes(piece)), lambda _: None)
        return [b"".join(written)]

    def decode(self, stored: list[bytes], before: Model, out: Array) -> None:
        decoder = ColdBlobDecoder(stored[0])
        decoder.give_base(before.store.base(*before.blob))
        decoder.read_into(out.data)


CODECS: Mapping[str, Codec] = {"slime": Slime(), "fast": Cold("fast"), "small": Cold("small")}


class Measured(NamedTuple):
    """A codec on a step."""

    size: int
    encode: float
    decode: float
    """Seconds."""


def measure(codec: Codec, before: Model, after: Model) -> Measured:
    """Encode and decode all tensors."""
    started = time.process_time()
    stored = codec.encode(before, after)
    encoded = time.process_time() - started
    out = np.zeros(after.blob.size, np.uint8)
    started = time.process_time()
    codec.decode(stored, before, out)
    decoded = time.process_time() - started
    whole = np.concatenate(after.mapped())
    assert np.array_equal(out[-after.nbytes :].view(np.uint16), whole)
    return Measured(sum(map(len, stored)), encoded, decoded)


def report(before: Model, after: Model, count: int) -> None:
    """Print the table of a step."""
    least = bound(before.tensors, after.tensors)
    nbytes = before.nbytes
    rounds: dict[str, list[Measured]] = {name: [] for name in CODECS}
    for _ in range(count):
        for name, codec in CODECS.items():
            rounds[name].append(measure(codec, before, after))
    print(
        f"\n{nbytes / 1e6:.1f} MB in {len(before.tensors)} tensors, "
        f"{changed(before.tensors, after.tensors):.2%} of the elements differ, bound {least:,.0f} bytes\n"
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
    with workspace(options.folder) as scratch:
        store = LocalStore(scratch / "store")
        for share in RATES:
            after = step(tensors, share)
            for some in (slice(None), slice(largest, largest + 1)):
                sides = [Model.of(store, side[some]) for side in (before, after)]
                report(sides[0], sides[1], options.rounds)


if __name__ == "__main__":
    main()
