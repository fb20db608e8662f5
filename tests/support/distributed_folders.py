"""Folders of ``torch.distributed.checkpoint`` that are cut as a test says, without any processes."""

from __future__ import annotations

import io
import itertools
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""
Change = Callable[[Metadata], None]


def grid(shape: Sequence[int], *counts: int) -> list[Box]:
    """Return the boxes of a tensor that is cut into about equal ranges in each dimension."""
    ranges = []
    for size, count in itertools.zip_longest(shape, counts, fillvalue=1):
        step = -(-size // count)
        ranges.append([(start, min(step, size - start)) for start in range(0, size, step)])
    return [
        (tuple(start for start, _ in part), tuple(size for _, size in part))
        for part in itertools.product(*ranges)
    ]


def data_name(rank: int) -> str:
    """Return the name of the data file of a rank."""
    return f"__{rank}_0.distcp"


def write_folder(
    folder: Path,
    tensors: Mapping[Any, tuple[torch.Tensor, Sequence[Box]]],
    values: Mapping[Any, Any] | None = None,
    *,
    ranks: int = 2,
    change: Change = lambda metadata: None,
) -> Path:
    """Write a checkpoint whose pieces are distributed over the data files of some ranks.

    Args:
        folder: the folder, which is made.
        tensors: the tensors and their boxes, by the tuples of their keys.
        values: other values, by their keys.
        ranks: number of data files.
        change: called with the metadata before they are written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = [bytearray() for _ in range(ranks)]
    turn = itertools.cycle(range(ranks))
    entries: dict[str, Any] = {}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    paths = {}

    def add(index: MetadataIndex, value: Any) -> None:
        rank = next(turn)
        begin = len(files[rank])
        item = io.BytesIO()
        torch.save(value, item)
        files[rank] += item.getvalue()
        stored[index] = _StorageInfo(data_name(rank), begin, len(files[rank]) - begin)

    for path, value in (values or {}).items():
        name = ".".join(map(str, path))
        paths[name] = path
        entries[name] = BytesStorageMetadata()
        add(MetadataIndex(name), value)
    for path, (tensor, boxes) in tensors.items():
        name = ".".join(map(str, path))
        paths[name] = path
        chunks = []
        for offsets, sizes in boxes:
            ranges = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
            piece = tensor[ranges]
            # A piece that is the complete storage keeps its strides, as in torch's writer.
            is_part = piece.untyped_storage().size() != piece.nbytes
            add(MetadataIndex(name, offsets), piece.clone() if is_part else piece)
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        properties = TensorProperties(dtype=tensor.dtype)
        entries[name] = TensorStorageMetadata(properties, tensor.size(), chunks)
    metadata = Metadata(entries, paths, stored)
    change(metadata)
    for rank, data in enumerate(files):
        (folder / data_name(rank)).write_bytes(data)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder
