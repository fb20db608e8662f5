"""Checkpoints of Lightning's Trainer as steps of a store."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blobstore.core.libraries import optional_libraries
from blobstore.manifests.reference import Reference
from blobstore.manifests.step_record import state_of
from blobstore.objects.address import StoreAddress, is_address
from blobstore.objects.store import ObjectStore
from blobstore.operations.create.save import save
from blobstore.operations.load import load
from blobstore.operations.maintenance.names import remove_models

with optional_libraries():
    from lightning.fabric.plugins import CheckpointIO

if TYPE_CHECKING:
    import os

    from blobstore.store.local import StoreLike

__all__ = ["StoreCheckpointIO"]


class StoreCheckpointIO(CheckpointIO):
    """Saves checkpoints as steps: ``epoch=0-step=10.ckpt`` is ``RUN:epoch-0-step-10``, in any folder.

    Pass it in the ``plugins`` of a Trainer.
    """

    def __init__(self, run: str, store: StoreLike = None) -> None:
        """Write nothing yet.

        Args:
            run: the name of the run, without a tag.
            store: the store or its folder, or the address of one in object storage.

        Raises:
            InvalidReference: ``run`` is not such a name.
        """
        Reference.parse(f"{run}:last")  # now, and not at the first checkpoint of a long training
        self._run = run
        self._store = store

    def _name(self, path: str | os.PathLike[str]) -> str:
        return f"{self._run}:{re.sub('[^A-Za-z0-9_.-]', '-', Path(path).stem)}"

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Save a checkpoint. Raises as :func:`save`."""
        del storage_options
        plain = {
            key: dict(one) if isinstance(one, dict) else one for key, one in checkpoint.items()
        }
        save(plain, self._name(path), model="state_dict", store=self._store)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = None,
        weights_only: bool | None = None,
    ) -> Any:
        """Return a checkpoint, on the CPU; nothing is unpickled. Raises as :func:`load`."""
        del map_location, weights_only
        return load(self._name(path), store=self._store)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove the names of a checkpoint. Raises as :func:`remove`."""
        step = Reference.parse(self._name(path))
        names = [step, state_of(step)]
        if is_address(self._store):
            ObjectStore(StoreAddress.parse(str(self._store))).remove(names)
        else:
            remove_models(names, store=self._store)
