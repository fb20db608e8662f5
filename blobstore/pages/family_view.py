"""The view of families: which model descends from which, as trees with bytes on the edges."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from blobstore.pages.text import shown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from blobstore.manifests.reference import Reference
    from blobstore.operations.describe.disk_usage import StoreDisk
    from blobstore.pages.ancestry import DeltaBase, Parent


def family_view(
    disk: StoreDisk,
    parents: Mapping[Reference, Parent],
    delta_bases: Mapping[Reference, DeltaBase],
) -> dict[str, Any]:
    """Return trees of models. A node has its depth and its row; the rows of a tree follow each other.

    The tree of the most models comes first. A node that is compressed against another model than its
    parent names that one, with the bytes of the deltas. Models without relatives are counted, not shown.
    """
    children: dict[Reference | str, list[Reference]] = defaultdict(list)
    for child, base in parents.items():
        children[base.reference or base.name].append(child)
    outside = [other for other in children if isinstance(other, str)]
    inside = [item for item in disk.entries if item not in parents and item in children]
    sizes = {
        name: sum(disk.sizes.get(digest, 0) for digest in needed)
        for name, needed in disk.needs.items()
    }

    def extent(start: Reference | str) -> tuple[int, int, str]:
        """Return a key that sorts the root of the largest tree first."""
        members = [start]
        for name in members:
            members += children.get(name, ())
        size = sum(sizes[name] for name in members if not isinstance(name, str))
        return -len(members), -size, str(start)

    nodes: list[dict[str, Any]] = []
    row = 0
    starts: list[Reference | str] = [*inside, *outside]
    for start in sorted(starts, key=extent):
        stack = [(start, 0, -1)]
        while stack:
            name, depth, above = stack.pop()
            node: dict[str, Any] = {"name": shown(name), "depth": depth, "row": row, "above": above}
            if isinstance(name, str):
                node["outside"] = True
            else:
                node["size"] = sizes[name]
                node |= _relations(parents.get(name), delta_bases.get(name))
            place = len(nodes)
            nodes.append(node)
            row += 1
            found = sorted(children.get(name, ()), reverse=True)
            stack += [(child, depth + 1, place) for child in found]
        row += 1
    alone = sum(item not in parents and item not in children for item in disk.entries)
    return {"nodes": nodes, "rows": max(row - 1, 0), "alone": alone}


def _relations(parent: Parent | None, base: DeltaBase | None) -> dict[str, Any]:
    """Return the bytes that a model shares with its parent, and its base for compression."""
    found: dict[str, Any] = {}
    if base is not None:
        found["against"] = [shown(base.reference), base.size]
    if parent is not None:
        found |= {
            "relation": parent.relation,
            "evidence": shown(parent.evidence),
            "shared": parent.shared,
            "delta": parent.delta,
            "own": parent.own,
        }
    return found
