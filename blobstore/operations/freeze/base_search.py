"""Finds the base model of each model: the one that its card or config names, or the most similar one."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from blobstore.errors import BlobstoreError
from blobstore.manifests import media_types
from blobstore.operations.freeze.blob_encoder import MIN_GAIN

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Final

    from blobstore.manifests.descriptor import Descriptor
    from blobstore.manifests.model import Manifest
    from blobstore.manifests.reference import Reference
    from blobstore.operations.freeze.blob_encoder import SizeEstimator
    from blobstore.store.local import LocalStore

_MAX_CANDIDATES: Final = 8
"""Models whose bytes are sampled for one model."""
_SAMPLED_BLOBS: Final = 2
_MIN_SIMILAR: Final = 0.5
"""The share of a model's bytes that must lie in layers of equal name and size."""
_MAX_CARD: Final = 1 << 20
_FRONT_MATTER = re.compile(r"\A---\s*\n(.*?\n)---\s*\n", re.DOTALL)
_BASE_MODEL = re.compile(r"^base_model:[ \t]*(?:\n[ \t]*-[ \t]*)?[\"']?([^\s\"'#]+)", re.MULTILINE)


class BaseFinder:
    """Finds base models among some models of a store."""

    def __init__(
        self,
        store: LocalStore,
        manifests: Mapping[Reference, Manifest],
        estimator: SizeEstimator,
    ) -> None:
        self._store = store
        self._manifests = manifests
        self._estimator = estimator
        self._layers = {name: tensor_layers(manifest) for name, manifest in manifests.items()}

    def find_bases(self, references: Sequence[Reference]) -> dict[Reference, Reference]:
        """Return the base of each of the models that has one; a base has no base itself.

        The base that is best for most models is chosen first, so that all fine-tunes of a model get that
        model. The others then choose among the models that have no base.
        """
        best = {reference: self.find_base(reference) for reference in references}
        votes = Counter(base for base in best.values() if base is not None)
        bases: dict[Reference, Reference] = {}
        for base, _ in votes.most_common():
            if base not in bases:
                theirs = (item for item in references if best[item] == base)
                bases |= {item: base for item in theirs if item not in bases.values()}
        for reference in references:
            if best[reference] is not None and reference not in {*bases, *bases.values()}:
                found = self.find_base(reference, list(bases))
                if found is not None:
                    bases[reference] = found
        return bases

    def find_base(
        self, reference: Reference, excluded: Sequence[Reference] = ()
    ) -> Reference | None:
        """Return the best base of a model; None if there is none.

        Args:
            reference: the model.
            excluded: models that have a base themselves.
        """
        mine = self._layers.get(reference, {})
        total = sum(layer.size for layer in mine.values())
        similar: list[tuple[float, Reference]] = []
        for other, layers in self._layers.items():
            if not total or other == reference or other in excluded:
                continue
            shared = (mine[name] for name in mine.keys() & layers.keys())
            size = sum(item.size for item in shared if layers[item.name].size == item.size)
            if size / total >= _MIN_SIMILAR:
                similar.append((size / total, other))
        named = set(self._named_bases(reference))
        for _, other in similar:
            if _normalize(other.model) in named:
                return other
        nearest = sorted(similar, key=lambda item: (-item[0], item[1]))[:_MAX_CANDIDATES]
        gains = [(self._estimate_gain(mine, self._layers[other]), other) for _, other in nearest]
        gain, best = max(gains, key=lambda item: item[0], default=(0.0, None))
        return best if gain >= MIN_GAIN else None

    def _named_bases(self, reference: Reference) -> Iterator[str]:
        """Yield the base models that the model card and config name, normalized."""
        for layer in self._manifests[reference].layers:
            if layer.name not in {"README.md", "config.json"} or layer.size > _MAX_CARD:
                continue
            names: list[Any] = []
            try:
                text = self._store.read_blob(layer.digest, layer.size).decode()
                if layer.name == "README.md":
                    front_matter = _FRONT_MATTER.match(text)
                    names = _BASE_MODEL.findall(front_matter[1]) if front_matter else []
                elif isinstance(config := json.loads(text), dict):
                    names = [config.get(key) for key in ("base_model", "_name_or_path")]
            except (BlobstoreError, ValueError, RecursionError):
                continue
            for name in names:
                if isinstance(name, str) and name:
                    yield _normalize(name.rpartition("/")[2])

    def _estimate_gain(
        self, mine: Mapping[str, Descriptor], theirs: Mapping[str, Descriptor]
    ) -> float:
        """Return the share of the compressed size that a base saves for the largest blobs."""
        pairs = [
            (layer.id, theirs[name].id)
            for name, layer in mine.items()
            if name in theirs
            and theirs[name].digest != layer.digest
            and self._store.has_hot(layer.digest)
        ]
        alone = delta = 0
        for blob, base in sorted(pairs, key=lambda pair: -pair[0].size)[:_SAMPLED_BLOBS]:
            try:
                with_base = self._estimator.estimate(blob, base)
                alone += self._estimator.estimate(blob)
                delta += with_base
            except BlobstoreError:  # reported when the blob is compressed
                continue
        return 1 - delta / alone if alone else 0.0


def tensor_layers(manifest: Manifest) -> dict[str, Descriptor]:
    """Return the tensor layers of a model by name."""
    return {layer.name: layer for layer in manifest.layers_of(media_types.TENSOR)}


def _normalize(name: str) -> str:
    """Return the letters and digits of a name in lower case."""
    return re.sub(r"[^a-z0-9]", "", name.casefold())
