"""Checkpoints of the Trainer of transformers as steps of a store."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from blobstore.core.libraries import optional_libraries
from blobstore.core.targets import check_target
from blobstore.errors import BlobDamaged
from blobstore.integrations.torch_checkpoint.export import export_trainer
from blobstore.manifests.reference import Reference
from blobstore.manifests.step_record import METRICS_FILE
from blobstore.operations.create.create import create
from blobstore.operations.describe.cat import read_file
from blobstore.operations.maintenance.names import copy_model
from blobstore.store.local import LocalStore

with optional_libraries():
    import torch.distributed as dist
    from transformers import TrainerCallback

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from blobstore.store.local import StoreLike

__all__ = ["StoreCallback"]

_STATE: Final = "trainer_state.json"


class StoreCallback(TrainerCallback):
    """Keeps each checkpoint that a Trainer writes, as ``RUN:step-N`` with its optimizer in ``RUN:step-N.state``.

    ``RUN:last`` is the newest, and ``RUN:best`` the one with the best ``metric_for_best_model``.
    """

    def __init__(self, run: str, store: StoreLike = None) -> None:
        """Write nothing yet.

        Args:
            run: the name of the run, without a tag.
            store: the store or its folder; by default ``$BLOBSTORE_HOME`` or ``~/.blobstore``.

        Raises:
            InvalidReference: ``run`` is not such a name.
            UsageError: the store is not a folder. ``push`` sends its steps to object storage.
        """
        Reference.parse(f"{run}:last")  # now, and not at the first checkpoint of a long training
        self._run = run
        self._store = LocalStore.of(store)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Import the checkpoint that was just written, in the first process. Raises as :func:`create`."""
        del control
        if args.distributed_state is not None:  # each process writes its own random state
            args.distributed_state.wait_for_everyone()
        if not state.is_world_process_zero:
            return
        folder = _folder(str(args.output_dir), state.global_step)
        logged = {
            name: value
            for entry in state.log_history
            if entry["step"] == state.global_step
            for name, value in entry.items()
            if type(value) in (int, float) and math.isfinite(value)
        }
        _write(folder / METRICS_FILE, logged)
        step = f"{self._run}:step-{state.global_step}"
        create(folder, step, store=self._store, state=True)
        is_best = state.best_global_step == state.global_step
        for tag in ("last", "best") if is_best else ("last",):
            copy_model(step, f"{self._run}:{tag}", store=self._store, force=True)

    def restore(self, folder: str | os.PathLike[str], tag: str = "last") -> str:
        """Write a step into ``output_dir`` again, and the best one before it; return what the Trainer resumes from.

        All processes of a run call it, and any number of them: the first one of each machine writes.

        Args:
            folder: the ``output_dir`` of the Trainer.
            tag: the tag of the step.

        Raises:
            ModelNotFound: the store has no such step.
            BlobDamaged: it does not say which one it is. Otherwise as :func:`export_trainer`.
        """
        name = f"{self._run}:{tag}"
        try:
            state = json.loads(read_file(name, _STATE, store=self._store))
            step, best = int(state["global_step"]), int(state["best_global_step"] or 0)
        except (KeyError, TypeError, ValueError, RecursionError):
            raise BlobDamaged(f"{name}: {_STATE} does not say which step it is") from None
        found, kept = _folder(folder, step), _folder(folder, best)
        is_first = (
            os.environ.get("LOCAL_RANK", "0") == "0"
        )  # of its machine, as torchrun numbers them
        has_ranks = dist.is_available() and dist.is_initialized()
        for rank in range(dist.get_world_size() if has_ranks else 1):
            # One after the other, because machines may share the folder.
            if not has_ranks or (rank == dist.get_rank() and is_first):
                if best:
                    export_trainer(f"{self._run}:step-{best}", kept, store=self._store, force=True)
                    state["best_model_checkpoint"] = str(kept)
                if best != step:
                    export_trainer(name, found, store=self._store, force=True)
                _write(found / _STATE, state)
            if has_ranks:
                dist.barrier()
        return str(found)


def _write(path: Path, value: Any) -> None:
    check_target(path)
    path.write_text(json.dumps(value))


def _folder(output: str | os.PathLike[str], step: int) -> Path:
    return Path(output, f"checkpoint-{step}")
