"""Which rank has which part of a state, which blobs it owns, and its bytes."""

from __future__ import annotations

import functools
import hashlib
import math
import operator
import secrets
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.checkpoint.planner import WriteItemType

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
from blobstore.models.plain_torch_values import KINDS
from blobstore.safetensors.torch import check_has_bytes, spec_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import (
        SavePlan,
        SavePlanner,
        TensorWriteData,
        WriteItem,
    )

    from blobstore.core.tensor import TensorSpec
    from blobstore.integrations.torch_checkpoint.windows import Part
    from blobstore.operations.create.step import StepPlan
    from blobstore.planning.grouping import BlobPlan

Shape = tuple[int, ...]


class GatheredBlob(NamedTuple):
    """A blob whose bytes come from several ranks."""

    name: str
    header: bytes
    """A digest of its header, which has the types of its tensors."""
    tensors: Sequence[tuple[str, Shape]]
    """The keys of its tensors and their shapes in bytes, in the order of its data."""
    begin: int
    """Where its data begins."""
    is_rows: bool
    """Whether each part of it is contiguous."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTask:
    """What one rank has to do: a value that the coordinator sends it."""

    rank: int
    world: int
    ingest: str
    """The import to join."""
    folder: str
    """See :attr:`Ingest.machine_folder`, of the coordinator."""
    token: str
    """Names this step to the ranks that write it."""
    previous: str
    """Names the last step that the coordinator's writer has written."""
    streams: Sequence[Sequence[GatheredBlob]]
    """The blobs of each owner whose bytes come from several ranks."""
    chunks: Sequence[Mapping[str, Sequence[Box]]]
    """What each rank has of the tensors that this rank owns."""
    gathered: Sequence[BlobPlan]
    """The blobs of those."""
    local: Sequence[BlobPlan]
    """The blobs that this rank has completely, and owns."""
    keys: Mapping[str, str]
    """The keys of the tensors of these blobs, by their names."""


class Layout:
    """Where the tensors of a state are: which rank has which part."""

    def __init__(self, plans: Sequence[SavePlan]) -> None:
        """Read the plans of all ranks. Raises UnsupportedSource."""
        self._world = len(plans)
        self.specs: dict[str, TensorSpec] = {}
        self._shapes: dict[str, Shape] = {}
        self._chunks: dict[str, dict[Box, int]] = defaultdict(dict)
        for rank, plan in enumerate(plans):
            for item in plan.items:
                if item.type == WriteItemType.BYTE_IO or item.tensor_data is None:
                    continue
                key, data = item.index.fqn, item.tensor_data
                if key not in self.specs:
                    self.specs[key] = _spec(key, data.properties.dtype, data.size)
                    whole = box_of_bytes(
                        (0,) * len(data.size), data.size, data.properties.dtype.itemsize
                    )
                    self._shapes[key] = whole.sizes
                box = _box(data)
                if box.nbytes:
                    self._chunks[key].setdefault(box, rank)
        for key, shape in self._shapes.items():
            saved, expected = sum(box.nbytes for box in self._chunks[key]), Box(shape, shape).nbytes
            if saved != expected:
                raise UnsupportedSource(
                    f"{saved} of the {expected} bytes of tensor {quote(key)} are saved",
                    advice="save on all ranks that have a part of it, without no_dist=True",
                )

    def tasks(self, step: StepPlan, ingest: str, folder: str, previous: str) -> list[RankTask]:
        """Return what each rank has to do."""
        tensors = {
            blob.name: [step.keys[recipe.spec.name] for recipe in blob.tensors]
            for blob in step.blobs
        }
        held: dict[str, dict[int, int]] = {}
        for blob, keys in tensors.items():
            held[blob] = defaultdict(int)
            for box, rank in (pair for key in keys for pair in self._chunks[key].items()):
                held[blob][rank] += box.nbytes
        owners = choose_owners({blob.name: blob.size for blob in step.blobs}, held, self._world)
        local: list[list[BlobPlan]] = [[] for _ in range(self._world)]
        gathered: list[list[BlobPlan]] = [[] for _ in range(self._world)]
        for one in step.blobs:
            owner = owners[one.name]
            (local if held[one.name].keys() <= {owner} else gathered)[owner].append(one)
        streams = [
            [
                GatheredBlob(
                    blob.name,
                    hashlib.sha256(blob.header).digest(),
                    [(key, self._shapes[key]) for key in tensors[blob.name]],
                    len(blob.header),
                    all(
                        begin_of_rows(box, self._shapes[key]) is not None
                        for key in tensors[blob.name]
                        for box in self._chunks[key]
                    ),
                )
                for blob in blobs
            ]
            for blobs in gathered
        ]
        token = secrets.token_hex(8)
        return [
            RankTask(
                rank=rank,
                world=self._world,
                ingest=ingest,
                folder=folder,
                token=token,
                previous=previous,
                streams=streams,
                chunks=self._chunks_of([key for blob in streams[rank] for key, _ in blob.tensors]),
                gathered=gathered[rank],
                local=local[rank],
                keys={
                    recipe.spec.name: step.keys[recipe.spec.name]
                    for blob in local[rank]
                    for recipe in blob.tensors
                },
            )
            for rank in range(self._world)
        ]

    def _chunks_of(self, keys: Sequence[str]) -> list[dict[str, list[Box]]]:
        """Return what each rank has of some tensors, in the order in which it is sent."""
        chunks: list[dict[str, list[Box]]] = [{} for _ in range(self._world)]
        for key in keys:
            for box, rank in sorted(self._chunks[key].items()):
                chunks[rank].setdefault(key, []).append(box)
        return chunks


