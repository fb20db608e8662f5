"""The view of a model: its tensors in a grid of layers by modules.

A cell stands for the tensors of one layer whose names differ only in the number of an expert. Tensors
outside of layers have a row each.
"""

from __future__ import annotations

from collections import defaultdict
from operator import itemgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from blobstore.errors import BlobstoreError
from blobstore.operations.describe.show import describe_model
from blobstore.operations.sign.report import describe_signers
from blobstore.pages.tensor_names import tensor_place
from blobstore.pages.text import shown
from blobstore.quantization.formats import type_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from blobstore.core.digest import Digest
    from blobstore.manifests.reference import Reference
    from blobstore.operations.describe.disk_usage import StoreDisk
    from blobstore.operations.describe.show import TensorDescription
    from blobstore.pages.ancestry import Parent
    from blobstore.pages.weight_statistics import Measurement

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
        layers = 0 if entry.known is None else entry.known.record.length - 1  # without the config
        if layers and (count := count + layers) <= MAX_TENSORS:
            chosen.append(name)
    return chosen


def model_views(
    disk: StoreDisk,
    references: Iterable[Reference],
    parents: Mapping[Reference, Parent],
    measured: Mapping[Reference, Mapping[str, Measurement]],
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
            "signed": shown(describe_signers(described.signatures or ())),
            "faults": [shown(blob.fault) for blob in described.faults[:10]],
            **grid(
                map(GridTensor.of, described.tensors),
                measured.get(reference, {}),
                disk.owners,
            ),
        }
    return found


class GridTensor(NamedTuple):
    """A tensor as the grid shows it."""

    name: str
    type: str
    shape: tuple[int, ...]
    size: int
    """Bytes in the blob, including scales and biases."""
    bits_per_weight: float | None
    digest: Digest | None = None
    """The digest of its blob, if that is shown."""

    @classmethod
    def of(cls, tensor: TensorDescription) -> GridTensor:
        """Return a tensor of the store as the grid shows it."""
        kind = type_name(tensor.type, tensor.group_size)
        bits = tensor.bits_per_weight
        return cls(tensor.name, kind, tensor.shape, tensor.size, bits, tensor.digest)


def grid(
    tensors: Iterable[GridTensor],
    measured: Mapping[str, Measurement],
    owners: Mapping[Digest, Sequence[int]] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the rows, columns, cells and tensors of a model.

    Each cell is its row, its column, its first tensor and the number of its tensors, which are in order.
    """
    cells: dict[tuple[str, int, str], list[GridTensor]] = defaultdict(list)
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
    # Tensors outside of layers have a column of their own, which has no name.
    columns = list(dict.fromkeys((layer >= 0, module) for _, layer, module in cells))
    columns.sort(key=itemgetter(0))
    row_of = {row: place for place, row in enumerate(rows)}
    column_of = {column: place for place, column in enumerate(columns)}

    def place(key: tuple[str, int, str]) -> tuple[int, int]:
        return row_of[key[:2]], column_of[key[1] >= 0, key[2]]

    types: dict[str, int] = {}
    sharing: dict[tuple[int, ...], int] = {}
    listed: list[list[Any]] = []
    placed = []
    measures: dict[int, Any] = {}
    for key in sorted(cells, key=place):
        placed.append([*place(key), len(listed), len(cells[key])])
        for tensor in cells[key]:
            digest, bits = tensor.digest, tensor.bits_per_weight
            others = () if digest is None else tuple(owners.get(digest, ())[: _MAX_OWNERS + 1])
            if tensor.name in measured:
                measures[len(listed)] = measured[tensor.name]
            listed.append(
                [
                    shown(tensor.name),
                    types.setdefault(tensor.type, len(types)),
                    list(tensor.shape),
                    tensor.size,
                    None if bits is None else round(bits, 3),
                    digest and digest.short,
                    sharing.setdefault(others, len(sharing)),
                ]
            )
    return {
        "rows": [shown(stack) if layer < 0 else layer for stack, layer in rows],
        "stacks": [shown(stack) if layer >= 0 else "" for stack, layer in rows],
        "columns": [
            shown(module or ("(the layer itself)" if is_layer else ""), 60)
            for is_layer, module in columns
        ],
        "cells": placed,
        "types": [shown(name) for name in types],
        "tensors": listed,
        "owners": list(sharing),
        "measured": measures,
    }
