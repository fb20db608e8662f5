"""The view of a model: its tensors in a grid of layers by modules.

A cell stands for the tensors of one layer whose names differ only in the number of an expert. Tensors
outside of layers have a row each.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from blobstore.errors import BlobstoreError
from blobstore.operations.maintenance.show import describe_model
from blobstore.operations.page.text import shown
from blobstore.operations.ui.tensor_names import tensor_place

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from blobstore.core.digest import Digest
    from blobstore.manifests.reference import Reference
    from blobstore.operations.maintenance.disk_usage import StoreDisk
    from blobstore.operations.maintenance.show import TensorDescription
    from blobstore.operations.page.measure import Measurement
    from blobstore.operations.page.parents import Parent

MAX_TENSORS = 5_000
"""Tensors of all models of a page, unless the models are named."""
_MAX_OWNERS = 50
"""Other models of a tensor that are listed."""


def chosen_models(disk: StoreDisk, references: Sequence[Reference]) -> list[Reference]:
    """Return the models that the page describes in detail: those named, or as many as fit."""
    if references:
        return [name for name in references if name in disk.entries]
    chosen, count = [], 0
    for name, entry in disk.entries.items():
        layers = len(entry.manifest.layers) if entry.manifest is not None else 0
        if layers and (count := count + layers) <= MAX_TENSORS:
            chosen.append(name)
    return chosen


def model_views(
    disk: StoreDisk,
    references: Iterable[Reference],
    parents: Mapping[Reference, Parent],
    measured: Mapping[Reference, Mapping[str, Measurement]],
    owners: Mapping[Digest, Sequence[int]],
) -> dict[str, Any]:
    """Return the view of each model by its name. Models that cannot be read have an error."""
    places = {name: place for place, name in enumerate(disk.entries)}
    found: dict[str, Any] = {}
    for reference in references:
        try:
            described = describe_model(reference, store=disk.store)
        except BlobstoreError as error:
            found[shown(reference)] = {"error": shown(error)}
            continue
        parent = parents.get(reference)
        found[shown(reference)] = {
            "architecture": shown(described.architecture or described.model_type),
            "parameters": described.parameters,
            "size": described.size,
            "place": places[reference],
            "id": (ident := disk.entries[reference].digest) and ident.short,
            "base": None if parent is None else shown(parent.name),
            "faults": [shown(blob.fault) for blob in described.faults[:10]],
            **grid(described.tensors, owners, measured.get(reference, {})),
        }
    return found


def grid(
    tensors: Sequence[TensorDescription],
    owners: Mapping[Digest, Sequence[int]],
    measured: Mapping[str, Measurement],
) -> dict[str, Any]:
    """Return the rows, columns, cells and tensors of a model.

    Each cell is its row, its column, its first tensor and the number of its tensors, which are in order.
    """
    cells: dict[tuple[str, int, str], list[TensorDescription]] = defaultdict(list)
    for tensor in tensors:
        stack, layer, module = tensor_place(tensor.name)
        key = (tensor.name, -1, "") if layer is None else (stack, layer, module)
        cells[key].append(tensor)
    # Tensors outside first, then each stack in the order of its layers.
    stacks = {stack: place for place, (stack, layer, _) in enumerate(cells) if layer >= 0}
    rows = sorted(
        dict.fromkeys((stack, layer) for stack, layer, _ in cells),
        key=lambda row: (row[1] >= 0, stacks.get(row[0], 0), row[1]),
    )
    columns = list(dict.fromkeys(module for _, layer, module in cells if layer >= 0))
    row_of = {row: place for place, row in enumerate(rows)}
    column_of = {column: place for place, column in enumerate(columns)}
    types: dict[str, int] = {}
    sharing: dict[tuple[int, ...], int] = {}
    listed: list[list[Any]] = []
    placed = []
    measures: dict[int, Any] = {}
    ordered = sorted(cells, key=lambda key: (row_of[key[:2]], column_of.get(key[2], 0)))
    for key in ordered:
        placed.append([row_of[key[:2]], column_of.get(key[2], 0), len(listed), len(cells[key])])
        for tensor in cells[key]:
            spelled = f"{tensor.type} g{tensor.group_size}" if tensor.group_size else tensor.type
            others = tuple(owners.get(tensor.digest, ())[: _MAX_OWNERS + 1])
            if tensor.name in measured:
                measures[len(listed)] = measured[tensor.name]
            bits = tensor.bits_per_weight
            listed.append(
                [
                    shown(tensor.name),
                    types.setdefault(spelled, len(types)),
                    list(tensor.shape),
                    tensor.size,
                    None if bits is None else round(bits, 3),
                    tensor.digest.short,
                    sharing.setdefault(others, len(sharing)),
                ]
            )
    return {
        "rows": [shown(stack) if layer < 0 else layer for stack, layer in rows],
        "stacks": [shown(stack) if layer >= 0 else "" for stack, layer in rows],
        "columns": [shown(column or "(the layer itself)", 60) for column in columns],
        "cells": placed,
        "types": [shown(name) for name in types],
        "tensors": listed,
        "owners": list(sharing),
        "measured": measures,
    }
