"""Which model of a store another is most like: what it was trained from, by its card or by its bytes."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from blobstore.errors import BlobstoreError
from blobstore.manifests import media_types
from blobstore.operations.freeze.blob_encoder import BlobEncoder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from blobstore.manifests.descriptor import Descriptor
    from blobstore.manifests.model import Manifest
    from blobstore.manifests.reference import Reference
    from blobstore.operations.freeze.blob_encoder import Level
    from blobstore.store.local import LocalStore

_MOST = 8
"""Models that are compared by their bytes."""
_SAMPLES = 2
"""Blobs of each that are compared."""
_ALIKE = 0.5
"""The least part of its bytes that a model must have in layers that the other has too."""
LEAST_GAIN = 0.05
"""What part of a blob coding it by another must save over coding it alone."""
_MAX_CARD = 1 << 20
_FRONT_MATTER = re.compile(r"\A---\s*\n(.*?\n)---\s*\n", re.DOTALL)
_BASE_MODEL = re.compile(r"^base_model:[ \t]*(?:\n[ \t]*-[ \t]*)?[\"']?([^\s\"'#]+)", re.MULTILINE)


class BaseFinder:
    """The models of a store, some of which are like others."""

    def __init__(self, store: LocalStore, references: Sequence[Reference], level: Level) -> None:
        self._store = store
        self._level: Level = level
        self._manifests: dict[Reference, Manifest] = {}
        for reference in references:
            try:
                self._manifests[reference] = store.parse(reference)[1]
            except BlobstoreError:
                continue

    @property
    def references(self) -> list[Reference]:
        """The models, without those whose manifests cannot be read, by name."""
        return sorted(self._manifests)

    def bases_of(self, references: Sequence[Reference]) -> dict[Reference, Reference]:
        """Return by which models others are best coded; no such model is coded itself.

        That which is the best for most comes first: of a family, all are coded by what they were made
        from. Others are thought of again without those that are coded.
        """
        best = {reference: self.base_of(reference, ()) for reference in references}
        votes = Counter(base for base in best.values() if base is not None)
        bases: dict[Reference, Reference] = {}
        for base, _ in votes.most_common():
            if base not in bases:
                theirs = (item for item in references if best[item] == base)
                bases |= {item: base for item in theirs if item not in bases.values()}
        for reference in references:
            if best[reference] is not None and reference not in {*bases, *bases.values()}:
                found = self.base_of(reference, list(bases))
                if found is not None:
                    bases[reference] = found
        return bases

    def base_of(self, reference: Reference, excluded: Sequence[Reference]) -> Reference | None:
        """Return the model by which another is best coded; None if there is none.

        Args:
            reference: the model.
            excluded: models that cannot serve, for they are coded by others themselves.
        """
        mine = self.layers(reference)
        near = [
            (share, other)
            for other in self._manifests
            if other != reference
            and other not in excluded
            and (share := _share(mine, self.layers(other))) >= _ALIKE
        ]
        named = set(self._named(reference))
        for _, other in near:
            if _plain(other.model) in named:
                return other
        nearest = sorted(near, key=lambda item: (-item[0], item[1]))[:_MOST]
        gains = [(self._gain(mine, self.layers(other)), other) for _, other in nearest]
        gain, best = max(gains, key=lambda item: item[0], default=(0.0, None))
        return best if gain >= LEAST_GAIN else None

    def layers(self, reference: Reference) -> Mapping[str, Descriptor]:
        """Return the tensor layers of a model by name."""
        manifest = self._manifests.get(reference)
        found = () if manifest is None else manifest.layers_of(media_types.TENSOR)
        return {layer.name: layer for layer in found}

    def _named(self, reference: Reference) -> Iterator[str]:
        """Yield what a model's own files say that it was made from."""
        for layer in self._manifests[reference].layers:
            if layer.name not in {"README.md", "config.json"} or layer.size > _MAX_CARD:
                continue
            try:
                text = self._store.read_blob(layer.digest, layer.size).decode()
            except (BlobstoreError, ValueError):
                continue
            for name in _card_bases(text) if layer.name == "README.md" else _config_bases(text):
                yield _plain(name.rpartition("/")[2])

    def _gain(self, mine: Mapping[str, Descriptor], theirs: Mapping[str, Descriptor]) -> float:
        """Return what part of some large blobs is saved when they are coded by the others."""
        pairs = [
            (layer, theirs[name])
            for name, layer in mine.items()
            if name in theirs
            and theirs[name].digest != layer.digest
            and self._store.has_hot(layer.digest)
        ]
        alone = beside = 0
        for layer, other in sorted(pairs, key=lambda pair: -pair[0].size)[:_SAMPLES]:
            try:
                blob, base = layer.id, other.id
                coding = BlobEncoder(self._store, blob, self._level, base)
                beside += coding.estimate()
                coding.alone()
                alone += coding.estimate()
            except BlobstoreError:  # told when it is its turn
                continue
        return 1 - beside / alone if alone else 0.0


def _share(mine: Mapping[str, Descriptor], theirs: Mapping[str, Descriptor]) -> float:
    total = sum(layer.size for layer in mine.values())
    alike = sum(
        layer.size
        for name, layer in mine.items()
        if name in theirs and theirs[name].size == layer.size
    )
    return alike / total if total else 0.0


def _card_bases(text: str) -> list[str]:
    front = _FRONT_MATTER.match(text)
    return _BASE_MODEL.findall(front[1]) if front else []


def _config_bases(text: str) -> list[str]:
    try:
        config: Any = json.loads(text)
    except (ValueError, RecursionError):
        return []
    if not isinstance(config, dict):
        return []
    found = (config.get(key) for key in ("base_model", "_name_or_path"))
    return [name for name in found if isinstance(name, str) and name]


def _plain(name: str) -> str:
    """Return a name without what is written one way or the other."""
    return re.sub(r"[^a-z0-9]", "", name.casefold())
