"""Writes a step as a folder of ``torch.distributed.checkpoint``, which programs without this package load."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from blobstore.core.escape import quote
from blobstore.errors import BlobDamaged
from blobstore.folders.writer import atomic_folder, resolve_target, write_new
from blobstore.manifests.plain_values import decode
from blobstore.manifests.reference import Reference
from blobstore.manifests.step_record import RECORD_FILE, stored_name
from blobstore.models.torch_values import KINDS
from blobstore.operations.export.export import Exported
from blobstore.operations.load import record_of
from blobstore.operations.open import open_model
from blobstore.safetensors.torch import empty_tensor

if TYPE_CHECKING:
    import os

    from torch.distributed.checkpoint.metadata import MetadataIndex

    from blobstore.core.progress import Progress
    from blobstore.manifests.step_record import StepRecord
    from blobstore.models.model import Model
    from blobstore.store.local import StoreLike


def export_checkpoint(
    reference: str | Reference,
    folder: str | os.PathLike[str],
    *,
    store: StoreLike = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Exported:
    """Write a step, or any other model, as a folder of ``torch.distributed.checkpoint``.

    Its ``load`` reads the folder with ``FileSystemReader``, on any number of ranks. The digests of all blobs are
    checked first. One tensor at a time is in memory.

    Args:
        reference: the name; that of all of a step ends in ``.state``.
        folder: the folder to create; it may exist if it is empty.
        store: the store or its folder; by default ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        force: replace a folder that has only files of the same names, or weights.
        progress: called with a tensor, bytes done and total bytes.

    Raises:
        ModelNotFound: the store has no model of this name.
        BlobMissing, BlobDamaged, InvalidManifest: the model is damaged.
        BlobstoreError: the folder exists or cannot be written.
    """
    started = time.monotonic()
    reference = Reference.of(reference)
    target = resolve_target(folder, force=force)
    with (
        open_model(reference, store=store, framework="torch", verify="none", read="pread") as model,
        atomic_folder(target, force=force) as new,
    ):
        model.check("digest")
        record = record_of(model)
        planner = _Planner(model, record, progress)
        planner.set_up_planner(planner.described(), is_coordinator=True)
        # What save does on one rank, whose errors would hide ours.
        writer = FileSystemWriter(new)
        writer.set_up_storage_writer(is_coordinator=True)
        plan = writer.prepare_local_plan(planner.create_local_plan())
        plans, metadata = planner.create_global_plan([plan])
        (plan,) = writer.prepare_global_plan(plans)
        results = writer.write_data(planner.finish_plan(plan), planner).wait()
        paths = dict(record.tensors) | {key: path for key, (path, _) in record.values.items()}
        writer.finish(replace(metadata, planner_data=paths), [results])
        for name in model.files:
            if name != RECORD_FILE:
                write_new(new / name, model.read_file(name))
        files = [path for path in new.rglob("*") if path.is_file()]
        return Exported(
            folder=target,
            files=len(files),
            tensors=len(record.tensors),
            shards=1,
            is_original=False,
            bytes_written=sum(path.stat().st_size for path in files),
            seconds=time.monotonic() - started,
        )


class _Planner(DefaultSavePlanner):
    """Plans the tensors of a model by their specs, and reads each when it is written."""

    def __init__(
        self, model: Model[torch.Tensor], record: StepRecord, progress: Progress | None
    ) -> None:
        super().__init__(flatten_state_dict=False)
        self._model, self._record, self._progress = model, record, progress
        self._done = 0
        self._last = torch.empty(0)

    def described(self) -> dict[str, Any]:
        """Return the state by its keys, with tensors that have no data."""
        state: dict[str, Any] = {
            key: empty_tensor(self._model.specs[self._name(key)], torch.device("meta"))
            for key in self._record.tensors
        }
        for key, (_, value) in self._record.values.items():
            try:
                state[key] = decode(value, KINDS)
            except ValueError as error:
                raise BlobDamaged(f"value {quote(key)}: {error}") from None
        return state

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return a value, or a tensor that is valid until the next one."""
        if index.fqn not in self._record.tensors:
            return super().lookup_object(index)
        name = self._name(index.fqn)
        self._last.untyped_storage().resize_(0)  # torch keeps all that it has written
        self._last = self._model.get_slice(name)[()].clone()
        self._done += self._last.nbytes
        if self._progress is not None:
            self._progress(name, self._done, self._model.nbytes)
        return self._last

    def _name(self, key: str) -> str:
        return stored_name(key, self._record.model)
