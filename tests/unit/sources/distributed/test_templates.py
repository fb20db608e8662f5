"""An item that is like an earlier one is read as if it were parsed itself."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from blobstore.errors import DamagedSource, UnsupportedSource
from blobstore.sources.distributed import templates as module
from blobstore.sources.distributed.files import DataFile
from blobstore.sources.distributed.items import read_piece
from blobstore.sources.distributed.metadata import Metadata, StoredPiece
from blobstore.sources.distributed.pieces import Piece
from blobstore.sources.distributed.templates import Templates
from blobstore.sources.distributed.torch_folder import read_metadata
from tests.support.distributed_folders import data_name, grid, write_folder


class Opened:
    """A folder with two pieces of equal shape, and the files that it consists of."""

    def __init__(self, folder: Path, tensor: torch.Tensor | None = None) -> None:
        if tensor is not None:
            write_folder(folder, {("a",): (tensor, grid(tensor.shape, 2))}, ranks=1)
        self.path = folder / data_name(0)
        self.metadata: Metadata = read_metadata(folder / ".metadata")
        self.first, self.second = self.metadata.tensors["a"].pieces
        self.file = DataFile(self.path)
        self.descriptor = os.open(self.path, os.O_RDWR)

    def read(self, piece: StoredPiece, templates: Templates) -> Piece | None:
        """Return a piece without its file; None if it is refused."""
        tensor = self.metadata.tensors["a"]
        try:
            return read_piece(self.descriptor, self.file, tensor, piece, templates)
        except (DamagedSource, UnsupportedSource):
            return None

    def match(self, piece: StoredPiece, templates: Templates) -> Piece | None:
        return templates.match(self.descriptor, self.file, self.metadata.tensors["a"], piece)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    opened = Opened(tmp_path / "step", torch.arange(24.0).reshape(4, 6))
    yield opened
    os.close(opened.descriptor)


def repack(folder: Path, last: str, filling: bytes) -> None:
    """Write the items of a folder again, with an entry at the start, and entries named ``last`` at the end."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    path = folder / data_name(0)
    data, written = path.read_bytes(), bytearray()
    for place in metadata.storage_data.values():
        item = io.BytesIO()
        content = data[place.offset : place.offset + place.length]
        with (
            zipfile.ZipFile(io.BytesIO(content)) as source,
            zipfile.ZipFile(item, "w") as target,
        ):
            names = sorted(source.namelist(), key=lambda name: name.endswith(last))
            root = names[0].partition("/")[0]
            target.writestr(zipfile.ZipInfo(f"{root}/filling"), filling)
            for name in names:
                target.writestr(zipfile.ZipInfo(name), source.read(name))
        place.offset, place.length = len(written), len(item.getvalue())
        written += item.getvalue()
    path.write_bytes(written)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize(
    ("last", "size", "is_known"),
    [
        ("serialization_id", 1, True),
        ("data.pkl", 1, False),  # its pickle would be where the identifiers differ
        ("serialization_id", 1 << 16, False),  # it would need much memory
    ],
)
def test_only_items_as_torch_writes_them_are_kept(
    tmp_path: Path, last: str, size: int, is_known: bool
) -> None:
    folder = tmp_path / "step"
    write_folder(folder, {("a",): (torch.ones(4, 6), grid((4, 6), 2))}, ranks=1)
    repack(folder, last, bytes(size))
    opened = Opened(folder)
    templates = Templates()
    assert opened.read(opened.first, templates) is not None
    assert (opened.match(opened.second, templates) is not None) == is_known
    os.close(opened.descriptor)


def test_the_number_of_items_that_are_kept_is_limited(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST", 0)
    templates = Templates()
    assert opened.read(opened.first, templates) is not None
    assert opened.match(opened.first, templates) is None


def test_an_item_of_equal_shape_is_not_parsed(opened: Opened) -> None:
    templates = Templates()
    assert opened.match(opened.first, templates) is None
    first = opened.read(opened.first, templates)
    assert first == opened.match(opened.first, templates)
    parsed = opened.read(opened.second, Templates())
    assert parsed is not None
    assert parsed == opened.match(opened.second, templates) == opened.read(opened.second, templates)
    assert first is not None
    assert parsed.crc != first.crc


def test_every_changed_byte_is_judged_as_by_parsing(opened: Opened) -> None:
    templates = Templates()
    opened.read(opened.first, templates)
    begin, size = opened.second.stored.begin, opened.second.stored.size
    outcomes = []
    for at in range(begin, begin + size):
        (byte,) = os.pread(opened.descriptor, 1, at)
        os.pwrite(opened.descriptor, bytes([byte ^ 1]), at)
        parsed = opened.read(opened.second, Templates())
        assert opened.read(opened.second, templates) == parsed, at - begin
        outcomes.append(parsed is None)
        os.pwrite(opened.descriptor, bytes([byte]), at)
    assert 100 < sum(outcomes) < size


def test_an_item_in_another_order_is_always_parsed(tmp_path: Path) -> None:
    opened = Opened(tmp_path / "step", torch.arange(24.0).reshape(6, 4).t())
    templates = Templates()
    piece = opened.read(opened.first, templates)
    assert piece is not None
    assert piece.strided is not None
    assert opened.match(opened.second, templates) is None
    os.close(opened.descriptor)
