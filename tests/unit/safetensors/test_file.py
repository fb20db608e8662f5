from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save, save_file

from blobstore.core.files import open_regular
from blobstore.errors import InvalidHeader
from blobstore.safetensors.file import read_header
from tests.support.models import dense_tensors
from tests.support.safetensors_file import SafetensorsFile


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file(dense_tensors(), tmp_path / "a.safetensors", metadata={"k": "v"})
    return tmp_path / "a.safetensors"


def test_views_are_the_file_s_bytes(path: Path) -> None:
    tensors = dense_tensors()
    with SafetensorsFile.open(path) as file:
        assert set(file) == set(tensors)
        assert file.header.metadata == {"k": "v"}
        for name, array in tensors.items():
            view = file.view(name)
            assert view.spec.shape == array.shape
            assert bytes(view.data) == array.tobytes()


@pytest.mark.parametrize("length", [4095 - 8, 4096 - 8, 4097 - 8, 10_000])
def test_reads_headers_of_every_length(tmp_path: Path, length: int) -> None:
    text = b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}'.ljust(length)
    (tmp_path / "a").write_bytes(length.to_bytes(8, "little") + text + b"xy")
    with SafetensorsFile.open(tmp_path / "a") as file:
        assert bytes(file.view("a").data) == b"xy"


def test_reads_a_header_of_many_tensors(tmp_path: Path) -> None:
    tensors = {f"tensor {number}": np.array(number) for number in range(1000)}
    save_file(tensors, tmp_path / "a")
    with SafetensorsFile.open(tmp_path / "a") as file:
        found = {name: int.from_bytes(file.view(name).data, "little") for name in file}
    assert found == {name: int(array) for name, array in tensors.items()}


def test_every_cut_is_an_error(tmp_path: Path) -> None:
    whole = save({"a": np.arange(4, dtype=np.uint8), "b": np.zeros(3)})
    path = tmp_path / "cut"
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(InvalidHeader):
            SafetensorsFile.open(path)


def test_a_file_that_shrinks_while_it_is_read_is_an_error(path: Path) -> None:
    descriptor, size = open_regular(path)
    try:
        for left, what in (
            (100, "ends after 92: the file has shrunk"),
            (8, "shrunk"),
            (7, "short"),
        ):
            os.truncate(path, left)
            with pytest.raises(InvalidHeader, match=what):
                read_header(descriptor, size)
    finally:
        os.close(descriptor)


def test_short_reads_are_continued(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = os.pread
    expected = SafetensorsFile.open(path).header
    for most in (1, 3, 7, 8, 9):
        with monkeypatch.context() as patch:
            patch.setattr(
                os, "pread", lambda fd, size, at, most=most: read(fd, min(size, most), at)
            )
            assert SafetensorsFile.open(path).header == expected
