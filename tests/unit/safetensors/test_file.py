from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from safetensors.numpy import save, save_file

from blobstore.core.files import open_regular
from blobstore.errors import BlobstoreError, InvalidHeader, TensorNotFound
from blobstore.safetensors.file import SafetensorsFile, read_header
from tests.support.models import dense_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file(dense_tensors(), tmp_path / "a.safetensors", metadata={"k": "v"})
    return tmp_path / "a.safetensors"


def descriptors() -> int:
    return len(os.listdir("/dev/fd"))


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Iterator[None]:
    before = descriptors()
    yield
    assert descriptors() == before


def test_views_are_the_file_s_bytes(path: Path) -> None:
    tensors = dense_tensors()
    with SafetensorsFile.open(path) as file:
        assert set(file) == set(tensors)
        assert file.header.metadata == {"k": "v"}
        for name, array in tensors.items():
            view = file.view(name)
            assert view.spec.shape == array.shape
            assert bytes(view.data) == array.tobytes()


def test_views_are_read_only(path: Path) -> None:
    with SafetensorsFile.open(path) as file:
        view = file.view("position_ids").data
        assert view.readonly
        with pytest.raises(TypeError):
            view[0] = 1


def test_no_descriptor_stays_open(path: Path) -> None:
    before = descriptors()
    with SafetensorsFile.open(path):
        assert descriptors() == before


def test_a_view_outlives_the_file(path: Path) -> None:
    file = SafetensorsFile.open(path)
    view = file.view("position_ids").data
    file.close()
    path.unlink()
    assert bytes(view) == np.arange(5, dtype=np.int64).tobytes()


def test_a_closed_file_gives_no_more_views(path: Path) -> None:
    with SafetensorsFile.open(path) as file:
        pass
    with pytest.raises(ValueError, match="released"):
        file.view("scalar")
    file.close()


def test_an_unknown_tensor_is_a_key_error_that_names_it(path: Path) -> None:
    with SafetensorsFile.open(path) as file, pytest.raises(KeyError) as caught:
        file.view("a\x1b")
    assert isinstance(caught.value, TensorNotFound)
    assert str(caught.value) == "no tensor 'a\\x1b' in this file"


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


def test_an_error_begins_with_the_path(tmp_path: Path) -> None:
    (tmp_path / "a\nb").write_bytes(b"")
    with pytest.raises(InvalidHeader) as caught:
        SafetensorsFile.open(tmp_path / "a\nb")
    assert str(caught.value).startswith(f"'{tmp_path}/a\\nb': too short")


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


def test_reads_that_give_less_than_there_is_are_gone_on_with(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = os.pread
    expected = SafetensorsFile.open(path).header
    for most in (1, 3, 7, 8, 9):
        with monkeypatch.context() as patch:
            patch.setattr(
                os, "pread", lambda fd, size, at, most=most: read(fd, min(size, most), at)
            )
            assert SafetensorsFile.open(path).header == expected


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(BlobstoreError, match="is not a regular file"):
            SafetensorsFile.open(path)


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        SafetensorsFile.open(tmp_path / "none")
