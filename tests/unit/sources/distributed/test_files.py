from __future__ import annotations

import os
from pathlib import Path

import pytest

from blobstore.errors import DamagedSource, SourceError
from blobstore.sources.distributed.files import DataFile


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "x.distcp").write_bytes(b"abc")
    return tmp_path / "x.distcp"


def open_files() -> list[str]:
    return os.listdir("/proc/self/fd")


def test_a_file_is_open_only_while_it_is_read(path: Path) -> None:
    before = open_files()
    file = DataFile(path)
    assert open_files() == before
    with file.opened() as descriptor:
        assert os.pread(descriptor, 3, 0) == b"abc"
        with file.opened(descriptor) as same:
            assert same == descriptor
        assert os.pread(descriptor, 3, 0) == b"abc"  # which the caller closes
    assert open_files() == before


def test_another_file_is_not_read_in_place_of_the_first_one(path: Path) -> None:
    file = DataFile(path)
    other = path.with_name("other")
    other.write_bytes(b"xyz")
    before = open_files()
    other.replace(path)
    with pytest.raises(DamagedSource, match="changed while it was read"), file.opened():
        pass
    path.unlink()
    with pytest.raises(DamagedSource, match="is missing"), file.opened():
        pass
    assert open_files() == before


def test_a_pipe_is_no_data_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x")
    with pytest.raises(SourceError, match="not a regular file"):
        DataFile(tmp_path / "x")
