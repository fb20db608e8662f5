"""Imports every model of a cache, of a folder of model folders, of Ollama's folder, or of a Hub repository."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from blobstore.core.escape import quote
from blobstore.core.public_calls import check_options
from blobstore.errors import (
    BlobstoreError,
    NameTaken,
    StoreError,
    UsageError,
)
from blobstore.manifests.reference import DEFAULT_TAG, Reference
from blobstore.operations.create.create import CreateOptions, importer, opened_with
from blobstore.operations.create.find_models import find_models
from blobstore.operations.create.source_names import (
    STEP,
    STEPS,
    derived_name,
)
from blobstore.planning.import_options import ImportOptions
from blobstore.planning.plan import quantize_options
from blobstore.sources.base import DEFAULT_OPTIONS, SourceOptions, advising_download
from blobstore.sources.gguf_models import EACH_MODEL
from blobstore.store.download_folders import Downloads, is_full
from blobstore.store.local import LocalStore, StoreLike

if TYPE_CHECKING:
    from typing import Unpack

    from blobstore.core.progress import Progress
    from blobstore.operations.create.create import Created


@dataclass(frozen=True, slots=True, kw_only=True)
class CreatedModel:
    """The outcome for one model of :func:`create_all`."""

    name: str
    """The name, valid or not."""
    source: Path | str
    """The path, ``ollama://NAME``, or a repository of the Hub."""
    created: Created | None = None
    """None if it failed, or in a dry run."""
    error: BlobstoreError | None = None


def create_all(
    folder: str | os.PathLike[str],
    name: str | Reference | None = None,
    *,
    store: StoreLike = None,
    prefix: str | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
    **options: Unpack[CreateOptions],
) -> list[CreatedModel]:
    """Import every model of a folder, and return what became of each.

    A model that fails does not keep the others from being imported.

    Args:
        folder: a cache of the Hub's client or of llama.cpp, whose models get the names of their repositories,
            or a folder of model folders, which get the names of the folders: ``name`` or ``org/name``. Steps of a
            run, ``checkpoint-N``, become tags of the folder that holds them: ``run:checkpoint-N``. Files
            of weights next to these are left out, except GGUF files; see :func:`loose_files`. Several
            quantizations of one model in GGUF files become ``name:Q4_K_M`` and the like, also those of a
            repository of the Hub. Or ``ollama://``, for all that Ollama has.
        name: the name, without a tag, for the steps of a run or the quantizations that lie in the folder itself;
            by default that of the folder.
        store: the store or its folder; by default ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        prefix: ``[host/]namespace`` that the models get instead of their own.
        dry_run: only list the models.
        progress: called with the model and the current step, bytes done and total bytes.
        options: as for :func:`create`, for all models.

    Returns:
        what became of each model, sorted by name; a failure is part of the list.

    Raises:
        SourceNotFound: there is no such folder.
        SourceError: the folder cannot be read, has no models, or is a model.
        StoreError: the store cannot be used, and not because its disk is full. Models imported before that stay.
        UsageError: a name is given that has a tag, all models have names of their own, or an option is of a
            wrong type.
    """
    check_options(create_all, options, CreateOptions)
    store = LocalStore.of(store)
    first: dict[str, Path | str] = {}
    results = []
    choices = ImportOptions(
        options.get("source_options", DEFAULT_OPTIONS),
        quantize_options(options.get("quantize")),
        options.get("experts", "packed"),
        options.get("decode", False),
        options.get("as_is", False),
    )
    weights, is_quantized = choices.source.weights, choices.quantize.quant_type is not None
    in_folder = None if name is None else _without_tag(Reference.of(name))
    models = [it for it in find_models(folder, in_folder) if it.matches(weights)]
    steps = (it.source for it in models if isinstance(it.source, Path))
    runs = {path.parent for path in steps if STEP.fullmatch(path.name)}
    with Downloads(store, is_quantized=is_quantized, is_shared=True) as downloads:
        for number, model in enumerate(models, start=1):
            name, created, error = model.name, None, None
            try:
                reference = derived_name(name, model.source)
                if prefix is not None:
                    reference = reference.under(prefix)
                name = str(reference)
                # Names that differ in case only cannot be in one store.
                if (other := first.setdefault(name.lower(), model.source)) is not model.source:
                    raise NameTaken(f"{quote(other)} already has the name {name}")
                if not dry_run:
                    step = progress and partial(
                        _report, progress, f"{number} of {len(models)} models, {name}"
                    )
                    read = replace(choices.source, weights=model.weights or weights)
                    own = choices._replace(source=read)
                    if model.source in runs:  # not recorded: create without --all makes the same
                        read = replace(read, exclude=(*read.exclude, STEPS))
                    created = _create(
                        downloads, model.source, reference, store, step, read, own, options
                    )
                    # The models that it leaves out are imported too.
                    notices = (it for it in created.notices if not it.endswith(EACH_MODEL))
                    created = replace(created, notices=tuple(notices))
            except BlobstoreError as failure:
                if isinstance(failure, StoreError) and not is_full(failure):
                    raise
                error = failure  # smaller ones may have space
            downloads.remove(model.files)
            results.append(
                CreatedModel(name=name, source=model.source, created=created, error=error)
            )
    return results


def _create(
    downloads: Downloads,
    source: Path | str,
    reference: Reference,
    store: LocalStore,
    progress: Progress | None,
    read: SourceOptions,
    choices: ImportOptions,
    options: CreateOptions,
) -> Created:
    """Import one model as :func:`~blobstore.operations.create.create.create` does, with shared downloads."""
    started = time.monotonic()
    update = store.names.seen(reference)
    store.names.check_name(reference)
    sha256, in_cache = options.get("sha256"), options.get("keep_hub_cache", False)
    read, import_opened = importer(source, read, state=options.get("state", False))
    with (
        advising_download(),
        opened_with(
            downloads, os.fspath(source), read, sha256, progress, in_cache=in_cache
        ) as opened,
    ):
        return import_opened(
            opened,
            update,
            store,
            choices,
            started=started,
            paranoid=options.get("paranoid", False),
            jobs=options.get("jobs"),
            executor=options.get("executor"),
            progress=progress,
        )


def _without_tag(reference: Reference) -> str:
    """Return a name to which tags can be added."""
    name, _, tag = str(reference).rpartition(":")
    if tag != DEFAULT_TAG:
        raise UsageError(f"{quote(reference)} has a tag, and each model gets one of its own")
    return name


def _report(progress: Progress, name: str, what: str, done: int, total: int) -> None:
    progress(f"{name}: {what}", done, total)
