"""Finds the base model of each model: the one that its card or config names, or the most similar one.

Models are compared with few others: those of the same layers whose blobs most models share, those next to
them by name or time, and the most similar ones of other layers. Samples of blobs tell roughly
how much a base saves. Of a family, as few models become bases as possible, because a base has no base itself:
of the steps of one run, the one in the middle. The model that was imported first is preferred, if it serves
as well: others are made from it. Where chains are allowed, each step has the one next to it. If another model
is many times nearer than the one that a card names, as the steps of a run are to each other, the card is
ignored.
"""

from __future__ import annotations

import contextlib
import math
import re
from bisect import bisect_left
from collections import Counter, defaultdict
from itertools import chain
from typing import TYPE_CHECKING, Any

from blobstore.cold_blobs.blob_encoder import MIN_GAIN
from blobstore.cold_blobs.delta_chains import Fit, choose_chains
from blobstore.cold_blobs.similarity import BlobSampler
from blobstore.core import strict_json
from blobstore.errors import BlobstoreError
from blobstore.manifests import media_types
from blobstore.manifests.reference import by_numbers
from blobstore.models.model_card import card_field

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from typing import Final

    from blobstore.cold_blobs.delta_chains import Fits
    from blobstore.core.digest import Digest
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.manifests.model import Manifest
    from blobstore.manifests.reference import Reference
    from blobstore.store.local import LocalStore

    Layers = Mapping[str, Descriptor]
    Order = Callable[[Reference], Any]
    Gains = Mapping[Reference, Mapping[Reference, float]]
    """About the bytes that models save with some others as their base."""

_MAX_CANDIDATES: Final = 8
"""Models of the same layers, and of other layers, that one model is compared with."""
_SAMPLED_BLOBS: Final = 2
MIN_SIMILAR: Final = 0.5
"""The share of a model's bytes that must lie in layers of equal name and size."""
_MANY_TIMES: Final = 8
"""A base that a card names must not take so many times the space that the nearest model takes."""
_MAX_CARD: Final = 1 << 20


