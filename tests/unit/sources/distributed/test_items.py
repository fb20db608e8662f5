"""An item of a data file is what the metadata say, or it is refused."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from blobstore.core.tensor import DType
from blobstore.errors import CheckpointRefused, DamagedSource
from blobstore.sources.distributed.files import DataFile
from blobstore.sources.distributed.items import read_piece, read_value
from blobstore.sources.distributed.metadata import Stored, StoredPiece, StoredTensor
from blobstore.sources.distributed.pieces import Box, Piece
from blobstore.sources.distributed.templates import Templates


class Command:
    """Pickles as a call of a function that a tensor does not need."""

    def __reduce__(self) -> Any:
        return os.system, ("exit 1",)


def saved(
    value: Any,
    change: Callable[[str, bytes], bytes] = lambda _, data: data,
    compressed: str = "nothing",
) -> bytes:
    """Return what torch saves; ``change`` gets each entry, and those named ``compressed`` are deflated."""
    before, after = io.BytesIO(), io.BytesIO()
    torch.save(value, before)
    with zipfile.ZipFile(before) as source, zipfile.ZipFile(after, "w") as target:
        for name in source.namelist():
            is_deflated = name.endswith(compressed)
            kind = zipfile.ZIP_DEFLATED if is_deflated else zipfile.ZIP_STORED
            target.writestr(name, change(name, source.read(name)), kind)
    return after.getvalue()


def piece_of(folder: Path, data: bytes, shape: tuple[int, ...], dtype: DType = DType.F32) -> Piece:
    """Read an item as a piece of this shape and type."""
    path = folder / "x.distcp"
    path.write_bytes(data)
    piece = StoredPiece(Box((0,) * len(shape), shape), Stored(path.name, 0, len(data)))
    file = DataFile(path)
    with file.opened() as descriptor:
        tensor = StoredTensor(dtype, "float32", shape, (piece,))
        return read_piece(descriptor, file, tensor, piece, Templates())


def test_an_item_of_the_shape_and_type_is_read(tmp_path: Path) -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    piece = piece_of(tmp_path, saved(tensor), (2, 3))
    data = (tmp_path / "x.distcp").read_bytes()
    assert data[piece.begin : piece.begin + piece.size] == tensor.numpy().tobytes()


@pytest.mark.parametrize("shape", [(3, 2), (6,), (2, 3, 1)])
def test_another_shape_of_as_many_elements_is_refused(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    with pytest.raises(DamagedSource, match=r"it is a tensor of F32 \[2, 3\], not of"):
        piece_of(tmp_path, saved(torch.ones(2, 3)), shape)


def test_another_type_of_as_many_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DamagedSource, match=r"it is a tensor of F32 \[2, 3\], not of"):
        piece_of(tmp_path, saved(torch.ones(2, 3)), (2, 3), DType.I32)


def test_big_endian_elements_are_refused(tmp_path: Path) -> None:
    def change(name: str, data: bytes) -> bytes:
        return b"big" if name.endswith("byteorder") else data

    with pytest.raises(DamagedSource, match="is compressed, big-endian, or has not exactly"):
        piece_of(tmp_path, saved(torch.ones(2, 3), change), (2, 3))


def test_compressed_elements_are_refused(tmp_path: Path) -> None:
    data = saved(torch.ones(200, 3), compressed="data/0")
    with pytest.raises(DamagedSource, match="is compressed, big-endian, or has not exactly"):
        piece_of(tmp_path, data, (200, 3))


def test_names_that_a_tensor_does_not_need_are_refused_and_not_called(tmp_path: Path) -> None:
    with pytest.raises(CheckpointRefused, match="system"):
        piece_of(tmp_path, saved(Command()), (2, 3))


def test_a_pickle_that_is_larger_than_its_item_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.distcp"
    for compressed, is_refused in (("nothing", False), ("data.pkl", True)):
        data = saved({"text": "x" * 100_000}, compressed=compressed)
        path.write_bytes(data)
        with DataFile(path).opened() as descriptor:
            if is_refused:
                with pytest.raises(DamagedSource, match="its pickle is compressed"):
                    read_value(descriptor, Stored(path.name, 0, len(data)))
            else:
                value = read_value(descriptor, Stored(path.name, 0, len(data)))
                assert value == {"text": "x" * 100_000}
