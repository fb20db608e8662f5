"""The view of health: the age of models, what was verified, what is damaged, and what gc would remove."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from blobstore.errors import BlobstoreError
from blobstore.operations.maintenance.disk_usage import usage_of
from blobstore.operations.maintenance.gc import collect_garbage
from blobstore.operations.page.text import shown
from blobstore.store.verified_cache import VerifiedBlobs

if TYPE_CHECKING:
    from blobstore.operations.maintenance.disk_usage import StoreDisk

_MAX_LISTED = 100


def health_view(disk: StoreDisk) -> dict[str, Any]:
    """Return the state of each model, damage that is known without reading, and what gc would remove."""
    verified = VerifiedBlobs(disk.store)
    usage = usage_of(disk)
    sizes = {
        digest: size for entry in disk.entries.values() for digest, size in entry.blobs.items()
    }
    intact = {digest for digest, size in sizes.items() if verified.has(digest, size)}
    models = []
    for model in usage.models:
        entry = disk.entries[model.reference]
        models.append(
            {
                "name": shown(model.reference),
                "modified": int(entry.modified),
                "blobs": model.blobs,
                "verified": sum(digest in intact for digest in entry.blobs),
                "cold": sum(digest in disk.blobs.cold for digest in entry.blobs),
                "faults": [shown(fault) for fault in model.faults[:_MAX_LISTED]],
                "error": model.error and shown(model.error),
            }
        )
    return {
        "models": models,
        "last_verified": int(verified.saved_at),
        "blobs": len(sizes),
        "verified": len(intact),
        "quarantine": usage.quarantine.files,
        "now": int(time.time()),
        "gc": _garbage(disk),
    }


def _garbage(disk: StoreDisk) -> dict[str, Any]:
    try:
        found = collect_garbage(disk.store, dry_run=True)
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
