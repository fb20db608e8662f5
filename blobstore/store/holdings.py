"""What each name of a store keeps on the disk, and so what its removal frees.

A name keeps the blobs of its manifest, and the bases that cold ones among these are deltas against. ``gc`` removes
blobs by the same rule. Everything that says beforehand what a removal frees asks here.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING

from blobstore.core.digest import Digest
from blobstore.core.files import is_there, status_of
from blobstore.store.references import References

if TYPE_CHECKING:
    import os
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from blobstore.manifests.reference import Reference
    from blobstore.store.catalog import CatalogEntry
    from blobstore.store.local import LocalStore


class Holdings:
    """The blobs that names keep, by number. A name whose manifest cannot be read keeps none."""

    def __init__(self, store: LocalStore, entries: Sequence[CatalogEntry]) -> None:
        """Read the index of cold blobs, and which blobs the cache of remote models keeps.

        The entries were read together.

        Raises:
            StoreError: the cold blobs cannot be listed.
        """
        self._store = store
        self.references = entries[0].references if entries else References()
        number = self.references.number
        bases = {number(delta): number(base) for delta, base in store.cold_bases().items()}
        self.of: Mapping[Reference, Collection[int]] = {
            entry.reference: _with_bases(entry.known.blobs, bases) if entry.known else ()
            for entry in entries
        }
        cached = {
            number(Digest(blob)) for model in store.remote_cache.all() for blob in model.blobs
        }
        self.cached = set(_with_bases(cached, bases))
        """Blobs that the cache of remote models keeps, whatever names there are."""
        self.counts = Counter(self.cached)
        """The number of names that keep each blob; the cache counts as one."""
        for held in self.of.values():
            self.counts.update(held)

    def freed(self, references: Iterable[Reference]) -> Iterator[int]:
        """Yield the blobs that nothing keeps once these names are removed.

        A name that is not among the entries, because somebody has removed it since, frees nothing.
        """
        held = [self.of.get(name, ()) for name in set(references)]
        if len(held) == 1:  # most often, and then each blob occurs once
            return (number for number in held[0] if self.counts[number] == 1)
        found = Counter(chain.from_iterable(held))
        return (number for number, count in found.items() if count == self.counts[number])

    def files(self, number: int) -> list[os.stat_result]:
        """Return the status of those files of a blob that exist; two names of one file count once."""
        store, digest = self._store, self.references.digest(number)
        hot = store.blob_path(digest)
        paths = (hot if is_there(hot) else store.base_path(digest), store.cold_path(digest))
        return [status for status in map(status_of, paths) if status is not None]


def _with_bases(blobs: Collection[int], bases: Mapping[int, int]) -> Collection[int]:
    """Return blobs with their bases, and the bases of these."""
    new = {bases[one] for one in blobs if one in bases}.difference(blobs) if bases else ()
    return _with_bases({*blobs, *new}, bases) if new else blobs
