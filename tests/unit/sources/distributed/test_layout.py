"""Folders with pieces are recognised by the names of their files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from blobstore.errors import DamagedSource, SourceError, UnsupportedSource
from blobstore.sources.base import SourceOptions
from blobstore.sources.distributed.layout import find_checkpoint, find_zero, open_distributed
from blobstore.sources.open import open_source
from tests.support.distributed_folders import grid, write_folder


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")


def test_finds_the_files_of_a_checkpoint(tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path) is None
    touch(tmp_path / "pytorch_model_fsdp_0" / "__0_0.distcp")
    assert find_checkpoint(tmp_path) == "pytorch_model_fsdp_0"
    touch(tmp_path / "__0_0.distcp")
    assert find_checkpoint(tmp_path) == ""
    touch(tmp_path / "model.safetensors")
    assert find_checkpoint(tmp_path) is None


def test_a_complete_model_wins_over_pieces(tmp_path: Path) -> None:
    weight = torch.ones(2, 2)
    write_folder(tmp_path, {("optimizer", "x"): (weight, grid((2, 2)))}, ranks=1)
    save_file({"w": weight}, tmp_path / "model.safetensors")
    source = open_source(tmp_path)
    assert set(source.specs) == {"w"}
    (notice,) = source.notices
    assert notice.startswith(
        f"left out: 2 files ('{tmp_path}/.metadata', '{tmp_path}/__0_0.distcp'); "
    )


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_one_file_of_a_folder_is_not_a_source(tmp_path: Path, name: str) -> None:
    touch(tmp_path / name)
    with pytest.raises(UnsupportedSource, match="one file of a folder of torch.distributed") as it:
        open_source(tmp_path / name)
    assert it.value.exit_code == 1


def test_the_folders_in_a_folder_are_named(tmp_path: Path) -> None:
    touch(tmp_path / "iter_2" / "__0_0.distcp", tmp_path / "iter_1" / "__0_0.distcp")
    touch(tmp_path / "logs" / "x", tmp_path / "latest_checkpointed_iteration.txt")
    with pytest.raises(UnsupportedSource, match="import one of them: 'iter_1', 'iter_2'"):
        open_source(tmp_path)


def test_other_sources_are_left_to_others(tmp_path: Path) -> None:
    touch(tmp_path / "config.json", tmp_path / "step" / "__0_0.distcp")
    touch(tmp_path / "x.pt")
    options = SourceOptions()
    assert open_distributed(tmp_path, options) is None
    assert open_distributed(tmp_path / "x.pt", options) is None
    assert open_distributed(tmp_path / "step", SourceOptions(weights="x*")) is None
    with pytest.raises(DamagedSource, match="no .metadata"):
        open_distributed(tmp_path / "step", options)


def test_shards_next_to_other_weights_are_not_joined(tmp_path: Path) -> None:
    touch(tmp_path / "shard-00001-model-00001-of-00001.safetensors")
    touch(tmp_path / "model.safetensors", tmp_path / "config.json")
    assert open_distributed(tmp_path, SourceOptions()) is None


def test_a_folder_without_anything_has_no_weights(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="is empty"):
        open_source(tmp_path)


MODEL, OPTIMIZER = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"


def test_finds_the_step_that_deepspeed_saved_last(tmp_path: Path) -> None:
    assert find_zero(tmp_path) is None
    for step in ("global_step1", "global_step2"):
        touch(tmp_path / step / MODEL, tmp_path / step / OPTIMIZER)
    with pytest.raises(UnsupportedSource, match="import one of .*: 'global_step1', 'global_step2'"):
        find_zero(tmp_path)
    (tmp_path / "latest").write_text("global_step1\n")
    assert find_zero(tmp_path) == "global_step1"
    assert find_zero(tmp_path / "global_step2") == ""
    (tmp_path / "latest").write_text("global_step3")
    with pytest.raises(DamagedSource, match="names 'global_step3', but there is no such folder"):
        find_zero(tmp_path)
    touch(tmp_path / "model.safetensors")
    assert find_zero(tmp_path) is None


def test_links_that_lead_out_are_neither_followed_nor_quoted(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    touch(tmp_path / "private" / MODEL, tmp_path / "private" / "x.distcp")
    (tmp_path / "secret").write_text("a secret")
    folder.mkdir()
    for name in ("step", "pytorch_model_fsdp_0"):
        (folder / name).symlink_to("../private")
    assert find_checkpoint(folder) is None
    assert find_zero(folder) is None
    (folder / "latest").symlink_to("../secret")
    with pytest.raises(SourceError, match="latest' leads out") as caught:
        find_zero(folder)
    assert "a secret" not in str(caught.value)


def test_a_universal_checkpoint_of_deepspeed_is_named(tmp_path: Path) -> None:
    universal = tmp_path / "global_step2_universal"
    touch(universal / MODEL, universal / "zero" / "a.weight" / "fp32.pt")
    (tmp_path / "latest_universal").write_text(universal.name)
    for folder in (universal, tmp_path):
        with pytest.raises(UnsupportedSource, match="global_step2_universal' is a universal check"):
            open_source(folder)
    (tmp_path / "latest").write_text(universal.name)
    with pytest.raises(UnsupportedSource, match="import the step from which ds_to_universal made"):
        open_source(tmp_path)
    # The step itself, and a model that is complete, are read.
    touch(tmp_path / "global_step2" / MODEL, tmp_path / "global_step2" / OPTIMIZER)
    (tmp_path / "latest").write_text("global_step2")
    assert find_zero(tmp_path) == "global_step2"
    touch(tmp_path / "model.safetensors")
    assert find_zero(tmp_path) is None


def test_a_file_that_is_called_latest_means_nothing_by_itself(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("run-7")
    touch(tmp_path / "run-7" / "x.pt")
    assert find_zero(tmp_path) is None


def test_the_optimizer_of_one_process_is_not_a_source(tmp_path: Path) -> None:
    touch(tmp_path / OPTIMIZER)
    with pytest.raises(UnsupportedSource, match="part of one process of DeepSpeed ZeRO"):
        open_source(tmp_path / OPTIMIZER)
