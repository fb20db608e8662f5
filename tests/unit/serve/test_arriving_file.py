"""Files that are read while they are fetched."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from blobstore.errors import BlobstoreError, DamagedSource, StoreError
from blobstore.serve.arriving_file import ArrivingFile, Claim
from blobstore.sources.hub_listing import ListedFile

DATA = bytes(range(256)) * 10


class Space:
    """Space for so many bytes."""

    def __init__(self, most: int = 10**6) -> None:
        self.most, self.spent = most, 0

    def extend(self, claim: Claim, size: int, found: int, files: int) -> None:
        raise NotImplementedError

    def spend(self, claim: Claim, size: int) -> None:
        del claim
        if self.spent + size > self.most:
            raise StoreError("no space")
        self.spent += size

    def release(self, claim: Claim) -> None:
        raise NotImplementedError


def claim(path: Path, space: Space | None = None) -> Claim:
    return Claim(space or Space(), path.parent)


def arriving(path: Path, data: bytes = DATA, algorithm: str = "sha256") -> ArrivingFile:
    head = b"blob %d\0" % len(data) if algorithm == "sha1" else b""
    digest = hashlib.new(algorithm, head + data).hexdigest()
    file = ArrivingFile(ListedFile(path.name, len(data), algorithm, digest), claim(path))
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
    file = ArrivingFile(listed, claim(tmp_path / "file"), wanted.append)
    file.open()
    with file.calling(lambda: reports.append("x")):
        file.append(DATA)
        file.finish()
    file.fail(BlobstoreError("too late"))
    assert reports == ["x", "x"]
    assert wanted == ["file"]
    assert file.readable(0) == len(DATA)


def test_many_readers_are_not_called_for_each_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, calls = [100.0], Counter[int]()
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    file = arriving(tmp_path / "file")
    with contextlib.ExitStack() as readers:
        for number in range(500):
            readers.enter_context(file.calling(partial(calls.update, [number])))
        for _ in range(1000):
            file.append(DATA[file.written : file.written + 1])
        assert calls == dict.fromkeys(range(500), 1), "the rest they find when they look"
        assert file.readable(0) == 1000
        now[0] += file.patience
        file.append(DATA[1000:])
        file.finish()
    assert calls == dict.fromkeys(range(500), 3)


def test_a_file_stays_readable_when_its_name_is_gone(tmp_path: Path) -> None:
    file = arriving(tmp_path / "file")
    file.append(DATA)
    file.finish()
    (tmp_path / "file").unlink()
    assert os.pread(file.descriptor, 10, 0) == DATA[:10]


# What is spent of a claim


def of_data(tmp_path: Path, space: Space) -> ArrivingFile:
    listed = ListedFile("file", len(DATA), "sha256", hashlib.sha256(DATA).hexdigest())
    return ArrivingFile(listed, claim(tmp_path / "file", space))


def test_bytes_without_space_are_not_written(tmp_path: Path) -> None:
    space = Space(1000)
    file = of_data(tmp_path, space)
    file.open()
    file.append(DATA[:1000])
    with pytest.raises(StoreError, match="no space"):
        file.append(DATA[1000:1001])
    assert (tmp_path / "file").read_bytes() == DATA[:1000]
    assert file.written == space.spent == 1000


def test_bytes_that_lie_there_are_not_spent_again(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(DATA[:1000])
    space = Space()
    file = of_data(tmp_path, space)
    assert file.find() == 1000
    file.open()
    assert space.spent == 0
    file.append(DATA[1000:])
    assert space.spent == len(DATA) - 1000
    file.finish()


@pytest.mark.parametrize("there", [b"", DATA + b"x", None])
def test_a_file_that_is_absent_or_too_long_leaves_nothing_to_go_on_with(
    tmp_path: Path, there: bytes | None
) -> None:
    if there is not None:
        (tmp_path / "file").write_bytes(there)
    assert of_data(tmp_path, Space()).find() == 0


def test_bytes_from_elsewhere_are_spent_once_right_or_wrong(tmp_path: Path) -> None:
    space = Space()
    file = of_data(tmp_path, space)
    assert not file.take([bytes(len(DATA))])
    assert space.spent == len(DATA)
    assert file.take([DATA[:100], DATA[100:]])
    file.open()
    assert space.spent == len(DATA)
    short = of_data(tmp_path / "other", Space(99))
    with pytest.raises(StoreError, match="no space"):
        short.take([DATA[:100], DATA[100:]])
    assert list((tmp_path / "other").iterdir()) == []
