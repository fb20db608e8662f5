"""Damaged and hostile cold blobs: each fails with one clear error, in bounded memory and time."""

from __future__ import annotations

import hashlib
import struct
import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import zstandard

from blobstore.compression.base import BaseBlob
from blobstore.compression.decoder import ColdBlobDecoder
from blobstore.compression.entropy import Method
from blobstore.compression.quant_rule import MAX_CODED, QuantRule
from blobstore.compression.scaled_rules import CODES as CODES_OF_GROUPS
from blobstore.compression.scaled_rules import AffineRule, Float8Rule
from blobstore.compression.spans import Span, mark_duplicates
from blobstore.compression.table import (
    PREFIX,
    PREFIXES,
    Chunk,
    Part,
    StoredFactors,
    StoredPlane,
    Table,
    decode_table,
    encode_table,
)
from blobstore.core.digest import BlobId, Digest
from blobstore.core.tensor import DType
from blobstore.core.trailer import FOOTER_SIZE
from blobstore.errors import ColdDamaged
from blobstore.gguf.quantize import quantize
from blobstore.gguf.types import TYPES
from tests.readers.scaled import read_affine, read_float8
from tests.support.cold import cold, decoded, noise, safetensors, spans_of, weights
from tests.support.ladders import coded_blocks

_TENSOR = weights(DType.BF16, 128)
BLOB = safetensors(
    {
        "a": (DType.BF16, _TENSOR),
        "b": (DType.F8_E4M3, weights(DType.F8_E4M3, 300)),
        "c": (DType.BF16, _TENSOR),
        "d": (DType.F32, weights(DType.F32, 150)),
    }
)
COLD = cold(BLOB, spans=mark_duplicates(spans_of(BLOB, len(BLOB)), BLOB))
BASE = bytes(byte ^ (place % 50 == 0) for place, byte in enumerate(BLOB))
DELTA = cold(BLOB, spans=[Span(len(BLOB), DType.BF16, base_begin=0)], base=BaseBlob.hot(BASE))
WEIGHTS = weights(DType.F32, 512)
BLOCKS = quantize("Q5_1", np.frombuffer(WEIGHTS, "<f4")).tobytes()
QUANTIZED = cold(
    BLOCKS,
    spans=[Span(len(BLOCKS), DType.U8, base_begin=0, rule=QuantRule("Q5_1", DType.F32, 32, 4))],
    base=BaseBlob.hot(WEIGHTS),
)
CODED = coded_blocks("Q4_1", np.frombuffer(WEIGHTS, "<f4").reshape(4, 128)).tobytes()
CODES = cold(
    CODED,
    spans=[
        Span(
            len(CODED),
            DType.U8,
            base_begin=0,
            rule=QuantRule("Q4_1", DType.F32, 32, 4, keeps_scales=True),
            blocks=TYPES[3],
        )
    ],
    base=BaseBlob.hot(WEIGHTS),
)
AFFINE = AffineRule(DType.F32, DType.F16, CODES_OF_GROUPS, 4, 64)
WORDS = read_affine(AFFINE.pack(), WEIGHTS, 256)
INTEGERS = cold(
    WORDS, spans=[Span(256, DType.U8, base_begin=0, rule=AFFINE)], base=BaseBlob.hot(WEIGHTS)
)
SCALES = np.full(4, 1e-4, np.float32).tobytes()
FLOAT8 = Float8Rule(DType.F32, 64, (2, 32)).with_scales(SCALES, 256)
BYTES = read_float8(FLOAT8.pack(), SCALES, WEIGHTS, 256)
FLOATS = cold(
    BYTES, spans=[Span(256, DType.U8, base_begin=0, rule=FLOAT8)], base=BaseBlob.hot(WEIGHTS)
)
FILES = [
    (COLD, None),
    (DELTA, BASE),
    (QUANTIZED, WEIGHTS),
    (CODES, WEIGHTS),
    (INTEGERS, WEIGHTS),
    (FLOATS, WEIGHTS),
]
IDS = ["solo", "delta", "quantized", "codes", "integers", "floats"]
DIGEST = Digest.of(BLOB)


