"""The view of a store: which bytes the removal of a model would free, as a treemap.

In the layout ``freed`` every file of the store is in exactly one cell, so the cells add up to the size
that ``du`` reports. In the layout ``size`` each model has all its blobs, as if nothing were shared.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

from blobstore.operations.describe.disk_usage import Space
from blobstore.pages.squarify import Rectangle, nested
from blobstore.pages.text import shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blobstore.operations.describe.disk_usage import StoreDisk, StoreUsage

_MAX_SETS = 200
"""Sets of models with shared blobs that have a cell each; the smaller ones have one together."""
_MAX_MEMBERS = 50
"""Models of a set that are listed."""
_SHAPES = {"wide": Rectangle(0, 0, 2000, 1000), "tall": Rectangle(0, 0, 800, 1000)}
"""The shapes of windows that layouts are computed for; the script stretches them to fit."""
_REST = {
    "unreferenced": ("garbage", "blobs that no model needs"),
    "foreign": ("other", "other files in the folder of blobs"),
    "temporary": ("other", "temporary files"),
    "partial": ("other", "unfinished downloads"),
    "quarantine": ("other", "damaged files in quarantine"),
    "caches": ("other", "caches"),
    "copies": ("other", "copies for servers"),
    "manifests": ("other", "manifests"),
}


class Cell(NamedTuple):
    """A rectangle of the treemap."""

    kind: str
    """``unique``, ``cold`` (unique and compressed), ``shared``, ``garbage`` or ``other``."""
    model: int
    """The position of the model in the list; -1 for a cell of no single model."""
    size: int
    """Bytes on disk."""
    blobs: int
    label: str
    """Empty for the cell of a model."""
    members: tuple[int, ...] = ()
    """Those of the models that share the blobs that are shown."""
    holders: int = 0
    """All models that share them."""


def store_view(disk: StoreDisk, usage: StoreUsage) -> dict[str, Any]:
    """Return the totals of the store, its models, and the cells and layouts of its treemap.

    Models of the store that ``usage`` does not have are in one cell.
    """
    freed, size = _freed_groups(disk, usage), _size_groups(disk, usage)
    return {
        "totals": _totals(usage),
        "models": [
            {
                "name": shown(model.reference),
                "id": (found := disk.entries[model.reference].digest) and found.short,
                "size": model.size,
                "unique": model.unique,
                "shared": model.shared,
                "blobs": model.blobs,
                "modified": int(disk.entries[model.reference].modified),
                "error": model.error and shown(model.error),
                "faults": [shown(fault) for fault in model.faults[:3]],
            }
            for model in usage.models
        ],
        "freed": _picture(freed),
        "size": _picture(size),
    }


def _totals(usage: StoreUsage) -> dict[str, Any]:
    """Return the numbers of ``du``."""
    return {
        "bytes_in_all": usage.size,
        "bytes": usage.referenced.size,
        "blobs": usage.referenced.files,
        "models": usage.names,
        "bytes_without_sharing": usage.without_sharing,
        "dedup_ratio": usage.dedup_ratio,
        "unreferenced": usage.unreferenced.size,
        "cold": usage.cold.size,
        "saved": usage.saved,
    }


def _freed_groups(disk: StoreDisk, usage: StoreUsage) -> list[list[Cell]]:
    """Return the cells of each model, those of sets of models, and those of everything else."""
    unique: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    sets: dict[tuple[tuple[int, ...], int], list[int]] = defaultdict(list)
    others = usage.referenced
    for number, models in disk.holders.items():
        size = disk.blobs.all_sizes[number]
        if size < 0:
            continue
        others = Space(others.files - 1, others.size - size)
        count = disk.holdings.counts[number]
        if count == 1:
            unique[models[0]][_unique(disk, number)].append(size)
        else:
            sets[tuple(models), count - (number in disk.holdings.cached)].append(size)
    groups = [
        [Cell(kind, model, sum(sizes), len(sizes), "") for kind, sizes in kinds.items()]
        for model, kinds in sorted(unique.items())
    ]
    ordered = sorted(sets.items(), key=lambda item: -sum(item[1]))
    shared = [
        Cell("shared", -1, sum(sizes), len(sizes), _label(count), models, count)
        for (models, count), sizes in ordered[:_MAX_SETS]
    ]
    if rest := [size for _, sizes in ordered[_MAX_SETS:] for size in sizes]:
        label = f"shared by {len(ordered) - _MAX_SETS} smaller sets of models"
        shared.append(Cell("shared", -1, sum(rest), len(rest), label))
    if others.files:
        label = f"only in {usage.names - len(usage.models)} smaller models"
        shared.append(Cell("shared", -1, others.size, others.files, label))
    spaces: dict[str, Space] = {name: getattr(usage, name) for name in _REST}
    other_files = [
        Cell(kind, -1, spaces[name].size, spaces[name].files, label)
        for name, (kind, label) in _REST.items()
        if spaces[name].size
    ]
    return [group for group in (*groups, shared, other_files) if group]


def _label(models: int) -> str:
    return f"shared by {models} models" if models > 1 else "shared with the cache of remote models"


def _unique(disk: StoreDisk, number: int) -> str:
    return "cold" if number in disk.blobs.cold_sizes else "unique"


def _size_groups(disk: StoreDisk, usage: StoreUsage) -> list[list[Cell]]:
    """Return the cells of each model, with all of its blobs."""
    found: list[dict[str, list[int]]] = [defaultdict(list) for _ in disk.entries]
    for number, models in disk.holders.items():
        size = disk.blobs.all_sizes[number]
        if size >= 0:
            is_shared = disk.holdings.counts[number] - (number in disk.holdings.cached) > 1
            kind = "shared" if is_shared else _unique(disk, number)
            for model in models:
                found[model][kind].append(size)
    groups = [
        [Cell(kind, model, sum(sizes), len(sizes), "") for kind, sizes in kinds.items()]
        for model, kinds in enumerate(found)
        if kinds
    ]
    if others := usage.names - len(usage.models):
        cells = [cell for group in groups for cell in group]
        size = usage.without_sharing - sum(cell.size for cell in cells)
        references = sum(disk.holdings.counts) - len(disk.holdings.cached)
        blobs = references - sum(cell.blobs for cell in cells)
        groups.append([Cell("shared", -1, size, blobs, f"{others} smaller models")])
    return groups


def _picture(groups: Sequence[Sequence[Cell]]) -> dict[str, Any]:
    """Return cells, and a layout for each shape: x, y, width and height of each cell."""
    sizes = [[cell.size for cell in group] for group in groups]
    cells = [cell for group in groups for cell in group]
    return {
        "cells": [
            [
                cell.kind,
                cell.model,
                cell.size,
                cell.blobs,
                cell.label,
                cell.members[:_MAX_MEMBERS],
                cell.holders,
            ]
            for cell in cells
        ],
        "groups": [len(group) for group in groups],
        **{
            name: [
                round(number, 1)
                for group in nested(sizes, shape)
                for rectangle in group
                for number in rectangle
            ]
            for name, shape in _SHAPES.items()
        },
    }
