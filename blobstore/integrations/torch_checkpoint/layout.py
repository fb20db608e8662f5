"""Which rank has which part of a state, which blobs it owns, and its bytes. Tensors have their names in the store."""

from __future__ import annotations

import functools
import hashlib
import operator
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from blobstore.core.escape import quote
from blobstore.errors import UnsupportedSource
from blobstore.integrations.torch_checkpoint.windows import (
    Box,
    begin_of_rows,
    box_of_bytes,
    choose_owners,
    windows_of,
)
from blobstore.manifests.plain_values import depth_checked, encode
from blobstore.manifests.step_record import stored_name
from blobstore.operations.create.step import unread
from blobstore.safetensors.torch import check_has_bytes, spec_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

    from blobstore.core.tensor import TensorSpec
    from blobstore.integrations.torch_checkpoint.windows import Part
    from blobstore.operations.create.step import Read, StepPlan
    from blobstore.planning.grouping import BlobPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTask:
    """What one rank has to do: a value that the coordinator sends it."""

    rank: int
    ingest: str
    """The name of the import to join."""
    folder: str
    """See :attr:`Ingest.machine_folder`, of the coordinator."""
    previous: str
    """The import of the last step that the coordinator's writer has written."""
    local: Sequence[BlobPlan]
    """The blobs that this rank has completely, and owns."""
    gathered: Sequence[Sequence[BlobPlan]]
    """The blobs of each owner whose bytes come from several ranks."""
    chunks: Sequence[Mapping[str, Sequence[Box]]]
    """What each rank has of the tensors that this rank owns, in the order in which it is sent."""

    @property
    def every(self) -> list[BlobPlan]:
        """All gathered blobs."""
        return [blob for its in self.gathered for blob in its]

    @property
    def own(self) -> Sequence[BlobPlan]:
        """The gathered blobs that this rank owns."""
        return self.gathered[self.rank]


def tensors_of(plans: Sequence[SavePlan]) -> dict[str, tuple[TensorSpec, Read]]:
    """Return the tensors of a state by key, for a :class:`StepPlan`. Raises UnsupportedSource."""
    found: dict[str, tuple[TensorSpec, Read]] = {}
    for item in (item for plan in plans for item in plan.items):
        key, data = item.index.fqn, item.tensor_data
        if data is not None and key not in found:
            whole = torch.empty(data.size, dtype=data.properties.dtype, device="meta")
            try:
                found[key] = spec_of(key, whole), unread
            except KeyError:
                raise UnsupportedSource(
                    f"tensor {quote(key)} is of type {whole.dtype}, which a store does not have",
                    advice="convert it to another type, or leave it out",
                ) from None
    return found


def plan_tasks(
    plans: Sequence[SavePlan], step: StepPlan, model: str, ingest: str, folder: str, previous: str
) -> list[RankTask]:
    """Return what each rank has to do. Raises UnsupportedSource."""
    ranks = range(len(plans))
    chunks: dict[str, dict[Box, int]] = defaultdict(dict)
    for rank in ranks:
        for name, box in _boxes(plans[rank].items, model):
            if box.nbytes:
                chunks[name].setdefault(box, rank)
    held = {blob.name: _held(blob, chunks) for blob in step.blobs}
    owners = choose_owners({blob.name: blob.size for blob in step.blobs}, held, len(plans))
    local: list[list[BlobPlan]] = [[] for _ in ranks]
    gathered: list[list[BlobPlan]] = [[] for _ in ranks]
    sent: list[list[dict[str, list[Box]]]] = [[{} for _ in ranks] for _ in ranks]
    for blob in step.blobs:
        owner = owners[blob.name]
        if held[blob.name].keys() <= {owner}:
            local[owner].append(blob)
            continue
        gathered[owner].append(blob)
        for spec in blob.stored:
            for box, rank in sorted(chunks[spec.name].items()):
                sent[owner][rank].setdefault(spec.name, []).append(box)
    return [
        RankTask(
            rank=rank,
            ingest=ingest,
            folder=folder,
            previous=previous,
            local=local[rank],
            gathered=gathered,
            chunks=sent[rank],
        )
        for rank in ranks
    ]


def _held(blob: BlobPlan, chunks: Mapping[str, Mapping[Box, int]]) -> dict[int, int]:
    """Return how many bytes of a blob each rank has. Raises UnsupportedSource if they are not all."""
    held: dict[int, int] = defaultdict(int)
    for spec in blob.stored:
        saved = sum(box.nbytes for box in chunks[spec.name])
        if saved != spec.nbytes:
            raise UnsupportedSource(
                f"{saved} of the {spec.nbytes} bytes of tensor {quote(spec.name)} are saved",
                advice="save on all ranks that have a part of it, without no_dist=True",
            )
        for box, rank in chunks[spec.name].items():
            held[rank] += box.nbytes
    return held


