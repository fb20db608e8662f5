"""What each name of a store keeps on the disk, and so what its removal frees.

A name keeps the blobs of its manifest, and the bases that cold ones among these are deltas against. ``gc`` removes
blobs by the same rule. Everything that says beforehand what a removal frees asks here.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING

from blobstore.core.digest import Digest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from collections.abc import Set as AbstractSet

    from blobstore.manifests.reference import Reference
    from blobstore.store.catalog import CatalogEntry
    from blobstore.store.local import LocalStore


class Holdings:
    """The blobs that names keep. A name whose manifest cannot be read keeps none."""

    def __init__(self, store: LocalStore, entries: Iterable[CatalogEntry]) -> None:
        """Read the index of cold blobs, and which blobs the cache of remote models keeps.

        Raises:
            StoreError: the cold blobs cannot be listed.
        """
        bases = store.cold_bases()
        self.of: Mapping[Reference, AbstractSet[Digest]] = {
            entry.reference: _with_bases(entry.blobs.keys(), bases) for entry in entries
        }
        cached = {Digest(blob) for model in store.remote_cache.all() for blob in model.blobs}
        self.cached: AbstractSet[Digest] = _with_bases(cached, bases)
        """Blobs that the cache of remote models keeps, whatever names there are."""
        self.counts = Counter(chain(self.cached, *self.of.values()))
        """The number of names that keep each blob; the cache counts as one."""

    def freed(self, references: Iterable[Reference]) -> set[Digest]:
        """Return the blobs that nothing keeps once these names are removed.

        A name that is not among the entries, because somebody has removed it since, frees nothing.
        """
        found = Counter(chain.from_iterable(self.of.get(name, ()) for name in set(references)))
        return {digest for digest, count in found.items() if count == self.counts[digest]}


def _with_bases(blobs: AbstractSet[Digest], bases: Mapping[Digest, Digest]) -> AbstractSet[Digest]:
    """Return blobs with their bases, and the bases of these."""
    new = {bases[digest] for digest in bases.keys() & blobs}.difference(blobs)
    return _with_bases({*blobs, *new}, bases) if new else blobs
