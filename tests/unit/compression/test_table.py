from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest

from blobstore.compression.entropy import Method
from blobstore.compression.quant_rule import RULE_SIZE, QuantRule
from blobstore.compression.table import (
    MAX_CHUNK,
    PREFIX,
    PREFIXES,
    Chunk,
    Part,
    StoredPlane,
    Table,
    decode_table,
    encode_table,
)
from blobstore.core.digest import BlobId, Digest
from blobstore.core.tensor import DType
from blobstore.core.trailer import FOOTER_SIZE
from blobstore.errors import ColdDamaged

RAW, ZSTD = Method.RAW, Method.ZSTD
DIGEST = Digest.of(b"the blob")
BASE = BlobId(Digest.of(b"the base"), 5000)
TABLE = Table(
    DIGEST,
    3900,
    BASE,
    (
        Part(900, 1, 900),
        Part(1000, 2, 600),
        Part(1000, 2, 600, same_as=1),
        Part(1000, 2, 1000, base_begin=4000),
    ),
    (
        Chunk(7, 0, (StoredPlane(ZSTD, 30),)),
        Chunk(1 << 31, 5, (StoredPlane(RAW, 4), StoredPlane(ZSTD, 20), StoredPlane(RAW, 300))),
        Chunk(9, 1, (StoredPlane(ZSTD, 199), StoredPlane(RAW, 200))),
        Chunk(11, 37, (StoredPlane(RAW, 90),)),
    ),
)
RULE = QuantRule("Q4_0", DType.BF16)
QUANTIZED = Table(
    DIGEST,
    180,
    BASE,
    (Part(90, 1, 90), Part(90, 1, 36, base_begin=5000 - 5 * 64, rule=RULE)),
    (
        Chunk(7, 0, (StoredPlane(ZSTD, 30),)),
        *(Chunk(8, 32, (StoredPlane(RAW, 9),)) for _ in range(3)),
    ),
    has_blocks=True,
)
STORED = sum(chunk.stored_size for chunk in TABLE.chunks)


def file(table: Table, stored: int | None = None) -> memoryview:
    planes = sum(chunk.stored_size for chunk in table.chunks)
    prefix = PREFIXES[table.has_blocks]
    return memoryview(prefix + bytes(planes if stored is None else stored) + encode_table(table))


def with_part(**fields: int | None) -> Table:
    """Return a table whose second part has other fields."""
    parts = list(TABLE.parts)
    parts[1] = parts[1]._replace(**fields)  # type: ignore[arg-type]
    return TABLE._replace(parts=parts)


def with_chunk(**fields: object) -> Table:
    """Return a table whose third chunk, the second of the second part, has other fields."""
    chunks = list(TABLE.chunks)
    chunks[2] = chunks[2]._replace(**fields)  # type: ignore[arg-type]
    return TABLE._replace(chunks=chunks)


def signed(content: bytearray) -> bytes:
    """Return the bytes of a table with the footer for them."""
    digest = hashlib.sha256(PREFIX + content).digest()
    return bytes(content) + len(content).to_bytes(8, "little") + digest + encode_table(TABLE)[-8:]


def reject(data: memoryview | Table, match: str) -> None:
    with pytest.raises(ColdDamaged, match=match):
        decode_table(file(data) if isinstance(data, Table) else data)


CODED = QUANTIZED._replace(
    parts=(QUANTIZED.parts[0], QUANTIZED.parts[1]._replace(rule=replace(RULE, keeps_scales=True))),
    chunks=(
        QUANTIZED.chunks[0],
        *(Chunk(8, 130, tuple(StoredPlane(RAW, size) for size in (n, n, 9))) for n in (2, 2, 1)),
    ),
)


@pytest.mark.parametrize("table", [TABLE, QUANTIZED, CODED], ids=["bytes", "blocks", "codes"])
def test_a_table_survives_a_round_trip(table: Table) -> None:
    read = decode_table(file(table))
    assert read._replace(parts=tuple(read.parts), chunks=tuple(read.chunks)) == table