def thawed(data: bytes | bytearray, base: bytes | None = None) -> bytes:
    """Decode a cold blob of any kind, but at most as many bytes as the valid one has."""
    blob = ColdBlobDecoder(data)
    if base is not None:
        blob.give_base(BaseBlob.hot(base))
    if blob.size > len(BLOB):
        raise ColdDamaged("another blob than the caller wanted")
    return decoded(blob)


def file(planes: bytes, table: Table) -> bytes:
    """Return a cold blob with a valid footer."""
    return PREFIX + planes + encode_table(table)


def forged(planes: bytes, part: Part, *chunks: Chunk) -> bytes:
    """Return a cold blob of one part, with the digest of ``BLOB``."""
    return file(planes, Table(DIGEST, part.size, None, [part], chunks))


@contextmanager
def little_memory(limit: int = 4 << 20) -> Iterator[None]:
    """Fail if the block ever has more bytes allocated."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < limit


def test_the_attacked_files_are_intact() -> None:
    assert thawed(COLD) == BLOB
    assert thawed(DELTA, BASE) == BLOB
    assert thawed(QUANTIZED, WEIGHTS) == BLOCKS
    assert ColdBlobDecoder(QUANTIZED).table.parts[0].rule is not None
    assert thawed(CODES, WEIGHTS) == CODED
    assert [chunk.transform for chunk in ColdBlobDecoder(CODES).table.chunks] == [131]
    for data, blocks in ((INTEGERS, WORDS), (FLOATS, BYTES)):
        assert thawed(data, WEIGHTS) == blocks
        assert [chunk.transform for chunk in ColdBlobDecoder(data).table.chunks] == [32]
    assert ColdBlobDecoder(COLD).table.parts[3].same_as == 1
    assert [chunk.transform for chunk in ColdBlobDecoder(DELTA).table.chunks] == [37]


@pytest.mark.parametrize(("data", "base"), FILES, ids=IDS)
def test_rejects_a_cold_blob_cut_at_any_byte(data: bytes, base: bytes | None) -> None:
    for size in range(len(data)):
        with pytest.raises(ColdDamaged):
            thawed(data[:size], base)


@pytest.mark.parametrize(("data", "base"), FILES, ids=IDS)
def test_rejects_flipped_bits_anywhere(data: bytes, base: bytes | None) -> None:
    damaged = bytearray(data)
    for place in range(len(data)):
        for bit in range(8):
            damaged[place] ^= 1 << bit
            with pytest.raises(ColdDamaged):
                thawed(damaged, base)
            damaged[place] ^= 1 << bit
    assert damaged == data


def test_rejects_missing_and_duplicated_bytes() -> None:
    for place in range(len(COLD)):
        with pytest.raises(ColdDamaged):
            thawed(COLD[:place] + COLD[place + 1 :])
        with pytest.raises(ColdDamaged):
            thawed(COLD[:place] + COLD[place : place + 1] + COLD[place:])


@pytest.mark.parametrize("tail", [b"\0", COLD, noise(4096)])
def test_rejects_bytes_after_the_end(tail: bytes) -> None:
    with pytest.raises(ColdDamaged):
        thawed(COLD + tail)


@pytest.mark.parametrize(
    "data", [b"", b"\x8f", noise(4096), BLOB, bytes(1 << 16), PREFIX, PREFIX * 99]
)
def test_rejects_bytes_that_are_not_a_cold_blob(data: bytes) -> None:
    with pytest.raises(ColdDamaged):
        thawed(data)


@pytest.mark.parametrize("version", [0, 3, 255])
def test_rejects_other_versions_even_with_a_valid_digest(version: int) -> None:
    prefix = PREFIX[:-1] + bytes([version])
    content = COLD[len(COLD) - FOOTER_SIZE - 400 : -FOOTER_SIZE]
    footer = struct.pack("<Q", len(content)) + hashlib.sha256(prefix + content).digest() + COLD[-8:]

    with pytest.raises(ColdDamaged, match=f"version {version}"):
        thawed(prefix + bytes(100) + content + footer)


def test_rejects_planes_in_another_order() -> None:
    part = Part(400, 2, 200)
    chunks = [noise(200, seed) for seed in (1, 2)]
    entries = [Chunk(zlib.crc32(chunk), 0, (StoredPlane(Method.RAW, 200),)) for chunk in chunks]

    with pytest.raises(ColdDamaged, match="decodes to"):  # valid, but another blob
        thawed(forged(b"".join(chunks), part, *entries))
    with pytest.raises(ColdDamaged, match="the file or the base is altered"):
        thawed(forged(b"".join(reversed(chunks)), part, *entries))


def test_rejects_the_table_of_another_file() -> None:
    other = cold(safetensors({"a": (DType.BF16, weights(DType.BF16, 128, seed=3))}))
    table = encode_table(decode_table(memoryview(other)))

    with pytest.raises(ColdDamaged):
        thawed(COLD[: len(COLD) - len(table)] + table)


@pytest.mark.parametrize("size", [1 << 40, 1 << 62, (1 << 64) - 1])
def test_rejects_huge_blobs_with_little_memory(size: int) -> None:
    part = Part(size, 1, 1 << 20)

    with little_memory(), pytest.raises(ColdDamaged, match="do not fit in the table"):
        ColdBlobDecoder(forged(b"", part))


def test_rejects_sizes_whose_sum_overflows() -> None:
    parts = [Part((1 << 64) - 1, 1, 1 << 20)] * 2
    table = Table(DIGEST, 5, None, parts, ())

    with pytest.raises(ColdDamaged, match="do not add up"):
        ColdBlobDecoder(file(b"", table))


def test_rejects_stored_sizes_beyond_the_file() -> None:
    stored = StoredPlane(Method.ZSTD, 999_999)

    with pytest.raises(ColdDamaged, match="lists 999999 bytes of planes, the file has 100"):
        ColdBlobDecoder(forged(bytes(100), Part(1 << 20, 1, 1 << 20), Chunk(0, 0, (stored,))))


def bomb(size: int) -> bytes:
    """Return a frame of zeros."""
    return zstandard.compress(bytes(size), 19)


@pytest.mark.parametrize("size", [1 << 20, 1 << 26])
def test_a_decompression_bomb_takes_little_memory(size: int) -> None:
    frame = bomb(size)
    entry = Chunk(0, 0, (StoredPlane(Method.ZSTD, len(frame)),))
    data = forged(frame, Part(200_000, 1, 200_000), entry)

    blob = ColdBlobDecoder(data)
    out = bytearray(200_000)
    with little_memory(), pytest.raises(ColdDamaged, match=f"declares {size} bytes"):
        blob.read_into(out)


def test_a_decompression_bomb_with_a_false_size_takes_little_memory() -> None:
    frame = bytearray(bomb(1 << 26))
    honest = zstandard.get_frame_parameters(bytes(frame)).content_size.to_bytes(4, "little")
    place = frame.index(honest)
    frame[place : place + 4] = (200_000).to_bytes(4, "little")
    entry = Chunk(0, 0, (StoredPlane(Method.ZSTD, len(frame)),))
    blob = ColdBlobDecoder(forged(bytes(frame), Part(200_000, 1, 200_000), entry))

    with little_memory(), pytest.raises(ColdDamaged):
        blob.read_into(bytearray(200_000))


def test_a_decompression_bomb_in_a_list_takes_little_memory() -> None:
    frame = bomb(1 << 26)
    most = 3 * (100_000 // 64 + 2)
    start = frame[:most]
    planes = (
        StoredPlane(Method.ZSTD, len(start)),
        StoredPlane(Method.RAW, 50_000),
        StoredPlane(Method.RAW, 100_000),
    )
    part = Part(200_000, 2, 200_000)
    blob = ColdBlobDecoder(forged(start + noise(150_000), part, Chunk(0, 5, planes)))

    with little_memory(), pytest.raises(ColdDamaged, match="declares 67108864"):
        blob.read_into(bytearray(200_000))


@pytest.mark.parametrize("place", [65_535, 4])
def test_rejects_a_list_with_an_index_out_of_range(place: int) -> None:
    listed = bytes([100]) + place.to_bytes(2, "little") + b"\7"
    planes = (StoredPlane(Method.RAW, 4), StoredPlane(Method.RAW, 2), StoredPlane(Method.RAW, 4))
    # Four elements; a list may have as many bytes as one of a few exponents.
    data = forged(listed + noise(6), Part(8, 2, 8), Chunk(0, 5, planes))

    with pytest.raises(ColdDamaged, match="has position"):
        thawed(data)


def test_rejects_lists_of_invalid_length() -> None:
    for size in range(2, 4):
        planes = (
            StoredPlane(Method.RAW, size),
            StoredPlane(Method.RAW, 2),
            StoredPlane(Method.RAW, 4),
        )
        data = forged(noise(size + 6), Part(8, 2, 8), Chunk(0, 5, planes))
        with pytest.raises(ColdDamaged, match=f"cannot have {size} bytes"):
            thawed(data)


def test_rejects_frames_of_another_size() -> None:
    for size in (199, 201):
        frame = zstandard.compress(bytes(size))
        entry = Chunk(0, 0, (StoredPlane(Method.ZSTD, len(frame)),))
        with pytest.raises(ColdDamaged, match=f"declares {size} bytes, expected 200"):
            thawed(forged(frame, Part(200, 1, 200), entry))


def test_rejects_a_frame_with_an_unknown_dictionary() -> None:
    words = zstandard.ZstdCompressionDict(noise(2000))
    frame = zstandard.ZstdCompressor(dict_data=words).compress(noise(2000)[:500])
    entry = Chunk(0, 0, (StoredPlane(Method.ZSTD, len(frame)),))

    with pytest.raises(ColdDamaged):
        thawed(forged(frame, Part(500, 1, 500), entry))


def test_rejects_a_chain_of_copies() -> None:
    first = Part(100, 1, 100)
    parts = [first, first._replace(same_as=0), first._replace(same_as=1)]
    entry = Chunk(0, 0, (StoredPlane(Method.RAW, 100),))

    with pytest.raises(ColdDamaged, match="kind 1 with 1 is not possible"):
        ColdBlobDecoder(file(bytes(100), Table(DIGEST, 300, None, parts, [entry])))


def test_many_copies_take_little_memory() -> None:
    # The table has 24 bytes per copy; the caller limits the output by the buffer that it allocates.
    chunk = noise(1000)
    first = Part(1000, 1, 1000)
    parts = [first, *[first._replace(same_as=0)] * 2000]
    entry = Chunk(zlib.crc32(chunk), 0, (StoredPlane(Method.RAW, 1000),))
    table = Table(Digest.of(chunk * 2001), 2_001_000, None, parts, [entry])

    blob = ColdBlobDecoder(file(chunk, table))
    with little_memory():
        out = decoded(blob)
    assert out == chunk * 2001


def listed(counts: bytes, highs: bytes, *, classes: int = 1, escapes: int = 0) -> bytes:
    """Return a chunk of differences whose nonzero ones are listed."""
    places = counts + struct.pack("<BI", Method.ZSTD, len(highs)) + highs
    form = 17 if escapes else 20
    rest = [(0, 0)] * (2 if escapes else 1)
    head = struct.pack("<BBBBBI", 0, classes, 1, classes, form, escapes)
    tables = [struct.pack("<BI", *one) for one in [(0, len(places)), *rest]]
    return b"".join([head, *tables, places])


@pytest.mark.parametrize(
    "chunk",
    [
        listed(b"\xff" * 3, b""),
        listed(b"\xff" * 48, b"", classes=16),
        listed((1 << 3).to_bytes(3, "little"), zstandard.compress(bytes(1 << 26))),
        listed(((1 << 19) << 3 | 7).to_bytes(3, "little"), zstandard.compress(bytes(1 << 19))),
        listed(bytes(3), zstandard.compress(b""), escapes=2**32 - 1),
        listed((1 << 3).to_bytes(3, "little"), zstandard.compress(b"\xff" * 3000 + b"\0")),
    ],
    ids=[
        "count",
        "counts of classes",
        "bomb",
        "low bits that are not there",
        "escapes",
        "past the end",
    ],
)
def test_listed_differences_that_cannot_be_are_refused_in_little_memory(chunk: bytes) -> None:
    size = 1 << 20
    base = bytes(size)
    plane = StoredPlane(Method.RAW, len(chunk))
    entry = Chunk(zlib.crc32(chunk, zlib.crc32(base)), 37, (plane,))
    part = Part(size, 2, size, base_begin=0)
    table = Table(DIGEST, size, BlobId(Digest.of(base), size), [part], [entry])
    blob = ColdBlobDecoder(file(chunk, table))
    blob.give_base(BaseBlob.hot(base))
    with little_memory(20 << 20), pytest.raises(ColdDamaged):
        decoded(blob)


def test_rejects_a_base_that_is_missing_or_wrong_or_a_delta_itself() -> None:
    with pytest.raises(ColdDamaged, match="without its base"):
        thawed(DELTA)
    with pytest.raises(ColdDamaged, match="expected"):
        thawed(DELTA, BLOB)
    with pytest.raises(ColdDamaged, match="is itself a delta"):
        ColdBlobDecoder(DELTA).as_base()


def test_rejects_a_base_altered_at_any_byte_that_is_used() -> None:
    chunk = np.frombuffer(weights(DType.BF16, 512), np.uint8)
    data = cold(
        chunk.tobytes(),
        spans=[Span(len(chunk), DType.BF16, base_begin=3)],
        base=BaseBlob.hot(b"abc" + chunk.tobytes()),
    )
    blob = ColdBlobDecoder(data)
    base = bytearray(b"abc" + chunk.tobytes())
    known = blob.table.base
    assert known is not None
    blob.give_base(BaseBlob.hot(base, known.digest))
    decoded(blob)

    for place in range(3, len(base)):
        base[place] ^= 64
        with pytest.raises(ColdDamaged):
            decoded(blob)
        base[place] ^= 64


@pytest.mark.parametrize("sides", [(1 << 30, 1), (1, 1 << 30), (1 << 21, 1 << 9)])
def test_factors_with_huge_sides_take_little_memory(sides: tuple[int, int]) -> None:
    size = 2 << 30
    factors = struct.pack("<BII", 64, *sides) + bytes(64)
    factors += 2 * struct.pack("<BI", Method.ZSTD, 0)
    base = BlobId(DIGEST, size)
    stored = StoredFactors(zlib.crc32(factors), len(factors))
    part = Part(size, 2, 1 << 20, base_begin=0, factors=stored)
    entry = Chunk(0, 37, (StoredPlane(Method.RAW, 1),))
    table = Table(DIGEST, size, base, [part], [entry] * 2048)
    blob = ColdBlobDecoder(file(factors + bytes(2048), table))
    blob.give_base(BaseBlob(base, lambda *_: None))

    with little_memory(), pytest.raises(ColdDamaged, match="factors of rank 64"):
        blob.read_into(bytearray(100))


def test_rejects_factors_for_elements_that_are_not_numbers() -> None:
    factors = struct.pack("<BIIbBIBI", 1, 5, 10, 0, Method.RAW, 5, Method.RAW, 10) + bytes(15)
    base = BlobId(DIGEST, 100)
    part = Part(100, 2, 100, base_begin=0, factors=StoredFactors(zlib.crc32(factors), len(factors)))
    table = Table(DIGEST, 100, base, [part], [Chunk(0, 35, (StoredPlane(Method.RAW, 1),))])
    blob = ColdBlobDecoder(file(factors + b"x", table))
    blob.give_base(BaseBlob.hot(bytes(100), DIGEST))

    with pytest.raises(ColdDamaged, match="factors cannot predict elements of transform 35"):
        blob.read_into(bytearray(100))


def test_codes_of_too_many_weights_in_a_chunk_are_refused() -> None:
    rule = QuantRule("Q2_K", DType.F32, keeps_scales=True)
    size = (MAX_CODED // 256 + 1) * 84
    part = Part(size, 1, size, base_begin=0, rule=rule)
    base = BlobId(Digest.of(b"zeros"), rule.source_size(size))
    table = Table(DIGEST, size, base, [part], [], has_blocks=True)
    with pytest.raises(ColdDamaged, match="cannot be quantized from byte 0"):
        ColdBlobDecoder(PREFIXES[1] + encode_table(table))


@pytest.mark.parametrize("rows", [1 << 10, 1 << 21])
def test_scales_of_another_size_than_their_part_has_are_refused(rows: int) -> None:
    rule = Float8Rule(DType.F32, 64, (1, 0))
    part = Part(rows * 64, 1, 64, base_begin=0, rule=rule)
    base = BlobId(Digest.of(b"zeros"), rule.source_size(part.size))
    for size in (0, 4, rows * 4 - 4, rows * 4, rows * 4 + 4, 1 << 31):
        stored = part._replace(factors=StoredFactors(0, size))
        table = Table(DIGEST, part.size, base, [stored], [], has_blocks=True)
        match = "do not fit in the table" if (size, rows) == (4096, 1 << 10) else "be quantized"
        with pytest.raises(ColdDamaged, match=match):
            ColdBlobDecoder(PREFIXES[1] + encode_table(table))


@pytest.mark.parametrize("keeps_scales", [False, True])
def test_chunks_that_are_small_for_a_head_are_refused(keeps_scales: bool) -> None:
    """Each would make a decoder read the whole head, however few blocks it has."""
    rule = QuantRule("Q4_1", DType.F32, 1 << 21, 2, keeps_scales=keeps_scales)
    blocks = (1 << 22) // 32
    base = BlobId(Digest.of(b"zeros"), rule.source_size(blocks * 20))
    for few in (1, blocks // 16 - 1):
        part = Part(blocks * 20, 1, few * 20, base_begin=0, rule=rule)
        table = Table(DIGEST, part.size, base, [part], [], has_blocks=True)
        with pytest.raises(ColdDamaged, match="cannot be quantized from byte 0"):
            ColdBlobDecoder(PREFIXES[1] + encode_table(table))


@pytest.mark.parametrize("head", [0, 1024])
@pytest.mark.parametrize("cast", [None, DType.F16, DType.BF16])
def test_blocks_of_many_weights_take_memory_for_a_chunk(head: int, cast: DType | None) -> None:
    rule = QuantRule("TQ1_0", DType.F32, 4096 if head else 0, head)
    if cast is not None:
        rule = replace(rule, type_name="Q2_K", keeps_scales=True, cast=cast)
    weights_of_head = 4096 * max(head, 1)
    block = rule.kind.size
    size = -(-19_000 * 256 // weights_of_head) * weights_of_head // 256 * block
    base = BlobId(Digest.of(b"zeros"), rule.source_size(size))
    at_once = 1_000_000 // 54 if cast is None else MAX_CODED // 256
    part = Part(size, 1, at_once * block, base_begin=0, rule=rule)
    chunks, stored = [], 0
    for begin in range(0, size, part.chunk_size):
        blocks = min(part.chunk_size, size - begin) // block
        kept = [blocks * field for field in ((16, 1, 1, 1, 1) if cast else ())]
        planes = [StoredPlane(Method.RAW, item) for item in (*kept, 9)]
        chunks.append(Chunk(0, 138 if cast else 32, planes))
        stored += sum(kept) + 9
    table = Table(DIGEST, size, base, [part], chunks, has_blocks=True)
    decoder = ColdBlobDecoder(PREFIXES[1] + bytes(stored) + encode_table(table))

    def read_into(out: memoryview, begin: int) -> None:
        assert begin + len(out) <= base.size
        out[:] = bytes(len(out))

    decoder.give_base(BaseBlob(base, read_into))  # type: ignore[arg-type]
    with little_memory(80 << 20 if head else 16 << 20), pytest.raises(ColdDamaged):
        decoder.read_into(bytearray(500_000))
