"""Folders of DeepSpeed ZeRO: real ones that DeepSpeed saved, and others made by the same rules."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parents[1] / "data" / "deepspeed"
CONSOLIDATED: dict[str, dict[str, list[Any]]] = json.loads((FOLDER / "tensors.json").read_bytes())
"""What DeepSpeed itself makes of its folders: types, shapes and digests of tensors."""

Tensors = Mapping[str, torch.Tensor]
Change = Callable[[int, dict[str, Any]], object]


def saved_by_deepspeed(name: str, folder: Path) -> Path:
    """Extract a folder that DeepSpeed saved."""
    with zipfile.ZipFile(FOLDER / "folders.zip") as archive:
        archive.extractall(folder, [it for it in archive.namelist() if it.startswith(f"{name}/")])
    return folder / name


def write_zero(
    folder: Path,
    stage: int,
    ranks: int,
    groups: Sequence[Tensors],
    *,
    frozen: Tensors | None = None,
    moments: Mapping[str, Sequence[Tensors]] | None = None,
    options: Sequence[Mapping[str, Any]] = ({}, {}),
    change_model: Change = lambda _, states: states,
    change_optimizer: Change = lambda _, states: states,
) -> Path:
    """Save parameters as DeepSpeed does, and return the folder; ``latest`` names the step ``tag``.

    ``moments`` are tensors of the optimizer, for the same groups, and ``options`` those of the groups. The changes are
    called with the rank and the values of a file before it is saved.
    """
    step = folder / "tag"
    step.mkdir(parents=True)
    (folder / "latest").write_text("tag\n")
    frozen = frozen or {}
    everything = {name: value for group in (*groups, frozen) for name, value in group.items()}
    for rank in range(ranks):
        if stage == 3 or rank == 0:
            name = f"zero_pp_rank_{rank}_" * (stage == 3) + "mp_rank_00_model_states.pt"
            states = {
                "module": {
                    name: torch.empty(0) if stage == 3 else value.bfloat16()
                    for name, value in everything.items()
                },
                "buffer_names": [],
                "param_shapes": [
                    {name: it.shape for name, it in group.items()} for group in groups
                ],
                "frozen_param_shapes": {name: it.shape for name, it in frozen.items()},
                "frozen_param_fragments": {
                    name: _part(it, rank, ranks) if stage == 3 else it
                    for name, it in frozen.items()
                },
                "shared_params": {},
            }
            change_model(rank, states)
            torch.save(states, step / name)
        flat = [_flat(group, stage, rank, ranks) for group in groups]
        key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        optimizer = {"zero_stage": stage, "partition_count": ranks, key: flat}
        optimizer["optimizer_state_dict" if stage == 3 else "base_optimizer_state"] = {
            "state": {
                index: {"step": torch.tensor(3.0)}
                | {
                    key: _flat(its[index], stage, rank, ranks)
                    for key, its in (moments or {}).items()
                }
                for index in range(len(groups))
            },
            "param_groups": [{**options[index], "params": [index]} for index in range(len(groups))],
        }
        change_optimizer(rank, optimizer)
        torch.save({"optimizer_state_dict": optimizer}, step / optimizer_file(rank))
    return folder


def optimizer_file(rank: int) -> str:
    """Return the name of the file with the optimizer of a process."""
    return f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def _flat(group: Tensors, stage: int, rank: int, ranks: int) -> torch.Tensor:
    """Return the part of a group that a process has."""
    if stage == 3:
        return torch.cat([_part(value, rank, ranks) for value in group.values()])
    whole = torch.cat([value.flatten() for value in group.values()])
    unit = 2 * ranks
    padded = torch.nn.functional.pad(whole, (0, -len(whole) % unit))
    return padded.chunk(ranks)[rank].clone()


def _part(value: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    size = -(-value.numel() // ranks)
    padded = torch.nn.functional.pad(value.flatten(), (0, size * ranks - value.numel()))
    return padded[rank * size : (rank + 1) * size].clone()
