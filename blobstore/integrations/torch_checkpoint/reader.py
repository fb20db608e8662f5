"""Reads a step: what ``torch.distributed.checkpoint.load`` calls, in its order, on each rank.

Each tensor is one piece for the planner of torch, which divides it among any number of ranks. A rank reads the
ranges that it needs.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from blobstore.core.escape import quote
from blobstore.core.tensor import DType
from blobstore.errors import BlobDamaged, UsageError
from blobstore.manifests.plain_values import encode
from blobstore.manifests.step_record import RECORD_FILE
from blobstore.operations.create.places import can_be_step
from blobstore.operations.load import open_step, read_state
from blobstore.safetensors.torch import empty_tensor

if TYPE_CHECKING:
    import os

    from torch.distributed.checkpoint.metadata import Metadata
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
        self._model: Model[torch.Tensor]
        self._state: dict[str, Any] = {}
        """The values of the step by key, and tensors without data."""
        self._names: dict[str, str] = {}
        """The names of the tensors in the store, by key."""

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
        self._model = model = open_step(
            self._reference, self._store, framework="torch", verify=self._verify
        )
        meta = torch.device("meta")
        tensors = {name: empty_tensor(spec, meta) for name, spec in model.specs.items()}
        state = read_state(model, tensors)
        if self._model_part and RECORD_FILE not in model.files:
            state = {self._model_part: state}
        names = {id(tensor): name for name, tensor in tensors.items()}
        planner = DefaultSavePlanner()
        try:
            planner.set_up_planner(state, is_coordinator=True)
            metadata = planner.create_global_plan([planner.create_local_plan()])[1]
        except (ValueError, RecursionError) as error:
            raise BlobDamaged(f"{self._reference}: {quote(error)}") from None
        self._state = planner.state_dict
        self._names = {
            key: names[id(value)]
            for key, value in self._state.items()
            if isinstance(value, torch.Tensor)
        }
        return metadata

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
            BlobDamaged, BlobMissing: a tensor cannot be read.
            UnsupportedSource: a value is a tuple that has tensors.
            RemoteError: the object storage cannot be reached.
        """
        tensors = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
        with self._model as model:
            for item in plan.items:
                if item.type == LoadItemType.BYTE_IO:
                    planner.load_bytes(item, self._value(item.storage_index.fqn))
            parts = model.read_parts(map(self._part, tensors))
            for item, part in zip(tensors, parts, strict=True):
                target = planner.resolve_tensor(item).detach()
                target.copy_(part.view(target.shape))
                planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _part(self, item: ReadItem) -> tuple[str, tuple[slice, ...]]:
        """Return the name and the index of what an item reads."""
        name = self._names[item.storage_index.fqn]
        begins, lengths = list(item.storage_offsets), list(item.lengths)
        if begins and self._model.specs[name].dtype is DType.F4:  # torch counts pairs
            begins[-1], lengths[-1] = 2 * begins[-1], 2 * lengths[-1]
        return name, tuple(
            slice(one, one + size) for one, size in zip(begins, lengths, strict=True)
        )

    def _value(self, key: str) -> io.BytesIO:
        """Return a value as the planner takes it: a pickle, made here and now of plain values."""
        encode(self._state[key], key)  # refuses a tuple with tensors: they have no data here
        data = io.BytesIO()
        torch.save(self._state[key], data)
        data.seek(0)
        return data