class BaseFinder:
    """Finds base models among some models of a store."""

    def __init__(
        self,
        store: LocalStore,
        manifests: Mapping[Reference, Manifest],
        deltas: Collection[Digest] = (),
        report: Callable[[str], object] = lambda _: None,
        uses: Mapping[Digest, int] | None = None,
    ) -> None:
        """Take the models, and the blobs that are deltas and cannot be bases.

        ``report`` is called with the state of the search, in words. ``uses`` is how many models have each blob, if
        there are others.
        """
        self._store = store
        self._manifests = manifests
        self._report = report
        self._sampler = BlobSampler(store)
        self._layers = {name: tensor_layers(manifest) for name, manifest in manifests.items()}
        self._uses = uses or Counter(
            layer.digest for layers in self._layers.values() for layer in layers.values()
        )
        self._groups: dict[frozenset[tuple[str, int]], list[Reference]] = defaultdict(list)
        """Models that can be bases, by the names and sizes of their layers."""
        self._sorted: dict[frozenset[tuple[str, int]], list[list[Reference]]] = {}
        """The same models in each of several orders."""
        for reference, layers in self._layers.items():
            # A base must not be a delta itself, so a model that consists mostly of deltas is of no
            # use as one.
            size = sum(layer.size for layer in layers.values() if layer.digest not in deltas)
            if size > sum(layer.size for layer in layers.values()) / 2:
                self._groups[kind_of(layers)].append(reference)

    def find_bases(
        self, references: Sequence[Reference], *, chains: bool = False
    ) -> dict[Reference, Reference]:
        """Return the base of each of the models that has one.

        Unless ``chains`` are allowed, a base has no base itself.
        """
        candidates: dict[frozenset[tuple[str, int]], list[Reference]] = {}
        named: dict[Reference, Reference] = {}
        fits: dict[Reference, dict[Reference, Fit]] = {}
        for number, reference in enumerate(references, start=1):
            self._report(f"searching for bases: {number} of {len(references)} models")
            kind = kind_of(self._layers.get(reference, {}))
            similar = self._similar_groups(kind)
            texts = set(named_bases(self._store, self._manifests[reference]))
            known = (other for group in similar for other in self._groups[group])
            base = next(
                (one for one in known if one != reference and normalized_names(one) & texts), None
            )
            # Models of one kind have the same candidates, so these are looked for once for a
            # family.
            if kind not in candidates:
                candidates[kind] = self._candidates(kind, similar)
            others = [*candidates[kind], *self._neighbours(reference, kind)]
            found = {
                other: self._fit(reference, other)
                for other in dict.fromkeys([*others, *([base] if base else [])])
                if other != reference
            }
            fits[reference] = {other: fit for other, fit in found.items() if fit.saved > 0}
            if base is not None:
                least = min((fit.left for fit in fits[reference].values()), default=math.inf)
                if found[base].left <= _MANY_TIMES * least:
                    named[reference] = base
        if chains:
            return choose_chains(fits)
        bases = choose_bases(
            named,
            {
                one: {other: fit.saved for other, fit in others.items()}
                for one, others in fits.items()
            },
        )
        self._prefer_older(fits, bases, named)
        return bases

    def _prefer_older(
        self, fits: Fits, bases: dict[Reference, Reference], named: Mapping[Reference, Reference]
    ) -> None:
        """Replace bases by older models that serve as well; those that cards name stay."""
        ages = {one: self._age(one) for one in {*fits, *chain.from_iterable(fits.values())}}
        kept: set[Digest] | None = None
        for base in dict.fromkeys(bases.values()):
            users = [one for one, other in bases.items() if other == base]
            if any(one in named for one in users):
                continue
            if base not in fits:
                # A model that is not frozen now can be a delta later, unless deltas need it already.
                if kept is None:
                    kept = {*self._store.cold_bases().values(), *self._store.frozen()}
                if not kept.isdisjoint(layer.digest for layer in self._layers[base].values()):
                    continue
            older = {*users, *chain.from_iterable(fits[one] for one in users)}
            for other in sorted(older, key=lambda one: (ages[one], one)):
                if ages[other] < ages[base] and _replace_base(base, other, fits, bases):
                    break

    def _age(self, reference: Reference) -> float:
        """Return when the manifest of a model was written; the last of all if it has just been removed."""
        try:
            return self._store.manifest_path(reference).stat().st_mtime
        except OSError:
            return math.inf

    def _age_key(self, reference: Reference) -> tuple[float, Reference]:
        return self._age(reference), reference

    def _similar_groups(self, kind: frozenset[tuple[str, int]]) -> list[frozenset[tuple[str, int]]]:
        """Return the groups with enough of the same layers, the most similar first."""
        total = sum(size for _, size in kind)
        shares = {group: sum(size for _, size in kind & group) for group in self._groups}
        found = [group for group, size in shares.items() if size and size >= MIN_SIMILAR * total]
        return sorted(found, key=lambda group: (-shares[group], self._groups[group]))

    def _candidates(
        self, kind: frozenset[tuple[str, int]], similar: Sequence[frozenset[tuple[str, int]]]
    ) -> list[Reference]:
        """Return the models that those with some layers are compared with."""
        own = sorted(self._groups.get(kind, ()), key=self._rank)
        others = [
            other
            for group in similar
            if group != kind
            for other in sorted(self._groups[group], key=self._rank)[:_MAX_CANDIDATES]
        ]
        chosen = own[: _MAX_CANDIDATES - 1]
        if rest := own[_MAX_CANDIDATES - 1 :]:
            # The base of a family is nearer to each fine-tune than the other fine-tunes are.
            chosen.append(max(rest, key=lambda other: self._fit(other, chosen[0]).saved))
        return [*chosen, *others[:_MAX_CANDIDATES]]

    def _neighbours(
        self, reference: Reference, kind: frozenset[tuple[str, int]]
    ) -> Iterator[Reference]:
        """Yield the models of the same layers that come before and after, as the steps of a run do."""
        if kind not in self._sorted:
            self._sorted[kind] = [
                sorted(self._groups.get(kind, ()), key=order) for order in _orders(self._age_key)
            ]
        return _neighbours(reference, self._sorted[kind], self._age_key)

    def _rank(self, reference: Reference) -> tuple[int, Reference]:
        """Return a key that sorts models with blobs that many models have first."""
        layers = self._layers[reference].values()
        return -sum(layer.size * self._uses[layer.digest] for layer in layers), reference

    def _fit(self, reference: Reference, base: Reference) -> Fit:
        """Return about how many bytes of a model's own blobs a base saves, 0 if too few, and how many remain."""
        theirs = self._layers[base]
        # Equal blobs are stored once in any case, so only blobs that differ count.
        pairs = [
            (layer, theirs[name])
            for name, layer in self._layers[reference].items()
            if name in theirs and theirs[name].digest != layer.digest
        ]
        saved = size = 0.0
        for layer, other in sorted(pairs, key=lambda pair: -pair[0].size)[:_SAMPLED_BLOBS]:
            with contextlib.suppress(BlobstoreError):  # reported when the blob is compressed
                saved += self._sampler.saved(layer.id, other.id) * layer.size
                size += layer.size
        # Models that share a blob share what it saves.
        total = sum(layer.size / self._uses[layer.digest] for layer, _ in pairs)
        if not size or saved < MIN_GAIN * size:
            return Fit(0.0, total)
        return Fit(saved / size * total, (1 - saved / size) * total)