def test_only_files_with_rules_have_version_2() -> None:
    assert [bytes(file(table)[:8]) for table in (TABLE, QUANTIZED)] == [
        b"\x8fBSCOLD\x01",
        b"\x8fBSCOLD\x02",
    ]
    reject(QUANTIZED._replace(has_blocks=False), "part 1: kind 4 with 4680 is not possible")


@pytest.mark.parametrize(
    "fields",
    [
        {"size": 89},
        {"chunk_size": 35},
        {"base_begin": 4681},
        {"base_begin": 1 << 63},
        {"rule": QuantRule("Q4_0", DType.F32)},
        {"rule": QuantRule("Q8_0", DType.BF16)},
        {"rule": QuantRule("Q4_0", DType.BF16, columns=32)},
        {"rule": QuantRule("Q4_0", DType.BF16, columns=32, head=2)},
    ],
    ids=str,
)
def test_rejects_a_part_that_cannot_be_quantized_from_the_base(fields: dict[str, object]) -> None:
    part = QUANTIZED.parts[1]._replace(**fields)  # type: ignore[arg-type]
    table = QUANTIZED._replace(parts=(QUANTIZED.parts[0], part), size=90 + part.size)
    reject(table, f"{part.size} bytes in chunks of {part.chunk_size} cannot be quantized from byte")


def test_rejects_quantized_parts_without_a_base_or_of_wide_elements() -> None:
    reject(QUANTIZED._replace(base=None), "part 1: kind 4 with 4680 is not possible")
    wide = QUANTIZED.parts[1]._replace(width=2)
    reject(QUANTIZED._replace(parts=(QUANTIZED.parts[0], wide)), "part 1: kind 4 with 4680")


@pytest.mark.parametrize(
    ("rule", "transform"),
    [
        (RULE, 130),
        (replace(RULE, keeps_scales=True), 32),
        (replace(RULE, keeps_scales=True), 131),
        (None, 130),
    ],
)
def test_rejects_a_transform_that_does_not_suit_the_rule(
    rule: QuantRule | None, transform: int
) -> None:
    part = QUANTIZED.parts[1]._replace(rule=rule)
    chunks = [chunk._replace(transform=transform) for chunk in QUANTIZED.chunks[1:]]
    table = QUANTIZED._replace(
        parts=(QUANTIZED.parts[0], part), chunks=(QUANTIZED.chunks[0], *chunks)
    )
    reject(table, f"transform {transform} does not suit the rule of its part")


@pytest.mark.parametrize("number", range(3))
def test_planes_of_codes_have_sizes_that_fit_their_chunk(number: int) -> None:
    for size in (3, 37):
        planes = list(CODED.chunks[1].planes)
        planes[number] = StoredPlane(RAW, size)
        if number < 2 or size > 36:
            chunks = (CODED.chunks[0], CODED.chunks[1]._replace(planes=planes), *CODED.chunks[2:])
            reject(CODED._replace(chunks=chunks), "a plane of .* cannot be stored in")


def test_rejects_an_unknown_rule() -> None:
    content = bytearray(encode_table(QUANTIZED)[:-FOOTER_SIZE])
    place = len(content) - 4 * 10 - RULE_SIZE
    assert content[place] == 2
    content[place] = 12
    digest = hashlib.sha256(PREFIXES[1] + content).digest()
    footer = len(content).to_bytes(8, "little") + digest + encode_table(TABLE)[-8:]
    planes = bytes(sum(chunk.stored_size for chunk in QUANTIZED.chunks))
    reject(memoryview(PREFIXES[1] + planes + content + footer), "a rule of version 1 is unknown")


def test_an_empty_blob_has_the_minimum_size() -> None:
    empty = Table(DIGEST, 0, None, (), ())
    assert len(file(empty)) == 101
    assert decode_table(file(empty)).size == 0


def test_parts_count_their_chunks() -> None:
    assert [part.chunks for part in TABLE.parts] == [1, 2, 0, 1]
    assert Part(MAX_CHUNK * 3 + 1).chunks == 13


