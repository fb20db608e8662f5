"""Folders of versions: which are complete, and which lead to another."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from blobstore.errors import DamagedSource, SourceNotFound
from blobstore.sources.weight_versions import (
    INDEX,
    OpenChanges,
    WeightVersion,
    WeightVersions,
    version_name,
)


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
        "weight_v0000013",
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
    (tmp_path / version_name(5) / INDEX).unlink()
    with pytest.raises(DamagedSource, match="changes version 5, which is not complete"):
        numbers(versions, None)
    (tmp_path / version_name(5)).rmdir()
    with pytest.raises(DamagedSource, match="weight_v000005' is missing"):
        numbers(versions, None)


def number_of(version: WeightVersion | None) -> int | None:
    return None if version is None else version.number


def test_weights_without_an_index_are_no_version_unless_they_are_one_file(tmp_path: Path) -> None:
    versions = WeightVersions(tmp_path)
    write(tmp_path, 1, 0)
    folder = tmp_path / version_name(2)
    folder.mkdir()
    save_file({"a": np.ones(3, np.float32)}, folder / "model.safetensors")
    part = folder / "model-00000-of-00001.safetensors"
    part.touch()
    assert number_of(versions.newest()) == 1
    part.unlink()
    newest = versions.newest()
    assert newest is not None
    assert (newest.number, newest.base, newest.has_index) == (2, None, False)


def test_one_file_that_is_half_written_or_may_be_a_change_is_no_version(tmp_path: Path) -> None:
    versions = WeightVersions(tmp_path)
    folder = tmp_path / version_name(1)
    folder.mkdir()
    path = folder / "model.safetensors"
    frame = np.zeros(9, np.uint8)
    save_file({"a": frame}, path, metadata={"a": "00"})
    assert versions.newest() is None
    save_file({"a": frame}, path, metadata={"format": "pt"})  # a tensor of bytes
    assert number_of(versions.newest()) == 1
    os.truncate(path, path.stat().st_size - 1)
    assert versions.newest() is None


def test_a_version_has_another_state_when_a_file_is_written_replaced_or_added(
    tmp_path: Path,
) -> None:
    versions = WeightVersions(tmp_path)
    folder = write(tmp_path, 1, 0)
    states = []
    for change in (
        lambda: None,
        (folder / INDEX).touch,
        lambda: (folder / INDEX).replace(folder / "x"),
        lambda: (folder / "x").replace(folder / INDEX),
        (folder / "config.json").touch,
    ):
        change()
        if (folder / INDEX).exists():
            version = versions.find(1) or versions.newest()
            assert version is not None
            states.append(version.state)
    assert len(set(states)) == len(states) == 4


def test_a_folder_that_becomes_a_link_is_refused_whenever_it_is_opened(tmp_path: Path) -> None:
    (tmp_path / "versions").mkdir()
    (tmp_path / "private").mkdir()
    folder = write(tmp_path / "versions", 1, None)
    version = WeightVersions(tmp_path / "versions").newest()
    assert version is not None
    folder.rename(tmp_path / "moved")
    folder.symlink_to(tmp_path / "private")
    with pytest.raises(DamagedSource, match="cannot read"), version.opened():
        pass


def test_versions_are_read_in_the_folder_that_was_opened(tmp_path: Path) -> None:
    """What the path of all versions becomes later counts when they are looked for again."""
    write(tmp_path / "versions", 1, None)
    write(tmp_path / "other", 2, None)
    versions = WeightVersions(tmp_path / "versions")
    assert number_of(versions.newest()) == 1
    (tmp_path / "versions").rename(tmp_path / "moved")
    (tmp_path / "versions").symlink_to(tmp_path / "other")
    assert number_of(versions.read(1)) == 1
    assert number_of(versions.newest()) == 2


def test_no_file_stays_open_if_one_of_the_changes_is_malformed(tmp_path: Path) -> None:
    folder = write(tmp_path, 1, 0)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] = {"x": "a.safetensors", "y": "b.safetensors"}
    (folder / INDEX).write_text(json.dumps(index))
    save_file({"x": np.zeros(3, np.uint8)}, folder / "a.safetensors", {"x": "1"})
    (folder / "b.safetensors").write_bytes(b"\1\0\0\0\0\0\0\0malformed")
    version = WeightVersions(tmp_path).read(1)
    assert version is not None
    before = os.listdir("/proc/self/fd")
    with pytest.raises(DamagedSource, match="b.safetensors"):
        OpenChanges(version)
    assert os.listdir("/proc/self/fd") == before
