from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from blobstore.errors import (
    CheckpointRefused,
    DamagedSource,
    SourceError,
    SourceNotFound,
    UsageError,
)
from blobstore.sources import hub
from blobstore.sources.base import SourceOptions
from blobstore.sources.open import open_source
from tests.support import sandbox
from tests.support.models import write_folder

ONE = {"a": np.zeros(3)}


def test_opens_a_folder_and_a_file(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, ONE)
    for source in (folder, str(folder), folder / "model.safetensors"):
        opened = open_source(source)
        assert set(opened.specs) == {"a"}
        opened.close()


def test_passes_its_options_on(tmp_path: Path) -> None:
    write_folder(tmp_path, ONE)
    save_file({"b": np.zeros(1)}, tmp_path / "other.safetensors")
    opened = open_source(tmp_path, SourceOptions(weights="other*"))
    assert set(opened.specs) == {"b"}
    opened.close()


@pytest.mark.parametrize("name", ["model.bin", "model", "model.safetensors.bak"])
def test_a_file_of_another_ending_is_taken_for_a_checkpoint(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(CheckpointRefused, match=f"'{tmp_path}/{name}': this is an empty file"):
        open_source(tmp_path / name)


def test_an_empty_text_is_not_the_working_folder() -> None:
    with pytest.raises(SourceNotFound, match="no such folder or file: ''"):
        open_source("")


@pytest.mark.parametrize("name", ["none", "none.safetensors", "none/"])
def test_a_missing_source_is_not_found(tmp_path: Path, name: str) -> None:
    with pytest.raises(SourceNotFound, match="no such folder or file: '"):
        open_source(f"{tmp_path}/{name}")


def test_suggests_the_hub_for_a_missing_folder() -> None:
    with pytest.raises(SourceNotFound, match="'gpt2'; for the Hub's repository, say hf://gpt2"):
        open_source("gpt2")


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000, "/" + "x" * 300, "./a/b/c", "a b/c"])
def test_an_impossible_path_is_not_found(name: str) -> None:
    with pytest.raises(SourceNotFound) as caught:
        open_source(name)
    assert str(caught.value).isprintable()
    assert caught.value.exit_code == 3


def test_links_that_lead_nowhere_are_not_found(tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to("gone")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("dangling", "loop"):
        with pytest.raises(SourceNotFound):
            open_source(tmp_path / name)


def test_a_pipe_is_not_a_source(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.safetensors")
    with pytest.raises(SourceError, match="is not a regular file"):
        open_source(tmp_path / "x.safetensors")


@pytest.mark.slow
def test_reports_a_source_without_read_permission() -> None:
    with sandbox.common_folder() as folder:
        write_folder(folder / "closed", ONE)
        write_folder(folder / "file", ONE)
        (folder / "closed").chmod(0)
        (folder / "file" / "model.safetensors").chmod(0)
        outcomes = [
            sandbox.call(lambda name=name: open_source(folder / name), unprivileged=True)  # type: ignore[misc]
            for name in ("closed", "file", "closed/deeper")
        ]
    assert (
        outcomes[0] == f"SourceError: cannot read '{folder}/closed/params.json': Permission denied"
    )
    assert outcomes[1] == (
        f"SourceError: cannot open '{folder}/file/model.safetensors': Permission denied"
    )
    assert outcomes[2].startswith(f"SourceNotFound: cannot access '{folder}/closed/deeper'")


def test_a_shard_name_too_long_for_the_system_is_an_error(tmp_path: Path) -> None:
    write_folder(tmp_path, ONE | {"b": np.zeros(1)}, shards=2)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map":{"a":"' + "x" * 300 + '.safetensors"}}')
    with pytest.raises(DamagedSource, match="shard .* is missing"):
        open_source(tmp_path)


def test_a_path_wins_over_a_hub_id_of_its_spelling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "download", lambda *_, **__: pytest.fail("the Hub was asked"))
    write_folder(tmp_path / "org" / "name", ONE)
    opened = open_source("org/name")
    assert set(opened.specs) == {"a"}
    opened.close()


def test_the_scheme_forces_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def download(name: str, *_: object, **__: object) -> None:
        asked.append(name)
        raise SourceNotFound(name)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "download", download)
    write_folder(tmp_path / "hf:" / "org" / "name", ONE)  # what hf://org/name is as a path
    with pytest.raises(SourceNotFound):
        open_source("hf://org/name")
    assert asked == ["hf://org/name"]


