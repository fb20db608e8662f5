from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from blobstore.sources.file_tree import FileTree
from blobstore.sources.small_files import KEPT_FILES, is_kept, small_files


@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "tokenizer.model", "LICENSE.txt", "x.py", "tokenizer.model.v3"),
        *("vocab.bpe", "hyperparams.yaml", "USAGE_POLICY", "bpe_simple_vocab_16e6.txt.gz"),
        *("selected_tags.csv", "spk_dict.pt", "speakers_xtts.pth", "COPYING", "bpe.codes"),
    ],
)
def test_keeps_small_files_of_a_runtime_and_its_user(name: str) -> None:
    assert is_kept(name)


@pytest.mark.parametrize(
    "name",
    [
        *("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin.index.json"),
        *("speaker_encoder.pt", "x.png", "model.onnx", "train.txt.gz.safetensors"),
    ],
)
def test_does_not_keep_weights_nor_their_index(name: str) -> None:
    assert not is_kept(name)


def test_lists_files_and_no_folders(tmp_path: Path) -> None:
    for name in ("config.json", "weights.bin", "sp ace.json"):
        (tmp_path / name).touch()
    (tmp_path / "folder.json").mkdir()
    tree = FileTree(tmp_path)
    assert list(small_files(tree, tree.entries(), [])) == ["config.json"]


def test_skips_files_that_cannot_be_kept_with_a_notice(tmp_path: Path) -> None:
    for name in ("config.json", "huge.txt"):
        (tmp_path / name).touch()
    os.truncate(tmp_path / "huge.txt", 64 * 2**20 + 1)
    os.mkfifo(tmp_path / "pipe.json")
    tree, notices = FileTree(tmp_path), list[str]()
    assert list(small_files(tree, tree.entries(), notices)) == ["config.json"]
    assert notices == [
        f"left out: '{tmp_path}/huge.txt', over 64 MiB; store it with --keep huge.txt",
        f"left out: '{tmp_path}/pipe.json', not a regular file",
    ]


def test_the_guide_lists_the_patterns() -> None:
    guide = (Path(__file__).parents[3] / "docs/guides/import.md").read_text(encoding="utf-8")
    table = guide.partition("## Files besides the weights")[2].partition("\n\nOne note")[0]
    listed = {word for word in re.findall(r"`([^`]+)`", table) if word != "--keep"}
    assert {it.upper() for it in listed} == {it.upper() for it in KEPT_FILES}
