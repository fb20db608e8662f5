from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from blobstore.core.tensor import DType, TensorSpec
from blobstore.folders.reflink import clone_data
from blobstore.safetensors.header import encode_header
from tests.support.reflinks import BLOCK, share_blocks

DATA = bytes(range(251)) * 80
"""Five blocks, the last not full."""


def blob(folder: Path, name: str, data: bytes = DATA) -> Path:
    path = folder / "blob"
    path.write_bytes(header(name, len(data)) + data)
    return path


def header(name: str, size: int) -> bytes:
    return encode_header([TensorSpec(name, DType.U8, (size,))])


def clone(source: Path, target: Path, new: bytes) -> bool:
    start = 8 + int.from_bytes(source.read_bytes()[:8], "little")
    descriptors = [os.open(source, os.O_RDONLY), os.open(target, os.O_WRONLY | os.O_CREAT)]
    try:
        size = source.stat().st_size
        return clone_data(descriptors[0], size, start, descriptors[1], new)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


@pytest.mark.parametrize("old", ["data", "a" * 100, "a" * 5000])
@pytest.mark.parametrize("new", ["b", "b" * 300, "b" * 9000])
def test_shares_the_data_after_another_header(
    old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = share_blocks(monkeypatch)
    source = blob(tmp_path, old)
    assert clone(source, tmp_path / "new", header(new, len(DATA)))
    arrays = load_file(tmp_path / "new")
    assert {name: array.tobytes() for name, array in arrays.items()} == {new: DATA}
    (length,) = shared
    assert len(DATA) - BLOCK < length <= len(DATA)
    assert source.read_bytes() == header(old, len(DATA)) + DATA


def test_shares_data_that_begins_at_a_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = share_blocks(monkeypatch)
    bare = len(header("", len(DATA)))
    source = blob(tmp_path, "a" * (BLOCK - bare))
    assert len(header("a" * (BLOCK - bare), len(DATA))) == BLOCK
    assert clone(source, tmp_path / "new", header("b", len(DATA)))
    assert shared == [len(DATA)]
    assert load_file(tmp_path / "new")["b"].tobytes() == DATA


def test_shares_no_data_within_one_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = share_blocks(monkeypatch)
    source = blob(tmp_path, "a", DATA[:200])
    assert not clone(source, tmp_path / "new", header("b", 200))
    assert shared == []
    assert (tmp_path / "new").read_bytes() == b""


def test_leaves_the_file_empty_if_blocks_cannot_be_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_blocks(monkeypatch, fails=errno.EOPNOTSUPP)
    source = blob(tmp_path, "a")
    assert not clone(source, tmp_path / "new", header("b", len(DATA)))
    assert (tmp_path / "new").read_bytes() == b""


def test_does_not_pad_a_header_to_a_block_of_a_network_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = share_blocks(monkeypatch, block=1 << 20)
    source = blob(tmp_path, "a", bytes(3 << 20))
    assert not clone(source, tmp_path / "new", header("b", 3 << 20))
    assert shared == []