class RankState:
    """The part of a state that one rank has."""

    def __init__(self, plan: SavePlan, planner: SavePlanner, model: str, window: int) -> None:
        self._planner = planner
        self._window = window
        self._values = [item.index for item in plan.items if item.tensor_data is None]
        tensors = [item for item in plan.items if item.tensor_data is not None]
        self._items = dict(zip(_boxes(tensors, model), tensors, strict=True))
        self.boxes: dict[str, list[Box]] = {}
        """The parts of tensors, by name, in the order in which they are sent."""
        for name, box in sorted(self._items):
            if box.nbytes:
                self.boxes.setdefault(name, []).append(box)
        self._resolve = functools.lru_cache(maxsize=1)(self._bytes)

    @depth_checked()
    def values(self) -> dict[str, Any]:
        """Return the values besides tensors by key, which are plain. Raises UnsupportedSource, or UsageError."""
        planner, found = self._planner, {}
        for index in self._values:
            if not isinstance(planner, DefaultSavePlanner):
                raise UnsupportedSource(
                    f"the planner {quote(type(planner).__name__)} gives values only as pickles",
                    advice="derive it from DefaultSavePlanner",
                )
            found[index.fqn] = value = planner.lookup_object(index)
            encode(value, index.fqn)
        return found

    def bytes_of(self, part: Part) -> torch.Tensor:
        """Return the bytes of a part that this rank has."""
        return self._resolve(part.key, part.chunk)[part.box.within(part.chunk)]

    def read(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of a tensor that this rank has completely."""
        # Copies: what is hashed is what is written, even if the program changes the tensor.
        return (bytes(piece) for _, piece in self._pieces(name))

    def is_rows(self, blob: BlobPlan) -> bool:
        """Return whether each part that this rank has of a blob is contiguous."""
        return all(
            begin_of_rows(box, shape_of(spec)) is not None
            for spec in blob.stored
            for box in self.boxes.get(spec.name, ())
        )

    def parts(self, blob: BlobPlan) -> Iterator[tuple[int, memoryview]]:
        """Yield what this rank has of a blob of rows, and where each part begins."""
        begin = len(blob.header)
        for spec in blob.stored:
            for box, piece in self._pieces(spec.name):
                yield begin + (begin_of_rows(box, shape_of(spec)) or 0), piece
            begin += spec.nbytes

    def digest(self, blob: BlobPlan) -> bytes:
        """Return a digest of what this rank has of a blob."""
        digest = hashlib.sha256(blob.header)
        for spec in blob.stored:
            digest.update(repr(self.boxes.get(spec.name)).encode())
            for _, piece in self._pieces(spec.name):
                digest.update(piece)
        return digest.digest()

    def _pieces(self, name: str) -> Iterator[tuple[Box, memoryview]]:
        """Yield what this rank has of a tensor: the bytes of parts of at most a window, not copied."""
        for chunk in self.boxes.get(name, ()):  # one, unless it has several that are rows
            data = self._bytes(name, chunk)
            for box in windows_of(chunk.sizes, self._window):
                piece = data[box.within(Box((0,) * len(chunk.sizes), chunk.sizes))]
                offsets = tuple(map(operator.add, chunk.offsets, box.offsets))
                yield Box(offsets, box.sizes), piece.cpu().view(-1).numpy().data

    def _bytes(self, name: str, box: Box) -> torch.Tensor:
        """Return the bytes of one of the parts. Raises UnsupportedSource."""
        data = cast("torch.Tensor", self._planner.resolve_data(self._items[name, box])).detach()
        check_has_bytes(name, data)
        data = data.resolve_conj().resolve_neg().contiguous()
        data = (data if data.dim() else data.reshape(1)).view(torch.uint8)
        if tuple(data.shape) != box.sizes:
            raise UnsupportedSource(
                f"tensor {quote(name)} has a part of {list(data.shape)} bytes where {list(box.sizes)} are planned"
            )
        return data


def shape_of(spec: TensorSpec) -> tuple[int, ...]:
    """Return the shape of a tensor in bytes."""
    if not spec.shape:
        return (spec.nbytes,)
    return (*spec.shape[:-1], spec.shape[-1] * spec.dtype.bits // 8)


def _boxes(items: Sequence[WriteItem], model: str) -> Iterator[tuple[str, Box]]:
    """Yield the names of tensors, and which parts of them items have."""
    for data, key in ((item.tensor_data, item.index.fqn) for item in items):
        if data is not None:
            chunk, itemsize = data.chunk, data.properties.dtype.itemsize
            yield stored_name(key, model), box_of_bytes(chunk.offsets, chunk.sizes, itemsize)
