"""Writes a step: what ``torch.distributed.checkpoint.save`` calls, in its order, on each rank.

The coordinator, rank 0, plans the blobs and their owners, and begins an import whose lease holds what all ranks
write. Each owner hashes and writes its blobs under temporary names. When all ranks have done so, the coordinator
gives the step its names. Until then nothing of it can be seen, and if a process dies, ``gc`` removes the rest.
"""

from __future__ import annotations

import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Literal

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from blobstore.core.escape import quote
from blobstore.core.workers import check_jobs
from blobstore.errors import BlobstoreError, UsageError
from blobstore.integrations.torch_checkpoint.exchange import all_agree, kept
from blobstore.integrations.torch_checkpoint.layout import RankState, plan_tasks, tensors_of
from blobstore.integrations.torch_checkpoint.rank import Rank, Remembered
from blobstore.integrations.torch_checkpoint.staging import Staging
from blobstore.manifests.reference import Reference
from blobstore.manifests.step_record import StoredName, encode_state, nested
from blobstore.objects.address import is_address
from blobstore.operations.create.places import can_be_step, open_place
from blobstore.operations.create.save import check_mapping, file_content
from blobstore.operations.create.step import StepPlan
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.store.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from concurrent.futures import Future as Freezing

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

    from blobstore.integrations.torch_checkpoint.layout import RankTask
    from blobstore.operations.create.places import Place
    from blobstore.operations.create.save import File
    from blobstore.store.ingest import Ingested
    from blobstore.store.local import StoreLike

    _Written = tuple[dict[str, Ingested], dict[str, Any]]
    """The blobs that a rank has added, and its values by key."""

_WINDOW: Final = 8 << 20
"""Bytes that an owner gets at a time. It holds two windows."""


