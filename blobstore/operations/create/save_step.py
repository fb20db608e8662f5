"""Saves the state of a training program in this process as a step: as ``StoreWriter`` does on one rank."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from blobstore.core.digest import Digest
from blobstore.core.workers import WorkerPool
from blobstore.manifests.step_record import stored_name
from blobstore.operations.create.create import Created
from blobstore.operations.create.jobs import reporting
from blobstore.operations.create.places import open_place
from blobstore.operations.create.step import StepPlan
from blobstore.quantization.tensor_bytes import Converter
from blobstore.sources.memory import MemorySource

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from typing_extensions import Buffer

    from blobstore.core.progress import Progress
    from blobstore.core.tensor import TensorSpec
    from blobstore.manifests.reference import Reference
    from blobstore.manifests.step_record import StepRecord
    from blobstore.planning.grouping import BlobPlan
    from blobstore.store.ingest import Ingested
    from blobstore.store.local import StoreLike


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSave:
    """A step that is to be saved."""

    plan: StepPlan
    record: StepRecord
    source: MemorySource

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, tuple[TensorSpec, Callable[[], Buffer]]],
        record: StepRecord,
        **options: Any,
    ) -> StepSave:
        """Plan a step.

        Args:
            tensors: the specs of the tensors and functions that return their bytes, by key.
            record: the rest of the state.
            options: those of :class:`StepPlan`.

        Raises:
            UsageError, UnsupportedSource: as :class:`StepPlan`.
        """
        specs = {key: spec for key, (spec, _) in tensors.items()}
        plan = StepPlan(specs, model=record.model, **options)
        found = {
            spec._replace(name=stored_name(key, record.model)): read
            for key, (spec, read) in tensors.items()
        }
        return cls(plan=plan, record=record, source=MemorySource(found, {}, {}))

    def run(
        self,
        reference: Reference,
        store: StoreLike,
        *,
        started: float,
        jobs: int | None,
        progress: Progress | None,
        check: Callable[[], object] = lambda: None,
    ) -> Created:
        """Write the step to a store, or to one in object storage. Raises as :func:`save`.

        ``check`` is called before the step gets its names.
        """
        place = open_place(store)
        convert = Converter(self.source.read).convert
        pool = WorkerPool(jobs, progress, sum(blob.size for blob in self.plan.blobs))
        with place.checked(), contextlib.closing(place.begin(self.plan, reference)) as step:

            def add(blob: BlobPlan) -> Ingested:
                buffers = reporting(lambda: blob.buffers(convert), pool.report, blob.name)
                return step.blobs.add(blob.size, buffers)

            items = pool.run(self.plan.blobs, add)
            check()
            names = [blob.name for blob in self.plan.blobs]
            published = step.publish(dict(zip(names, items, strict=True)), self.record)
        return Created(
            reference=reference,
            digest=Digest.of(published.manifests[-1].to_bytes()),
            tensors=len(self.source.specs),
            blobs=len(published.manifests[0].layers) + 1,
            bytes_written=sum(item.size for item in items if item.written),
            bytes_present=sum(item.size for item in items if not item.written),
            blobs_repaired=published.repaired,
            repository=None,
            commit=None,
            replaced=published.replaced,
            seconds=time.monotonic() - started,
            notices=(),
        )
