"""Delta compression of fine-tunes against their base: size and speed, compared with other codecs.

The pairs are trained (`fine_tunes`) or published models, all cast to bf16. Speeds are GB/s of bf16 in
processor time of one thread: the best of the rounds, in each of which all codecs take turns. Use
--folder to train only once, and OPENBLAS_NUM_THREADS=1 to measure fits with one thread.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import zstandard

from blobstore.compression.decoder import ColdBlobDecoder
from blobstore.compression.delta.codec import FAST, SMALL, DeltaSettings, decode_chunk, encode_chunk
from blobstore.compression.delta.low_rank import LowRankPredictor, pack, unpack
from blobstore.compression.delta.low_rank_fit import fit
from blobstore.compression.encoder import encode
from blobstore.compression.spans import Span
from blobstore.core.digest import Digest
from blobstore.core.tensor import DType
from blobstore.safetensors.numpy import BF16, as_bytes
from tests.benchmarks.common import arguments, workspace
from tests.benchmarks.fine_tunes import pairs
from tests.benchmarks.plot import Point

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping

    Array = np.ndarray[Any, Any]

_ELEMENTS = 1 << 18
_ANY_DIGEST = Digest("0" * 64)
_FAMILY = 4


class Pair(NamedTuple):
    """A tensor of a base and of a fine-tune, as bits."""

    base: Array
    tensor: Array
    columns: int


class Codec(Protocol):
    """A way to store a tensor whose base is known."""

    def encode(self, pair: Pair) -> list[bytes]:
        """Return what is stored."""

    def decode(self, stored: list[bytes], pair: Pair, out: Array) -> None:
        """Write the tensor, from what is stored and the base."""


class Zstd:
    """Plain zstd, which looks at no base."""

    _compressor = zstandard.ZstdCompressor(level=3)
    _decompressor = zstandard.ZstdDecompressor()

    def encode(self, pair: Pair) -> list[bytes]:
        return [self._compressor.compress(pair.tensor.data)]

    def decode(self, stored: list[bytes], pair: Pair, out: Array) -> None:
        out[:] = np.frombuffer(self._decompressor.decompress(stored[0]), np.uint16)


class BitX(Zstd):
    """The method of ZipLLM: exclusive or, the exponents apart from signs and mantissas, zstd 3."""

    def encode(self, pair: Pair) -> list[bytes]:
        planes = []
        for part in _parts(pair):
            mixed = pair.tensor[part] ^ pair.base[part]
            exponents = (mixed >> 7).astype(np.uint8)
            rest = ((mixed >> 8) & 0x80 | mixed & 0x7F).astype(np.uint8)
            planes += [self._compressor.compress(plane.data) for plane in (exponents, rest)]
        return planes

    def decode(self, stored: list[bytes], pair: Pair, out: Array) -> None:
        for number, part in enumerate(_parts(pair)):
            exponents, rest = (
                np.frombuffer(self._decompressor.decompress(plane), np.uint8).astype(np.uint16)
                for plane in stored[2 * number : 2 * number + 2]
            )
            mixed = exponents << 7 | rest & 0x7F | (rest & 0x80) << 8
            np.bitwise_xor(pair.base[part], mixed, out=out[part])


class Differences:
    """Ours: differences in classes of the base's exponents."""

    def __init__(self, settings: DeltaSettings) -> None:
        self._settings = settings

    def encode(self, pair: Pair) -> list[bytes]:
        return [
            encode_chunk(pair.tensor[part], pair.base[part], DType.BF16, self._settings)
            for part in _parts(pair)
        ]

    def decode(self, stored: list[bytes], pair: Pair, out: Array) -> None:
        for part, chunk in zip(_parts(pair), stored, strict=True):
            decode_chunk(memoryview(chunk), pair.base[part], DType.BF16, out[part])


class Predicted(Differences):
    """Ours: differences from what a product of narrow matrices predicts, where that is smaller."""

    def encode(self, pair: Pair) -> list[bytes]:
        base = pair.base
        found = fit(
            pair.tensor,
            lambda begin, end: base[begin:end],
            DType.BF16,
            pair.columns,
            "small",
        )
        if found is None:
            return [b"", *super().encode(pair)]
        factors = found.factors
        prediction = LowRankPredictor(factors, DType.BF16)
        chunks = []
        for part in _parts(pair):
            start = prediction.predict(pair.base[part], part.start)
            chunks.append(encode_chunk(pair.tensor[part], start, DType.BF16, self._settings))
        return [pack(factors), *chunks]

    def decode(self, stored: list[bytes], pair: Pair, out: Array) -> None:
        if not stored[0]:
            super().decode(stored[1:], pair, out)
            return
        factors = unpack(memoryview(stored[0]), len(pair.base))
        prediction = LowRankPredictor(factors, DType.BF16)
        for part, chunk in zip(_parts(pair), stored[1:], strict=True):
            start = prediction.predict(pair.base[part], part.start)
            decode_chunk(memoryview(chunk), start, DType.BF16, out[part])


class Solo:
    """Ours, of a tensor alone."""

    def encode(self, pair: Pair) -> list[bytes]:
        written: list[bytes] = []
        data = pair.tensor.view(np.uint8).data
        span = Span(len(data), DType.BF16)
        encode(
            [data],
            [span],
            lambda piece: written.append(bytes(piece)),
            level="small",
            digest=_ANY_DIGEST,
        )
        return [b"".join(written)]

    def decode(self, stored: list[bytes], pair: Pair, out: Array) -> None:
        ColdBlobDecoder(stored[0]).read_into(out.view(np.uint8).data)


