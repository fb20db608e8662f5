"""The files of DeepSpeed: what they say is checked before it is used."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from blobstore.errors import CheckpointDamaged, CheckpointUnsupported
from blobstore.sources.distributed.files import DataFile
from blobstore.sources.distributed.zero_files import read_model_states, read_optimizer_states
from tests.support.zero_folders import saved_by_deepspeed

FLAT = "single_partition_of_fp32_groups"


class Custom:
    """Becomes an object of a class that is not known."""


def model(path: Path, **changes: Any) -> DataFile:
    states = {
        "module": {"a": torch.ones(2, 3)},
        "buffer_names": [],
        "param_shapes": [{"a": torch.Size([2, 3])}],
        **changes,
    }
    torch.save(states, path / "model.pt")
    return DataFile(path / "model.pt")


def optimizer(path: Path, **changes: Any) -> DataFile:
    states = {"zero_stage": 2, "partition_count": 4, FLAT: [torch.ones(6)], **changes}
    torch.save({"optimizer_state_dict": states}, path / "optimizer.pt")
    return DataFile(path / "optimizer.pt")


def test_reads_the_model(tmp_path: Path) -> None:
    states = read_model_states(model(tmp_path))
    run = states.module["a"]
    assert (run.shape, run.elements, run.dtype.value) == ((2, 3), 6, "F32")
    assert (states.groups, states.frozen, states.tied) == ([{"a": (2, 3)}], {}, {})


def test_reads_the_optimizer(tmp_path: Path) -> None:
    states = read_optimizer_states(optimizer(tmp_path, loss_scaler=Custom()))
    assert (states.stage, states.processes, states.paddings) == (2, 4, None)
    assert [run.elements for run in states.groups] == [6]


def test_reads_the_stage_that_deepspeed_writes_as_an_enumeration(tmp_path: Path) -> None:
    folder = saved_by_deepspeed("stage3", tmp_path) / "global_step2"
    states = read_optimizer_states(DataFile(folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"))
    assert (states.stage, states.processes) == (3, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"module": [1]}, "its module is not a dict with names"),
        ({"module": {1: torch.ones(1)}}, "its module is not a dict with names"),
        ({"buffer_names": None}, "buffer_names is not a list"),
        ({"buffer_names": [1]}, "a name of a parameter is not a string"),
        ({"param_shapes": {}}, "param_shapes is not a list"),
        ({"param_shapes": [[]]}, "a group of shapes is not a dict"),
        ({"param_shapes": [{"a": 6}]}, "the shape of 'a': these are not integers"),
        ({"param_shapes": [{"a": (2**63,)}]}, "the shape of 'a': these are not integers"),
        ({"param_shapes": [{"a": (-1,)}]}, "the shape of 'a': these are not integers"),
        ({"param_shapes": [{"a": (True,)}]}, "the shape of 'a': these are not integers"),
        ({"param_shapes": [{"a": (1,) * 65}]}, "the shape of 'a': these are not integers"),
        ({"frozen_param_fragments": {"f": 1}}, "'f' is not a tensor"),
        ({"shared_params": {"b": 1}}, "a name of a parameter is not a string"),
    ],
)
def test_a_model_that_is_not_one_is_damaged(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    file = model(tmp_path, **changes)
    with pytest.raises(CheckpointDamaged, match=f"^'{file.path}': .*{message}"):
        read_model_states(file)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"partition_count": 0}, "partition_count is not a positive integer"),
        ({"partition_count": True}, "partition_count is not a positive integer"),
        ({"partition_count": []}, "partition_count is not a positive integer"),
        ({"partition_count": 2**63}, "partition_count is not a positive integer"),
        ({FLAT: torch.ones(6)}, f"{FLAT} is not a list"),
        ({FLAT: [6]}, f"'{FLAT}.0' is not a tensor"),
        ({FLAT: [torch.ones(2, 3)]}, f"a tensor of {FLAT} is not flat"),
        ({"param_alignment_paddings": [0]}, "param_alignment_paddings is not a list"),
        ({"param_alignment_paddings": [[-1]]}, "param_alignment_paddings: these are not integers"),
    ],
)
def test_an_optimizer_that_is_not_one_is_damaged(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    file = optimizer(tmp_path, **changes)
    with pytest.raises(CheckpointDamaged, match=f"^'{file.path}': .*{message}"):
        read_optimizer_states(file)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"zero_stage": 0}, "its ZeRO stage is 0, not 1, 2 or 3"),
        ({"zero_stage": None}, "its ZeRO stage is missing"),
        ({"zero_stage": Custom()}, "its ZeRO stage is missing"),
        ({"partition_count": [4, 2]}, "different numbers of processes"),
        ({FLAT: [torch.ones(2, 6).T[0]]}, "is not contiguous"),
    ],
)
def test_an_optimizer_of_another_kind_is_unsupported(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointUnsupported, match=message):
        read_optimizer_states(optimizer(tmp_path, **changes))


def test_an_object_among_the_parameters_is_unsupported(tmp_path: Path) -> None:
    with pytest.raises(CheckpointUnsupported, match=r"an object of .* at 'b', not a tensor"):
        read_model_states(model(tmp_path, module={"b": _Called()}))


def test_big_endian_values_are_unsupported(tmp_path: Path) -> None:
    file = optimizer(tmp_path)
    changed = tmp_path / "changed.pt"
    with zipfile.ZipFile(file.path) as source, zipfile.ZipFile(changed, "w") as target:
        for name in source.namelist():
            data = b"big" if name.endswith("byteorder") else source.read(name)
            target.writestr(name, data)
    with pytest.raises(CheckpointUnsupported, match="its values are big-endian"):
        read_optimizer_states(DataFile(changed))


class _Called:
    """Pickles as the call of a function that is not known."""

    def __reduce__(self) -> Any:
        return print, (1,)
