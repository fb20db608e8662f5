"""The operation ``find``: which models have a blob, a tensor or a file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from blobstore.core.globs import glob_matches
from blobstore.errors import BlobstoreError
from blobstore.manifests import media_types
from blobstore.models.tensors import read_tensors
from blobstore.store.catalog import read_catalog
from blobstore.store.local import LocalStore
from blobstore.store.name_patterns import id_start, is_pattern

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    from blobstore.core.digest import Digest
    from blobstore.manifests.reference import Reference
    from blobstore.store.catalog import CatalogEntry


class FoundPlace(NamedTuple):
    """A place in the store that has what was looked for."""

    reference: Reference
    kind: Literal["model", "blob", "tensor", "file"]
    name: str
    """The name of the tensor, file or layer; empty for a model, or a layer without a name."""
    size: int
    digest: Digest
    """The digest of the manifest or blob."""


class FoundPlaces(NamedTuple):
    """The result of :func:`find_content`."""

    places: tuple[FoundPlace, ...]
    errors: tuple[BlobstoreError, ...]
    """Manifests and blobs that could not be read, so that they may have it too."""


def find_content(
    text: str, *, store: LocalStore | str | os.PathLike[str] | None = None
) -> FoundPlaces:
    """Find the models that have a blob, a tensor or a file. Only manifests and headers are read.

    Args:
        text: four or more hexadecimal digits with which the digest of a manifest or blob begins; or
            the name of a tensor or file, or a glob. Names are looked for if no digest begins so.
        store: the store or its folder; by default ``$BLOBSTORE_HOME`` or ``~/.blobstore``.

    Raises:
        StoreError: the store cannot be read.
    """
    store = LocalStore.of(store)
    entries = list(read_catalog(store))
    errors = [entry.error for entry in entries if entry.error is not None]
    start = id_start(text)
    places = [*_with_digest(entries, start)] if start else []
    if not places:
        for entry in entries:
            places += _with_name(store, entry, text, errors)
    return FoundPlaces(tuple(places), tuple(errors))


def _with_digest(entries: list[CatalogEntry], start: str) -> Iterator[FoundPlace]:
    for entry in entries:
        if entry.manifest is None or entry.digest is None:
            continue
        if entry.digest.hex.startswith(start):
            size = sum(entry.blobs.values())
            yield FoundPlace(entry.reference, "model", "", size, entry.digest)
        for blob in (entry.manifest.config, *entry.manifest.layers):
            if blob.digest.hex.startswith(start):
                yield FoundPlace(entry.reference, "blob", blob.name, blob.size, blob.digest)


def _with_name(
    store: LocalStore, entry: CatalogEntry, text: str, errors: list[BlobstoreError]
) -> Iterator[FoundPlace]:
    if entry.manifest is None:
        return

    def is_wanted(name: str) -> bool:
        return glob_matches(name, text) if is_pattern(text) else name == text

    try:
        contents = read_tensors(store, entry.manifest, collect_faults=True)
    except BlobstoreError as error:  # two blobs have one tensor
        errors.append(error.at(f"model {entry.reference}"))
        return
    errors.extend(fault.at(f"model {entry.reference}") for fault in contents.faults.values())
    for name, tensor in contents.tensors.items():
        if is_wanted(name):
            digest = tensor.layer.digest
            yield FoundPlace(entry.reference, "tensor", name, tensor.nbytes, digest)
    for layer in entry.manifest.layers:
        if layer.media_type in (media_types.JSON, media_types.FILE) and is_wanted(layer.name):
            yield FoundPlace(entry.reference, "file", layer.name, layer.size, layer.digest)
