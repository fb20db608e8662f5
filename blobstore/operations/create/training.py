"""Imports all of a training's state with its model, as the two names of a step: ``create --state``."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

from blobstore.core.arguments import local_path
from blobstore.errors import UsageError
from blobstore.operations.create.step import StepPlan, save_step
from blobstore.planning.import_options import ImportOptions
from blobstore.sources.base import SourceOptions
from blobstore.sources.training import TRAINER_FILES, TrainingState

if TYPE_CHECKING:
    import os
    from concurrent.futures import Executor

    from blobstore.core.progress import Progress
    from blobstore.operations.create.create import Created
    from blobstore.sources.base import TensorSource
    from blobstore.store.local import LocalStore
    from blobstore.store.names import NameUpdate


def without_state(options: SourceOptions) -> SourceOptions:
    """Return the options to open the source of the model with: other files of the training are read apart."""
    return replace(options, exclude=(*options.exclude, *TRAINER_FILES))


def import_state(
    source: str | os.PathLike[str],
    opened: TensorSource,
    update: NameUpdate,
    store: LocalStore,
    options: ImportOptions,
    *,
    started: float,
    jobs: int | None = None,
    progress: Progress | None = None,
    paranoid: bool = False,
    executor: Executor | None = None,
) -> Created:
    """Import all of a training's state; the arguments are those of :func:`import_source`.

    Raises:
        UsageError: an option would convert or rename tensors, or is one of other imports.
        UnsupportedSource: the source has no state that can be read. Otherwise as :func:`import_source`.
    """
    if options._replace(source=SourceOptions()) != ImportOptions() or options.source.strip_prefix:
        raise UsageError(
            "the state of a training is kept as it is, without options that convert or rename tensors"
        )
    if paranoid or executor is not None:
        raise UsageError(
            "the state of a training is imported neither with paranoid nor on an executor"
        )
    with contextlib.closing(TrainingState(opened, local_path(source, "source"))) as state:
        created = save_step(
            StepPlan(state.tensors, model=state.part, files=state.files),
            state.record,
            update.reference,
            store,
            started=started,
            jobs=jobs,
            progress=progress,
            check=opened.check_unchanged,
        )
        return replace(created, notices=tuple(state.notices))
