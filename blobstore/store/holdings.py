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
from blobstore.core.fork import cached_property

if TYPE_CHECKING:
    import os
    from array import array
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from blobstore.manifests.reference import Reference
    from blobstore.store.catalog import Catalog
    from blobstore.store.local import LocalStore
    from blobstore.store.references import KnownManifest


class Holdings:
    """The blobs that names keep, by number. A name whose manifest cannot be read keeps none."""

    def __init__(self, store: LocalStore, catalog: Catalog) -> None:
        """Read the index of cold blobs, and which blobs the cache of remote models keeps.

        Raises:
            StoreError: the cold blobs cannot be listed.
        """
        self._store = store
        self._catalog = catalog
        self.references = catalog.references
        self.deltas = store.cold_bases()
        """The bases of the cold blobs that are deltas."""
        kept = {Digest(blob) for model in store.remote_cache.all() for blob in model.blobs}
        number = self.references.numbers({*self.deltas, *self.deltas.values(), *kept})
        self._bases = {number[delta]: number[base] for delta, base in self.deltas.items()}
        self.cached = set(self._with_bases([number[digest] for digest in kept]))
        """Blobs that the cache of remote models keeps, whatever names there are."""

    @cached_property
    def counts(self) -> Sequence[int]:
        """The number of names that keep each blob; the cache counts as one, and so does the shared store."""
        counts = self.uses(self._catalog.known())
        for number in self.cached:
            counts[number] += 1
        for number, count in enumerate(counts) if self._store.shared is not None else ():
            counts[number] += count == 1 and self._store.is_shared(self.references.digest(number))
        return counts

    def uses(self, several: Iterable[KnownManifest]) -> array[int]:
        """Return how many of these manifests keep each blob, by number."""
        several = list(several)
        uses = self.references.uses(known.row for known in several)
        for known in several if self._bases else ():
            numbers = known.blobs
            if (held := self._with_bases(numbers)) is not numbers:
                for number in set(held).difference(numbers):
                    uses[number] += 1
        return uses

    def of(self, reference: Reference) -> Collection[int]:
        """Return the blobs that a name keeps; none if somebody has removed it since."""
        entry = self._catalog.get(reference)
        return self.by(entry.known) if entry is not None else ()

    def by(self, known: KnownManifest | None) -> Collection[int]:
        """Return the blobs that a manifest keeps; none for one that cannot be read."""
        return self._with_bases(known.blobs) if known is not None else ()

    def _with_bases(self, blobs: Collection[int]) -> Collection[int]:
        """Return blobs with their bases, and the bases of these."""
        bases = self._bases
        new = {bases[one] for one in blobs if one in bases}.difference(blobs) if bases else ()
        return self._with_bases({*blobs, *new}) if new else blobs

    def freed(self, references: Iterable[Reference]) -> Iterator[int]:
        """Yield the blobs that nothing keeps once these names are removed.

        A name that is not among the entries, because somebody has removed it since, frees nothing.
        """
        held = [self.of(name) for name in set(references)]
        counts = self.counts
        if len(held) == 1:  # most often, and then each blob occurs once
            return (number for number in held[0] if counts[number] == 1)
        found = Counter(chain.from_iterable(held))
        return (number for number, count in found.items() if count == counts[number])

    def files(self, number: int) -> list[os.stat_result]:
        """Return the status of those files of a blob that exist; two names of one file count once."""
        store, digest = self._store, self.references.digest(number)
        hot = store.blob_path(digest)
        paths = (hot if is_there(hot) else store.base_path(digest), store.cold_path(digest))
        return [status for status in map(status_of, paths) if status is not None]
