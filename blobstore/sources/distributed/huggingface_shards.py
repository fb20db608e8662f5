"""Reads the shards that the Hugging Face writer of ``torch.distributed.checkpoint`` saves.

Each process writes safetensors files of its own. Their ``__metadata__`` has the offsets of the pieces, but
neither the sizes of the complete tensors nor the number of processes.
"""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any

from blobstore.core import strict_json
from blobstore.core.escape import quote
from blobstore.core.tensor import DType
from blobstore.errors import DamagedSource, InvalidHeader, UnsupportedSource, UsageError
from blobstore.safetensors.file import read_header
from blobstore.sources.base import DEFAULT_OPTIONS
from blobstore.sources.distributed.file_names import SHARD
from blobstore.sources.distributed.files import DataFile
from blobstore.sources.distributed.folder import Assembled, AssembledFolder, spec_of
from blobstore.sources.distributed.pieces import Box, Piece
from blobstore.sources.distributed.tiling import check_tiling
from blobstore.sources.file_tree import FileTree
from blobstore.sources.selection import read_json
from blobstore.sources.small_files import files_next_to

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from blobstore.core.tensor import TensorSpec
    from blobstore.safetensors.header import Header
    from blobstore.sources.base import SourceOptions

_INFO_KEY = "DCP_SHARDING_INFO"
_LARGEST = 2**63 - 1
_SHOWN = 8


class HuggingFaceShards(AssembledFolder):
    """A :class:`TensorSource` over the shards of all processes."""

    _format = "safetensors"

    def __init__(self, folder: Path, options: SourceOptions = DEFAULT_OPTIONS) -> None:
        """Read the headers of all shards, and check that they tile their tensors.

        Raises:
            DamagedSource: a shard is missing or malformed, or shards contradict each other.
            UnsupportedSource: a tensor is of a type that torch does not write.
            UsageError: an option does not fit.
        """
        super().__init__(FileTree(folder, exclude=options.exclude), options)
        self.reopen = functools.partial(HuggingFaceShards, folder.absolute(), options)
        tree = self._tree
        if options.subtree is not None:
            raise UsageError(
                f"{tree.label()} is not a PyTorch checkpoint, so it has no parts for --subtree"
            )
        names = [name for name in tree.entries() if SHARD.fullmatch(name)]
        # Before files are opened: a missing shard is reported as such, and not as a hole in a tensor.
        self._check_complete(names)
        pieces: dict[str, list[Piece]] = {}
        dtypes: dict[str, DType] = {}
        for name in names:
            file = self._data_files[name] = DataFile(tree.path(name), tree.versions.open)
            for tensor, dtype, piece in _pieces(file):
                if dtypes.setdefault(tensor, dtype) is not dtype:
                    raise DamagedSource(
                        f"tensor {quote(tensor)} is {dtypes[tensor].value} in one shard and "
                        f"{dtype.value} in {quote(file.path)}"
                    )
                pieces.setdefault(tensor, []).append(piece)
        self.config = read_json(tree, "config.json", dict)
        self.files = files_next_to(self._tree, set(names), options.keep, self.notices)
        self._add({name: _assembled(name, dtypes[name], found) for name, found in pieces.items()})
        self.notices.append(
            f"joined {len(names)} shards; the files do not say how many there were, so a missing last "
            "one cannot be noticed"
        )
        # Not all of them: a few files can have names with very many gaps.
        if absent := [quote(name) for name in itertools.islice(_absent(names), _SHOWN + 1)]:
            more = " and others" if len(absent) > _SHOWN else ""
            self.notices.append(
                f"not there: {', '.join(absent[:_SHOWN])}{more}; if their processes had tensors to "
                "write, the model lacks parts of them"
            )

    def _check_complete(self, names: list[str]) -> None:
        """Check that the numbers in the names of the shards have no gap."""
        found = [match for name in names if (match := SHARD.fullmatch(name))]
        ranks = {int(match["rank"]) for match in found}
        numbers = {int(match["number"]) for match in found}
        counts = {int(match["count"]) for match in found}
        gaps = [f"shard-{rank:05}" for rank in range(1, max(ranks, default=0)) if rank not in ranks]
        gaps += [
            f"model-{number:05}"
            for number in range(1, max(counts, default=0) + 1)
            if number not in numbers
        ]
        if len(counts) != 1 or gaps:
            what = f"{gaps[0]} is missing" if gaps else "the names have different counts"
            raise DamagedSource(
                f"the shards in {self._tree.label()} are not a complete set: {what}; copy the shards of "
                "all processes"
            )


