"""The operation ``list``: the models of a store. It reads manifests and configs, and names of other blobs."""

from __future__ import annotations

import contextlib
from array import array
from dataclasses import dataclass, field, replace
from heapq import merge
from itertools import chain, islice
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from blobstore.core.digest import BlobId
from blobstore.errors import Damaged, StoreError
from blobstore.models import metrics
from blobstore.models.published import scheme_in
from blobstore.operations.sign.report import signatures_of
from blobstore.operations.sign.require_trust import policy_keys
from blobstore.store.catalog import Catalog, read_some
from blobstore.store.holdings import Holdings
from blobstore.store.local import LocalStore, StoreLike
from blobstore.store.name_patterns import named_models

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
    from pathlib import Path

    from blobstore.core.digest import Digest
    from blobstore.errors import BlobstoreError
    from blobstore.manifests.reference import Names, Reference
    from blobstore.manifests.source_record import SourceRecord
    from blobstore.operations.sign.report import CheckedSignature
    from blobstore.store.catalog import CatalogEntry

_MANY: Final = 10_000
"""Of so many names or more, the first are described before the last are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedModel:
    """A model of the store. Sizes count each blob of the model once."""

    reference: Reference
    modified: float
    """When the manifest was written, in seconds since the epoch."""
    digest: Digest | None = None
    """The digest of the manifest's bytes; None if there is an error."""
    size: int = 0
    """Bytes of the model's blobs, config included."""
    shared: int = 0
    """Bytes of the blobs that other names need too, as bases of frozen blobs or otherwise."""
    frozen: int = 0
    """Bytes of the blobs that are only cold, before compression."""
    published_scheme: str | None = None
    """The name of the quantization if the model is kept as published."""
    source: SourceRecord | None = None
    """What the model was imported from, if that was asked for and is known."""
    signatures: tuple[CheckedSignature, ...] = ()
    """The signatures of the model, checked with the keys of the policy, if that was asked for."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The numbers of its ``metrics.json``, such as the loss of a training step, if that was asked for."""
    error: BlobstoreError | None = None
    """Why the manifest cannot be read."""
    store: Path | None = None
    """The shared store that has the model, if it is not in the store itself."""

    @property
    def name(self) -> str:
        """The name of the model, as messages print it."""
        return str(self.reference)


def list_models(
    references: Names = (),
    *,
    store: StoreLike = None,
    read_sources: bool = False,
    read_signatures: bool = False,
    read_metrics: bool = False,
    on_error: Callable[[StoreError], object] | None = None,
) -> tuple[ListedModel, ...]:
    """Return models of a store, sorted by name. Returns none if the store does not exist.

    A manifest that cannot be read is listed with its error.

    Args:
        references: the models; none means all of the store.
        store: the store or its folder; by default ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        read_sources: read what the models were imported from too.
        read_signatures: read who signed the models too.
        read_metrics: read the metrics of the models too.
        on_error: called with the error of each folder of manifests that cannot be read, which is then
            skipped; by default the first of these errors is raised.

    Raises:
        ModelNotFound: a model in ``references`` does not exist.
        StoreError: the store is not a folder or cannot be read.
    """
    store = LocalStore.of(store)
    names = frozenset(named_models(store, references))
    chosen = choose_models(
        store,
        lambda reference, _: not names or reference in names,
        read_shared=True,
        read_sources=read_sources,
        read_signatures=read_signatures,
        read_metrics=read_metrics,
        on_error=on_error,
    )
    models = tuple(chosen.models)
    for name in names - {model.reference for model in models}:
        store.read_manifest(name)  # raises ModelNotFound
    return models


class ChosenModels(NamedTuple):
    """The result of :func:`choose_models`."""

    models: Iterator[ListedModel]
    """Sorted by name. Each is described when it is asked for."""
    has_shared: bool
    """Whether :attr:`ListedModel.shared` is known; otherwise it is 0."""


