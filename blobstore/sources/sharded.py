"""Weight indexes: the JSON that says which shard holds which tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from blobstore import strictjson
from blobstore.errors import BlobstoreError, DamagedSource
from blobstore.files import read_regular
from blobstore.text import quoted

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from blobstore.sources.safetensors import ShardSet

_MAX_INDEX_SIZE = 256 * 2**20


def read_weight_map(index: Path) -> dict[str, str]:
    """Return the map from tensor names to file names of an ``*.index.json``; it may be empty.

    Raises:
        DamagedSource: the index is not JSON of that form, or names a file with a path separator
            or without the ending ``.safetensors``.
    """
    try:
        value: Any = strictjson.loads(read_regular(index, _MAX_INDEX_SIZE))
    except (OSError, ValueError, BlobstoreError) as error:
        message = f"cannot read weight index {quoted(index)}: {error}"
        raise DamagedSource(message) from None
    weight_map = value.get("weight_map") if isinstance(value, dict) else None
    if not isinstance(weight_map, dict) or not all(
        isinstance(file, str) for file in weight_map.values()
    ):
        message = f"weight index {quoted(index)} has no 'weight_map' from tensor to file names"
        raise DamagedSource(message)
    for name, file in weight_map.items():
        if "/" in file or "\\" in file or "\0" in file or not file.endswith(".safetensors"):
            message = (
                f"weight index {quoted(index)}: file {quoted(file)} of tensor {quoted(name)} is "
                "not the plain name of a .safetensors file"
            )
            raise DamagedSource(message)
    return weight_map


def add_indexed(
    shards: ShardSet, index: Path, weight_map: dict[str, str], *, prefix: str, ignore: bool
) -> Iterator[str]:
    """Add the shards that an index names; yield notices.

    Raises:
        DamagedSource: a shard is missing, is not whole, or lacks a tensor that the index promises;
            or holds one that the index does not place there, unless ``ignore``.
    """
    by_file: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        by_file.setdefault(file, set()).add(name)
    for file, names in sorted(by_file.items()):
        path = index.parent / file
        if not path.exists():
            message = (
                f"shard {quoted(path)} is missing; {quoted(index)} places {len(names)} tensors "
                "in it. Fetch the complete model"
            )
            raise DamagedSource(message)
        shards.add(path, prefix=prefix, names=names)
        found = shards.names_in(path)
        if lacking := sorted(names - found):
            message = (
                f"shard {quoted(path)} lacks tensor {quoted(lacking[0])}"
                f"{_and_more(lacking)} that {quoted(index)} places in it"
            )
            raise DamagedSource(message)
        if extra := sorted(found - names):
            unnamed = (
                f"shard {quoted(path)} holds tensor {quoted(extra[0])}{_and_more(extra)} that "
                f"{quoted(index)} does not place in it"
            )
            if not ignore:
                message = f"{unnamed}; leave such tensors out with --ignore-unindexed"
                raise DamagedSource(message)
            yield f"left out: {unnamed}"


def _and_more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
