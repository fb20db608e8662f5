from __future__ import annotations

import io
import random
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from blobstore.core.tensor import DType
from blobstore.errors import CheckpointRefused
from blobstore.sources.pytorch import zip as torch_zip
from blobstore.sources.pytorch.tensors import Storage
from blobstore.sources.pytorch.zip import ZipCheckpoint
from blobstore.sources.pytorch.zip_entries import ZipEntry
from tests.support.checkpoints import (
    VALUES,
    call,
    deflated_file,
    mapping,
    members,
    named,
    pickled,
    tensor,
    text,
    zip_file,
)
from tests.support.zip_files import Member, make_zip, opened

PICKLE = pickled(mapping(a=tensor()))
FLOATS = Storage("0", "FloatStorage", DType.F32, 4, 4)


def with_records(**replaced: bytes | None) -> bytes:
    """Return a checkpoint with records replaced, or left out for None."""
    found = members(PICKLE)
    for name, content in replaced.items():
        key = name.replace("__", ".")
        found.pop(key, None)
        if content is not None:
            found[key] = Member(f"archive/{key}".encode(), content)
    return make_zip(list(found.values()))


def parsed(data: bytes) -> ZipCheckpoint:
    with opened(data) as (descriptor, size):
        return ZipCheckpoint(descriptor, size)


def located(data: bytes, **storages: Storage) -> Mapping[str, ZipEntry]:
    found = {name.removeprefix("_"): value for name, value in storages.items()}
    return parsed(data).locate(found or {"0": FLOATS})


def refusal(data: bytes) -> str:
    with pytest.raises(CheckpointRefused) as caught:
        parsed(data)
    return str(caught.value)


def test_reads_a_checkpoint() -> None:
    data = zip_file(PICKLE)
    found = parsed(data)
    assert (found.kind, found.is_swapped) == ("zip checkpoint", False)
    assert found.pickle_size == len(PICKLE)
    places = found.locate({"0": FLOATS})
    place = places["0"]
    assert data[place.offset : place.offset + place.size] == VALUES
    assert found.notices() == []


# The records


@pytest.mark.parametrize(
    ("order", "is_swapped"), [(b"little", False), (b"big", True), (None, False)]
)
def test_reads_the_byte_order(order: bytes | None, is_swapped: bool) -> None:
    assert parsed(with_records(byteorder=order)).is_swapped is is_swapped


@pytest.mark.parametrize("version", [b"1\n", b"2", b"3\n", b"10\n"])
def test_reads_all_versions_that_torch_reads(version: bytes) -> None:
    data = with_records(version=version)
    assert parsed(data).result.value
    torch.load(io.BytesIO(data), weights_only=True)


def test_finds_the_version_in_its_second_place() -> None:
    data = with_records(version=None, __data__version=b"3\n").replace(
        b".data.version", b".data/version"
    )
    assert parsed(data).result.value


# The folder


@pytest.mark.parametrize("root", [b"archive", b"a b", b"v3.pth", b"\xe4\xbd\xa0", b".."])
def test_the_folder_can_have_any_name(root: bytes) -> None:
    found = members(PICKLE)
    for member in found.values():
        member.name = member.name.replace(b"archive", root)
    assert len(located(make_zip(list(found.values())))) == 1


def test_folders_have_entries_of_their_own() -> None:
    folders = [Member(b"archive/", b""), Member(b"archive/data/", b"")]
    assert len(located(make_zip([*folders, *members(PICKLE).values()]))) == 1


# The pickle


def test_reads_a_pickle_that_is_compressed() -> None:
    found = parsed(deflated_file(PICKLE))
    assert found.pickle_size == len(PICKLE)
    assert found.locate({"0": FLOATS})["0"].is_deflated


def padded(size: int) -> bytes:
    """Return a pickle of about ``size`` bytes that compress well."""
    return pickled(mapping(a=tensor(), b=text("x" * size)))


@pytest.mark.slow
def test_rejects_a_pickle_that_compresses_too_well() -> None:
    size = 8 * 2**20
    assert parsed(deflated_file(padded(4 * 2**20))).pickle_size > 4 * 2**20
    assert parsed(zip_file(padded(size))).pickle_size > size
    assert "over the limit of 4" in refusal(deflated_file(padded(size)))


@pytest.mark.parametrize(("ratio", "is_read"), [(2, True), (1, False)])
def test_the_limit_of_a_pickle_depends_on_its_compressed_size(
    monkeypatch: pytest.MonkeyPatch, ratio: int, is_read: bool
) -> None:
    monkeypatch.setattr(torch_zip, "_SPARE_PICKLE_SIZE", 0)
    monkeypatch.setattr(torch_zip, "_MAX_PICKLE_RATIO", ratio)
    digits = random.Random(1).randbytes(10_000).hex()  # which compresses to a little over half
    data = deflated_file(pickled(mapping(a=tensor(), b=text(digits))))
    if is_read:
        assert parsed(data).pickle_size > len(digits)
    else:
        assert "over the limit of 1" in refusal(data)


# The storages


def test_a_storage_of_packed_elements_can_have_any_size() -> None:
    packed = Storage("0", "QUInt4x2Storage", None, 0, 7)
    assert located(zip_file(PICKLE), _0=packed)["0"].size == 16


def test_reports_entries_that_no_tensor_refers_to() -> None:
    found = parsed(zip_file(PICKLE, {"0": VALUES, "2": VALUES, "1": VALUES}))
    found.locate({"0": FLOATS})
    assert found.notices() == ["no tensor refers to entry 'archive/data/1' and 1 more"]
    found.locate({"0": FLOATS, "1": FLOATS._replace(key="1")})
    assert found.notices() == ["no tensor refers to entry 'archive/data/2'"]


def test_a_global_is_only_noted_here() -> None:
    pickle = pickled(call(named("posix", "system"), text("id")))
    assert [str(item) for item in parsed(zip_file(pickle)).result.refused] == ["posix.system"]


def test_reads_what_torch_writes(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"a": torch.arange(4.0)}, path)
    data = path.read_bytes()
    found = parsed(data)
    place = found.locate({"0": FLOATS})["0"]
    assert data[place.offset : place.offset + 16] == torch.arange(4.0).numpy().tobytes()
    with zipfile.ZipFile(path) as archive:
        assert len(archive.read("model/data.pkl")) == found.pickle_size
