"""Chooses the models among which the bases of some others are searched, so that few manifests are read.

The file of references says which models have layers of the same names and sizes. Of each such layout one manifest is
read. If it has layers that may be of use by their names and sizes, so do the others. Of a large family some are enough:
those next to a model, the oldest, those whose blobs many models have, and the one that a card names.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from typing import TYPE_CHECKING

from blobstore.cold_blobs.base_search import (
    MIN_SIMILAR,
    kind_of,
    named_bases,
    neighbours,
    normalized_names,
    tensor_layers,
)
from blobstore.core import interrupts
from blobstore.core.digest import Digest
from blobstore.errors import BlobstoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import Final

    from blobstore.manifests.descriptor import Descriptor
    from blobstore.manifests.model import Manifest
    from blobstore.manifests.reference import Reference
    from blobstore.store.local import LocalStore
    from blobstore.store.reachability import ReachableBlobs

_FAMILY: Final = 64
"""Models of one layout that are all considered."""
_CHOSEN: Final = 16
"""How many of the oldest ones, and of those whose blobs most models have, are considered of a larger family."""


class SearchedModels:
    """The models of a store by the layouts of their tensors."""

    def __init__(self, store: LocalStore, reachable: ReachableBlobs) -> None:
        """Take what was read of the store's manifests."""
        self._store = store
        self._reachable = reachable
        self._layouts: dict[bytes, list[str]] = defaultdict(list)
        for path, state in reachable.by_path().items():
            self._layouts[state.known.record.layout].append(path)

    def find(
        self,
        chosen: Mapping[Reference, Manifest],
        is_useful: Callable[[Descriptor], bool],
        *,
        with_similar: bool,
    ) -> dict[Reference, Manifest]:
        """Return the manifests of models with a blob that is of use, and of those similar to ``chosen``, if asked.

        Manifests that cannot be read are left out.
        """
        found = dict(chosen)
        kinds = (
            [kind_of(tensor_layers(manifest)) for manifest in chosen.values()]
            if with_similar
            else []
        )
        for paths in self._layouts.values():
            interrupts.check()
            first = next(self._read(self._names(paths), found), None)
            if first is None:
                continue
            name, manifest = first
            kind = kind_of(tensor_layers(manifest))
            layers = (layer._replace(digest=Digest("")) for layer in manifest.layers)
            if kind and any(map(is_useful, layers)):
                found.update(self._read(self._names(paths), found))
            elif any(_size(kind & other) >= MIN_SIMILAR * _size(other) for other in kinds if kind):
                found[name] = manifest
                found.update(self._read(self._some(paths, chosen), found))
        return found

    def uses(self, layers: Iterable[Descriptor]) -> dict[Digest, int]:
        """Return how many models have each of some blobs."""
        numbers = self._reachable.references.numbers(layer.digest for layer in layers)
        counts = self._counts()
        return {digest: counts[number] for digest, number in numbers.items()}

    def _counts(self) -> Sequence[int]:
        return self._reachable.references.uses(
            state.known.row for state in self._reachable.by_path().values()
        )

    def _names(self, paths: Iterable[str]) -> Iterator[Reference]:
        return (name for name, _ in self._reachable.by_name(paths))

    def _read(
        self, names: Iterable[Reference], known: Mapping[Reference, Manifest]
    ) -> Iterator[tuple[Reference, Manifest]]:
        for name in names:
            with contextlib.suppress(BlobstoreError):  # removed since, or damaged
                yield name, known[name] if name in known else self._store.parse(name)[1]

    def _some(
        self, paths: Sequence[str], chosen: Mapping[Reference, Manifest]
    ) -> Iterable[Reference]:
        """Return those of the models of one layout that may be the bases of the chosen ones."""
        family = list(self._names(paths))
        if len(family) <= _FAMILY:
            return family
        counts, sizes = self._counts(), self._reachable.references.sizes
        others = [str(self._store.manifest_path(name)) for name in chosen]
        states = dict(self._reachable.by_name([*paths, *others]))

        def age(name: Reference) -> tuple[float, Reference]:
            return states[name].state.modified, name

        def rank(name: Reference) -> tuple[int, Reference]:
            blobs = states[name].known.blobs
            return -sum(sizes[blob] * counts[blob] for blob in blobs), name

        named = {
            text for manifest in chosen.values() for text in named_bases(self._store, manifest)
        }
        some = {name for name in family if not named.isdisjoint(normalized_names(name))}
        some.update(sorted(family, key=age)[:_CHOSEN], sorted(family, key=rank)[:_CHOSEN])
        for name in chosen.keys() & states.keys():
            some.update(neighbours(name, family, age))
        return some


def _size(kind: frozenset[tuple[str, int]]) -> int:
    return sum(size for _, size in kind)
