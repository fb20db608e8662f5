"""The weight files of a Hugging Face folder: names, headers and index. Pure computation."""

from __future__ import annotations

import json
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

from blobstore.safetensors.header import encode_header

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from blobstore.core.digest import Digest
    from blobstore.core.tensor import TensorSpec

SHARD_SIZE = 5 * 10**9
"""Bytes of tensors per file, unless a single tensor is larger."""
_METADATA = {"format": "pt"}
"""transformers loads no file without it."""


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A weight file. ``offsets`` has the full names of tensors, including the component's prefix."""

    name: str
    tensors: Sequence[str]
    """Names of its tensors, without the component's prefix."""
    header: bytes
    offsets: Mapping[str, int]
    constants: Sequence[tuple[int, bytes]] = ()
    """Offsets and bytes of tensors that no blob holds."""
    sha256: Digest | None = None
    """The digest that the whole file must have, if it is known."""


def weight_file(
    path: str,
    specs: Sequence[TensorSpec],
    joins: Mapping[str, Sequence[str]],
    prefix: str,
    constants: Mapping[str, bytes],
) -> WeightFile:
    """Return the file of some tensors, in the given order.

    Args:
        path: its name in the folder.
        specs: the tensors, with their full names.
        joins: for tensors that are stacks, the names of their members in order.
        prefix: the component's prefix, which the names in the file do not have.
        constants: the bytes of tensors that no blob holds.

    Raises:
        InvalidHeader: no safetensors file can have these tensors.
    """
    local = [spec._replace(name=spec.name.removeprefix(prefix)) for spec in specs]
    header = encode_header(local, _METADATA)
    offsets: dict[str, int] = {}
    offset = len(header)
    for spec in specs:
        members = joins.get(spec.name, (spec.name,))
        for number, member in enumerate(members):
            offsets[member] = offset + number * (spec.nbytes // len(members))
        offset += spec.nbytes
    held = [
        (offsets.pop(spec.name), constants[spec.name]) for spec in specs if spec.name in constants
    ]
    return WeightFile(path, [spec.name for spec in local], header, offsets, held)


def split_by_size(specs: Iterable[TensorSpec], shard_size: int) -> list[list[TensorSpec]]:
    """Return the tensors of each file, sorted by name; always at least one file."""
    parts: list[list[TensorSpec]] = [[]]
    left = shard_size
    for spec in sorted(specs, key=attrgetter("name")):
        if spec.nbytes > left and parts[-1]:
            parts.append([])
            left = shard_size
        parts[-1].append(spec)
        left -= spec.nbytes
    return parts


def file_names(stem: str, count: int, variant: str = "") -> list[str]:
    """Return the names of ``count`` weight files, numbered if there is more than one.

    ``stem`` is the start of their names, including the folder of a component. ``variant`` is what
    libraries call so, such as ``fp16``.
    """
    stem = f"{stem}.{variant}" if variant else stem
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def index_name(stem: str, variant: str = "") -> str:
    """Return the name of the index of such files."""
    return (
        f"{stem}.safetensors.index.{variant}.json" if variant else f"{stem}.safetensors.index.json"
    )


def index(files: Mapping[str, Sequence[str]], total_size: int) -> bytes:
    """Return an index of the names of tensors by file. Files are in the folder of the index."""
    weight_map = {name: file for file, names in files.items() for name in names}
    value = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    return f"{json.dumps(value, indent=2)}\n".encode()
