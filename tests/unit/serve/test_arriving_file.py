"""Files that are read while they are fetched."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from blobstore.errors import BlobstoreError, DamagedSource
from blobstore.serve.arriving_file import ArrivingFile
from blobstore.sources.hub_listing import ListedFile

DATA = bytes(range(256)) * 10


def arriving(path: Path, data: bytes = DATA, algorithm: str = "sha256") -> ArrivingFile:
    head = b"blob %d\0" % len(data) if algorithm == "sha1" else b""
    digest = hashlib.new(algorithm, head + data).hexdigest()
    file = ArrivingFile(ListedFile("file", len(data), algorithm, digest), path)
    file.open()
    return file


@pytest.mark.parametrize("algorithm", ["sha256", "sha1"])
def test_the_last_byte_is_there_only_when_the_digest_is_right(
    tmp_path: Path, algorithm: str
) -> None:
    file = arriving(tmp_path / "file", algorithm=algorithm)
    assert file.readable(0) == 0
    file.append(DATA[:1000])
    assert file.readable(0) == 1000
    assert file.readable(900) == 100
    assert file.readable(1001) == 0
    file.append(DATA[1000:])
    assert file.readable(0) == len(DATA) - 1
    assert not file.is_complete
    file.finish()
    assert file.readable(0) == len(DATA)
    assert file.is_complete


def test_wrong_bytes_never_become_a_file(tmp_path: Path) -> None:
    file = arriving(tmp_path / "file")
    file.append(bytes(len(DATA)))
    with pytest.raises(DamagedSource, match=r"its sha256 is .*, the upstream lists"):
        file.finish()
    assert file.is_wrong
    assert not (tmp_path / "file").exists()
    file.fail(BlobstoreError("over"))
    with pytest.raises(BlobstoreError, match="over"):
        file.readable(0)


def test_more_bytes_than_were_listed_are_not_written(tmp_path: Path) -> None:
    file = arriving(tmp_path / "file")
    file.append(DATA)
    with pytest.raises(DamagedSource, match="more than the 2560 bytes"):
        file.append(b"x")
    assert (tmp_path / "file").stat().st_size == len(DATA)


def test_what_is_there_is_not_fetched_again(tmp_path: Path) -> None:
    arriving(tmp_path / "file").append(DATA[:1000])
    again = arriving(tmp_path / "file")
    assert (again.written, again.received) == (1000, 0)
    again.append(DATA[1000:])
    again.finish()
    assert again.received == len(DATA) - 1000


def test_a_file_that_is_longer_than_listed_begins_again(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(DATA + b"x")
    assert arriving(tmp_path / "file").written == 0


def test_readers_may_move_the_position_of_the_descriptor(tmp_path: Path) -> None:
    file = arriving(tmp_path / "file")
    for begin in range(0, len(DATA), 100):
        file.append(DATA[begin : begin + 100])
        os.lseek(file.descriptor, begin // 2, os.SEEK_SET)  # as sendfile leaves it
    file.finish()
    assert (tmp_path / "file").read_bytes() == DATA


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="symbolic"):
        arriving(tmp_path / "link")
    assert not (tmp_path / "target").exists()


def test_bytes_and_the_end_are_reported_to_readers(tmp_path: Path) -> None:
    reports: list[str] = []
    wanted: list[str] = []
    digest = hashlib.sha256(DATA).hexdigest()
    listed = ListedFile("file", len(DATA), "sha256", digest)
    file = ArrivingFile(listed, tmp_path / "file", wanted.append)
    file.open()
    with file.calling(lambda: reports.append("x")):
        file.append(DATA)
        file.finish()
    file.fail(BlobstoreError("too late"))
    assert reports == ["x", "x"]
    assert wanted == ["file"]
    assert file.readable(0) == len(DATA)


def test_a_file_stays_readable_when_its_name_is_gone(tmp_path: Path) -> None:
    file = arriving(tmp_path / "file")
    file.append(DATA)
    file.finish()
    (tmp_path / "file").unlink()
    assert os.pread(file.descriptor, 10, 0) == DATA[:10]
