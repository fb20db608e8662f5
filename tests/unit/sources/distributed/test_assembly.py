"""Tensors are assembled from pieces of any tiling, with a buffer of any size."""

from __future__ import annotations

import itertools
import os
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from blobstore.errors import DamagedSource
from blobstore.sources.distributed.assembly import read_assembled
from blobstore.sources.distributed.files import DataFile
from blobstore.sources.distributed.pieces import Box, Piece
from tests.support.distributed_folders import Box as Cut
from tests.support.distributed_folders import grid

SHAPES = [(), (7,), (5, 6), (3, 4, 5), (2, 1, 3, 4)]


def pieces_of(path: Path, array: np.ndarray, boxes: Sequence[Cut]) -> list[Piece]:
    """Write the boxes of an array to a file, one after the other and with gaps."""
    data, places = bytearray(b"head"), []
    for offsets, sizes in boxes:
        ranges = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
        content = array[ranges].tobytes()
        places.append((Box(offsets, sizes), len(data), content))
        data += content + b"gap"
    path.write_bytes(data)
    file = DataFile(path)
    return [
        Piece(box, file, begin, len(content), zlib.crc32(content)) for box, begin, content in places
    ]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("buffer", [4, 8, 12, 24, 100, 4096])
def test_assembles_every_grid(tmp_path: Path, shape: tuple[int, ...], buffer: int) -> None:
    array = np.arange(np.prod(shape, dtype=int), dtype=np.uint32).reshape(shape)
    for counts in itertools.product((1, 2, 3), repeat=len(shape)):
        pieces = pieces_of(tmp_path / "data", array, grid(shape, *counts))
        parts = read_assembled(shape, 4, pieces, memoryview(bytearray(buffer)))
        assert b"".join(map(bytes, parts)) == array.tobytes(), counts


def test_assembles_a_tiling_other_than_a_grid(tmp_path: Path) -> None:
    array = np.arange(18, dtype=np.uint16).reshape(3, 3, 2)
    boxes = [
        ((0, 0, 0), (1, 2, 2)),
        ((0, 2, 0), (2, 1, 2)),
        ((2, 1, 0), (1, 2, 2)),
        ((1, 0, 0), (2, 1, 2)),
        ((1, 1, 0), (1, 1, 2)),
    ]
    pieces = pieces_of(tmp_path / "data", array, boxes)
    for size in (2, 6, 12, 100):
        parts = read_assembled(array.shape, 2, pieces, memoryview(bytearray(size)))
        assert b"".join(map(bytes, parts)) == array.tobytes()


def test_a_tensor_without_elements_has_no_parts() -> None:
    assert list(read_assembled((0, 3), 4, [], memoryview(bytearray(8)))) == []


@pytest.mark.parametrize("counts", [(2,), (1, 2)])
def test_verifies_checksums(tmp_path: Path, counts: tuple[int, ...]) -> None:
    array = np.arange(20, dtype=np.uint8).reshape(4, 5)
    pieces = pieces_of(tmp_path / "data", array, grid((4, 5), *counts))
    wrong = [pieces[0], pieces[1]._replace(crc=pieces[1].crc ^ 1)]
    with pytest.raises(DamagedSource, match="have the CRC [0-9a-f]{8}, not [0-9a-f]{8}"):
        list(read_assembled((4, 5), 1, wrong, memoryview(bytearray(10))))


def test_a_file_that_ends_early_is_reported(tmp_path: Path) -> None:
    array = np.arange(20, dtype=np.uint8)
    (piece,) = pieces_of(tmp_path / "data", array, grid((20,)))
    far = piece._replace(begin=1000)
    with pytest.raises(DamagedSource, match="truncated at byte 1000"):
        list(read_assembled((20,), 1, [far], memoryview(bytearray(10))))


def test_a_file_that_changes_is_reported(tmp_path: Path) -> None:
    array = np.arange(20, dtype=np.uint8)
    pieces = pieces_of(tmp_path / "data", array, grid((20,)))
    (tmp_path / "data").write_bytes(b"other")
    with pytest.raises(DamagedSource, match="changed while it was read"):
        list(read_assembled((20,), 1, pieces, memoryview(bytearray(10))))


@pytest.mark.parametrize("count", [16, 40])
def test_a_tensor_in_many_files_keeps_few_of_them_open(tmp_path: Path, count: int) -> None:
    array = np.arange(4 * count, dtype=np.uint8).reshape(4, count)
    pieces = []
    for column in range(count):
        box = ((0, column), (4, 1))
        pieces += pieces_of(tmp_path / str(column), array, [box])
    before = len(os.listdir("/proc/self/fd"))
    parts = read_assembled(array.shape, 1, pieces, memoryview(bytearray(count)))
    found = b""
    for part in parts:
        found += part
        assert len(os.listdir("/proc/self/fd")) <= before + 16
    assert found == array.tobytes()
    assert len(os.listdir("/proc/self/fd")) == before
