"""The weight files of a Hugging Face folder: their numbered names, their headers and the index. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

from blobstore.safetensors.header import encode_header

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from blobstore.core.tensor import TensorSpec

SHARD_SIZE = 5 * 10**9
"""Bytes of tensors in one file, unless a single tensor is larger."""
_METADATA = {"format": "pt"}
"""What transformers demands of a file that it loads."""


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A file of weights; ``offsets`` are by the model's names, below a component too."""

    name: str
    tensors: Sequence[str]
    """The tensors of the file, below its component."""
    header: bytes
    offsets: Mapping[str, int]


def weight_file(
    path: str, specs: Sequence[TensorSpec], joins: Mapping[str, Sequence[str]], prefix: str
) -> WeightFile:
    """Return the file of tensors laid out in the order given.

    Args:
        path: its name in the folder.
        specs: what it holds, by the model's names.
        joins: tensors that hold several of the model's, and those in their order.
        prefix: what the names begin with in the model and not in the file.

    Raises:
        InvalidHeader: the tensors do not make a file.
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
    return WeightFile(path, [spec.name for spec in local], header, offsets)


def divided(specs: Iterable[TensorSpec], shard_size: int) -> list[list[TensorSpec]]:
    """Return the tensors of each file, filled in the order of the names; always one at least."""
    parts: list[list[TensorSpec]] = [[]]
    room = shard_size
    for spec in sorted(specs, key=attrgetter("name")):
        if spec.nbytes > room and parts[-1]:
            parts.append([])
            room = shard_size
        parts[-1].append(spec)
        room -= spec.nbytes
    return parts


def file_names(stem: str, count: int) -> list[str]:
    """Return what ``count`` weight files are called, numbered if there is more than one.

    ``stem`` is their place in the folder and what their names begin with.
    """
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def index_name(stem: str) -> str:
    """Return what the index of such files is called."""
    return f"{stem}.safetensors.index.json"


def index(files: Mapping[str, Sequence[str]], total_size: int) -> bytes:
    """Return the index of files by their names beside it, with the tensors that each holds."""
    weight_map = {name: file for file, names in files.items() for name in names}
    value = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    return f"{json.dumps(value, indent=2)}\n".encode()
