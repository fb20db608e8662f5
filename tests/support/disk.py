"""What a store takes on disk, as the views of the page get it."""

from __future__ import annotations

from blobstore.operations.describe.disk_usage import StoreDisk, StoreUsage, read_disk, usage_of
from blobstore.store.local import LocalStore


def measured(store: LocalStore) -> tuple[StoreDisk, StoreUsage]:
    """Read a store, and measure it."""
    disk = read_disk(store)
    return disk, usage_of(disk)
