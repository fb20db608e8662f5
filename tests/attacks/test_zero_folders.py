"""Hostile folders of DeepSpeed: refused in one line, and nothing is written."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faults.processes import Ended, nursery
from tests.support.zero_folders import optimizer_file, write_zero

HUGE = 2**63 - 1
STAGES = pytest.mark.parametrize("stage", [2, 3])


def groups() -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return [{"a": torch.randn(40, 30), "b": torch.randn(7)}, {"c": torch.randn(9, 5)}]


def created(folder: Path, store: Path, *options: str) -> Ended:
    """Import a folder in a process of its own."""
    return nursery().run("blobstore", "create", folder, "model", "--store", store, *options)


def refused(folder: Path, *words: str, options: Sequence[str] = ()) -> None:
    """Check that a folder is refused in one line, and that nothing is written."""
    store = folder.parent / "store"
    ran = created(folder, store, *options)
    (line,) = ran.stderr.splitlines()
    assert ran.code in (1, 4), line
    assert len(line) < 2000
    assert all(word in line for word in words), line
    assert not [path for path in store.rglob("*") if path.is_file() and path.name != "version"]


class Command:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


@STAGES
def test_an_object_that_runs_a_command_is_an_inert_record(stage: int, tmp_path: Path) -> None:
    trap = tmp_path / "trap"

    def change(_: int, states: dict[str, Any]) -> None:
        states["loss_scaler"] = Command(f"touch {trap}")

    folder = write_zero(
        tmp_path / "x", stage, 2, groups(), change_model=change, change_optimizer=change
    )
    store = tmp_path / "store"
    assert created(folder, store).code == 0
    assert not trap.exists()


@STAGES
@pytest.mark.parametrize("shape", [(HUGE,), (HUGE, HUGE), (2**32, 2**31), (1203,)])
def test_a_parameter_larger_than_the_file(stage: int, shape: Any, tmp_path: Path) -> None:
    def change(_: int, states: dict[str, Any]) -> None:
        states["param_shapes"][0]["a"] = torch.Size(shape)
        states["module"].pop("a")

    refused(write_zero(tmp_path / "x", stage, 2, groups(), change_model=change), "elements")


def test_a_shape_that_the_module_contradicts(tmp_path: Path) -> None:
    def change(_: int, states: dict[str, Any]) -> None:
        states["param_shapes"][0]["a"] = torch.Size((1201,))

    folder = write_zero(tmp_path / "x", 2, 2, groups(), change_model=change)
    refused(folder, "parameter 'a' is [1201], but in the module [40, 30]")


@STAGES
def test_a_parameter_smaller_than_its_part(stage: int, tmp_path: Path) -> None:
    def change(_: int, states: dict[str, Any]) -> None:
        states["param_shapes"][0]["a"] = torch.Size((10, 30))
        states["module"].pop("a")

    refused(write_zero(tmp_path / "x", stage, 2, groups(), change_model=change), "elements")


@STAGES
def test_a_part_that_is_too_short(stage: int, tmp_path: Path) -> None:
    def change(rank: int, states: dict[str, Any]) -> None:
        key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        if rank == 1:
            states[key][0] = states[key][0][:-9].clone()

    refused(write_zero(tmp_path / "x", stage, 2, groups(), change_optimizer=change), "elements")


@pytest.mark.parametrize("padding", [HUGE, 2])
def test_paddings_that_lead_out_of_a_group(padding: int, tmp_path: Path) -> None:
    def change(_: int, states: dict[str, Any]) -> None:
        states["param_alignment_paddings"] = [[0, padding], [0]]

    folder = write_zero(tmp_path / "x", 2, 2, groups(), change_optimizer=change)
    refused(folder, "group 0 has 1208 elements, but its parameters")


@STAGES
def test_a_type_that_differs_between_processes(stage: int, tmp_path: Path) -> None:
    def change(rank: int, states: dict[str, Any]) -> None:
        key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        states[key] = [it.double() if rank else it for it in states[key]]

    folder = write_zero(tmp_path / "x", stage, 2, groups(), change_optimizer=change)
    refused(folder, "process 1 has other groups or types")


@STAGES
def test_another_number_of_groups(stage: int, tmp_path: Path) -> None:
    def change(_: int, states: dict[str, Any]) -> None:
        states["param_shapes"].pop()

    refused(write_zero(tmp_path / "x", stage, 2, groups(), change_model=change))


@STAGES
def test_no_groups(stage: int, tmp_path: Path) -> None:
    def no_shapes(_: int, states: dict[str, Any]) -> None:
        states["param_shapes"] = []

    def no_parts(_: int, states: dict[str, Any]) -> None:
        states["fp32_flat_groups"] = states["single_partition_of_fp32_groups"] = []

    folder = write_zero(
        tmp_path / "x", stage, 2, groups(), change_model=no_shapes, change_optimizer=no_parts
    )
    if stage == 3:
        refused(folder, "different numbers or types")
    else:  # all parameters are in the module
        store = tmp_path / "store"
        assert created(folder, store).code == 0


@STAGES
def test_a_parameter_in_two_groups(stage: int, tmp_path: Path) -> None:
    def change(_: int, states: dict[str, Any]) -> None:
        states["param_shapes"][1] = {"a": states["param_shapes"][1]["c"]}
        states["module"].clear()

    folder = write_zero(tmp_path / "x", stage, 2, groups(), change_model=change)
    refused(folder, "parameter 'a' is in two groups")


def test_processes_with_other_parameters(tmp_path: Path) -> None:
    def change(rank: int, states: dict[str, Any]) -> None:
        if rank:
            states["param_shapes"][0]["b"] = torch.Size((1, 7))

    folder = write_zero(tmp_path / "x", 3, 2, groups(), change_model=change)
    refused(folder, "process 1 has other parameters than process 0")


@pytest.mark.parametrize("count", [1, 3, HUGE])
def test_another_number_of_processes(count: int, tmp_path: Path) -> None:
    def change(_: int, states: dict[str, Any]) -> None:
        states["partition_count"] = count

    folder = write_zero(tmp_path / "x", 2, 2, groups(), change_optimizer=change)
    refused(folder, f"saved by {count} processes")


def test_processes_of_different_stages(tmp_path: Path) -> None:
    folder = write_zero(tmp_path / "x", 2, 2, groups())
    other = write_zero(tmp_path / "y", 1, 2, groups())
    (other / "tag" / optimizer_file(1)).rename(folder / "tag" / optimizer_file(1))
    refused(folder, "but process 1 stage 1")


@pytest.mark.parametrize("latest", ["../x/tag", "/", "", ".", "..", "tag/..", "a\0b", "\ud800" * 9])
def test_latest_names_no_folder_of_the_checkpoint(latest: str, tmp_path: Path) -> None:
    folder = write_zero(tmp_path / "x", 2, 2, groups())
    (folder / "latest").write_bytes(latest.encode("utf-8", "surrogatepass"))
    refused(folder, "there is no such folder")


@STAGES
def test_files_cut_short(stage: int, tmp_path: Path) -> None:
    folder = write_zero(tmp_path / "x", stage, 2, groups())
    for path in (folder / "tag").iterdir():
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2])
        refused(folder, path.name)
        path.write_bytes(data)


def set_params(states: dict[str, Any], *params: Any) -> None:
    for group, its in zip(states["param_groups"], params, strict=True):
        group["params"] = its


OPTIMIZERS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no state": (lambda it: it.pop("state"), "is in parts, as elastic checkpoints have it"),
    "a state that lacks a group": (lambda it: it["state"].pop(1), "has no state of some"),
    "a huge number": (lambda it: it["state"].update({HUGE: {}}), "is not a dict with names"),
    "a state of no names": (lambda it: it["state"].update({0: {1: 2}}), "is not a dict with names"),
    "no groups": (lambda it: it.pop("param_groups"), "param_groups is not a list"),
    "groups of others": (lambda it: set_params(it, [1], [0]), "are not those of the parameters"),
    "a huge group": (lambda it: set_params(it, [0], [HUGE]), "are not those of the parameters"),
    "groups of no numbers": (lambda it: set_params(it, "a", [[0]]), "are not those of the param"),
    "a short moment": (
        lambda it: it["state"][0].update(m=torch.ones(7)),
        "ends after the 14 elements",
    ),
    "a long moment": (
        lambda it: it["state"][0].update(m=torch.ones(700)),
        "has 1400 elements, but its parameters",
    ),
    "a moment that is not flat": (
        lambda it: it["state"][0].update(m=torch.ones(604, 1)),
        "has no 'm' of '",
    ),
    "a moment of one group": (lambda it: it["state"][0].pop("m"), "has no 'm' of '"),
    "an object": (
        lambda it: it["state"][0].update(m=Command("false")),
        "has 'm', which is neither a tensor nor a number",
    ),
    "tensors that share their bytes": (
        lambda it: [
            one.update({f"m{n}": one["m"] for n in range(99)}) for one in it["state"].values()
        ],
        "more than 16 times",
    ),
}


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_an_optimizer_that_contradicts_its_weights(case: str, tmp_path: Path) -> None:
    change, words = OPTIMIZERS[case]
    folder = write_zero(
        tmp_path / "x",
        2,
        2,
        groups(),
        moments={"m": groups()},
        change_optimizer=lambda _, states: change(states["base_optimizer_state"]),
    )
    refused(folder, words, options=["--state"])
    assert created(folder, tmp_path / "store").code == 0  # the model alone
