from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from blobstore.errors import BlobstoreError, DamagedSource, UnsupportedSource
from blobstore.sources.base import SourceOptions
from blobstore.sources.open import open_source
from blobstore.sources.parts import check_whole_path
from tests.unit.sources.test_gguf_models import write

ONE = {"a": np.ones(3, np.float32)}


def put(path: Path, **tensors: Any) -> Path:
    """Write a file of weights, in the format that its name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        save_file(tensors or ONE, path)
    else:
        torch.save(tensors or {"a": torch.ones(3)}, path)
    return path


def opened(path: Path, **options: Any) -> list[str]:
    """Return the notices of a source that can be opened."""
    source = open_source(path, SourceOptions(**options))
    source.close()
    return [*source.notices]


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises((UnsupportedSource, DamagedSource)) as caught:
        opened(path, **options)
    return str(caught.value)


# Downloads that are not finished


@pytest.mark.parametrize(
    "ending",
    ["aria2", "part", "incomplete", "crdownload", "download", "!qB", "tmp", "st", "td.cfg"],
)
def test_a_control_file_says_that_a_download_is_not_finished(tmp_path: Path, ending: str) -> None:
    path = put(tmp_path / "model.safetensors")
    control = tmp_path / f"model.safetensors.{ending}"
    control.write_bytes(b"\0\1")
    for source in (tmp_path, path):
        for keep in ((), ("*",)):
            message = refusal(source, keep=keep)
            assert f"{control}' says that a download is not finished" in message
        found = re.search(r"ignore that with --exclude (\S+)$", refusal(source))
        assert found is not None
        assert opened(source, exclude=(found[1].strip("'"),)) == []


@pytest.mark.parametrize("ending", ["part", "crdownload", "aria2"])
def test_a_small_file_that_is_not_finished_counts_too(tmp_path: Path, ending: str) -> None:
    put(tmp_path / "model.safetensors")
    (tmp_path / f"tokenizer.json.{ending}").write_bytes(b"{")
    assert "tokenizer.json" in refusal(tmp_path)
    (tmp_path / f"tokenizer.json.{ending}").rename(tmp_path / f"training.log.{ending}")
    opened(tmp_path)


def test_an_unfinished_download_alone_is_named(tmp_path: Path) -> None:
    path = put(tmp_path / "model.safetensors").rename(tmp_path / "model.safetensors.part")
    for source in (tmp_path, path):
        assert "not finished" in refusal(source) or "unfinished download" in refusal(source)
    assert "unfinished download" in refusal(path, keep=("*",))


def test_a_folder_of_a_download_is_a_control_file_too(tmp_path: Path) -> None:
    put(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.download").mkdir()
    assert "not finished" in refusal(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model.safetensors.download" / "x")
    assert "not finished" in refusal(tmp_path)


@pytest.mark.parametrize("folder", [".cache/huggingface/download", ".huggingface/download"])
def test_what_the_client_of_the_hub_left_is_a_notice(tmp_path: Path, folder: str) -> None:
    put(tmp_path / "model.safetensors")
    left = tmp_path / folder
    left.mkdir(parents=True)
    (left / "tokenizer.json.metadata").touch()
    assert opened(tmp_path) == []
    (left / "abc.def.incomplete").touch()
    (notice,) = opened(tmp_path)
    assert "has unfinished downloads" in notice


def test_what_the_client_of_modelscope_left_is_a_notice(tmp_path: Path) -> None:
    put(tmp_path / "model.safetensors")
    put(tmp_path / "._____temp" / "model.safetensors")
    (notice,) = opened(tmp_path)
    assert "has unfinished downloads" in notice


@pytest.mark.parametrize("ending", ["part", "downloadInProgress"])
def test_an_unfinished_quantization_does_not_stop_another_one(tmp_path: Path, ending: str) -> None:
    write(tmp_path / "x-Q4_K_M.gguf")
    (tmp_path / f"downloading_x-Q8_0.gguf.{ending}").write_bytes(b"GGUF")
    (notice,) = opened(tmp_path)
    assert "an unfinished download of another model" in notice
    (tmp_path / f"mmproj-F16.gguf.{ending}").write_bytes(b"GGUF")
    assert "mmproj-F16" in refusal(tmp_path)


# Parts


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("mp_rank_00/model.pt", "mp_rank_01/model.pt"),
        ("tp_rank_00_pp_rank_000/model.pt", "tp_rank_00_pp_rank_001/model.pt"),
        ("mp_rank_01/model.pt", "x"),
        ("rank0.safetensors", "rank1.safetensors"),
        ("model-rank-0-part-0.safetensors", "model-rank-1-part-0.safetensors"),
        ("reshard-model_part-0.pt", "reshard-model_part-1.pt"),
        ("mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"),
        ("consolidated.00.pth", "consolidated.01.pth"),
        ("consolidated.01.pth", "x"),
        ("pytorch_model-00001-of-00002.bin", "x"),
        ("model-00002-of-00002.safetensors", "x"),
        ("pytorch_model_fsdp_rank0.bin", "x"),
        ("model_world_size_8_rank_0.pt", "x"),
        ("layer_00-model_00-model_states.pt", "x"),
        ("layer_1_expert_0_mp_rank_00_model_states.pt", "x"),
        ("zero_pp_rank_0_mp_rank_00_model_states.pt", "x"),
    ],
)
def test_a_file_that_its_name_or_its_neighbours_call_a_part_is_refused(
    tmp_path: Path, name: str, other: str
) -> None:
    path = put(tmp_path / name)
    (tmp_path / other).parent.mkdir(exist_ok=True)
    (tmp_path / other).touch()
    message = refusal(path)
    assert str(path) in message
    assert "part" in message or "one layer or expert" in message
    if path.parent != tmp_path:  # given the folder of the rank, or that of the step
        assert "part" in refusal(path.parent)
        assert "one of several parts" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("lora_rank32.safetensors", ["lora_rank64.safetensors"]),
        ("mp_rank_00_model_states.pt", ["latest"]),
        ("model_1.pt", ["model_2.pt"]),
        ("step-100.pt", ["step-200.pt"]),
        ("consolidated.00.pth", []),
        ("pytorch_model-00001-of-00001.bin", []),
        ("shard-512.pt", ["shard-1024.pt"]),
    ],
)
def test_other_numbers_are_those_of_steps_and_sizes(
    tmp_path: Path, name: str, others: list[str]
) -> None:
    path = put(tmp_path / name)
    for other in others:
        (tmp_path / other).touch()
    opened(path)


def test_all_parts_together_are_no_parts(tmp_path: Path) -> None:
    for number in (1, 2):
        put(tmp_path / f"model-0000{number}-of-00002.safetensors", **{str(number): ONE["a"]})
    opened(tmp_path)


def test_a_pattern_that_chooses_one_shard_is_refused(tmp_path: Path) -> None:
    for number in (1, 2):
        put(tmp_path / f"model-0000{number}-of-00002.safetensors", **{str(number): ONE["a"]})
    assert "there are 2" in refusal(tmp_path, weights="model-00001*")


@pytest.mark.parametrize(
    "values",
    [
        {"args": argparse.Namespace(tensor_model_parallel_size=2, lr=0.1)},
        {"args": argparse.Namespace(pipeline_model_parallel_size=4)},
        {"cfg": {"common": {"model_parallel_size": 8}}},
        {"mp_world_size": 2, "dp_world_size": 1},
        {"hyper_parameters": {"cfg": {"expert_model_parallel_size": 2}}},
    ],
)
def test_arguments_in_a_file_say_that_it_is_a_part(tmp_path: Path, values: dict[str, Any]) -> None:
    path = put(tmp_path / "x.pt", model={"w": torch.ones(2, 2)}, **values)
    assert "has the part of one process" in refusal(path)
    assert "has the part of one process" in refusal(tmp_path)


def test_arguments_of_one_process_say_nothing(tmp_path: Path) -> None:
    args = argparse.Namespace(tensor_model_parallel_size=1, world_size=8)
    opened(put(tmp_path / "x.pt", model={"w": torch.ones(2, 2)}, args=args, mp_world_size=None))


def test_a_shard_of_metas_is_known_by_its_shapes(tmp_path: Path) -> None:
    tensors = {"tok_embeddings.weight": torch.ones(8, 2), "norm.weight": torch.ones(4)}
    assert "a part of 'tok_embeddings.weight'" in refusal(
        put(tmp_path / "consolidated.00.pth", **tensors)
    )
    tensors["tok_embeddings.weight"] = torch.ones(8, 4)
    opened(put(tmp_path / "consolidated.00.pth", **tensors))


@pytest.mark.parametrize(
    "name", ["x.gguf.part1of2", "x.gguf-split-a", "m.safetensors.partaa", "m.safetensors.001"]
)
def test_pieces_are_to_be_joined(tmp_path: Path, name: str) -> None:
    whole = "x.gguf" if name.startswith("x") else "m.safetensors"
    (tmp_path / name).write_bytes(b"GGUF" + bytes(20))
    for source in (tmp_path, tmp_path / name):
        message = refusal(source)
        assert f"is a piece of '{whole}'" in message
        assert f"* > {tmp_path}/{whole}'" in message


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_one_file_of_a_distributed_checkpoint_is_a_part(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"PK\3\4")
    assert "import the folder" in refusal(tmp_path / name)


def test_the_names_of_folders_above_are_no_words_of_parts(tmp_path: Path) -> None:
    for number in (0, 1):
        path = put(tmp_path / f"rank{number}" / "model.safetensors")
    opened(path)
    opened(path.parent)


def test_a_folder_that_cannot_be_listed_says_nothing(tmp_path: Path) -> None:
    check_whole_path(Path("/"))
    with pytest.raises(BlobstoreError, match="mp_rank_01"):
        check_whole_path(tmp_path / "nowhere" / "mp_rank_01" / "x.pt")
