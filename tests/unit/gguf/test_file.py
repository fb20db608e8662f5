from __future__ import annotations

import os
from pathlib import Path

import pytest

from blobstore.errors import SourceError, SourceNotFound
from blobstore.gguf.file import is_gguf, read_file_header
from blobstore.gguf.header import InvalidGguf
from tests.support.gguf_files import gguf_file


def test_reads_the_header_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_bytes(gguf_file([], [("a", 0, [1], bytes(4))]))
    assert is_gguf(path)
    assert list(read_file_header(path).tensors) == ["a"]


def test_errors_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(InvalidGguf, match=r"m\.gguf': the file ends at byte 4, in its header"):
        read_file_header(path)
    with pytest.raises(SourceNotFound, match="does not exist"):
        read_file_header(tmp_path / "nothing")
    with pytest.raises(SourceError, match="is not a regular file"):
        read_file_header(tmp_path)


def test_other_files_are_not_gguf(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"GGU")
    assert not any(map(is_gguf, (tmp_path, tmp_path / "x", tmp_path / "nothing")))


def test_a_look_leaves_no_file_open(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_bytes(gguf_file([], [("a", 0, [1], bytes(4))]))
    (tmp_path / "x").write_bytes(b"GGUF")
    before = os.listdir("/proc/self/fd")
    assert is_gguf(path)
    read_file_header(path)
    with pytest.raises(InvalidGguf):
        read_file_header(tmp_path / "x")
    assert os.listdir("/proc/self/fd") == before
