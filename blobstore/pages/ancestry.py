"""Which model of a store descends from which: from its source, its model card, and what it shares.

No single record says it, so each parent comes with its evidence. In this order:

- A quantized model has a source record with options. Its parent is the model of the same files without.
- A model card or a config names a base model. Its parent is the model of that name, or one outside.
- Some of the weights are equal to those of a model that was imported earlier, or stored as differences.

Several models may fit; the one with the most bytes in common is the parent. Which blob is a delta and which
its base is no evidence of descent, because that is the choice of ``freeze``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from blobstore.errors import BlobstoreError
from blobstore.manifests import media_types
from blobstore.models.model_card import small_texts
from blobstore.models.source_layers import read_source_record
from blobstore.operations.describe.info import stated_bases

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from blobstore.core.digest import Digest
    from blobstore.manifests.reference import Reference
    from blobstore.operations.describe.disk_usage import StoreDisk
    from blobstore.store.catalog import CatalogEntry

Relation = Literal["quantized from", "fine-tuned from", "similar to"]

_MIN_SIMILAR = 0.1
"""The share of the weights of the smaller model that two similar models have in common."""
_MAX_NEAR = 8
"""How many of the earliest, and of the latest, models with a blob can be the parent of a later one."""


class Parent(NamedTuple):
    """The parent of a model."""

    reference: Reference | None
    """None if the model is not in the store."""
    name: str
    """The name of the model, as the model card spells it if it is not in the store."""
    relation: Relation
    evidence: str
    shared: int
    """Bytes of blobs that both have."""
    delta: int
    """Bytes of blobs that are stored as differences to blobs of the parent."""
    own: int
    """Bytes of the other blobs of the model."""


class _Origin(NamedTuple):
    """The origin that a model states."""

    files: tuple[Any, ...]
    options: Mapping[str, Any]
    repository: str
    bases: tuple[str, ...]


class DeltaBase(NamedTuple):
    """A model that another is compressed against, though it is not its parent."""

    reference: Reference
    size: int
    """Bytes of the deltas on disk."""


def find_parents(disk: StoreDisk) -> dict[Reference, Parent]:
    """Return the parent of each model that has one. There are no circles."""
    entries = {name: entry for name, entry in disk.entries.items() if entry.manifest is not None}
    origins = {name: _origin(disk, entry) for name, entry in entries.items()}
    relatives = _Relatives(disk, entries)
    found: dict[Reference, Parent] = {}
    # Models that were changed least come first, so that they are what others descend from.
    for name in sorted(entries, key=lambda name: (len(origins[name].options), str(name))):
        for parent in _candidates(name, origins, relatives):
            if not _is_below(parent.reference, name, found):
                found[name] = parent
                break
    return found


def find_delta_bases(
    disk: StoreDisk, parents: Mapping[Reference, Parent]
) -> dict[Reference, DeltaBase]:
    """Return the model that holds the bases of most of a model's deltas, besides its parent.

    Blobs that the parent has too, and deltas against blobs of the parent, do not count.
    """
    bases = disk.holdings.deltas
    wanted = set(bases.values())
    holders: dict[Digest, list[Reference]] = defaultdict(list)
    for name, needed in disk.needs.items() if bases else ():
        for digest in wanted.intersection(needed):
            holders[digest].append(name)
    found: dict[Reference, DeltaBase] = {}
    for name, needed in disk.needs.items() if bases else ():
        parent = parents[name].reference if name in parents else None
        theirs = disk.needs[parent] if parent is not None else {}
        sizes: Counter[Reference] = Counter()
        for digest in needed.keys() & bases.keys() - theirs.keys():
            if bases[digest] not in theirs:
                for holder in holders[bases[digest]]:
                    sizes[holder] += disk.sizes.get(digest, 0)
        sizes.pop(name, None)
        if sizes:
            found[name] = DeltaBase(*min(sizes.items(), key=lambda item: (-item[1], str(item[0]))))
    return found


class _Relatives:
    """The number of bytes that each pair of models has in common."""

    def __init__(self, disk: StoreDisk, entries: Mapping[Reference, CatalogEntry]) -> None:
        self._disk = disk
        self._bases = disk.holdings.deltas
        # Names of one manifest count as imported when the first of them was.
        first: dict[Digest | None, tuple[float, str]] = {}
        for name, entry in entries.items():
            age = entry.modified, str(name)
            first[entry.digest] = min(first.get(entry.digest, age), age)
        ages = {name: first[entry.digest] for name, entry in entries.items()}
        self._names = sorted(entries, key=lambda name: (ages[name], str(name)))
        """The models, the earliest first. Below, they are numbers: their places here."""
        self._places = {name: place for place, name in enumerate(self._names)}
        self._weights = [_weights(entries[name]) for name in self._names]
        self._totals = [sum(weights.values()) for weights in self._weights]
        self._kin: dict[Digest, list[int]] = defaultdict(list)
        """The models with a blob or deltas against it, the earliest first."""
        for place, weights in enumerate(self._weights):
            for root in {self._root(digest) for digest in weights}:
                self._kin[root].append(place)
        firsts: dict[tuple[float, str], int] = {}
        self._first = [firsts.setdefault(ages[name], n) for n, name in enumerate(self._names)]
        """The first name of the same manifest."""

    def _root(self, digest: Digest) -> Digest:
        """Return the blob that stands for all that are stored as differences to it."""
        return self._bases.get(digest, digest)

    def similar(self, name: Reference) -> list[tuple[Reference, int]]:
        """Return earlier models with similar weights and the bytes of these.

        Those with the most equal weights come first, then the earliest. Deltas do not count here: they say
        what freeze chose.
        """
        place = self._places[name]
        ours, first = self._weights[place], self._first[place]
        similar: Counter[int] = Counter()
        equal: Counter[int] = Counter()
        for digest, size in ours.items():
            kin = self._kin[self._root(digest)]
            earlier = bisect_left(kin, first)
            for other in {
                *kin[: min(earlier, _MAX_NEAR)],
                *kin[max(earlier - _MAX_NEAR, 0) : earlier],
            }:
                similar[other] += size
                equal[other] += size if digest in self._weights[other] else 0
        found = [
            (other, size)
            for other, size in similar.items()
            if size >= _MIN_SIMILAR * min(self._totals[place], self._totals[other])
        ]
        found.sort(key=lambda item: (-equal[item[0]], item[0]))
        return [(self._names[other], size) for other, size in found]

    def between(self, name: Reference, parent: Reference | None) -> tuple[int, int, int]:
        """Return the bytes that a model shares with another, those of its deltas, and the rest."""
        theirs: Mapping[Digest, int] = self._disk.needs[parent] if parent is not None else {}
        shared = delta = own = 0
        for digest in self._disk.needs[name]:
            size = self._disk.sizes.get(digest, 0)
            if digest in theirs:
                shared += size
            elif self._bases.get(digest) in theirs:
                delta += size
            else:
                own += size
        return shared, delta, own

    def nearest(self, name: Reference, others: Sequence[Reference]) -> list[Reference]:
        """Return models in the order of the bytes that they have in common with one, most first."""
        ours = self._disk.needs[name]

        def common(other: Reference) -> int:
            theirs = self._disk.needs[other]
            return sum(size for digest, size in ours.items() if digest in theirs)

        return sorted(others, key=lambda other: (-common(other), str(other)))


def _weights(entry: CatalogEntry) -> dict[Digest, int]:
    """Return the sizes of the blobs of a model's tensors."""
    if entry.manifest is None:
        return {}
    return {layer.digest: layer.size for layer in entry.manifest.layers_of(media_types.TENSOR)}


