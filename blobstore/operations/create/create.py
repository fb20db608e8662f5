"""Workflow: a source becomes blobs, a manifest and a name.

Every blob is one independent job on a pool of threads; hashing, reading and writing let go of the
interpreter's lock. Memory is one buffer a thread, whatever the size of the model. The name comes
last, after everything that it names is durable.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import threading
import time
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blobstore.core.escape import escape
from blobstore.core.progress import Meter
from blobstore.core.workers import check_jobs
from blobstore.errors import BlobDamaged, BlobstoreError
from blobstore.manifests import media_types
from blobstore.manifests.descriptor import Descriptor
from blobstore.manifests.model import Manifest, layers_digest
from blobstore.manifests.reference import Reference
from blobstore.models.index import load_index, write_index
from blobstore.operations.create.convert import Converter
from blobstore.operations.create.files import config_json, file_layers, stacks_layer
from blobstore.operations.create.plan import QuantizeOptions, plan_source
from blobstore.quantization.recipes import Copied, Prequantized
from blobstore.sources.base import SourceOptions
from blobstore.sources.open import open_source
from blobstore.store.blobs import ADVICE
from blobstore.store.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from typing_extensions import Buffer

    from blobstore.core.digest import Digest
    from blobstore.core.progress import Progress
    from blobstore.operations.create.blobs import BlobPlan, ExpertForm
    from blobstore.operations.create.plan import ModelPlan
    from blobstore.quantization.policy import PolicyName
    from blobstore.sources.base import TensorSource
    from blobstore.store.ingest import Ingest, Ingested


@dataclass(frozen=True, slots=True, kw_only=True)
class Created:
    """What :func:`create` did."""

    reference: Reference
    tensors: int
    """Tensors of the source."""
    blobs: int
    """Layers of the manifest and its config."""
    bytes_written: int
    bytes_present: int
    """Bytes of blobs that the store had already."""
    seconds: float
    notices: tuple[str, ...]
    """What a person should know, one line each."""


def create(
    source: str | os.PathLike[str],
    reference: str | Reference,
    *,
    store: LocalStore | None = None,
    experts: ExpertForm = "packed",
    quantize: str | None = None,
    group_size: int | None = None,
    policy: PolicyName = "recommended",
    overrides: Sequence[str] = (),
    weights: str | None = None,
    ignore_unindexed: bool = False,
    subtree: str | None = None,
    keep_names: bool = False,
    paranoid: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Created:
    """Import a model under a name.

    Args:
        source: a Hugging Face model folder, a ``.safetensors`` file, a PyTorch checkpoint, a folder
            of Meta's, or a Hub id.
        reference: the name, ``[host/][namespace/]model[:tag]``.
        store: where to; by default the store of ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        experts: ``packed`` keeps experts as they are, one blob a layer; ``stacked`` joins them.
        quantize: ``int4``, ``int8``, ``nvfp4``, ``mxfp8`` or ``mxfp4``; None keeps the tensors.
        group_size: elements that share a scale: 32, 64 or 128 for int4 and int8.
        policy: ``recommended`` keeps or promotes what suffers most; ``uniform`` gives the type to
            every matrix that can take it but embeddings, norms, routers and vision.
        overrides: ``GLOB=TYPE``, the last that matches a tensor deciding; ``none`` keeps it.
        weights: pattern of file names, where a folder holds several sets of weights.
        ignore_unindexed: leave out tensors that the weight index does not name.
        subtree: the part of a PyTorch checkpoint, by its keys with dots between; ``.`` is all of it.
            By default it is the model, found by the names that training programs use.
        keep_names: keep the names and the order of rows of Meta's Llamas.
        paranoid: read blobs that the store has already again, and compare their digests.
        jobs: threads; by default the machine's processors.
        progress: called with what is being done, bytes done and bytes in all.

    Raises:
        SourceError, DamagedSource, SourceNotFound: the source cannot be imported.
        StoreError, NameConflict, BlobDamaged: the store cannot take it.
        InvalidReference, UsageError: an argument means nothing.
    """
    started = time.monotonic()
    if isinstance(reference, str):
        reference = Reference.parse(reference)
    check_jobs(jobs)
    request = QuantizeOptions(
        quant_type=quantize, group_size=group_size, policy=policy, overrides=overrides
    )
    store = store or LocalStore()
    store.check_name(reference)
    opened = open_source(
        source,
        SourceOptions(
            weights=weights,
            ignore_unindexed=ignore_unindexed,
            subtree=subtree,
            keep_names=keep_names,
        ),
        progress=progress,
    )
    try:
        planned = plan_source(opened, experts=experts, quantize=request)
        exists = _Exists(store, source, paranoid=paranoid)
        layers, ingested = _write(opened, planned, store, exists, reference, jobs, progress)
    finally:
        opened.close()
    return Created(
        reference=reference,
        tensors=len(opened.specs),
        blobs=len(layers),
        bytes_written=sum(item.size for item in ingested if item.written),
        bytes_present=sum(item.size for item in ingested if not item.written),
        seconds=time.monotonic() - started,
        notices=planned.notices,
    )


def _write(
    source: TensorSource,
    planned: ModelPlan,
    store: LocalStore,
    exists: _Exists,
    reference: Reference,
    jobs: int | None,
    progress: Progress | None,
) -> tuple[list[Descriptor], list[Ingested]]:
    blobs = planned.blobs
    with store.ingest(exists) as ingest:
        stored = _ingest_blobs(source, blobs, ingest, exists.stop, jobs, progress)
        layers = [
            Descriptor(
                media_type=media_types.TENSOR, digest=item.digest, size=item.size, name=blob.name
            )
            for blob, item in zip(blobs, stored, strict=True)
        ]
        for media_type, name, data in (*stacks_layer(blobs), *file_layers(source)):
            item = ingest.add(len(data), lambda data=data: [data])  # type: ignore[misc]
            stored.append(item)
            layers.append(
                Descriptor(media_type=media_type, digest=item.digest, size=item.size, name=name)
            )
        data = config_json(source, planned.quant_type, layers_digest(layers))
        config = ingest.add(len(data), lambda: [data])
        stored.append(config)
        ingest.publish()
        described = Descriptor(
            media_type=media_types.CONFIG, digest=config.digest, size=config.size
        )
        manifest = Manifest(config=described, layers=tuple(layers))
        # What a loader cannot resolve must not get a name; and the first one finds the index there.
        index = load_index(store, manifest.to_bytes())
        if not index.is_cached:
            write_index(store, manifest.to_bytes(), index)
        store.publish(reference, manifest)
    return [described, *layers], stored


def _ingest_blobs(
    source: TensorSource,
    blobs: Sequence[BlobPlan],
    ingest: Ingest,
    stop: threading.Event,
    jobs: int | None,
    progress: Progress | None,
) -> list[Ingested]:
    """Add all blobs; the results are in the order of the plan."""
    work = _Work(source, ingest, stop, Meter(progress, sum(blob.size for blob in blobs)))
    # In the order of the source's bytes, so that a cold disk is read forwards.
    place = {name: index for index, name in enumerate(source.specs)}
    in_order = sorted(blobs, key=lambda blob: place[blob.tensors[0].sources[0]])
    with ThreadPoolExecutor(jobs or os.cpu_count(), thread_name_prefix="blobstore") as pool:
        futures: dict[str, Future[Ingested]] = {}
        try:
            for blob in in_order:
                futures[blob.name] = pool.submit(work.add, blob)
            wait(futures.values(), return_when=FIRST_EXCEPTION)
            failed = [future for future in futures.values() if future.done() and future.exception()]
            if failed:
                failed[0].result()
        except BaseException:  # also Ctrl-C: stop the threads before their files are removed
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    return [futures[blob.name].result() for blob in blobs]


class _Work:
    """The job of one blob, with what all jobs share."""

    def __init__(
        self, source: TensorSource, ingest: Ingest, stop: threading.Event, meter: Meter
    ) -> None:
        self._stop = stop
        self._converter = Converter(source.read)
        self._ingest = ingest
        self._meter = meter

    def add(self, blob: BlobPlan) -> Ingested:
        """Store one blob."""
        reported = 0

        def buffers() -> Iterator[Buffer]:
            nonlocal reported
            done = 0
            for buffer in blob.buffers(self._converter.convert):
                _check_going(self._stop)
                yield buffer
                done += len(buffer)  # type: ignore[arg-type]
                if done > reported:  # a blob that turns out to be new is read a second time
                    self._meter.add(done - reported, blob.name)
                    reported = done

        is_copied = all(isinstance(recipe, Copied | Prequantized) for recipe in blob.tensors)
        return self._ingest.add(blob.size, buffers, once=not is_copied)


def _check_going(stop: threading.Event) -> None:
    if stop.is_set():
        raise BlobstoreError("stopped")


class _Exists:
    """Tells whether the store has a blob that can be used; one that is damaged is an error."""

    def __init__(
        self, store: LocalStore, source: str | os.PathLike[str], *, paranoid: bool
    ) -> None:
        self._store = store
        self._source = source
        self._is_paranoid = paranoid
        self.stop = threading.Event()
        """Set when what goes on shall end at once."""

    def __call__(self, digest: Digest, size: int) -> bool:
        try:
            exists = self._store.exists(digest, size)
            if exists and self._is_paranoid:
                self._store.check_digest(digest, size, lambda _: _check_going(self.stop))
        except BlobDamaged as error:
            what = str(error).removesuffix(ADVICE)
            raise BlobDamaged(f"{what}; {self._advice(digest)}, and create again") from None
        return exists

    def _advice(self, digest: Digest) -> str:
        """Return what to do, which depends on whether repair finds the blob by a model."""
        for reference in self._store.references():
            with contextlib.suppress(BlobstoreError):
                _, manifest = self._store.parse(reference)
                if any(blob.digest == digest for blob in manifest.blobs):
                    source = shlex.quote(escape(str(self._source)))
                    return f"run blobstore repair {reference} --from {source}"
        return "no model uses it: remove that file"
