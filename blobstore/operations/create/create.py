"""Imports a model: a source becomes blobs, a manifest and a name.

Each blob is an independent job, on a thread or in a worker process. Hashing, reading and writing release
the GIL. A job needs one buffer of memory, whatever the size of the model. The manifest gets its name
last, after everything that it lists is durable.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import functools
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypedDict, overload

from blobstore.core.digest import Digest
from blobstore.core.escape import cli_command, quote
from blobstore.core.workers import WorkerPool, check_jobs
from blobstore.errors import BlobstoreError, NameTaken, UsageError
from blobstore.manifests import media_types
from blobstore.manifests.descriptor import Descriptor
from blobstore.manifests.layers_digest import layers_digest
from blobstore.manifests.model import Manifest
from blobstore.manifests.reference import Reference
from blobstore.models.header_index import load_index, rewrite_indexes, write_index
from blobstore.operations.create.files import FileLayer, config_json, file_layers, stacks_layer
from blobstore.operations.create.jobs import (
    SharedImport,
    add_blob,
    add_in_worker,
    close_joined,
    reporting,
)
from blobstore.operations.create.ollama import opened_source
from blobstore.operations.create.source_names import is_elsewhere, source_name
from blobstore.planning.import_options import ImportOptions, source_record
from blobstore.planning.plan import quantize_options
from blobstore.quantization.representable import UnreadableGroups
from blobstore.quantization.tensor_bytes import Converter
from blobstore.sources.base import DEFAULT_OPTIONS, SourceOptions, advising_download
from blobstore.sources.hub import with_quantization
from blobstore.store.catalog import read_catalog
from blobstore.store.download_folders import Downloads, is_full
from blobstore.store.history import replacement_notices
from blobstore.store.local import LocalStore, StoreLike
from blobstore.store.names import ABSENT, NameUpdate
from blobstore.store.scan import scan_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from concurrent.futures import Executor
    from pathlib import Path
    from typing import Unpack

    from blobstore.core.progress import Progress
    from blobstore.manifests.source_record import SourceRecord
    from blobstore.operations.create.places import StepBlobs
    from blobstore.planning.grouping import BlobPlan, ExpertForm
    from blobstore.planning.plan import ModelPlan, QuantizeOptions
    from blobstore.sources.base import TensorSource
    from blobstore.store.ingest import Buffers, Ingest, Ingested
    from blobstore.store.names import Name

_MAX_HEADER = 1 << 20
"""Bytes of the header of a blob, at most, for a guess at its size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Created:
    """The result of :func:`blobstore.create`."""

    reference: Reference
    digest: Digest
    """Of the manifest."""
    tensors: int
    """Tensors of the source."""
    blobs: int
    """Layers of the manifest and its config."""
    bytes_written: int
    bytes_present: int
    """Bytes of blobs that the store already had."""
    blobs_repaired: int = 0
    """Blobs that the store already had, but damaged, and that were replaced."""
    repository: str | None = None
    """The Hub repository of the source, if it has one."""
    commit: str | None = None
    """The hash of the repository's commit."""
    replaced: bool
    """Whether the name belonged to another model before."""
    seconds: float
    notices: tuple[str, ...] = ()
    """Messages for the user, one line each."""


class CreateOptions(TypedDict, total=False):
    """The options of :func:`create` that say what a model becomes, and how."""

    source_options: SourceOptions
    sha256: str | None
    keep_hub_cache: bool
    experts: ExpertForm
    quantize: QuantizeOptions | str | None
    decode: bool
    as_is: bool
    paranoid: bool
    state: bool
    jobs: int | None
    executor: Executor | None


