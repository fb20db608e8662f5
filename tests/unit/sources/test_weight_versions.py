"""Folders of versions: which are complete, and which lead to another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from blobstore.errors import DamagedSource, SourceNotFound
from blobstore.sources.weight_versions import INDEX, WeightVersions, version_name


def write(folder: Path, number: int, base: int | None, *, as_text: bool = True) -> Path:
    """Write the index of a version."""
    made = folder / version_name(number)
    made.mkdir(parents=True)
    metadata: dict[str, object] = {}
    if base is not None:
        numbers = {"version": number, "base_version": base}
        metadata = {
            **{key: f"{value:06d}" if as_text else value for key, value in numbers.items()},
            "delta_encoding": "xor",
            "compression_format": "zstd",
            "checksum_format": "adler32",
        }
    (made / INDEX).write_text(json.dumps({"metadata": metadata, "weight_map": {}}))
    return made


def numbers(versions: WeightVersions, known: int | None) -> list[int]:
    newest = versions.newest()
    assert newest is not None
    return [version.number for version in versions.chain(newest, known)]


def test_only_folders_of_versions_count(tmp_path: Path) -> None:
    versions = WeightVersions(tmp_path)
    assert versions.newest() is None
    for name in (
        "weight_v1",
        "weight_v000001.tmp",
        "weight_v1234567890",
        "x",
        "weight_v\u0660\u0660\u0660\u0660\u0660\u0661",
    ):
        (tmp_path / name).mkdir()
    write(tmp_path, 12, 11)
    write(tmp_path, 1_000_000, 12)
    assert versions.numbers() == [1_000_000, 12]
    with pytest.raises(SourceNotFound):
        WeightVersions(tmp_path / "no").newest()


def test_numbers_may_be_integers(tmp_path: Path) -> None:
    write(tmp_path, 1, 0, as_text=False)
    newest = WeightVersions(tmp_path).newest()
    assert newest is not None
    assert (newest.number, newest.base) == (1, 0)


def test_a_chain_goes_on_from_what_is_known_or_from_a_full_version(tmp_path: Path) -> None:
    versions = WeightVersions(tmp_path)
    for number in range(1, 7):
        write(tmp_path, number, None if number == 3 else number - 1)
    assert numbers(versions, None) == [3, 4, 5, 6]
    assert numbers(versions, 1) == [3, 4, 5, 6]
    assert numbers(versions, 4) == [5, 6]
    write(tmp_path, 9, 5)
    assert numbers(versions, 5) == [9]
    with pytest.raises(DamagedSource, match="changes version 5, and version 6 is here"):
        numbers(versions, 6)


def test_weights_without_an_index_are_no_version_unless_they_are_one_file(tmp_path: Path) -> None:
    versions = WeightVersions(tmp_path)
    write(tmp_path, 1, 0)
    folder = tmp_path / version_name(2)
    folder.mkdir()
    for name in ("model-00000-of-00001.safetensors", "model.safetensors"):
        (folder / name).touch()
        newest = versions.newest()
        assert newest is not None
        assert newest.number == 1
    (folder / "model-00000-of-00001.safetensors").unlink()
    newest = versions.newest()
    assert newest is not None
    assert (newest.number, newest.base) == (2, None)
