"""Manifests that a store has lost, judged by its blobs: a disk may not be mounted, or a file was deleted.

Names that this program has given are known to be lost by :mod:`blobstore.store.published`; this finds others.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from blobstore.core.escape import quote
from blobstore.core.files import read_regular
from blobstore.errors import BlobstoreError
from blobstore.manifests.layers_digest import MAX_CONFIG_SIZE, promise
from blobstore.store.published import hex_digests_of
from blobstore.store.reachability import ReachableBlobs
from blobstore.store.scan import digest_of, list_names

if TYPE_CHECKING:
    import os

    from blobstore.store.local import LocalStore

GRACE: Final = 3600.0
"""The age in seconds from which a blob without a manifest counts; other programs hold no leases."""
IMPLAUSIBLE: Final = 0.9
"""The share of all blobs above which garbage is more likely a mistake."""


def implausible(store: LocalStore, garbage: int, blobs: int, *, has_models: bool) -> str:
    """Return why so many blobs without a manifest, out of ``blobs``, are hardly garbage; empty if they may be."""
    folder = quote(store.folder("manifests"))
    if garbage and not has_models:
        return f"there are no manifests in {folder}, but {blobs:,} blobs"
    if garbage <= IMPLAUSIBLE * blobs:
        return ""
    return (
        f"the manifests in {folder} do not reference {garbage:,} of {blobs:,} blobs, so some manifests "
        "may be missing"
    )


def lost_manifests(store: LocalStore) -> str:
    """Return why manifests seem to be lost; empty if they do not.

    Blobs of models that were removed or replaced are known by their former manifests, and those of imports that
    run or were interrupted by their leases.

    Raises:
        InvalidManifest: a manifest cannot be read, so that the blobs it needs are unknown.
        StoreError: the store cannot be read.
    """
    # A model may get its name while the first look is taken.
    return _suspicion(store) and _suspicion(store)


def _suspicion(store: LocalStore) -> str:
    leases, marks, history = store.read_leases(), ReachableBlobs(store), store.names.whole_history()
    marks.update()
    history.update()
    known = {
        *marks.reached(),
        *history.blobs(),
        *(base.hex for base in store.cold_bases().values()),
    }
    if marks.by_path():  # otherwise the folder itself is lost, and that is said once
        known |= hex_digests_of(store.names.published.lost(on_error=lambda _: None))
    known |= {digest.hex for held in (leases.digests, *leases.dead.values()) for digest in held}
    paths = [
        (Path(folder, name), digest)
        for folder in (store.folder("blobs"), store.folder("cold"))
        for name in list_names(folder)
        if (digest := digest_of(name)) is not None
    ]
    unknown = [path for path, digest in paths if digest.hex not in known]
    # An import writes the config last, so even a young one had a manifest.
    if marks.by_path() or not any(map(promise_of, unknown)):
        unknown = [path for path in unknown if path.exists() and age_of(path.lstat()) >= GRACE]
    return implausible(store, len(unknown), len(paths), has_models=bool(marks.by_path()))


def promise_of(path: Path) -> str | None:
    """Return the digest of the layer list that a config blob holds; None for other blobs."""
    try:
        return promise(read_regular(path, MAX_CONFIG_SIZE))
    except (BlobstoreError, OSError):
        return None


def age_of(status: os.stat_result) -> float:
    """Return the seconds since a file was written."""
    # If the clock was set back, a file may be from the future: its age is 0.
    return max(0.0, time.time() - status.st_mtime)
