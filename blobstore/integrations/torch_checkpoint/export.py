"""Writes steps as folders that programs without this package load: torch's own, and those of the Trainer."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from blobstore.core.globs import any_glob_matches
from blobstore.core.progress import Meter
from blobstore.errors import UsageError
from blobstore.folders.writer import atomic_folder, resolve_target
from blobstore.manifests.file_names import is_valid_part
from blobstore.manifests.reference import Reference
from blobstore.manifests.step_record import step_of
from blobstore.operations.export.export import Exported, export_model, exported_folder
from blobstore.operations.load import check_is_state_of, open_step, read_state
from blobstore.operations.open import open_model
from blobstore.sources.training import TRAINER_STATE

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import WriteItem

    from blobstore.core.progress import Progress
    from blobstore.store.local import StoreLike


def export_checkpoint(
    reference: str | Reference,
    folder: str | os.PathLike[str],
    *,
    store: StoreLike = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Exported:
    """Write all of a step, or any other model, as a folder of ``torch.distributed.checkpoint``. Raises as :func:`load`.

    Its ``load`` reads the folder with ``FileSystemReader``, on any number of ranks. Blobs are mapped, so that
    memory is needed only for the tensors of frozen ones. The digests of all are checked first. ``force`` replaces a
    folder that has only files of the same names, or weights.
    """
    started = time.monotonic()
    target = resolve_target(folder, force=force)
    with open_step(reference, store, framework="torch", verify="digest") as model:
        planner, state = _Planner(Meter(progress, model.nbytes)), read_state(model)
    with atomic_folder(target, force=force) as new:
        # What save does on one rank, without its warning that there is one, and with our errors.
        writer = FileSystemWriter(new)
        planner.set_up_planner(state, is_coordinator=True)
        writer.set_up_storage_writer(is_coordinator=True)
        plan = writer.prepare_local_plan(planner.create_local_plan())
        plans, metadata = planner.create_global_plan([plan])
        (plan,) = writer.prepare_global_plan(plans)
        writer.finish(metadata, [writer.write_data(planner.finish_plan(plan), planner).wait()])
        numbers = {"tensors": planner.tensors, "shards": 1, "is_original": False}
        return exported_folder(new, target, started, **numbers)


def export_trainer(
    reference: str | Reference,
    folder: str | os.PathLike[str],
    *,
    store: StoreLike = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Exported:
    """Write a step of ``create(…, state=True)`` as a folder of the Trainer of transformers, to resume from it.

    Raises:
        UsageError: the step has no state of the Trainer, or its model or its state was replaced without the other.
            Otherwise as :func:`export_checkpoint`.
    """
    started = time.monotonic()
    target = resolve_target(folder, force=force)
    step = step_of(Reference.of(reference))
    with open_step(reference, store, framework="torch", verify="digest") as model:
        manifest, state = model.manifest, read_state(model)
    found = {f"{part}{'.pth' if f'{part}'[:3] == 'rng' else '.pt'}": state[part] for part in state}
    parts = [name for name in filter(is_valid_part, found) if any_glob_matches(name, TRAINER_STATE)]
    if not parts:
        raise UsageError(f"{reference} has no optimizer and no other part of the Trainer's state")
    with atomic_folder(target, force=force) as new:
        exported = export_model(step, new, store=store, progress=progress)
        # Only now: it may have been replaced since.
        with open_model(step, store=store, verify="none") as model:
            check_is_state_of(manifest, model)
        for name in parts:
            with (new / name).open("xb") as file:
                torch.save(found[name], file)
                file.flush()
                os.fsync(file.fileno())
        numbers = {"tensors": exported.tensors, "shards": exported.shards, "is_original": False}
        return exported_folder(new, target, started, **numbers)


class _Planner(DefaultSavePlanner):
    """Reports the tensors that are written, and counts them."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter
        self.tensors = 0

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Return a tensor, or the bytes of a value."""
        data = super().resolve_data(write_item)
        if isinstance(data, torch.Tensor):
            self._meter.add(data.nbytes, write_item.index.fqn)
            self.tensors += 1
        return data