def _absent(names: list[str]) -> Iterator[str]:
    """Yield the names of shards that are missing between those of other numbers and processes.

    A process writes no file if it has no piece of any of its tensors, so they may be missing rightly.
    """
    found = [match.groups() for name in names if (match := SHARD.fullmatch(name))]
    there = {*names}
    for parts in itertools.product(*(sorted(set(part)) for part in zip(*found, strict=True))):
        name = "shard-{}-model-{}-of-{}.safetensors".format(*parts)
        if name not in there:
            yield name


def _pieces(file: DataFile) -> Iterator[tuple[str, DType, Piece]]:
    """Yield the names and types of the tensors that a shard has pieces of, and the pieces."""
    with file.opened() as descriptor:
        try:
            header = read_header(descriptor, file.version.size)
        except InvalidHeader as error:
            raise DamagedSource(f"{quote(file.path)}: {error}") from None
    info = _info(file, header)
    for name, entry in header.tensors.items():
        shape = _torch_shape(file, entry.spec)
        offsets = info.get(name, {}).get("saved_offsets")
        if (
            not isinstance(offsets, list)
            or len(offsets) != len(shape)
            or not all(type(offset) is int and 0 <= offset <= _LARGEST for offset in offsets)
        ):
            raise DamagedSource(
                f"{quote(file.path)}: {_INFO_KEY} has no valid offsets for tensor {quote(name)}"
            )
        begin = header.data_start + entry.begin
        box = Box(tuple(offsets), shape)
        yield name, entry.spec.dtype, Piece(box, file, begin, entry.end - entry.begin)


def _torch_shape(file: DataFile, spec: TensorSpec) -> tuple[int, ...]:
    """Return the sizes of a tensor in torch, which counts pairs of F4."""
    if spec.dtype.bits >= 8:
        return spec.shape
    *outer, last = spec.shape or (1,)
    if spec.dtype is not DType.F4 or last % 2:
        raise UnsupportedSource(
            f"{quote(file.path)}: tensor {quote(spec.name)} is {spec.dtype.value} {list(spec.shape)}, "
            "whose pieces cannot be joined; load the checkpoint with torch and save complete tensors"
        )
    return (*outer, last // 2)


def _info(file: DataFile, header: Header) -> Mapping[str, Any]:
    text = header.metadata.get(_INFO_KEY)
    try:
        value = strict_json.loads(text.encode()) if text is not None else None
    except ValueError as error:
        raise DamagedSource(f"{quote(file.path)}: {_INFO_KEY}: {error}") from None
    if not isinstance(value, dict) or not all(isinstance(item, dict) for item in value.values()):
        raise DamagedSource(f"{quote(file.path)} has no {_INFO_KEY} that says where its pieces lie")
    return value


def _assembled(name: str, dtype: DType, pieces: list[Piece]) -> Assembled:
    rank = len(pieces[0].box.sizes)
    if any(len(piece.box.sizes) != rank for piece in pieces):
        raise DamagedSource(f"the pieces of tensor {quote(name)} have different dimensions")
    shape = tuple(
        max(piece.box.offsets[d] + piece.box.sizes[d] for piece in pieces) for d in range(rank)
    )
    filled = sorted((it for it in pieces if 0 not in it.box.sizes), key=lambda piece: piece.box)
    try:
        if filled or 0 not in shape:
            check_tiling(shape, filled)
    except DamagedSource as error:
        raise error.at(f"tensor {quote(name)}") from None
    return Assembled(spec_of(name, dtype, shape), shape, filled)
