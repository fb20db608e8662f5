"""A step of a training run: the plan of its blobs, and its one or two names.

A step has the name of all of its state, and if the program says which part is the model, another one of the model
alone. Both are the models that ``save`` would make of the same tensors and files, so a blob is stored once, and every
command works with them. See docs/internals/decisions/0017-steps-are-two-models.md.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn

from blobstore.core import strict_json
from blobstore.core.digest import Digest
from blobstore.core.escape import quote
from blobstore.core.workers import WorkerPool
from blobstore.errors import UnsupportedSource, UsageError
from blobstore.manifests import media_types
from blobstore.manifests.step_record import (
    METRICS_FILE,
    RECORD_FILE,
    state_of,
    stored_name,
)
from blobstore.operations.create.create import Created, add_files
from blobstore.operations.create.files import FileLayer, file_layers, stacks_layer
from blobstore.operations.create.jobs import reporting
from blobstore.operations.create.places import open_place
from blobstore.planning.import_options import ImportOptions, source_record
from blobstore.quantization.detect import is_marker
from blobstore.quantization.recipes import Copied
from blobstore.quantization.tensor_bytes import Converter
from blobstore.sources.memory import MemorySource

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Buffer

    from blobstore.core.progress import Progress
    from blobstore.core.tensor import TensorSpec
    from blobstore.manifests.model import Manifest
    from blobstore.manifests.reference import Reference
    from blobstore.operations.create.places import StepBlobs
    from blobstore.planning.grouping import BlobPlan
    from blobstore.planning.plan import ModelPlan
    from blobstore.store.ingest import Ingested
    from blobstore.store.local import StoreLike

    Read = Callable[[], Buffer]

METADATA: Final[Mapping[str, Mapping[str, str]]] = {
    "torch": {"format": "pt"},
    "mlx": {"format": "mlx"},
    "numpy": {},
}
"""The metadata that transformers and mlx-lm write into their files, and look for."""


class _Part(NamedTuple):
    """A model as a part of the step."""

    source: MemorySource
    options: ImportOptions
    plan: ModelPlan

    @classmethod
    def of(cls, source: MemorySource) -> _Part:
        options = ImportOptions(as_is=any(map(is_marker, source.specs.values())))
        plan = options.plan(source)
        # Bytes come from many processes and are copied. Nothing is converted, as it would be with one source.
        if not all(isinstance(recipe, Copied) for blob in plan.blobs for recipe in blob.tensors):
            options = ImportOptions(as_is=True)
            plan = options.plan(source)
        return cls(source, options, plan)

    def manifest(self, added: Mapping[str, Ingested], adder: StepBlobs) -> Manifest:
        """Return the manifest, after adding the blobs that are not tensors."""
        record, _ = source_record(self.source, self.plan.blobs, self.options)
        layer = FileLayer(media_types.SOURCE, "", record.to_bytes())
        layers = [*stacks_layer(self.plan.blobs), *file_layers(self.source), layer]
        blobs = [added[blob.name] for blob in self.plan.blobs]
        return add_files(self.source, self.plan, layers, adder, blobs, WorkerPool(1, None, 0))


class StepPlan:
    """The blobs of a step."""

    def __init__(
        self,
        tensors: Mapping[str, tuple[TensorSpec, Read]],
        *,
        model: str = "",
        files: Mapping[str, bytes] | None = None,
        metrics: Mapping[str, float] | None = None,
        framework: str = "torch",
    ) -> None:
        """Plan a step; nothing is read.

        Args:
            tensors: the tensors by their keys, each with a function that returns its bytes in the form of a file.
            model: the part of the keys that is the model, such as ``model``; empty if none is.
            files: small files of the model, by name.
            metrics: numbers that describe the step, by name.
            framework: the library of the tensors.

        Raises:
            UsageError: no tensor is of the model, two tensors would have one name, or a file or metric is not valid.
            UnsupportedSource: the tensors cannot be stored.
        """
        if type(model) is not str:
            raise UsageError(f"model is the key of a part of the state, got {quote(model)}")
        self._metrics = {METRICS_FILE: _metrics_json(metrics)} if metrics else {}
        self.keys: dict[str, str] = {}
        """The keys of the tensors, by the names in the store."""
        for key in sorted(tensors):
            other = self.keys.setdefault(stored_name(key, model), key)
            if other != key:
                raise UsageError(
                    f"tensors {quote(other)} and {quote(key)} would both be stored as {quote(stored_name(key, model))}",
                    advice="rename the part of the state that has the second one",
                )
        named = {
            tensors[key][0]._replace(name=name): tensors[key][1] for name, key in self.keys.items()
        }
        metadata = METADATA[framework]
        self.source = MemorySource(named, metadata, {})
        """The tensors under their names in the store."""
        self._all = _Part.of(self.source)
        self.model: _Part | None = None
        if model:
            own = {spec: read for spec, read in named.items() if self.keys[spec.name] != spec.name}
            if not own:
                raise UsageError(
                    f"the state has no tensors under {quote(model)}, which is to be the model",
                    advice=f"its parts are {', '.join(map(quote, sorted({key.partition('.')[0] for key in tensors})))}",
                )
            self.model = _Part.of(MemorySource(own, metadata, {**(files or {}), **self._metrics}))
            planned = {blob.name: blob for blob in self.blobs}
            if any(planned.get(blob.name) != blob for blob in self.model.plan.blobs):
                raise UnsupportedSource(
                    f"the blobs of {quote(model)} would be others with the rest of the state",
                    advice="save the model alone, without its optimizer",
                )
        elif files:
            raise UsageError("files belong to the model; say which part of the state it is")

    @property
    def blobs(self) -> tuple[BlobPlan, ...]:
        """All blobs with tensors, each once."""
        return self._all.plan.blobs

    def names(self, reference: Reference) -> list[Reference]:
        """Return the names of the step in the order in which they are given."""
        return [reference] if self.model is None else [state_of(reference), reference]

    def manifests(
        self, blobs: StepBlobs, added: Mapping[str, Ingested], record: bytes
    ) -> list[Manifest]:
        """Return the manifests of :meth:`names`, after adding the blobs without tensors.

        Args:
            blobs: adds the blobs.
            added: the blobs of the tensors by name.
            record: the content of the file with the state.

        Raises:
            UsageError: the values are too large.
        """
        specs, (metadata,) = self.source.specs.values(), self.source.metadata.values()
        files = {RECORD_FILE: record, **self._metrics}
        every = self._all._replace(
            source=MemorySource(dict.fromkeys(specs, unread), metadata, files)
        )
        return [part.manifest(added, blobs) for part in (every, self.model) if part is not None]


def save_step(
    plan: StepPlan,
    record: bytes,
    reference: Reference,
    store: StoreLike,
    *,
    started: float,
    jobs: int | None,
    progress: Progress | None,
    check: Callable[[], object] = lambda: None,
) -> Created:
    """Save a step. Raises as :func:`save`. ``check`` is called before the step gets its names."""
    place = open_place(store)
    convert = Converter(plan.source.read).convert
    pool = WorkerPool(jobs, progress, sum(blob.size for blob in plan.blobs))

    def add(blob: BlobPlan) -> Ingested:
        buffers = reporting(lambda: blob.buffers(convert), pool.report, blob.name)
        return place.blobs.add(blob.size, buffers)

    with contextlib.closing(place):
        place.begin(plan, reference)
        with place.checked():
            items = pool.run(plan.blobs, add)
            check()
            added = {blob.name: item for blob, item in zip(plan.blobs, items, strict=True)}
            manifests, is_replaced = place.publish(plan, added, record)
    return Created(
        reference=reference,
        digest=Digest.of(manifests[-1].to_bytes()),
        tensors=len(plan.keys),
        blobs=len(manifests[0].layers) + 1,
        bytes_written=sum(item.size for item in items if item.written),
        bytes_present=sum(item.size for item in items if not item.written),
        replaced=is_replaced,
        seconds=time.monotonic() - started,
    )


def _metrics_json(metrics: object) -> bytes:
    if not isinstance(metrics, Mapping):
        raise UsageError(f"metrics are numbers by name, got {quote(type(metrics).__name__)}")
    for name, value in metrics.items():
        if not isinstance(name, str) or type(value) not in (int, float):
            raise UsageError(f"a metric is a number, got {quote(value)} for {quote(name)}")
    try:
        return f"{strict_json.dumps(dict(metrics))}\n".encode()
    except ValueError as error:
        raise UsageError(f"metrics: {error}", advice="leave out what is not finite") from None


def unread() -> NoReturn:
    """Stand for the bytes of a tensor that are elsewhere."""
    raise AssertionError