class StoreWriter(StorageWriter, AsyncStager):
    """Saves with ``torch.distributed.checkpoint`` into a store.

    Pass it as the ``storage_writer`` of ``save`` or ``async_save``, with the name of the step as ``checkpoint_id``,
    such as ``run:step-1000``. All ranks must be able to write to the store. A writer can save any
    number of steps, one after the other. Use the same one for all steps of a run: it recognises tensors that have not
    changed since the step before, and does not gather them.

    Tensors are stored whole. Other values must be plain: None, booleans, numbers, texts, bytes, lists, tuples, sets,
    dicts (also ordered ones and counters), arrays and numbers of numpy, and dtypes, devices and sizes of torch. They
    are kept as JSON and have the same types when they are loaded; nothing is pickled. Others are refused, with the
    key of the value.

    ``async_save`` copies the state into memory that the writer keeps for the next save.
    """

    _synchronize_after_execute = False

    def __init__(
        self,
        store: StoreLike = None,
        *,
        model: str = "",
        files: Mapping[str, File] | None = None,
        metrics: Mapping[str, float] | None = None,
        process_group: dist.ProcessGroup | None = None,
        jobs: int | None = None,
        keep: Literal["files", "delta"] = "files",
    ) -> None:
        """Write nothing yet.

        Args:
            store: the store or its folder, or the address of one in object storage, such as
                ``s3://bucket/prefix``; by default ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
            model: the part of the state that is the model, such as ``model`` for ``{"model": …, "optimizer": …}``.
                The step then has two names: ``run:step-1000``, the model alone under its own names, which
                :func:`blobstore.open` and others use at once, and ``run:step-1000.state``, all of the state. Without
                it, the state has the one name.
            files: small files of the model by name, as for :func:`blobstore.save`: its config and tokenizer.
            metrics: numbers to keep with the step, such as ``{"loss": 1.2}``. They can be set again before each save.
            process_group: the group that is passed to ``save``; by default the default group.
            jobs: number of threads that hash the tensors which this rank has completely.
            keep: with ``delta``, rank 0 freezes all names of the run but those of the newest step on a thread, as
                :func:`blobstore.freeze` does: losslessly, as deltas where that saves space. A failure is a warning.

        Raises:
            UsageError: an argument is invalid, or the store is in object storage, where nothing is frozen.
            StoreError: this user has no home folder, and no store is given.
        """
        check_mapping({} if files is None else files, "files", "a dict of small files")
        check_jobs(jobs)
        if keep not in ("files", "delta") or (keep == "delta" and is_address(store)):
            raise UsageError(f"keep is 'files', or 'delta' in a folder, got {quote(keep)}")
        # A process that saves for this one opens it again.
        self._store = store if is_address(store) else LocalStore.of(store)
        self._model = model
        self._files = {name: file_content(name, file) for name, file in (files or {}).items()}
        self.metrics = metrics
        """Numbers that are kept with the next step."""
        self._group = process_group
        self._jobs = jobs
        self._keep = keep
        self._freezing: Freezing[None] | None = None
        self._reference: Reference | None = None
        self._place: Place | None = None
        self._plan: StepPlan | None = None
        """The plan of the step that has begun, on the coordinator."""
        self._before = Remembered()
        self._staging = Staging()
        self._window = _WINDOW

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a step with the name ``checkpoint_id``. Raises InvalidReference."""
        self._end()
        self._reference = None if checkpoint_id is None else Reference.of(str(checkpoint_id))

    def stage(self, state_dict: Any) -> Any:
        """Copy a state to save it on a thread, into the memory of the last copy unless that may be in use still."""
        return self._staging.copy(state_dict)

    def synchronize_staging(self) -> None:
        """Do nothing: a copy is complete when :meth:`stage` returns."""

    def close(self) -> None:
        """Release the memory of the copy."""
        self._staging = Staging()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether it can be the name of a step."""
        return can_be_step(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Check what can be checked without a plan. Raises UsageError if ranks save without each other."""
        del is_coordinator, args
        self._end()  # what an earlier save has left that failed on another rank
        if not kwargs.get("use_collectives", True):
            raise UsageError(
                "use_collectives=False saves each rank for itself, and a store has whole tensors",
                advice="save with use_collectives=True",
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Plan the blobs and their owners, and begin the import: on the coordinator.

        Raises:
            UsageError: no name is given, the state has no such model, or its names clash.
            UnsupportedSource: a tensor is of a type that a store does not have, or not all of it is saved.
            NameConflict, StoreError, StoreBusy: the store cannot be used.
        """
        # The planner has cached them, with the tasks of an earlier step.
        if not all(plan.usable for plan in plans):
            raise UsageError(
                "plans that are cached have no import to join",
                advice="use a planner without enable_plan_caching",
            )
        tensors = tensors_of(plans)
        step = StepPlan(tensors, model=self._model, files=self._files, metrics=self.metrics)
        ingest = self._opened.begin(step, self._named)
        self._plan = step
        folder, previous = self._opened.blobs.machine_folder, self._before.ingest
        tasks = plan_tasks(plans, step, self._model, ingest, folder, previous)
        return [replace(plan, storage_data=task) for plan, task in zip(plans, tasks, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the blobs that this rank owns, and send other ranks what they need.

        Raises:
            UnsupportedSource: a value is not plain.
            UsageError: the process group is not the one that saves.
            StoreError: the disk is full, or the store cannot be written.
            RuntimeError: another rank cannot be reached any more.
        """
        before, self._before = self._before, Remembered()
        try:
            with self._opened.checked():
                written = self._write(plan, planner, before)
        except BaseException:
            self._end()
            raise
        if self._plan is None:  # only the coordinator goes on
            self._end()
        self._staging.is_free = True
        result = WriteResult(MetadataIndex(f"rank {plan.storage_data.rank}"), 0, written)
        future: Future[list[WriteResult]] = Future()
        future.set_result([result])
        return future

    def _write(self, plan: SavePlan, planner: SavePlanner, before: Remembered) -> _Written:
        task: RankTask = plan.storage_data
        ranks = len(task.gathered)
        if ranks > 1 and dist.get_world_size(self._group) != ranks:
            raise UsageError(
                f"the process group of the writer has {dist.get_world_size(self._group)} ranks, and {ranks} save",
                advice="pass the same process_group to StoreWriter and to save",
            )
        errors: list[Exception] = []

        def agree(votes: list[bool]) -> list[bool]:
            return all_agree(self._group, votes) if ranks > 1 else votes

        votes = [False] * (1 + 2 * len(task.every))
        with kept(errors):
            state = RankState(plan, planner, self._model, self._window)
            values = state.values()
            if self._plan is None:
                self._opened.join(task.ingest)
            rank = Rank(
                task=task,
                state=state,
                ingest=self._opened.blobs,
                group=self._group,
                jobs=self._jobs or max(1, (os.cpu_count() or 1) // ranks),
                before=before if before.ingest == task.previous else Remembered(),
            )
            votes = [True, *rank.look()]
        is_well, *agreed = agree(votes)
        if is_well:  # and so all ranks can take part
            if agreed:
                rank.gather(agreed, errors, self._window)
            if all(agree([not errors])):
                with kept(errors):
                    rank.add()
        is_complete = all(agree([not errors]))
        if errors:
            raise errors[0]
        if not is_complete:  # the other rank reports why
            self._end()
            return {}, {}
        self._before = Remembered(task.ingest, rank.parts, rank.added)
        return rank.added, values

    @property
    def _named(self) -> Reference:
        if self._reference is None:
            raise UsageError("a step needs a name; pass it as checkpoint_id")
        return self._reference

    @property
    def _opened(self) -> Place:
        if self._place is None:
            self._place = open_place(self._store)
        return self._place

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Give the step its names, when all ranks have written: on the coordinator.

        Raises:
            NameTaken: another process gave one of them another model in the meantime.
            StoreError, StoreBusy: the store cannot be written, or the disk is full.
        """
        plan = self._plan
        if plan is None:
            raise BlobstoreError("another rank failed to write its part of the step")
        place = self._opened
        added: dict[str, Ingested] = {}
        values: dict[str, Any] = {key: StoredName(name) for name, key in plan.keys.items()}
        for result in (one for rank in results for one in rank):
            its_added, its_values = result.storage_data
            added |= its_added
            values |= its_values
        for item in added.values():
            place.blobs.adopt(item)
        paths = dict(metadata.planner_data or {})
        state = nested([(tuple(paths.get(key, (key,))), value) for key, value in values.items()])
        try:
            with place.checked():
                place.publish(plan, added, encode_state(state))
            if self._keep == "delta" and (self._freezing is None or self._freezing.done()):
                thread = ThreadPoolExecutor(1, thread_name_prefix="blobstore-freeze")
                self._freezing = thread.submit(
                    _freeze_earlier, LocalStore.of(self._store), plan.names(self._named), self._jobs
                )
                thread.shutdown(wait=False)
        finally:
            self._end()

    def _end(self) -> None:
        if self._place is not None:
            self._place.close()
        self._place = self._plan = None


def _freeze_earlier(store: LocalStore, newest: Sequence[Reference], jobs: int | None) -> None:
    """Freeze the names of a run whose models are not those of its newest step. Errors become warnings."""
    try:
        new = {store.read_manifest(name) for name in newest}
        names = [name for name in store.tags(newest[0]) if store.read_manifest(name) not in new]
        if names:
            freeze_models(names, store=store, jobs=jobs or 1)
    except BlobstoreError as error:
        warnings.warn(f"steps before {newest[-1]} were not frozen: {error}", stacklevel=1)
