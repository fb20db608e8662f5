"""The operations ``lock`` and ``sync``: one machine says which models it has, and another gets the same."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from blobstore.core import toml
from blobstore.core.arguments import local_path
from blobstore.core.digest import Digest
from blobstore.core.escape import quote
from blobstore.core.files import read_regular, write_file
from blobstore.core.progress import of_items
from blobstore.core.targets import check_new_file
from blobstore.core.workers import WorkerPool
from blobstore.errors import (
    BlobDamaged,
    BlobstoreError,
    Damaged,
    ModelNotFound,
    NameTaken,
    NotFound,
    UnsupportedSource,
)
from blobstore.manifests.lock_file import LockedModel, format_lock, parse_lock
from blobstore.models.source_layers import read_source_record
from blobstore.operations.create.create import create
from blobstore.operations.transfer.many import place_of, pull_order
from blobstore.operations.transfer.pull import STREAMS, pull_model
from blobstore.planning.import_options import ImportOptions
from blobstore.registry.reference import RemoteReference
from blobstore.remotes.addresses import find_model, is_in_objects
from blobstore.remotes.catalog import RemoteEntry
from blobstore.remotes.transfer_cache import PullRecord
from blobstore.store.local import LocalStore, StoreLike
from blobstore.store.name_patterns import named_models
from blobstore.store.names import ABSENT, ANYTHING, NameUpdate

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from blobstore.core.progress import Progress
    from blobstore.manifests.reference import Names, Reference

State = Literal["present", "missing", "other model", "fetched", "replaced"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncedModel:
    """The outcome for a model of a lock file."""

    reference: Reference
    state: State
    """The state of the name, with ``check`` before and otherwise after the transfer."""
    manifest: Digest
    """As the lock file says."""
    found: Digest | None = None
    """Of the manifest that the name had before; None if there was none, or it cannot be read."""
    error: BlobstoreError | None = None
    """Why it could not be fetched."""
    notices: tuple[str, ...] = ()
    """What the transfer has to say about it, such as signatures that are not kept."""


def lock_models(
    references: Names = (),
    path: str | os.PathLike[str] | None = None,
    *,
    remote: str | None = None,
    store: StoreLike = None,
) -> list[LockedModel]:
    """Return the entries of a lock file for models: digests, and the origin of each.

    Args:
        references: the models; by default all models of the store.
        path: the lock file to write, which is replaced; None for none.
        remote: a store in object storage, or the start of repositories in a registry, that has the models
            that came neither from a remote nor from the Hub.
        store: the store or its folder; by default ``$BLOBSTORE_HOME`` or ``~/.blobstore``.

    Raises:
        ModelNotFound: the store has no such model, or ``remote`` has not.
        InvalidManifest, BlobMissing, BlobDamaged: a model is damaged.
        BlobDamaged: ``remote`` has another model of that name.
        RemoteError: ``remote`` cannot be reached.
        BlobstoreError: the file cannot be written, or would be too large to be read.
    """
    local = LocalStore.to_read(store)
    file = None if path is None else local_path(path)
    if file is not None:
        check_new_file(file, force=True)
    names = named_models(local, references) or local.references()
    models = [_locked(local, name, remote) for name in sorted(names)]
    if file is not None:
        write_file(file, [format_lock(models).encode()])
    return models


def _locked(store: LocalStore, name: Reference, remote: str | None) -> LockedModel:
    data, manifest = store.parse(name)
    model = LockedModel(reference=name, manifest=Digest.of(data))
    if pulled := PullRecord.read(store.holder(name), name):
        address = pulled.remote
        if not is_in_objects(address):
            place = RemoteReference.parse(address)
            address = str(replace(place, digest=Digest.parse(pulled.digest)))
        return replace(model, remote=address)
    record = read_source_record(store, manifest)
    if record is not None and record.repository and record.commit:
        return replace(
            model,
            repository=record.repository,
            commit=record.commit,
            options=dict(record.options),
        )
    if remote is None:
        return model
    place_there = place_of(remote, name)
    if is_in_objects(remote):
        place_there = f"{place_there.rstrip('/')}/{name}"
    with find_model(place_there) as source:
        if Digest.of(source.data) != model.manifest:
            raise BlobDamaged(
                f"{quote(place_there)} is another model than {quote(name)}; push it first"
            )
        if isinstance(source.address, RemoteReference):
            return replace(model, remote=str(replace(source.address, digest=source.root.digest)))
        return replace(model, remote=str(source.address))


def sync_models(
    models: str | os.PathLike[str] | Sequence[LockedModel],
    *,
    store: StoreLike = None,
    check: bool = False,
    replace_others: bool = True,
    streams: int = STREAMS,
    limit_rate: float | str | None = None,
    jobs: int | None = None,
    plain_http: bool | None = None,
    progress: Progress | None = None,
) -> list[SyncedModel]:
    """Make a store have the models of a lock file, with the same manifests, and return the outcome for each.

    Models that have bases of others' compressed forms come first. One that fails does not keep others from
    being fetched. Other models of the store stay.

    Args:
        models: the path of a lock file, or what :func:`lock_models` returned.
        store: the store or its folder; by default ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        check: fetch nothing; return what differs.
        replace_others: replace other models that have the names; ``restore`` brings them back.
        streams: as for :func:`pull_model`.
        limit_rate: likewise.
        jobs: likewise.
        plain_http: likewise.
        progress: called with the number of the model and its name.

    Raises:
        NotFound: there is no such lock file.
        StoreError: the store cannot be used.
        UsageError: an argument is invalid, or the file is not a lock file.
    """
    if isinstance(models, str | os.PathLike):
        models = read_lock(local_path(models, "source"))
    options = {"streams": streams, "limit_rate": limit_rate, "jobs": jobs, "plain_http": plain_http}
    local = LocalStore.of(store)
    results = [_compared(local, model) for model in models]
    different = [number for number, result in enumerate(results) if result.state != "present"]
    order = [] if check else _in_order(local, models, different, plain_http)
    names = [str(models[number].reference) for number in order]
    for position, number in enumerate(order):
        step = of_items(progress, "models", names, [0] * len(names), position)
        model, result = models[number], results[number]
        is_new = result.state == "missing"
        try:
            if not is_new and not replace_others:
                raise NameTaken(f"another model has the name {quote(model.reference)}")
            # Compared under the lock: the name may have been given since the check above.
            old = ANYTHING if replace_others else ABSENT
            update = NameUpdate(model.reference, old, model.manifest)
            notices = _fetch(local, model, update, step, options)
            state: State = "fetched" if is_new else "replaced"
            results[number] = replace(result, state=state, notices=notices)
        except BlobstoreError as failure:
            results[number] = replace(result, error=failure)
    return results


def read_lock(path: Path) -> list[LockedModel]:
    """Return the models of a lock file.

    Raises:
        NotFound: there is no such file.
        UsageError: as :func:`parse_lock`.
        BlobstoreError, OSError: it is not a regular file, is too large, or cannot be read.
    """
    try:
        text = read_regular(path, toml.MAX_SIZE).decode(errors="replace")
    except FileNotFoundError:
        raise NotFound(f"there is no lock file {quote(path)}") from None
    return parse_lock(text, quote(path))


def _in_order(
    store: LocalStore,
    models: Sequence[LockedModel],
    numbers: Iterable[int],
    plain_http: bool | None,
) -> list[int]:
    """Return numbers of models so that each follows those that have bases of its compressed form.

    Imports come first: they need no bases, and may be the bases of what is pulled.
    """
    numbers = sorted(numbers, key=lambda number: bool(models[number].remote))
    pulls = [number for number in numbers if models[number].remote]
    if not pulls[1:]:
        return numbers

    def entry_of(number: int) -> RemoteEntry:
        address = models[number].remote
        try:
            with find_model(address, plain_http=plain_http, with_files=True) as source:
                return RemoteEntry(
                    address=address, blobs=tuple(blob.id for blob in source.model.blobs)
                )
        except BlobstoreError as error:  # the pull reports it
            return RemoteEntry(address=address, error=error)

    entries = WorkerPool(STREAMS, None, 0).run(pulls, entry_of)
    order, _ = pull_order(entries, store, plain_http)
    return [*numbers[: -len(pulls)], *(pulls[position] for position in order)]


def _compared(store: LocalStore, model: LockedModel) -> SyncedModel:
    name, found = model.reference, _digest_of(store, model.reference)
    state: State = "missing" if found is None else "other model"
    if found == model.manifest:
        state = "present"
    return SyncedModel(reference=name, state=state, manifest=model.manifest, found=found)


def _digest_of(store: LocalStore, name: Reference) -> Digest | None:
    try:
        return Digest.of(store.read_manifest(name))
    except (ModelNotFound, Damaged):
        return None


def _fetch(
    store: LocalStore,
    model: LockedModel,
    update: NameUpdate,
    progress: Progress | None,
    options: dict[str, Any],
) -> tuple[str, ...]:
    """Fetch a model, which gets its name only if it has the manifest that the lock file says; return notices."""
    if model.remote:
        done = pull_model(model.remote, update, store=store, progress=progress, **options)
        return done.notices
    if not model.repository:
        raise UnsupportedSource(
            f"the lock file does not say where {quote(model.reference)} comes from",
            advice="push it, and lock it with --remote",
        )
    source = f"hf://{model.repository}@{model.commit}"
    wanted = ImportOptions.from_json(model.options).arguments
    create(source, update, store=store, progress=progress, **wanted)
    return ()
