"""Reads a step: what ``torch.distributed.checkpoint.load`` calls, in its order, on each rank.

Each tensor is one piece for the planner of torch, which divides it among any number of ranks. A rank reads the
ranges that it needs.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from blobstore.core.escape import quote
from blobstore.core.tensor import DType
from blobstore.errors import BlobDamaged, UsageError
from blobstore.manifests.plain_values import decode
from blobstore.manifests.step_record import StepRecord, stored_name
from blobstore.models.plain_torch_values import KINDS
from blobstore.operations.create.places import can_be_step
from blobstore.operations.load import open_step, record_of
from blobstore.safetensors.torch import empty_tensor

if TYPE_CHECKING:
    import os

    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

    from blobstore.models.model import Model
    from blobstore.operations.open import Verify
    from blobstore.store.local import StoreLike


class StoreReader(StorageReader):
    """Loads with ``torch.distributed.checkpoint`` from a store.

    Pass it as the ``storage_reader`` of ``load``, with the name of the step as ``checkpoint_id``. The number of ranks
    and the placement of tensors may be others than those that saved. Nothing of the store is unpickled.
    """

    def __init__(
        self, store: StoreLike = None, *, model: str = "", verify: Verify = "size"
    ) -> None:
        """Read nothing yet.

        Args:
            store: the store or its folder, or the address of one in object storage, such as ``s3://bucket/prefix``;
                by default ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
            model: the part of the state that is the model, to load one that no training has saved here, such as
                the base of a fine-tuning. Steps know theirs.
            verify: how closely to check the blobs first, as for :func:`blobstore.open`.
        """
        self._store = store
        self._model_part = model
        self._verify = verify
        self._reference = ""
        self._model: Model[torch.Tensor] | None = None
        self._record = StepRecord(model=model, tensors={}, values={})

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin to load the step ``checkpoint_id``."""
        self._reference = "" if checkpoint_id is None else str(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether it can be the name of a step."""
        return can_be_step(checkpoint_id)

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return what the step has.

        Raises:
            UsageError: no name is given.
            ModelNotFound: the store has no such step.
            BlobDamaged, BlobMissing, InvalidManifest: it is incomplete or damaged.
        """
        if not self._reference:
            raise UsageError("which step is to be loaded? pass its name as checkpoint_id")
        self._close()
        self._model = model = open_step(
            self._reference, self._store, framework="torch", verify=self._verify
        )
        self._record = record = record_of(model, self._model_part)
        described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for key in record.tensors:
            spec = model.specs[stored_name(key, record.model)]
            like = empty_tensor(spec, torch.device("meta"))
            whole = ChunkStorageMetadata(torch.Size([0] * like.dim()), like.size())
            described[key] = TensorStorageMetadata(
                TensorProperties(dtype=like.dtype), like.size(), [whole]
            )
        described |= {key: BytesStorageMetadata() for key in record.values}
        paths = dict(record.tensors) | {key: path for key, (path, _) in record.values.items()}
        return Metadata(described, planner_data=paths)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what this rank needs into its tensors, and give the planner its values.

        Raises:
            BlobDamaged, BlobMissing: a tensor or value cannot be read.
            RemoteError: the object storage cannot be reached.
        """
        model = self._model
        if model is None:
            raise UsageError("nothing is to be read before the metadata")
        tensors = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
        try:
            for item in plan.items:
                if item.type == LoadItemType.BYTE_IO:
                    planner.load_bytes(item, self._value(item.storage_index.fqn))
            parts = model.read_parts(self._part(model, item) for item in tensors)
            for item, part in zip(tensors, parts, strict=True):
                target = planner.resolve_tensor(item).detach()
                target.copy_(part.view(target.shape))
                planner.commit_tensor(item, target)
        finally:
            self._close()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _part(self, model: Model[torch.Tensor], item: ReadItem) -> tuple[str, tuple[slice, ...]]:
        """Return the name and the index of what an item reads."""
        name = stored_name(item.storage_index.fqn, self._record.model)
        bounds = [
            (begin, begin + length)
            for begin, length in zip(item.storage_offsets, item.lengths, strict=True)
        ]
        if bounds and model.specs[name].dtype is DType.F4:  # torch counts pairs
            bounds[-1] = (2 * bounds[-1][0], 2 * bounds[-1][1])
        return name, tuple(slice(*pair) for pair in bounds)

    def _value(self, key: str) -> io.BytesIO:
        """Return a value as the planner takes it: a pickle, made here and now of plain values."""
        try:
            value = decode(self._record.values[key][1], KINDS)
        except (ValueError, RecursionError) as error:
            raise BlobDamaged(f"{self._reference}: value {quote(key)}: {error}") from None
        data = io.BytesIO()
        torch.save(value, data)
        data.seek(0)
        return data

    def _close(self) -> None:
        if self._model is not None:
            self._model.close()
            self._model = None
