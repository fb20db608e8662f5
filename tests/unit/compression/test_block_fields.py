from __future__ import annotations

import numpy as np
import pytest

from blobstore.compression.block_fields import FIELDS
from blobstore.compression.decoder import ColdBlobDecoder
from blobstore.compression.spans import Span
from blobstore.compression.table import decode_table
from blobstore.core.tensor import DType
from blobstore.errors import ColdDamaged
from blobstore.gguf.dequantize import dequantize
from blobstore.gguf.types import TYPES
from tests.readers.block_fields import field_sizes, read_fields
from tests.readers.cold_blobs import read_cold
from tests.support.cold import cold, cold_with_table, decoded, noise, spans_of
from tests.support.models import blob

NUMBERS = sorted(FIELDS)


def name_of(number: int) -> str:
    return TYPES[number].name


def blocks_of(number: int, count: int) -> bytes:
    """Return blocks whose scales have few values, and whose codes are small more often than large."""
    shape = count, TYPES[number].size
    columns = np.frombuffer(noise(2 * count * shape[1]), np.uint8).reshape(2, *shape)
    found = columns[0] & columns[1]
    first = {"Q2_K": 80, "Q3_K": 108, "Q6_K": 208}.get(TYPES[number].name, 0)
    found[:, first : first + 2] &= 3
    return bytes(found.tobytes())


@pytest.mark.parametrize("number", NUMBERS, ids=name_of)
def test_blocks_come_back_from_their_fields(number: int) -> None:
    fields, data = FIELDS[number], np.frombuffer(noise(50 * TYPES[number].size), np.uint8)
    planes = fields.encode(data, None)
    assert planes is not None
    assert tuple(map(len, planes)) == fields.sizes(len(data))
    out = np.zeros_like(data)
    fields.decode(planes, out, None)
    assert np.array_equal(out, data)


@pytest.mark.parametrize("number", NUMBERS, ids=name_of)
def test_a_second_reader_finds_the_same_fields(number: int) -> None:
    data = noise(5 * TYPES[number].size)
    planes = FIELDS[number].encode(np.frombuffer(data, np.uint8), None)
    assert planes is not None
    assert field_sizes(64 + number, len(data)) == [len(plane) for plane in planes]
    assert read_fields(64 + number, [plane.tobytes() for plane in planes]) == data


@pytest.mark.parametrize("number", NUMBERS, ids=name_of)
def test_parts_of_blocks_have_no_fields(number: int) -> None:
    size = TYPES[number].size
    assert FIELDS[number].sizes(size + 1) == ()
    assert FIELDS[number].encode(np.zeros(2 * size - 1, np.uint8), None) is None


@pytest.mark.parametrize(("name", "lowest"), [("Q3_K", 4), ("Q5_K", 0), ("Q6_K", 32)])
def test_joined_codes_are_those_of_the_weights(name: str, lowest: int) -> None:
    number = next(number for number in NUMBERS if name_of(number) == name)
    kind = TYPES[number]
    data = np.frombuffer(noise(kind.size), np.uint8).copy()
    scales = {"Q3_K": (96, 108), "Q5_K": (4, 16), "Q6_K": (192, 208)}[name]
    one = {"Q3_K": [0x11] * 8 + [0xAA] * 4, "Q5_K": [1] * 4 + [0] * 4 + [1] * 4, "Q6_K": [1] * 16}
    data[slice(*scales)] = one[name]  # all scales are 1
    halves = {"Q3_K": [(108, 1)], "Q5_K": [(0, 1), (2, 0)], "Q6_K": [(208, 1)]}[name]
    for place, value in halves:
        data[place : place + 2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)
    planes = FIELDS[number].encode(data, None)
    assert planes is not None
    codes = planes[-1]
    if name == "Q3_K":
        codes = np.concatenate([codes & 15, codes >> 4])
    weights = dequantize(name, data[None])[0]
    np.testing.assert_array_equal(weights, codes.astype(np.float32) - lowest)


@pytest.mark.parametrize("number", NUMBERS, ids=name_of)
def test_blobs_of_blocks_are_compressed_field_for_field(number: int) -> None:
    kind = TYPES[number]
    rows = blocks_of(number, 1000)
    name = kind.name.lower()
    metadata = {"quant_type": f"gguf_{name}" if kind.name in {"MXFP4", "NVFP4"} else name}
    data = blob(("w", "U8", (100, 10 * kind.size), rows), **metadata)
    stored, table = cold_with_table(data, spans=spans_of(data, len(data)))
    assert stored[7] == 2
    assert table.chunks[-1].transform == 64 + number
    assert decoded(ColdBlobDecoder(stored)) == data
    assert read_cold(stored) == data


def test_a_wrong_type_in_the_metadata_does_no_harm() -> None:
    for name, size in (("q4_k", 999), ("q4_0", 18_001), ("unknown", 180)):
        data = blob(("w", "U8", (1, size), noise(size)), quant_type=name)
        stored = cold(data, spans=spans_of(data, len(data)))
        assert decoded(ColdBlobDecoder(stored)) == data


def test_only_version_2_has_fields() -> None:
    data = blocks_of(12, 500)
    stored = cold(data, spans=[Span(len(data), DType.U8, blocks=TYPES[12])])
    table = decode_table(memoryview(stored))
    assert {chunk.transform for chunk in table.chunks} == {76}
    with pytest.raises(ColdDamaged, match="transform 76 of elements of 1 bytes is unknown"):
        decode_table(memoryview(relabelled(stored)))


def relabelled(stored: bytes) -> bytes:
    """Return a file of version 2 as one of version 1."""
    from blobstore.compression.table import PREFIX, encode_table

    table = decode_table(memoryview(stored))
    end = encode_table(table._replace(has_blocks=False))
    return PREFIX + stored[8 : len(stored) - len(end)] + end
