"""The headers of blobs that are GGUF files."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blobstore.core.digest import Digest
from blobstore.core.tensor import DType
from blobstore.errors import BlobDamaged, InvalidHeader
from blobstore.safetensors.header import Header
from blobstore.store.gguf_blob import is_gguf, read_gguf_header
from blobstore.store.local import LocalStore
from tests.support.cold import cold
from tests.support.gguf_files import U32, gguf_file
from tests.support.models import add_blob
from tests.support.ollama_store import F32, GGUF_FILE, Q8_0, q8_0
from tests.support.samples import samples


def header_of(content: bytes) -> Header:
    return read_gguf_header(lambda begin, end: content[begin:end], len(content))


def test_a_gguf_file_has_the_header_of_a_blob() -> None:
    header = header_of(GGUF_FILE)
    assert list(header.tensors) == [
        "token_embd.weight",
        "output_norm.weight",
        "blk.0.ffn_gate_exps.weight",
    ]
    spec, begin, end = header.tensors["token_embd.weight"]
    assert (spec.dtype, spec.shape, begin, end) == (DType.U8, (5, 68), 0, 340)
    start = header.data_start
    assert GGUF_FILE[start : start + 340] == q8_0(5, 64)
    assert header.metadata == {
        "token_embd.weight.quant_type": "q8_0",
        "token_embd.weight.group_size": "32",
        "blk.0.ffn_gate_exps.weight.quant_type": "q8_0",
        "blk.0.ffn_gate_exps.weight.group_size": "32",
    }


def test_a_file_without_tensors_has_a_header() -> None:
    assert header_of(gguf_file()).tensors == {}


@pytest.mark.parametrize("alignment", [1, 8, 64])
def test_tensors_may_have_any_alignment(alignment: int) -> None:
    content = gguf_file(
        [("general.alignment", U32, alignment.to_bytes(4, "little"))],
        [("a", Q8_0, (32,), q8_0(1, 32)), ("b", F32, (1,), b"abcd")],
        alignment=alignment,
    )
    header = header_of(content)
    begin = header.data_start + header.tensors["b"].begin
    assert content[begin : begin + 4] == b"abcd"


def test_the_first_bytes_tell_a_gguf_file() -> None:
    assert is_gguf(memoryview(GGUF_FILE))
    assert not is_gguf(b"GGU")


@pytest.mark.slow
@given(st.integers(0, len(GGUF_FILE) - 1), st.integers(0, 255), st.integers(0, len(GGUF_FILE)))
@settings(max_examples=samples(1000), deadline=None)
def test_damaged_files_have_a_header_within_the_file_or_none(at: int, byte: int, end: int) -> None:
    content = bytearray(GGUF_FILE)
    content[at] = byte
    try:
        header = header_of(bytes(content[:end]))
    except InvalidHeader:
        return
    for spec, begin, stop in header.tensors.values():
        assert spec.nbytes == stop - begin
        assert 0 <= header.data_start + begin <= header.data_start + stop <= end


@pytest.mark.parametrize("is_cold", [False, True])
def test_a_store_reads_headers_of_both_formats(store: LocalStore, is_cold: bool) -> None:
    digest, size = add_blob(store, GGUF_FILE)
    if is_cold:
        freeze(store, GGUF_FILE)
    assert store.read_blob_header(digest, size) == header_of(GGUF_FILE)


@pytest.mark.parametrize("is_cold", [False, True])
@pytest.mark.parametrize("content", [b"GG", b"GGUF", GGUF_FILE[:60], b"GGUF" + bytes(96)])
def test_a_damaged_header_names_the_blob(store: LocalStore, content: bytes, is_cold: bool) -> None:
    digest, size = add_blob(store, content)
    if is_cold:
        freeze(store, content)
    with pytest.raises(BlobDamaged, match=digest.hex):
        store.read_blob_header(digest, size)


def freeze(store: LocalStore, content: bytes) -> None:
    """Leave a compressed form of a blob alone."""
    path = Path(store.cold_path(Digest.of(content)))
    path.parent.mkdir(parents=True)
    path.write_bytes(cold(content))
    Path(store.blob_path(Digest.of(content))).unlink()