def choose_bases(named: Mapping[Reference, Reference], gains: Gains) -> dict[Reference, Reference]:
    """Return the bases of models; a base has no base itself.

    Args:
        named: bases that cards name; they come first, the most frequent one before the others.
        gains: the bytes that each model saves with some others as its base.
    """
    bases: dict[Reference, Reference] = {}
    # The most frequent first: a model that has a base by the time its turn comes cannot be one.
    for base, _ in Counter(named.values()).most_common():
        if base not in bases:
            bases |= {
                one: base for one in named if named[one] == base and one not in bases.values()
            }
    settled = {*bases, *bases.values()}
    return bases | _fewest_bases(
        {
            one: {other: gain for other, gain in others.items() if other not in bases}
            for one, others in gains.items()
            if one not in settled
        }
    )


def _replace_base(
    base: Reference, other: Reference, fits: Fits, bases: dict[Reference, Reference]
) -> bool:
    """Make another model the base of those with some base, if it serves all as well.

    If it is one of them, it has no base from then on. Then it must serve another model, or ``base`` if that
    is frozen too: else nothing would be saved.
    """
    users = [one for one, known in bases.items() if known == base and one != other]
    children = [*users, base] if base in fits and other in bases else users
    if not children or bases.get(other, base) != base:
        return False
    if any(other not in fits[one] for one in children):
        return False
    before = sum(fits[one][base].left if base in fits[one] else math.inf for one in users)
    if sum(fits[one][other].left for one in users) > before:
        return False
    bases.pop(other, None)
    bases.update(dict.fromkeys(children, other))
    return True


def _fewest_bases(gains: Gains) -> dict[Reference, Reference]:
    """Choose bases one after the other: each time the model with which most is saved.

    The gain of a base is the sum that others save with it, less the bytes that it saves itself so far.
    """
    by_base: dict[Reference, dict[Reference, float]] = defaultdict(dict)
    for one, others in gains.items():
        for other, gain in others.items():
            by_base[other][one] = gain
    bases: dict[Reference, Reference] = {}
    saved = dict.fromkeys(gains, 0.0)
    chosen: set[Reference] = set()

    def total(base: Reference) -> float:
        more = (gain - saved[one] for one, gain in by_base[base].items() if one not in chosen)
        return sum(gain for gain in more if gain > 0) - saved.get(base, 0.0)

    while by_base and total(best := max(by_base, key=total)) > 0:
        chosen.add(best)
        # A base has no base itself.
        bases.pop(best, None)
        for one, gain in by_base.pop(best).items():
            if one not in chosen and gain > saved[one]:
                bases[one], saved[one] = best, gain
    return bases


def named_bases(store: LocalStore, manifest: Manifest) -> Iterator[str]:
    """Yield the base models that the model card and config of a model name, normalized."""
    for layer in manifest.layers:
        if layer.name not in {"README.md", "config.json"} or layer.size > _MAX_CARD:
            continue
        names: list[Any] = []
        try:
            text = store.read_blob(layer.digest, layer.size).decode()
            if layer.name == "README.md":
                names = list(card_field({layer.name: text}, "base_model"))
            elif isinstance(config := strict_json.loads_any(text), dict):
                names = [config.get(key) for key in ("base_model", "_name_or_path")]
        except (BlobstoreError, ValueError):
            continue
        for name in names:
            if isinstance(name, str) and name:
                yield _normalize(name.rpartition("/")[2])


def kind_of(layers: Layers) -> frozenset[tuple[str, int]]:
    """Return the names and sizes of layers."""
    return frozenset((layer.name, layer.size) for layer in layers.values())


def normalized_names(reference: Reference) -> set[str]:
    """Return the names that a card may have for a model: ``llama-3.2:1b`` is Llama-3.2-1B."""
    return {_normalize(reference.model), _normalize(reference.model + reference.tag)}


def tensor_layers(manifest: Manifest) -> dict[str, Descriptor]:
    """Return the tensor layers of a model by name."""
    return {layer.name: layer for layer in manifest.layers_of(media_types.TENSOR)}


def neighbours(
    reference: Reference, group: Collection[Reference], age: Order
) -> Iterator[Reference]:
    """Yield the models that come before and after one in a group, in the order of ``age`` or of numbers in names."""
    return _neighbours(reference, [sorted(group, key=order) for order in _orders(age)], age)


def _neighbours(
    reference: Reference, groups: Iterable[Sequence[Reference]], age: Order
) -> Iterator[Reference]:
    for order, group in zip(_orders(age), groups, strict=True):
        place = bisect_left(group, order(reference), key=order)
        yield from group[max(place - 1, 0) : place + 2]


def _orders(age: Order) -> tuple[Order, ...]:
    """Return the orders of the steps of a run: by time, or by one of the numbers in their names.

    Of those of ``step-2-seed-1`` that is the first or the last.
    """
    return by_numbers, _numbered_last, age


def _numbered_last(reference: Reference) -> tuple[list[str], list[int]]:
    """Return a key as :func:`by_numbers`, but with the last number as the first."""
    texts, numbers = by_numbers(reference)
    return texts, numbers[::-1]


def _normalize(name: str) -> str:
    """Return the letters and digits of a name in lower case."""
    return re.sub(r"[^a-z0-9]", "", name.casefold())
