"""What a store takes on disk, as the views of the page get it."""

from __future__ import annotations

from collections.abc import Mapping

from blobstore.core.digest import Digest
from blobstore.operations.describe.disk_usage import StoreDisk, StoreUsage, read_disk, usage_of
from blobstore.store.local import LocalStore


def measured(store: LocalStore) -> tuple[StoreDisk, StoreUsage]:
    """Read a store, and measure it."""
    disk = read_disk(store)
    return disk, usage_of(disk)


def held(store: LocalStore) -> tuple[StoreDisk, StoreUsage, Mapping[Digest, list[int]]]:
    """Read a store, measure it, and list the names that keep each blob."""
    disk, usage = measured(store)
    return disk, usage, disk.holders()


def shared_by(store: LocalStore) -> tuple[StoreDisk, Mapping[Digest, list[int]]]:
    """Read a store, and list the names that keep each blob."""
    disk = read_disk(store)
    return disk, disk.holders()
