"""Workflow: what a store holds. Manifests are read, blobs are not touched."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from blobstore.digest import Digest
from blobstore.errors import BlobstoreError, InvalidManifest, ModelNotFound
from blobstore.manifests.model import Manifest
from blobstore.store.local import LocalStore
from blobstore.text import quoted

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from blobstore.manifests.reference import Reference


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedModel:
    """A name of the store, and what its manifest says. Sizes count a blob of the model once."""

    reference: Reference
    modified: float
    """When the manifest was written, in seconds since the epoch."""
    digest: Digest | None = None
    """Of the manifest's bytes; None where there is an error."""
    size: int = 0
    """Bytes of the model's blobs, config included."""
    shared: int = 0
    """Bytes of those blobs that other names of the store use too."""
    error: BlobstoreError | None = None
    """Why the manifest cannot be read."""


def list_models(store: LocalStore | None = None) -> tuple[ListedModel, ...]:
    """Return every model of a store by name, Ollama's own models too; none for an absent store.

    A manifest that cannot be read is listed with its error.

    Raises:
        StoreError: the store is not a folder or cannot be read.
    """
    found = list(_read_manifests(store or LocalStore()))
    uses = Counter(
        blob.digest for _, manifest in found if manifest is not None for blob in manifest.blobs
    )
    return tuple(
        model if manifest is None else _with_sizes(model, manifest, uses)
        for model, manifest in found
    )


def _read_manifests(store: LocalStore) -> Iterator[tuple[ListedModel, Manifest | None]]:
    for reference in store.references():
        path = store.layout.manifest(reference)
        modified = _modified(path)
        try:
            data = store.read_manifest(reference)
            manifest = _parse(data, path)
        except ModelNotFound:  # removed since the names were listed
            continue
        except BlobstoreError as error:
            yield ListedModel(reference=reference, modified=modified, error=error), None
            continue
        digest = Digest.of(data)
        yield ListedModel(reference=reference, modified=modified, digest=digest), manifest


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # reading it says why
        return 0


def _parse(data: bytes, path: Path) -> Manifest:
    try:
        return Manifest.from_bytes(data)
    except InvalidManifest as error:
        raise error.at(quoted(path)) from None


def _with_sizes(model: ListedModel, manifest: Manifest, uses: Counter[Digest]) -> ListedModel:
    return replace(
        model,
        size=sum(blob.size for blob in manifest.blobs),
        shared=sum(blob.size for blob in manifest.blobs if uses[blob.digest] > 1),
    )
