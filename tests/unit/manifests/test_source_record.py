"""The record of a source: what it keeps, and what a forged one cannot do."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from blobstore.core.digest import Digest
from blobstore.errors import BlobDamaged
from blobstore.manifests.source_record import RecordedFile, SourceRecord

RECORD = SourceRecord(
    kind="hub",
    repository="org/model",
    commit="0" * 40,
    options={"experts": "stacked", "overrides": ["a=b"]},
    files=(
        RecordedFile("a.safetensors", "safetensors", 30, b"header", Digest.of(b"x")),
        RecordedFile("a.safetensors.index.json", "index", 5, b"index"),
        RecordedFile("vae/weights with spaces.bin", "pytorch", 7, b""),
    ),
    stored_names={"x.scales": "x.weight.scale"},
    left_out={"x.input_scale": b"\0\0\x80?"},
)


def forged(**changes: Any) -> bytes:
    """Return the layer of ``RECORD`` with other values for some keys; None removes a key."""
    value = json.loads(RECORD.to_bytes()) | changes
    return json.dumps({key: item for key, item in value.items() if item is not None}).encode()


def forged_file(**changes: Any) -> bytes:
    files = json.loads(RECORD.to_bytes())["files"]
    files[0] |= changes
    return forged(files=files)


REST = b'headerindex{"stored_names":{},"left_out":{}}'
"""The least data that fits ``RECORD``."""


def packed(data: bytes) -> str:
    return base64.b64encode(zstandard.ZstdCompressor().compress(data)).decode()


def test_a_record_is_read_as_it_was_written() -> None:
    assert SourceRecord.from_bytes(RECORD.to_bytes()) == RECORD
    assert SourceRecord.from_bytes(forged(data=packed(REST))).left_out == {}


def test_equal_records_have_equal_bytes() -> None:
    assert RECORD.to_bytes() == SourceRecord.from_bytes(RECORD.to_bytes()).to_bytes()


@pytest.mark.parametrize(
    "name",
    [
        *(
            "../x",
            "/etc/passwd",
            "a/../b",
            "a//b",
            "",
            ".",
            "..",
            "a/b/c/d",
            "a\\b",
            "a\0b",
            "a\nb",
        ),
        *("\x1b[2J", "x" * 256, "é" * 128, 5, None, "a/"),
    ],
)
def test_a_file_name_that_must_not_be_written_is_damage(name: object) -> None:
    with pytest.raises(BlobDamaged, match=r"\$\.files\[0\]\.name"):
        SourceRecord.from_bytes(forged_file(name=name))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b'{"kind":"a","kind":"b"}', "twice|duplicate|repeated"),
        (forged(kind=5), r"\$\.kind"),
        (forged(repository="a\nb"), r"\$\.repository"),
        (forged(commit="c" * 300), r"\$\.commit"),
        (forged(options=[]), "options"),
        (forged(files={}), "files"),
        (forged(files=["x"]), r"\$\.files\[0\]: expected an object"),
        (forged_file(format="ggml"), r"\$\.files\[0\]\.format"),
        (forged_file(format=["index"]), r"\$\.files\[0\]\.format"),
        (forged_file(size=-1), "sizes"),
        (forged_file(size=2**63), "sizes"),
        (forged_file(size=True), "sizes"),
        (forged_file(held=31), "sizes"),
        (forged_file(held=-1), "sizes"),
        (forged_file(sha256="zz"), r"\$\.files\[0\]\.sha256"),
        (forged_file(sha256=5), r"\$\.files\[0\]\.sha256"),
        (forged_file(name="a.safetensors.index.json"), "occurs twice"),
        (forged_file(held=30, size=2**40), "names of the stored tensors"),
        (forged_file(held=2**40, size=2**40), r"\$\.data: declares"),
        (forged_file(format="index"), r"\$\.files\[0\]\.held: 6 of 30 bytes"),
        (forged_file(format="pytorch"), r"\$\.files\[0\]\.held: 6 of 30 bytes"),
        (forged(data=None), r"\$\.data: expected a text"),
        (forged(data="***"), r"\$\.data"),
        (forged(data="AAAA"), r"\$\.data"),
        (forged(data=base64.b64encode(zstandard.compress(REST) + b"x").decode()), r"\$\.data"),
        (forged(data=packed(b"")), r"\$\.data: declares 0 bytes, for 11 bytes of files"),
        (forged(data=packed(b"headerindex")), "names of the stored tensors"),
        (forged(data=packed(b"headerindex[]")), "names of the stored tensors"),
        (forged(data=packed(b'headerindex{"stored_names":{"a":5},"left_out":{}}')), "names of"),
        (forged(data=packed(b'headerindex{"stored_names":[],"left_out":{}}')), "names of"),
        (forged(data=packed(b'headerindex{"stored_names":{},"left_out":{"a":"*"}}')), "names of"),
        (forged(data=packed(b'headerindex{"stored_names":{},"left_out":{"a":5}}')), "names of"),
    ],
)
def test_a_malformed_record_is_damage(content: bytes, message: str) -> None:
    with pytest.raises(BlobDamaged, match=message):
        SourceRecord.from_bytes(content)


@pytest.mark.slow
def test_a_frame_that_declares_far_more_than_it_has_is_not_decompressed() -> None:
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(2**28))
    with pytest.raises(BlobDamaged, match="declares 268435456 bytes"):
        SourceRecord.from_bytes(forged(data=base64.b64encode(bomb).decode()))


def test_a_frame_without_its_size_is_damage() -> None:
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(b"x")
    with pytest.raises(BlobDamaged, match=r"\$\.data"):
        SourceRecord.from_bytes(forged(data=base64.b64encode(frame).decode()))


@pytest.mark.slow
@given(st.data())
def test_flipped_bytes_are_read_or_reported(data: st.DataObject) -> None:
    content = bytearray(RECORD.to_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(content) - 1))
        content[position] = data.draw(st.integers(0, 255))
    try:
        SourceRecord.from_bytes(bytes(content))
    except BlobDamaged as error:
        assert str(error).isprintable()


@pytest.mark.slow
def test_twenty_thousand_tensors_take_few_bytes_each() -> None:
    names = [f"model.layers.{i // 400}.mlp.experts.{i % 400}.up_proj.weight" for i in range(20_000)]
    header = {
        name: {
            "dtype": "BF16",
            "shape": [768, 2048],
            "data_offsets": [i * 3145728, (i + 1) * 3145728],
        }
        for i, name in enumerate(sorted(names))
    }
    start = json.dumps(header).encode()
    index = json.dumps({"weight_map": dict.fromkeys(names, "model-00001-of-00002.safetensors")})
    files = (
        RecordedFile("model.safetensors", "safetensors", 2**40, start),
        RecordedFile("model.safetensors.index.json", "index", len(index), index.encode()),
    )
    assert len(SourceRecord(kind="folder", files=files).to_bytes()) / len(names) < 25
