"""Pushes or pulls several models, one after the other. If one fails, the others follow all the same."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from blobstore.core.escape import quote
from blobstore.core.globs import glob_matches
from blobstore.core.outcomes import Outcome, each_of
from blobstore.core.workers import WorkerPool
from blobstore.errors import (
    BlobstoreError,
    ModelNotFound,
    NotFound,
    UsageError,
)
from blobstore.manifests.reference import DEFAULT_HOST, Reference, all_under
from blobstore.objects.address import StoreAddress, has_tag, model_addresses
from blobstore.operations.transfer.pull import WITHOUT_BASES, Pulled, pull_model
from blobstore.operations.transfer.push import Pushed, push_model
from blobstore.operations.transfer.registry_target import DEFAULT_OPTIONS, RegistryOptions
from blobstore.registry.reference import SCHEME, RemoteReference
from blobstore.remotes.addresses import find_model, is_in_objects
from blobstore.remotes.catalog import RemoteEntry, read_remote_catalog
from blobstore.remotes.fetch_attached import attached
from blobstore.store.local import LocalStore, StoreLike
from blobstore.store.name_patterns import is_pattern, named_models

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from blobstore.core.digest import BlobId, Digest
    from blobstore.core.progress import Progress

_MAX_NAME_PARTS: Final = 3
_STREAMS: Final = 8


def push_models(
    references: Sequence[str | Reference],
    remote: str | None = None,
    *,
    store: StoreLike = None,
    progress: Progress | None = None,
    registry: RegistryOptions = DEFAULT_OPTIONS,
    **options: Any,
) -> list[Outcome[Pushed]]:
    """Push several models, and return the outcome for each.

    Args:
        references: the models.
        remote: a store in object storage, or the start of the repositories of a registry, such as
            ``host/team``: each model gets the repository of its name there. By default each goes to its host.
        store: the store or its folder; by default ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        progress: called with the number of the model and its name, and the bytes of all models.
        registry: as for :func:`push_model`.
        options: as for that.

    Raises:
        UsageError: an argument is invalid, or ``remote`` has a tag.
    """
    local = LocalStore.to_read(store)
    names = named_models(local, references)
    blobs = [local.blobs_of(name) for name in names]
    sizes = [sum(blob.size for blob in own) for own in blobs]
    places = [None if remote is None else place_of(remote, name) for name in names]
    expected: set[Digest] = set()

    def push(number: int, step: Progress | None) -> Pushed:
        pushed = push_model(
            names[number],
            places[number],
            store=local,
            registry=registry,
            progress=step,
            expected=expected,
            **options,
        )
        # After the push, or a dry run would take the model's own blobs for present.
        if remote is not None and registry.mount:
            expected.update(blob.digest for blob in blobs[number])
        return pushed

    return list(each_of([str(name) for name in names], sizes, progress, push))


def pull_models(
    addresses: Sequence[RemoteEntry],
    *,
    store: StoreLike = None,
    prefix: str | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> list[Outcome[Pulled]]:
    """Fetch several models, which get the names that they have there, and return the outcome for each.

    Models that have bases of others' compressed forms come first.

    Args:
        addresses: what :func:`find_remote_models` returned.
        store: the store or its folder; by default ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        prefix: ``[host/]namespace`` that the models get instead of those of their addresses.
        progress: called with the number of the model and its address, and the bytes of all models.
        options: as for :func:`pull_model`.

    Raises:
        NameConflict: two models would get one name; nothing is fetched.
        UsageError: an argument is invalid.
    """
    local = LocalStore.of(store)
    if prefix is not None:
        all_under(prefix, (_nearest_name(one.address) for one in addresses if one.error is None))
    order: Sequence[int] = range(len(addresses))
    bases: Sequence[set[BlobId]] = [set()] * len(addresses)
    if options.get("cold", True):
        order, bases = pull_order(addresses, local, options.get("plain_http"))
    entries = [addresses[number] for number in order]
    blobs = [set(entry.blobs) for entry in entries]
    expected: set[BlobId] = set()

    def pull(number: int, step: Progress | None) -> Pulled:
        entry, own = entries[number], blobs[number]
        blobs[number] = set()  # they have not come if this fails
        if entry.error is not None:
            raise entry.error
        pulled = pull_model(
            entry.address,
            store=local,
            prefix=prefix,
            progress=step,
            expected=expected,
            **options,
        )
        blobs[number] = own
        # After the pull, or a dry run would take the model's own blobs for present.
        expected.update(own)
        if bases[order[number]] <= set().union(*blobs):  # nothing else is to be pulled first
            others = [text for text in pulled.notices if not text.startswith(WITHOUT_BASES)]
            return replace(pulled, notices=tuple(others))
        return pulled

    sizes = [entry.size or 0 for entry in entries]
    return list(each_of([entry.address for entry in entries], sizes, progress, pull))


def _nearest_name(address: str) -> Reference:
    if is_in_objects(address):
        return next(model_addresses(address)).reference
    return RemoteReference.parse(address).nearest_name()


def pull_order(
    entries: Sequence[RemoteEntry], store: LocalStore, plain_http: bool | None
) -> tuple[Sequence[int], Sequence[set[BlobId]]]:
    """Return the numbers of models so that each follows those that have its bases, and the bases of each.

    Args:
        entries: the models.
        store: the store that they are fetched into. The models that it has need no base.
        plain_http: whether to use HTTP without TLS for registries; by default only for this machine.
    """
    bases = WorkerPool(_STREAMS, None, 0).run(entries, partial(_bases, store, plain_http))
    return _bases_first(bases, [set(entry.blobs) for entry in entries]), bases


def _bases_first(bases: Sequence[set[BlobId]], blobs: Sequence[set[BlobId]]) -> list[int]:
    """Return the numbers of models so that each follows those that have its bases, except in cycles.

    Args:
        bases: those of the compressed forms of each model.
        blobs: the blobs of each model.
    """
    homes: dict[BlobId, int] = {}
    for number, own in enumerate(blobs):
        for blob in own:
            homes.setdefault(blob, number)
    needs = [sorted({homes[base] for base in found if base in homes}) for found in bases]
    order: dict[int, None] = {}
    for start in range(len(needs)):
        path = {start: None}
        while path:
            last = next(reversed(path))
            # A base on the path closes a cycle, of which one model must come before its base.
            rest = (one for one in needs[last] if one not in order and one not in path)
            if (base := next(rest, None)) is not None:
                path[base] = None
            else:
                path.popitem()
                order[last] = None
    return list(order)


def _bases(store: LocalStore, plain_http: bool | None, entry: RemoteEntry) -> set[BlobId]:
    """Return the bases of a model's compressed forms; none if the store has its blobs, or they cannot be read."""
    if entry.error is None and not store.has_blobs(entry.blobs):
        with (
            contextlib.suppress(BlobstoreError),  # the pull reports it
            find_model(entry.address, plain_http=plain_http, with_files=True) as source,
        ):
            layers = attached(source, source.root.digest, lambda _: None).fetch_layers()
            return {layer.base for layer in layers.values() if layer.base}.difference(entry.blobs)
    return set()


