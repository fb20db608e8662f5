"""The golden vectors of docs/reference/cold-format.md.

They were written by the code of their version and read by tests/readers/cold_blobs.py, which shares no code
with it. What is written today may differ, for zstd may find other codes; what was written must be read.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from blobstore.compression.base import BaseBlob
from blobstore.compression.block_fields import FIELDS
from blobstore.compression.decoder import ColdBlobDecoder
from blobstore.compression.quant_rule import QuantRule
from blobstore.compression.scaled_rules import (
    AFFINE_BITS,
    AFFINE_GROUPS,
    BIASES,
    CODES,
    SCALES,
    AffineRule,
    Float8Rule,
)
from blobstore.compression.table import Part
from blobstore.core.digest import Digest
from blobstore.core.tensor import DType
from blobstore.gguf.fill_codes import CODED
from blobstore.gguf.quantize import QUANTIZED
from blobstore.gguf.types import TYPES
from tests.readers.cold_blobs import read_cold
from tests.support.cold import cold, decoded, safetensors, spans_of, weights

VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "cold.json").read_text())


def parts(vector: dict[str, Any]) -> Sequence[Part]:
    return ColdBlobDecoder(base64.b64decode(vector["cold"])).table.parts


WITHOUT_FACTORS = [
    vector for vector in VECTORS if all(part.factors is None for part in parts(vector))
]


def why(vector: dict[str, Any]) -> str:
    return str(vector["why"])


@pytest.mark.parametrize("vector", VECTORS, ids=why)
def test_reads_what_was_written(vector: dict[str, Any]) -> None:
    blob = ColdBlobDecoder(base64.b64decode(vector["cold"]))
    if "base" in vector:
        blob.give_base(BaseBlob.hot(base64.b64decode(vector["base"])))
    assert str(Digest.of(decoded(blob))) == vector["digest"]


@pytest.mark.parametrize("vector", WITHOUT_FACTORS, ids=why)
def test_a_second_reader_reads_the_same(vector: dict[str, Any]) -> None:
    data, base = (base64.b64decode(vector.get(key, "")) for key in ("cold", "base"))
    assert str(Digest.of(read_cold(data, base))) == vector["digest"]


def test_the_vectors_have_every_transform() -> None:
    found = {
        chunk.transform
        for vector in VECTORS
        for chunk in ColdBlobDecoder(base64.b64decode(vector["cold"])).table.chunks
    }
    coded = {128 + number for number, kind in TYPES.items() if kind.name in CODED}
    assert found == {*range(11), 32, 37, *(64 + number for number in FIELDS), *coded}


def test_the_vectors_have_every_rule() -> None:
    every = [part.rule for vector in VECTORS for part in parts(vector)]
    rules = [rule for rule in every if isinstance(rule, QuantRule)]
    assert {rule.type_name for rule in rules if not rule.keeps_scales} == QUANTIZED
    assert {rule.type_name for rule in rules if rule.keeps_scales} == CODED
    assert {rule.cast for rule in rules} == {DType.F32, DType.F16, DType.BF16, DType.U8}
    assert {rule.dtype for rule in rules} == {DType.F32, DType.F16, DType.BF16, DType.U8}
    assert {rule.head for rule in rules} == {0, 4}
    affine = {rule for rule in every if isinstance(rule, AffineRule)}
    assert {rule.tensor for rule in affine} == {CODES, SCALES, BIASES}
    assert {rule.bits for rule in affine} == set(AFFINE_BITS)
    assert {rule.group_size for rule in affine} == set(AFFINE_GROUPS)
    floats = {rule for rule in every if isinstance(rule, Float8Rule)}
    assert {rule.cast for rule in floats} == {DType.F32, DType.F16, DType.BF16}
    assert {rule.block for rule in floats} == {(0, 0), (1, 0), (3, 20)}


@pytest.mark.parametrize("dtype", DType, ids=lambda dtype: dtype.value)
def test_a_second_reader_reads_what_is_written_today(dtype: DType) -> None:
    blob = safetensors({"a": (dtype, weights(dtype, 5000)), "b": (dtype, bytes(48))})
    assert read_cold(cold(blob, spans=spans_of(blob, len(blob)))) == blob
