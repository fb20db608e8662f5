from __future__ import annotations

import os
from pathlib import Path

import pytest

from blobstore.errors import DamagedSource, SourceError
from blobstore.sources.small_files import files_of, is_kept, is_part


@pytest.mark.parametrize("name", ["config.json", "tokenizer.model", "LICENSE.txt", "x.py"])
def test_keeps_small_files_of_a_runtime_and_its_user(name: str) -> None:
    assert is_kept(name)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin.index.json"]
)
def test_does_not_keep_weights_nor_their_index(name: str) -> None:
    assert not is_kept(name)


@pytest.mark.parametrize("name", [".", "..", "a/b", "a b", "é.json", ""])
def test_knows_names_that_a_store_cannot_take(name: str) -> None:
    assert not is_part(name)


def test_gives_files_with_their_prefix_and_no_folders(tmp_path: Path) -> None:
    for name in ("config.json", "weights.bin", "sp ace.json"):
        (tmp_path / name).touch()
    (tmp_path / "folder.json").mkdir()
    found = list(files_of(tmp_path, "vae/"))
    assert [(file.name, file.path, file.content) for file in found] == [
        ("vae/config.json", tmp_path / "config.json", None)
    ]


def test_rejects_a_link_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to("nowhere")
    with pytest.raises(DamagedSource, match="link to nothing"):
        list(files_of(tmp_path))


def test_rejects_a_file_too_large_to_keep(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    os.truncate(tmp_path / "config.json", 64 * 2**20 + 1)
    with pytest.raises(SourceError, match="too large"):
        list(files_of(tmp_path))