@overload
def create(
    source: str | os.PathLike[str],
    reference: Name | None = None,
    *,
    store: StoreLike = None,
    dry_run: Literal[False] = False,
    progress: Progress | None = None,
    **options: Unpack[CreateOptions],
) -> Created: ...
@overload
def create(
    source: str | os.PathLike[str],
    reference: Name | None = None,
    *,
    store: StoreLike = None,
    dry_run: Literal[True],
    progress: Progress | None = None,
    **options: Unpack[CreateOptions],
) -> ModelPlan: ...
def create(
    source: str | os.PathLike[str],
    reference: Name | None = None,
    *,
    store: StoreLike = None,
    source_options: SourceOptions = DEFAULT_OPTIONS,
    sha256: str | None = None,
    keep_hub_cache: bool = False,
    experts: ExpertForm = "packed",
    quantize: QuantizeOptions | str | None = None,
    decode: bool = False,
    as_is: bool = False,
    paranoid: bool = False,
    state: bool = False,
    jobs: int | None = None,
    executor: Executor | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Created | ModelPlan:
    """Import a model under a name.

    Args:
        source: a Hugging Face model folder, a ``.safetensors`` file, a PyTorch checkpoint, a folder
            of ``torch.distributed.checkpoint`` or of Meta's Llama, a GGUF file, ``ollama://NAME`` for a
            model of Ollama's, a Hub id, a folder in object storage, or the URL of a weight file.
        reference: the name, ``[host/][namespace/]model[:tag]``; or its update, which says what it must have had.
            By default the name of the source, if no other model has it: ``org/name[:revision]`` for the Hub's.
        store: the store or its folder; by default ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        source_options: which files and tensors of the source are read, and under which names.
        sha256: what the file of a URL must have, in hexadecimal digits.
        keep_hub_cache: download files of the Hub to the cache of its client, and leave them there. By default,
            files that the cache lacks are removed after the import.
        experts: ``packed`` keeps experts as they are, one blob per layer; ``stacked`` joins them.
        quantize: the type to quantize to, or all options; None keeps the tensors.
        decode: decode FP8 weights to BF16 instead of keeping them with their scales. ``quantize``
            decodes them in any case.
        as_is: keep all tensors as published. That is the default for quantized sources that are not
            understood.
        paranoid: hash all blobs that exist already, also those that were hashed since they last changed.
        state: import all of a training's state, too, as another model whose name ends in ``.state``. See
            docs/guides/train.md.
        jobs: number of threads; by default one per processor.
        executor: runs the jobs instead of threads, for example a ``ProcessPoolExecutor`` or the
            ``Client.get_executor()`` of Dask. It stays open. Its workers open the source and the
            store by their paths, so all of them need the same file system.
        dry_run: give no name, and return the plan of the model. Files that lie elsewhere are downloaded, and
            removed.
        progress: called with the name of a blob, bytes done and total bytes; by an executor's jobs
            once per blob.

    Returns:
        the name, the digest, and what was written; with ``dry_run``, the plan: the blobs, and how each
        tensor would be stored.

    Raises:
        SourceError, DamagedSource, SourceNotFound: the source cannot be imported.
        StoreError, StoreBusy, NameConflict: the store cannot be used.
        NameTaken: another process gave the name another model in the meantime.
        InvalidReference, UsageError: an argument is invalid.
    """
    started = time.monotonic()
    given, implied = reference, None
    if reference is None:
        if state:
            raise UsageError("a state needs a name")
        implied = source_name(source, source_options)
        reference = NameUpdate(implied, ABSENT)
    elif not isinstance(reference, NameUpdate):
        reference = Reference.of(reference)  # before anything else
    quantize = quantize_options(quantize)
    check_jobs(jobs, executor)
    store = LocalStore.of(store)
    update = store.names.seen(reference)
    if update is not given:  # the check before a name is given is enough for many imports
        store.names.check_name(update.reference)
    source, source_options = with_quantization(os.fspath(source), source_options)
    options = ImportOptions(source_options, quantize, experts, decode, as_is)
    read, import_opened = importer(source, options.source, state=state)
    with (
        _advising(source, implied),
        Downloads(
            store, is_quantized=options.quantize.quant_type is not None, progress=progress
        ) as downloads,
        opened_with(downloads, source, read, sha256, progress, in_cache=keep_hub_cache) as opened,
    ):
        if dry_run:
            if state:
                raise UsageError("a dry run plans the model; leave out the state")
            for _ in file_layers(opened):  # each file is opened, and may be something else
                pass
            return options.plan(opened)
        return import_opened(
            opened,
            update,
            store,
            options,
            started=started,
            paranoid=paranoid,
            jobs=jobs,
            executor=executor,
            progress=progress,
        )


def importer(
    source: str | os.PathLike[str], read: SourceOptions, *, state: bool
) -> tuple[SourceOptions, Callable[..., Created]]:
    """Return the options to open a source with, and the function that imports it then."""
    if not state:
        return read, import_source
    # The readers of checkpoints take a while to import.
    from blobstore.operations.create.training import import_state, without_state

    return without_state(read), functools.partial(import_state, source)


@contextlib.contextmanager
def opened_with(
    downloads: Downloads,
    source: str,
    options: SourceOptions,
    sha256: str | None,
    progress: Progress | None,
    *,
    in_cache: bool,
) -> Iterator[TensorSource]:
    """Open a source; download it first if it lies elsewhere. Raises as :func:`create`."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(downloads.named())
        if is_elsewhere(source):
            # The clients of servers take a while to import.
            from blobstore.remotes.download_files import opened_remote

            opened = opened_remote(source, options, downloads, sha256, progress)
            yield stack.enter_context(opened)
        elif sha256 is not None:
            raise UsageError(
                "a SHA-256 applies only to the URL of a file; files of the Hub are compared with its own"
            )
        else:
            cache = None if in_cache else downloads
            yield stack.enter_context(opened_source(source, options, progress, cache))


def import_source(
    opened: TensorSource,
    update: NameUpdate,
    store: LocalStore,
    options: ImportOptions,
    *,
    started: float | None = None,
    paranoid: bool = False,
    jobs: int | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
    planned: Callable[[ModelPlan], object] = lambda _: None,
    mark: str = "",
) -> Created:
    """Import an open source, which stays open, with the arguments of :func:`create`. Raises as that, and NameTaken.

    ``started`` is when the import began, by the monotonic clock; by default now. ``planned`` is called with the plan
    before anything is written. ``mark`` is that of a model that a server fetches, see :mod:`blobstore.store.fetched`.
    """
    started = time.monotonic() if started is None else started
    reference = update.reference
    plan = options.plan(opened)
    planned(plan)
    record, files, notices = _described(opened, plan, options, store, mark)
    _check_name_free(store, update, record)
    total = sum(blob.size for blob in plan.blobs)
    total += sum(file.size for file in files if file.is_large())
    pool = WorkerPool(jobs, progress, total, executor=executor)
    with with_space(store, plan.blobs, total), store.ingest(paranoid=paranoid) as ingest:
        in_workers = executor is not None
        done: dict[str, tuple[BlobPlan, Ingested]] = {}
        kept: list[str] = []
        while failed := _add_tensors(
            opened, plan.blobs, done, store, ingest, pool, in_workers=in_workers
        ):
            # Plan again, so that the record has what it takes to import the same blobs.
            kept += (error.tensor for error in failed)
            options = options.keeping(error.tensor for error in failed)
            plan = options.plan(opened)
        if kept:
            record, files, notices = _described(opened, plan, options, store, mark)
            notices += _kept(kept)
        added = [done[blob.name][1] for blob in plan.blobs]
        manifest = add_files(opened, plan, files, ingest, added, pool)
        opened.check_unchanged()
        data = manifest.to_bytes()
        # A model gets its name only if it can be opened.
        publish_blobs(store, ingest, [data])
        opened.check_unchanged()
        former = store.names.publish(update, manifest, ingest)
    return Created(
        reference=reference,
        digest=Digest.of(data),
        tensors=len(opened.specs),
        blobs=len(added),
        bytes_written=sum(item.size for item in added if item.written),
        bytes_present=sum(item.size for item in added if not item.written),
        blobs_repaired=len(ingest.repaired),
        repository=record.repository or None,
        commit=record.commit or None,
        replaced=former is not None,
        seconds=time.monotonic() - started,
        notices=(
            *notices,
            *_repairs(ingest.repaired),
            *replacement_notices(reference, former),
        ),
    )


def publish_blobs(store: LocalStore, ingest: Ingest, manifests: Iterable[bytes]) -> None:
    """Give all blobs of an import their names, and make the indexes of its manifests for faster opening.

    Raises:
        BlobDamaged, BlobMissing: a model could not be opened. Otherwise as :meth:`Ingest.publish`.
    """
    ingest.publish()
    rewrite_indexes(store, ingest.repaired)
    for data in manifests:
        index = load_index(store, data, use_index=not ingest.repaired)
        if not index.is_cached:
            write_index(store, data, index)


@contextlib.contextmanager
def _advising(source: str, implied: Reference | None) -> Iterator[None]:
    """Add to a NameTaken in the block which command replaces the model that has the name of the source.

    Errors of damaged sources get advice, too.
    """
    try:
        with advising_download():
            yield
    except NameTaken as error:
        if implied is None:
            raise
        raise NameTaken(
            f"{quote(implied)} is the name of another model",
            advice=f"{cli_command('create', source, implied)} replaces it",
        ) from error


def _check_name_free(store: LocalStore, update: NameUpdate, record: SourceRecord) -> None:
    """Check that a name that must be free has no model of another source, before anything is written."""
    if update.old is not ABSENT or store.names.version(update.reference) is ABSENT:
        return
    layers = store.resolve(update.reference).layers_of(media_types.SOURCE)
    if not any(layer.digest == Digest.of(record.to_bytes()) for layer in layers):
        raise NameTaken(f"another model has the name {quote(update.reference)}")


@contextlib.contextmanager
def with_space(store: LocalStore, blobs: Sequence[BlobPlan], total: int) -> Iterator[None]:
    """Check that an import has space before it writes, and say the same if the disk is full in the middle.

    Blobs that are as large as one of the store may be there.
    """
    needed = total
    if total > store.free_space():
        sizes = sorted(entry.stat().st_size for entry in scan_folder(store.folder("blobs")))
        for blob in blobs:
            index = bisect.bisect_left(sizes, blob.size)
            if index < len(sizes) and sizes[index] <= blob.size + _MAX_HEADER:
                needed -= blob.size
        if needed > store.free_space():
            raise store.no_space(needed) from OSError(errno.ENOSPC, "the disk will be full")
    try:
        yield
    except (OSError, BlobstoreError) as error:
        if not is_full(error):
            raise
        raise store.no_space(total, "up to ") from error


def _described(
    opened: TensorSource, plan: ModelPlan, options: ImportOptions, store: LocalStore, mark: str
) -> tuple[SourceRecord, list[FileLayer], list[str]]:
    """Return the record of the source, the layers other than tensors, and the notices."""
    record, unkept = source_record(opened, plan.blobs, options)
    layer = FileLayer(media_types.SOURCE, mark, record.to_bytes())
    files = [*stacks_layer(plan.blobs), *file_layers(opened), layer]
    same = () if mark else _same_imports(store, record, layer.data)  # a server tells nobody
    return record, files, [*plan.notices, *unkept, *same]


def _add_tensors(
    source: TensorSource,
    blobs: Sequence[BlobPlan],
    done: dict[str, tuple[BlobPlan, Ingested]],
    store: LocalStore,
    ingest: Ingest,
    pool: WorkerPool,
    *,
    in_workers: bool,
) -> list[UnreadableGroups]:
    """Add the blobs of the tensors that are not done; return why some cannot be added as planned."""
    if in_workers:
        shared = SharedImport(
            open_source=source.reopen,
            versions=source.versions,
            store=store.root,
            lock_timeout=store.lock_timeout,
            name=ingest.name,
            is_paranoid=ingest.is_paranoid,
        )
        job = functools.partial(add_in_worker, shared)
    else:
        converter = Converter(source.read)
        job = functools.partial(add_blob, ingest=ingest, converter=converter, report=pool.report)
    # In the order of the source's bytes, so that a cold disk is read sequentially.
    position = {name: index for index, name in enumerate(source.specs)}
    missing = [blob for blob in blobs if blob.name not in done or done[blob.name][0] != blob]
    in_order = sorted(missing, key=lambda blob: position[blob.tensors[0].sources[0]])
    failed: list[UnreadableGroups] = []
    try:
        with contextlib.closing(pool.completed(in_order, job, ingest.stop)) as results:
            for blob, item in results:
                if isinstance(item, UnreadableGroups):
                    failed.append(item)
                    continue
                done[blob.name] = blob, item
                if in_workers:
                    ingest.adopt(item)
                    pool.report(blob.size, blob.name)
    finally:
        close_joined(ingest.name)  # the workers may be threads of this process
    return failed


def add_files(
    source: TensorSource,
    plan: ModelPlan,
    files: Sequence[FileLayer],
    ingest: StepBlobs,
    added: list[Ingested],
    pool: WorkerPool,
) -> Manifest:
    """Add the other layers and the config; return the manifest of the model.

    ``added`` holds the blobs of the tensors, and gets those of the files.
    """
    layers = [
        Descriptor(
            media_type=media_types.TENSOR, digest=item.digest, size=item.size, name=blob.name
        )
        for blob, item in zip(plan.blobs, added, strict=True)
    ]
    for file in files:
        buffers: Buffers = file.buffers
        if file.is_large():
            buffers = reporting(buffers, pool.report, file.name)
        item = ingest.add(file.size, buffers)
        added.append(item)
        layers.append(
            Descriptor(
                media_type=file.media_type, digest=item.digest, size=item.size, name=file.name
            )
        )
    data = config_json(source, plan, layers_digest(layers))
    item = ingest.add(len(data), lambda: [data])
    added.append(item)
    config = Descriptor(media_type=media_types.CONFIG, digest=item.digest, size=item.size)
    return Manifest(config=config, layers=tuple(layers))


def _same_imports(store: LocalStore, record: SourceRecord, source_layer: bytes) -> Iterator[str]:
    """Yield a notice for each model that was imported from the same commit with the same options.

    Equal imports have equal source layers. So unless the store has that blob, the other models are not looked at:
    importing many would take time that grows with the square of their number.
    """
    digest = Digest.of(source_layer)
    if not (record.repository and store.has(digest)):
        return
    catalog = read_catalog(store, on_error=lambda _: None)
    number = catalog.references.number(digest)
    for entry in catalog:
        if entry.known and number in entry.known.blobs and entry.manifest:
            layers = entry.manifest.layers_of(media_types.SOURCE)
            if any(layer.digest == digest for layer in layers):
                yield f"{entry.reference} was imported from the same commit of {record.repository}"


def _kept(names: Sequence[str]) -> Iterator[str]:
    """Yield a notice of the tensors that could not be quantized."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    yield (
        f"kept {quote(names[0])}{more} unquantized: groups of values are too small, too large or "
        "too far apart for the type"
    )


def _repairs(repaired: Mapping[Digest, Path | None]) -> Iterator[str]:
    """Yield notices of the blobs that were replaced because they were damaged."""
    for digest, quarantined in repaired.items():
        where = "" if quarantined is None else f"; the damaged file is now {quote(quarantined)}"
        yield f"replaced blob {digest}, which was damaged{where}"