def find_remote_models(
    texts: Iterable[str], *, all_models: bool = False, plain_http: bool | None = None
) -> list[RemoteEntry]:
    """Return the remote models that texts name, each once.

    Args:
        texts: addresses of models; or with a glob after the address of a store, of a repository, or of a
            registry that lists its repositories: ``s3://bucket/prefix/team/*``, ``oci://host/repository:v*``,
            ``oci://host/team/*``.
        all_models: the texts are addresses of stores or repositories, and stand for all of their models.
        plain_http: whether to use HTTP without TLS for registries; by default only for this machine.

    Raises:
        InvalidReference: an address is not valid.
        NotFound: there is no such store, model or repository, or a glob matches nothing.
        RemoteError: a remote cannot be reached, or denies access.
    """
    found: dict[str, RemoteEntry] = {}
    for text in texts:
        if all_models:
            entries = read_remote_catalog(text, plain_http=plain_http)
        elif is_pattern(text):
            entries = _matches(text, plain_http)
        else:
            with find_model(text, plain_http=plain_http, with_files=True) as source:
                blobs = tuple(blob.id for blob in source.model.blobs)
            entries = [RemoteEntry(address=text, blobs=blobs)]
        found |= {entry.address: entry for entry in entries}
    return list(found.values())


def _matches(text: str, plain_http: bool | None) -> list[RemoteEntry]:
    """Return the models that match the glob at the end of an address of a store or repository."""
    fixed = text[: min(text.index(character) for character in "*?[" if character in text)]
    if is_in_objects(text):
        places = [fixed.rpartition("/")[0]]
        while len(places) < _MAX_NAME_PARTS and places[-1].rpartition("/")[0].count("/") > 1:
            places.append(places[-1].rpartition("/")[0])  # a namespace may precede the glob
        # The address of a bucket alone ends with its slash.
        starts = [str(StoreAddress.parse(place)) for place in places]
    else:
        # A glob of tags follows a colon, and one of repositories a slash.
        end = max(fixed.rfind("/"), fixed.rfind(":"))
        if "/" not in fixed.removeprefix(SCHEME):
            raise UsageError(f"{quote(text)}: the host of a registry cannot be a glob")
        places = [fixed[: end + (fixed[end] == "/")]]
        starts = [fixed[:end].removeprefix(SCHEME)]
    failure: NotFound | None = None
    for place, start in zip(places, starts, strict=True):
        pattern = text[len(place.removesuffix("/")) + 1 :]
        is_match = partial(_is_match, pattern, len(start) + 1)
        try:
            found = read_remote_catalog(place, plain_http=plain_http, is_chosen=is_match)
        except NotFound as error:
            failure = failure or error
            continue
        if found:
            return found
        failure = failure or ModelNotFound(f"no model matches {quote(text)}")
    raise failure or ModelNotFound(f"no model matches {quote(text)}")


def _is_match(pattern: str, begin: int, address: str) -> bool:
    name = address[begin:]
    return any(glob_matches(one, pattern) for one in (name, name.removesuffix(":latest")))


def place_of(remote: str, name: Reference) -> str:
    """Return the address that a model gets below ``remote``, to which several models are pushed.

    Raises:
        InvalidReference: ``remote`` is not an address, or a registry allows no such name.
        UsageError: ``remote`` is the address of one model.
    """
    if is_in_objects(remote):
        if has_tag(remote):
            raise UsageError(
                f"{quote(remote)} is the address of one model",
                advice="give that of the store to push several",
            )
        return remote
    start = RemoteReference.parse(f"{remote.rstrip('/')}/x/x")
    own = RemoteReference.of(replace(name, host=DEFAULT_HOST))
    repository = start.repository.removesuffix("x/x") + own.repository.removeprefix("library/")
    place = replace(start, repository=repository, tag=name.tag)
    return str(place) if place.scheme else f"oci://{place}"
