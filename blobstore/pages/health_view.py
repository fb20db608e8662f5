"""The view of health: the age of models, what was verified, damaged files, and the blobs that gc would remove."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from blobstore.errors import BlobstoreError
from blobstore.operations.maintenance.gc import collect_garbage
from blobstore.pages.text import shown
from blobstore.store.verified_cache import VerifiedBlobs

if TYPE_CHECKING:
    from blobstore.operations.describe.disk_usage import StoreDisk, StoreUsage

_MAX_LISTED = 100
_NO_GARBAGE: dict[str, Any] = {"size": 0, "files": 0, "refusal": "", "kept": {}, "largest": []}


def health_view(disk: StoreDisk, usage: StoreUsage) -> dict[str, Any]:
    """Return the state of each model, damage that is known without reading, and what gc would remove.

    No cache says that compressed blobs were verified: they are counted apart.
    """
    verified = VerifiedBlobs(disk.store)
    sizes = {digest: size for needed in disk.needs.values() for digest, size in needed.items()}
    frozen = disk.store.frozen()
    intact = {digest for digest, size in sizes.items() if verified.has(digest, size)}
    hot = sizes.keys() - frozen
    models = []
    for model in usage.models:
        needed = disk.needs[model.reference]
        models.append(
            {
                "name": shown(model.reference),
                "modified": int(disk.entries[model.reference].modified),
                "blobs": model.blobs,
                "verified": sum(digest in intact for digest in needed),
                "cold": sum(digest in frozen for digest in needed),
                "faults": [shown(fault) for fault in model.faults[:_MAX_LISTED]],
                "error": model.error and shown(model.error),
            }
        )
    return {
        "models": models,
        # Without a verified blob, the cache is from before the files changed, or from freezing.
        "last_verified": int(verified.saved_at) if intact or not hot else 0,
        "blobs": len(hot),
        "cold": len(sizes.keys() & frozen),
        "verified": len(intact),
        "quarantine": usage.quarantine.files,
        "now": int(time.time()),
        "gc": _garbage(disk) if _has_garbage(usage) else _NO_GARBAGE,
    }


def _has_garbage(usage: StoreUsage) -> bool:
    """Return whether gc may have more to remove than caches; gc reads all manifests once more."""
    spaces = (usage.unreferenced, usage.temporary, usage.partial)
    return bool(usage.unreadable) or any(space.files for space in spaces)


def _garbage(disk: StoreDisk) -> dict[str, Any]:
    try:
        found = collect_garbage(store=disk.store, dry_run=True)
    except BlobstoreError as error:
        return {"error": shown(error)}
    kept: Counter[str] = Counter()
    for item in found.kept_blobs:
        kept[item.reason] += item.size
    removed = (*found.blobs, *found.leftovers)
    largest = sorted(removed, key=lambda item: -item.size)[:_MAX_LISTED]
    return {
        "size": found.size,
        "files": len(removed),
        "refusal": shown(found.refusal, 400),
        "kept": dict(kept),
        "largest": [[shown(item.path), item.size] for item in largest],
    }
