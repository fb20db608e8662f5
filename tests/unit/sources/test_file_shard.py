from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from blobstore.core.tensor import DType, FileLayout, TensorSpec
from blobstore.errors import DamagedSource, UnsupportedSource
from blobstore.sources.file_shard import FileShard


class Invalid(ValueError):
    pass


class OneTensor(FileShard):
    """A format whose header is the number of bytes that follow, in one byte."""

    ending = ".one"
    format = "gguf"
    invalid = Invalid

    def parse(self, size: int) -> FileLayout:
        return self.layout_of(self.read_range(0, 1), size)

    @staticmethod
    def begins(head: bytes) -> bool:
        return head[:1] != b"\xff"

    @staticmethod
    def layout_of(start: bytes, size: int) -> FileLayout:
        if not start or size < 1 + start[0]:
            raise Invalid(f"tensor 'a' ends after byte {size}")
        return FileLayout({"a": (TensorSpec("a", DType.U8, (start[0],)), 1, 1 + start[0])}, 1)


def written(folder: Path, data: bytes) -> Path:
    (folder / "x.one").write_bytes(data)
    return folder / "x.one"


def test_a_format_says_where_its_tensors_are(tmp_path: Path) -> None:
    with contextlib.closing(OneTensor(written(tmp_path, b"\3abc"))) as shard:
        assert shard.specs == {"a": TensorSpec("a", DType.U8, (3,))}
        assert b"".join(map(bytes, shard.read("a", memoryview(bytearray(2))))) == b"abc"
        assert (shard.header(), shard.gaps, [*shard.block_types()]) == (b"\3", (), [])


@pytest.mark.parametrize("data", [b"", b"\3ab"])
def test_an_error_of_a_format_names_the_file(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(DamagedSource, match=r"x\.one': tensor 'a' ends after byte"):
        OneTensor(written(tmp_path, data))


def test_a_file_of_another_format_is_not_damaged(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedSource, match=r"x\.one': this is not a gguf file, nor any other"):
        OneTensor(written(tmp_path, b"\xffab"))


def test_a_file_that_becomes_shorter_is_an_error(tmp_path: Path) -> None:
    path = written(tmp_path, b"\3abc")
    with contextlib.closing(OneTensor(path)) as shard:
        path.write_bytes(b"\3a")
        with pytest.raises(DamagedSource, match="ended at byte 2, in tensor 'a' with 2 bytes"):
            list(shard.read("a", memoryview(bytearray(3))))
        path.write_bytes(b"")
        with pytest.raises(DamagedSource, match="ended at byte 0, in its header of 1 bytes"):
            shard.header()


def test_gaps_are_what_no_tensor_has() -> None:
    specs = [TensorSpec(name, DType.U8, (2,)) for name in "ab"]
    layout = FileLayout({"a": (specs[0], 4, 6), "b": (specs[1], 8, 10)}, 3)
    assert [*layout.gaps(11)] == [(3, 4), (6, 8), (10, 11)]
    assert [*layout.gaps(10)] == [(3, 4), (6, 8)]
