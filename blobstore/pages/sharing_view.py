"""The view of what models share: a matrix of models by models, and of each family by layers."""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import lru_cache
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any

from blobstore.pages.tensor_names import tensor_place
from blobstore.pages.text import shown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from blobstore.manifests.reference import Reference
    from blobstore.operations.describe.disk_usage import StoreDisk

_MAX_FAMILIES = 50
_MAX_FAMILY = 100
"""Models of a family that are shown by layers."""
_LEAST_SHARE = 0.01
"""The share of the smaller model that two models of a family have in common."""


def sharing_view(disk: StoreDisk) -> dict[str, Any]:
    """Return the models in the order of their families, the bytes that each two share, and the families.

    Row ``i`` of ``shared`` has the bytes that model ``i`` shares with ``i``, ``i + 1`` and so on, as
    pairs of a number of equal values and the value.
    """
    import numpy as np

    names = list(disk.entries)
    sizes = [
        disk.blobs.space(disk.holdings.by(entry.known)).size for entry in disk.entries.values()
    ]
    sets: Counter[tuple[int, ...]] = Counter()
    for number, models in disk.holders.items():
        sets[tuple(models)] += max(0, disk.blobs.all_sizes[number])
    shared = np.zeros((len(names), len(names)), np.int64)
    for group, size in sets.items():
        shared[np.ix_(group, group)] += size
    families = _families(sets, sizes)
    order = [place for family in families for place in family]
    shared = shared[np.ix_(order, order)]
    return {
        "models": [shown(names[place]) for place in order],
        "shared": [_runs(shared[row, row:].tolist()) for row in range(len(order))],
        "families": [
            family_by_layers(disk, [names[place] for place in family[:_MAX_FAMILY]])
            for family in [family for family in families if len(family) > 1][:_MAX_FAMILIES]
        ],
    }


def _runs(values: Sequence[int]) -> list[int]:
    """Return numbers of equal values, each followed by the value."""
    return [number for value, run in groupby(values) for number in (sum(1 for _ in run), value)]


def _families(sets: Mapping[tuple[int, ...], int], sizes: Sequence[int]) -> list[list[int]]:
    """Return the models in groups that share blobs, directly or by way of others; largest first."""
    roots = list(range(len(sizes)))

    def root(place: int) -> int:
        while roots[place] != place:
            roots[place] = roots[roots[place]]
            place = roots[place]
        return place

    for models, size in sets.items():
        # A config or a tokenizer makes no family.
        members = [place for place in models if size >= _LEAST_SHARE * sizes[place]]
        for place in members[1:]:
            roots[root(place)] = root(members[0])
    found: dict[int, list[int]] = defaultdict(list)
    for place in range(len(sizes)):
        found[root(place)].append(place)
    return sorted(found.values(), key=lambda family: -sum(sizes[place] for place in family))


@lru_cache(1 << 15)  # the models of a family have the same names
def _column(name: str) -> tuple[str, int]:
    """Return the layer stack and the layer number of a tensor, or -1 if it is in no layer."""
    stack, number, _ = tensor_place(name)
    return ("", -1) if number is None else (stack, number)


def family_by_layers(disk: StoreDisk, family: Sequence[Reference]) -> dict[str, Any]:
    """Return the bytes of each model of a family by layer: shared, stored as deltas, and its own.

    Blobs are shared if another model of the family has them. Sizes are those on disk.
    """
    uses = Counter(chain.from_iterable(disk.needs[name] for name in family))
    cells: list[dict[tuple[str, int], list[int]]] = []
    for name in family:
        manifest = disk.entries[name].manifest
        row: dict[tuple[str, int], list[int]] = defaultdict(lambda: [0, 0, 0])
        layers = manifest.layers if manifest is not None else ()
        for digest, layer_name in {one.digest: one.name for one in reversed(layers)}.items():
            kind = 0 if uses[digest] > 1 else 1 if digest in disk.holdings.deltas else 2
            row[_column(layer_name)][kind] += disk.sizes.get(digest, 0)
        cells.append(row)
    columns = sorted({column for row in cells for column in row}, key=lambda it: (it[1] >= 0, *it))
    return {
        "models": [shown(name) for name in family],
        "columns": ["outside of layers" if number < 0 else number for _, number in columns],
        "stacks": [shown(stack) for stack, _ in columns],
        "cells": [[row.get(column) for column in columns] for row in cells],
    }