@pytest.mark.parametrize("size", range(101))
def test_rejects_less_than_the_smallest_table(size: int) -> None:
    reject(file(TABLE)[:size], "truncated: it needs at least 101")


def test_rejects_missing_or_additional_planes() -> None:
    reject(file(TABLE, STORED - 1), "lists .* bytes of planes")
    reject(file(TABLE, STORED + 1), "lists .* bytes of planes")


@pytest.mark.parametrize(
    "fields",
    [
        {"size": 0},
        {"size": 999},
        {"width": 3},
        {"width": 0},
        {"chunk_size": 0},
        {"chunk_size": 601},
        {"chunk_size": MAX_CHUNK + 2},
        {"same_as": 1},
        {"same_as": 0},
        {"same_as": 9},
        {"base_begin": 4001},
        {"base_begin": 1 << 63},
    ],
    ids=str,
)
def test_rejects_an_impossible_part(fields: dict[str, int]) -> None:
    reject(with_part(**fields), "part 1: .* not possible")


def test_rejects_a_copy_of_a_copy() -> None:
    parts = (*TABLE.parts[:3], Part(1000, 2, 600, same_as=2), *TABLE.parts[3:])
    reject(TABLE._replace(parts=parts, size=4900), "part 3: kind 1 with 2 is not possible")


HUGE = Table(DIGEST, 1 << 60, None, (Part(1 << 60, 1, 1 << 20),), ())


@pytest.mark.parametrize(
    ("table", "match"),
    [
        (TABLE._replace(base=None), "part 3: kind 2 with 4000 is not possible"),
        (TABLE._replace(size=3901), "do not add up to the 3901 bytes"),
        (HUGE, "do not fit in the table"),
        (TABLE._replace(chunks=TABLE.chunks[:-1]), "ends after .* bytes, within an entry"),
        (TABLE._replace(chunks=(*TABLE.chunks, TABLE.chunks[0])), "goes on for 10 bytes"),
    ],
    ids=["delta without base", "other sum", "too many chunks", "ends early", "goes on"],
)
def test_rejects_a_table_that_contradicts_itself(table: Table, match: str) -> None:
    reject(table, match)


def test_rejects_more_parts_than_the_table_could_list() -> None:
    content = bytearray(encode_table(Table(DIGEST, 0, None, (), ()))[:-FOOTER_SIZE])
    content[41:45] = b"\xff" * 4
    reject(memoryview(PREFIX + signed(content)), "4294967295 parts do not fit")


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"transform": 31}, "transform 31 .* is unknown"),
        ({"transform": 2}, "transform 2 .* is unknown"),
        ({"transform": 37}, "needs a base, but its part has none"),
        ({"planes": (StoredPlane(RAW, 400),)}, "cannot have 1 planes"),
        ({"planes": (StoredPlane(RAW, 200), StoredPlane(RAW, 199))}, "cannot be stored in 199"),
        ({"planes": (StoredPlane(RAW, 200), StoredPlane(RAW, 201))}, "cannot be stored in 201"),
        ({"planes": (StoredPlane(RAW, 200), StoredPlane(ZSTD, 0))}, "cannot be stored in 0"),
        ({"planes": (StoredPlane(RAW, 200), StoredPlane(ZSTD, 200))}, "cannot be stored in 200"),
        ({"planes": (StoredPlane(RAW, 200), StoredPlane(3, 9))}, "unknown method 3"),
    ],
)
def test_rejects_an_impossible_chunk(fields: dict[str, object], match: str) -> None:
    reject(with_chunk(**fields), match)


@pytest.mark.parametrize(
    ("place", "value", "match"),
    [
        (45 + 40 + 14, 1, "part 0: 1 where 0 is reserved"),
        (40, 2, "2 where 0 or 1 is expected"),
    ],
    ids=["reserved field", "base flag"],
)
def test_rejects_an_invalid_field(place: int, value: int, match: str) -> None:
    content = bytearray(encode_table(TABLE)[:-FOOTER_SIZE])
    content[place] = value
    reject(memoryview(PREFIX + bytes(STORED) + signed(content)), match)