def choose_models(
    store: LocalStore,
    is_chosen: Callable[[Reference, Digest | None], bool] = lambda *_: True,
    *,
    repositories: Collection[Reference] = (),
    read_shared: bool,
    read_sources: bool,
    read_signatures: bool,
    read_metrics: bool,
    on_error: Callable[[StoreError], object] | None,
) -> ChosenModels:
    """Return those models that are chosen by name and digest, as :func:`list_models` does.

    What they share depends on all models, so these are read for it with ``read_shared``, and otherwise only if they
    are few. With ``repositories``, only their tags are chosen, and then no other model is read without ``read_shared``.
    """
    entries: Iterable[CatalogEntry]
    if repositories and not read_shared:
        names = {name for name in _tags(store, repositories, on_error) if is_chosen(name, None)}
        entries = catalog = read_some(store, sorted(names))
    else:
        catalog = Catalog(store, store.known_references())
        paths = catalog.paths(on_error)
        first = list(islice(paths, _MANY))
        read_shared = read_shared or len(first) < _MANY
        paths = chain(first, paths)
        if read_shared:
            catalog.read_all(paths)
            entries = catalog.of_repositories(repositories) if repositories else catalog
        else:
            entries = catalog.each(paths)
    references = catalog.references
    counts = Holdings(store, catalog).counts if read_shared else ()
    # Summed by number without a loop in Python: there may be millions of references.
    sizes = zip(references.sizes, counts, strict=False)
    shared = array("Q", [size if count > 1 else 0 for size, count in sizes])
    frozen = store.frozen()
    keys = policy_keys(store) if read_signatures else ()

    def listed(entry: CatalogEntry) -> ListedModel:
        reference, modified, known = entry.reference, entry.modified, entry.known
        if known is None:
            return ListedModel(reference=reference, modified=modified, error=entry.error)
        numbers, digest, sizes = known.blobs, known.digest, known.sizes
        of_others = list(map(shared.__getitem__, numbers)) if read_shared else []
        if of_others and known.row in references.other_sizes:
            pairs = zip(numbers, sizes, strict=True)
            of_others = [size for number, size in pairs if counts[number] > 1]
        scheme = None
        if not known.record.is_unpublished:
            config = BlobId(references.digest(numbers[0]), sizes[0])
            scheme = scheme_in(store, config) or None
        return ListedModel(
            reference=reference,
            modified=modified,
            digest=digest,
            size=sum(sizes),
            shared=sum(of_others),
            frozen=sum(entry.blobs[blob] for blob in frozen & entry.blobs.keys()) if frozen else 0,
            published_scheme=scheme,
            source=_source(store, entry) if read_sources else None,
            signatures=signatures_of(store, digest, keys) if read_signatures else (),
            metrics=_metrics(store, entry) if read_metrics else {},
        )

    own = (listed(entry) for entry in entries if is_chosen(entry.reference, entry.digest))
    if store.shared is None:
        return ChosenModels(own, has_shared=read_shared)
    root = store.shared.root
    below = choose_models(
        store.shared,
        lambda reference, digest: not store.has_model(reference) and is_chosen(reference, digest),
        repositories=repositories,
        read_shared=read_shared,
        read_sources=read_sources,
        read_signatures=read_signatures,
        read_metrics=read_metrics,
        on_error=on_error,
    )
    marked = (replace(model, store=root) for model in below.models)
    models = merge(own, marked, key=attrgetter("reference"))
    return ChosenModels(models, has_shared=read_shared and below.has_shared)


def _tags(
    store: LocalStore,
    repositories: Iterable[Reference],
    on_error: Callable[[StoreError], object] | None,
) -> Iterator[Reference]:
    store.check_root()
    for repository in repositories:
        try:
            yield from store.tags(repository)
        except StoreError as error:
            if on_error is None:
                raise
            on_error(error)


def _metrics(store: LocalStore, entry: CatalogEntry) -> Mapping[str, float]:
    return {} if entry.manifest is None else metrics.read_metrics(store, entry.manifest)


def _source(store: LocalStore, entry: CatalogEntry) -> SourceRecord | None:
    """Return the record of a model's source; None if there is none, or it is damaged."""
    from blobstore.models.source_layers import read_source_record

    with contextlib.suppress(Damaged):
        if entry.manifest is not None:
            return read_source_record(store, entry.manifest)
    return None
