"""Keeps the blobs of remote models in the local store within their limit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from blobstore.core.digest import Digest
from blobstore.errors import StoreError
from blobstore.store.eviction import choose_evicted
from blobstore.store.published import hex_digests_of
from blobstore.store.reachability import ReachableBlobs

if TYPE_CHECKING:
    from blobstore.store.local import LocalStore


class _Cached(NamedTuple):
    """A cached model with the sizes of its hot blobs."""

    path: Path
    used: float
    blobs: dict[str, int]
    other_size: int = 0


def evict_models(store: LocalStore, needed: int, limit: int, manifest: Digest) -> bool:
    """Remove cached models until ``needed`` bytes fit into ``limit``; return whether they do.

    The model that was not used for longest goes first. Blobs that a model of the store, another cached model
    or a running process needs stay.

    Args:
        store: the store.
        needed: bytes that are about to be kept.
        limit: bytes of blobs that are kept for remote models, at most.
        manifest: the model that needs them, which stays.

    Raises:
        StoreError: the store cannot be read or written.
    """
    if needed > limit:
        return False
    # Under the exclusive lock no process can publish a manifest, or begin to rely on a blob that goes.
    with store.exclusive_lock(), store.writing():
        leased = set().union(*store.read_leases().held.values())
        found = list(store.remote_cache.all())
        sizes = {name: _size(store, name) for name in {name for one in found for name in one.blobs}}
        models = [
            _Cached(one.path, one.used, {name: sizes[name] for name in one.blobs}) for one in found
        ]
        reachable = ReachableBlobs(store, cached_within=-1)  # by models of the store itself
        reachable.update()
        reachable.prove(sizes.keys())
        own = reachable.reached() | hex_digests_of(store.names.published.lost())

        def freed(model: _Cached, only: set[str]) -> set[str] | None:
            # A second hard link marks the base of cold blobs.
            kept = {
                one for one in only if Digest(one) in leased or store.has_base_link(Digest(one))
            }
            return None if model.path.name == manifest.hex else only - kept

        evicted, excess = choose_evicted(models, own, limit - needed, freed)
        for model, blobs in evicted:
            for name in blobs:
                Path(store.blob_path(Digest(name))).unlink(missing_ok=True)
            # Last: a process that is killed before leaves a model whose missing blobs are read again.
            model.path.unlink(missing_ok=True)
        return not excess


def _size(store: LocalStore, name: str) -> int:
    """Return the bytes of a hot blob; an absent one has 0."""
    try:
        return os.lstat(store.blob_path(Digest(name))).st_size
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise StoreError(f"blob {name} cannot be read: {error.strerror}") from error