class RankState:
    """The part of a state that one rank has."""

    def __init__(self, items: Sequence[WriteItem], planner: SavePlanner, window: int) -> None:
        self._planner = planner
        self._window = window
        self._values = [item for item in items if item.type == WriteItemType.BYTE_IO]
        self._items = {
            (item.index.fqn, _box(item.tensor_data)): item
            for item in items
            if item.tensor_data is not None
        }
        self.boxes: dict[str, list[Box]] = {}
        """The parts of tensors, by key, in the order in which they are sent."""
        for key, box in sorted(self._items):
            if box.nbytes:
                self.boxes.setdefault(key, []).append(box)
        self._resolve = functools.lru_cache(maxsize=1)(self._bytes)

    @depth_checked()
    def values(self) -> dict[str, Any]:
        """Return the values besides tensors, which are plain. Raises UnsupportedSource, or UsageError."""
        if not self._values:
            return {}
        look_up: Callable[[MetadataIndex], Any] | None = getattr(
            self._planner, "lookup_object", None
        )
        if look_up is None:
            raise UnsupportedSource(
                f"the planner {quote(type(self._planner).__name__)} gives values only as pickles",
                advice="derive it from DefaultSavePlanner",
            )
        found = {item.index.fqn: look_up(item.index) for item in self._values}
        for key, value in found.items():
            encode(value, key, KINDS)
        return found

    def bytes_of(self, part: Part) -> torch.Tensor:
        """Return the bytes of a part that this rank has."""
        return self._resolve(part.key, part.chunk)[part.box.within(part.chunk)]

    def read(self, key: str) -> Iterator[memoryview]:
        """Yield the bytes of a tensor that this rank has completely, each valid until the next one."""
        for _, piece in self.pieces(key):
            # A copy: what is hashed is what is written, even if the program changes the tensor.
            yield piece.clone().numpy().data

    def parts(self, blob: GatheredBlob) -> Iterator[tuple[int, memoryview]]:
        """Yield what this rank has of a blob of rows, and where each part begins."""
        begin = blob.begin
        for key, shape in blob.tensors:
            for box, piece in self.pieces(key):
                yield begin + (begin_of_rows(box, shape) or 0), piece.numpy().data
            begin += math.prod(shape)

    def pieces(self, key: str) -> Iterator[tuple[Box, torch.Tensor]]:
        """Yield what this rank has of a tensor: the bytes of parts of at most a window, not copied."""
        for chunk in self.boxes.get(key, ()):  # one, unless it has several that are rows
            data = self._bytes(key, chunk)
            for box in windows_of(chunk.sizes, self._window):
                piece = data[box.within(Box((0,) * len(chunk.sizes), chunk.sizes))]
                offsets = tuple(map(operator.add, chunk.offsets, box.offsets))
                yield Box(offsets, box.sizes), piece.cpu().view(-1)

    def _bytes(self, key: str, box: Box) -> torch.Tensor:
        """Return the bytes of one of the parts. Raises UnsupportedSource."""
        data = self._planner.resolve_data(self._items[key, box])
        if not isinstance(data, torch.Tensor):
            raise UnsupportedSource(f"the planner gives no tensor for {quote(key)}")
        data = data.detach()
        check_has_bytes(key, data)
        data = data.resolve_conj().resolve_neg().contiguous()
        data = (data if data.dim() else data.reshape(1)).view(torch.uint8)
        if tuple(data.shape) != box.sizes:
            raise UnsupportedSource(
                f"tensor {quote(key)} has a part of {list(data.shape)} bytes where {list(box.sizes)} are planned"
            )
        return data


def _box(data: TensorWriteData) -> Box:
    """Return the part that an item has of its tensor."""
    return box_of_bytes(
        tuple(data.chunk.offsets), tuple(data.chunk.sizes), data.properties.dtype.itemsize
    )


def _spec(key: str, dtype: torch.dtype, size: torch.Size) -> TensorSpec:
    try:
        return spec_of(key, torch.empty(size, dtype=dtype, device="meta"))
    except KeyError:
        raise UnsupportedSource(
            f"tensor {quote(key)} is of type {dtype}, which a store does not have",
            advice="convert it to another type, or leave it out",
        ) from None