def _candidates(
    name: Reference, origins: Mapping[Reference, _Origin], relatives: _Relatives
) -> Iterator[Parent]:
    """Yield possible parents of a model, the most certain first."""

    def parent(
        reference: Reference | None, spelled: str, relation: Relation, evidence: str
    ) -> Parent:
        return Parent(reference, spelled, relation, evidence, *relatives.between(name, reference))

    own = origins[name]
    if own.options.get("quantize") and own.files:
        same = [
            other
            for other, origin in origins.items()
            if other != name and origin.files == own.files and not origin.options.get("quantize")
        ]
        for other in relatives.nearest(name, same)[:1]:
            evidence = "both were imported from files of the same names, sizes and headers"
            yield parent(other, str(other), "quantized from", evidence)
    for base in own.bases:
        same = [
            other
            for other, origin in origins.items()
            if other != name and _is_named(other, origin, base)
        ]
        evidence = f"its model card or config names {base}"
        for other in relatives.nearest(name, same):
            yield parent(other, str(other), "fine-tuned from", evidence)
    if own.bases and own.repository != own.bases[0]:
        evidence = "its model card or config names it; the store has no such model"
        yield parent(None, own.bases[0], "fine-tuned from", evidence)
    for other, size in relatives.similar(name):
        if origins[other].options.get("quantize") and not own.options.get("quantize"):
            continue
        evidence = (
            f"weights of {size:,} bytes are equal to its own or stored as differences, "
            "and it was imported earlier"
        )
        yield parent(other, str(other), "similar to", evidence)


def _is_named(reference: Reference, origin: _Origin, base: str) -> bool:
    """Return whether a model is the base that a card names, which is not itself quantized or tuned."""
    if origin.options.get("quantize"):
        return False
    if origin.repository:
        return origin.repository.lower() == base.lower()
    last = base.rpartition("/")[2].lower()
    model = reference.model.lower()
    return base not in origin.bases and (last == model or last.startswith(f"{model}-"))


def _is_below(parent: Reference | None, name: Reference, found: Mapping[Reference, Parent]) -> bool:
    """Return whether a model descends from ``name``, or is it."""
    while parent is not None:
        if parent == name:
            return True
        parent = found[parent].reference if parent in found else None
    return False


def _origin(disk: StoreDisk, entry: CatalogEntry) -> _Origin:
    if entry.manifest is None:
        return _Origin((), {}, "", ())
    try:
        record = read_source_record(disk.store, entry.manifest)
    except BlobstoreError:  # verify reports it
        record = None
    texts = dict(small_texts(disk.store, entry.manifest))
    bases = tuple(dict.fromkeys(stated_bases(texts)))
    if record is None:
        return _Origin((), {}, "", bases)
    files = tuple((file.name, file.size, file.start) for file in record.files)
    return _Origin(files, record.options, record.repository, bases)