def _parts(pair: Pair) -> Iterator[slice]:
    for start in range(0, len(pair.base), _ELEMENTS):
        yield slice(start, min(start + _ELEMENTS, len(pair.base)))


CODECS: Mapping[str, Codec] = {
    "zstd 3, no base": Zstd(),
    "planes, no base": Solo(),
    "BitX-like": BitX(),
    "differences, fast": Differences(FAST),
    "differences, small": Differences(SMALL),
    "predicted, fast": Predicted(FAST),
    "predicted, small": Predicted(SMALL),
}
_PEERS = (CODECS["zstd 3, no base"], CODECS["BitX-like"])
_PEER, _ALONE, _BEST = "BitX-like", "planes, no base", "predicted, small"


class Measured(NamedTuple):
    """A codec on a pair of models."""

    sizes: list[int]
    """Of each tensor."""
    encode: float
    decode: float
    """Seconds."""


def measure(codec: Codec, model: list[Pair], *, check: bool) -> Measured:
    """Encode and decode every tensor."""
    started = time.process_time()
    stored = [codec.encode(pair) for pair in model]
    encoded = time.process_time()
    outs = [np.zeros_like(pair.base) for pair in model]
    begun = time.process_time()
    for pair, pieces, out in zip(model, stored, outs, strict=True):
        codec.decode(pieces, pair, out)
    decoded = time.process_time()
    if check:
        for pair, out in zip(model, outs, strict=True):
            assert np.array_equal(out, pair.tensor)
    sizes = [sum(map(len, pieces)) for pieces in stored]
    return Measured(sizes, encoded - started, decoded - begun)


def best_of(rounds: list[Measured]) -> Measured:
    """Return the best speeds."""
    return Measured(
        rounds[0].sizes, min(one.encode for one in rounds), min(one.decode for one in rounds)
    )


def of_models(base: Mapping[str, Array], tuned: Mapping[str, Array], scale: float) -> list[Pair]:
    """Return the tensors that both have, in bf16."""
    model = []
    for name, tensor in tuned.items():
        other = base.get(name)
        if other is not None and other.shape == tensor.shape and tensor.size:
            columns = tensor[0].size if tensor.ndim > 1 else 1
            rows = max(int(tensor.size // columns * scale), 1)
            sides = (side.reshape(-1)[: rows * columns].astype(BF16) for side in (other, tensor))
            bits = [np.frombuffer(as_bytes(side), np.uint16).copy() for side in sides]
            model.append(Pair(bits[0], bits[1], columns))
    return model


def report(name: str, model: list[Pair], found: Mapping[str, Measured]) -> list[Point]:
    """Print the table of a pair of models, and return what the codecs came to."""
    points = []
    nbytes = sum(pair.tensor.nbytes for pair in model)
    differ = sum(int(np.count_nonzero(pair.tensor != pair.base)) for pair in model)
    peer = sum(found[_PEER].sizes)
    alone = found[_ALONE].sizes
    print(
        f"{name}: {nbytes / 1e6:.1f} MB of bf16, {200 * differ / nbytes:.1f} % of elements differ\n"
    )
    print("| codec | ratio | smaller than BitX | encode GB/s | decode GB/s |")
    print("| --- | --- | --- | --- | --- |")
    for codec, one in found.items():
        size = sum(one.sizes)
        if codec.startswith(("differences", "predicted")):  # the better of both for every tensor
            size = sum(min(pair) for pair in zip(one.sizes, alone, strict=True))
        print(
            f"| {codec} | {size / nbytes:.4f} | {1 - size / peer:.1%} "
            f"| {nbytes / one.encode / 1e9:.2f} | {nbytes / one.decode / 1e9:.2f} |"
        )
        is_ours = CODECS[codec] not in _PEERS
        decoded = nbytes / one.decode / 1e9
        points.append(Point(codec, size / nbytes, decoded, is_ours=is_ours))
    solo = sum(alone) / nbytes
    saved = {
        codec: 1 - (solo + _FAMILY * sum(found[codec].sizes) / nbytes) / (1 + _FAMILY)
        for codec in (_PEER, "differences, small", _BEST)
    }
    told = ", ".join(f"{codec} {part:.1%}" for codec, part in saved.items())
    print(f"\nOf a base and {_FAMILY} such fine-tunes is saved: {told}\n", flush=True)
    return points


def tables(options: argparse.Namespace) -> dict[str, list[Point]]:
    """Print the tables, and return what the codecs came to by pair."""
    points = {}
    with workspace(options.folder) as folder:
        where = folder if options.folder is None else options.folder / "fine-tunes"
        for name, sides in pairs(where).items():
            model = of_models(*sides, options.scale)
            rounds: dict[str, list[Measured]] = {codec: [] for codec in CODECS}
            for number in range(options.rounds):
                for codec, item in CODECS.items():
                    rounds[codec].append(measure(item, model, check=not number))
            best = {codec: best_of(taken) for codec, taken in rounds.items()}
            points[name] = report(name, model, best)
    return points


if __name__ == "__main__":
    tables(arguments(__doc__))