# PyTorch checkpoints


@pytest.mark.parametrize("name", ["x.pt", "x.pth", "x.bin", "x.ckpt", "x.pth.tar", "x.model", "x"])
@pytest.mark.parametrize("is_zip", [True, False])
def test_opens_checkpoints_of_any_name(tmp_path: Path, name: str, is_zip: bool) -> None:
    path = tmp_path / name
    torch.save({"a": torch.arange(3)}, path, _use_new_zipfile_serialization=is_zip)
    opened = open_source(path)
    (piece,) = opened.read("a", memoryview(bytearray(100)))
    assert bytes(piece) == torch.arange(3).numpy().tobytes()
    opened.close()


def test_opens_a_folder_of_a_checkpoint(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    opened = open_source(tmp_path)
    assert set(opened.specs) == {"a"}
    opened.close()


def test_passes_the_subtree_on(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"model": {"a": torch.zeros(1)}, "ema": {"b": torch.zeros(1)}}, path)
    for source in (path, tmp_path):
        for subtree, names in ((None, {"a"}), ("ema", {"b"}), (".", {"model.a", "ema.b"})):
            opened = open_source(source, SourceOptions(subtree=subtree))
            assert set(opened.specs) == names
            opened.close()
        with pytest.raises(UsageError, match="there is no subtree 'x' with tensors; there are"):
            open_source(source, SourceOptions(subtree="x"))


def test_a_safetensors_file_has_no_parts(tmp_path: Path) -> None:
    write_folder(tmp_path, ONE)
    for source in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(
            UsageError, match="is not a PyTorch checkpoint, so it has no parts for --subtree"
        ):
            open_source(source, SourceOptions(subtree="model"))


def test_only_meta_folders_have_names_to_keep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "download", lambda *_, **__: pytest.fail("the Hub was asked"))
    with pytest.raises(UsageError, match="'org/name' is a Hub repository; --keep-names applies"):
        open_source("org/name", SourceOptions(keep_names=True))
    torch.save({"a": torch.zeros(1)}, tmp_path / "x.pt")
    for source in (tmp_path, tmp_path / "x.pt"):
        with pytest.raises(UsageError, match="is not a Meta Llama folder; --keep-names"):
            open_source(source, SourceOptions(keep_names=True))


def test_a_meta_folder_has_no_parts(tmp_path: Path) -> None:
    torch.save({"norm.weight": torch.zeros(1)}, tmp_path / "consolidated.00.pth")
    (tmp_path / "params.json").write_text('{"dim": 8, "n_layers": 1}')
    with pytest.raises(
        UsageError, match="is a Meta Llama folder, which has no parts for --subtree"
    ):
        open_source(tmp_path, SourceOptions(subtree="model"))
    # A pattern means the files as they are.
    opened = open_source(tmp_path, SourceOptions(weights="consolidated*"))
    assert set(opened.specs) == {"norm.weight"}
    opened.close()


def test_a_checkpoint_that_may_not_be_read_says_so() -> None:
    with sandbox.common_folder() as folder:
        torch.save({"a": torch.zeros(1)}, folder / "x.pt")
        (folder / "x.pt").chmod(0)
        outcome = sandbox.call(lambda: open_source(folder / "x.pt"), unprivileged=True)
    assert outcome == f"SourceError: cannot read '{folder}/x.pt': Permission denied"
