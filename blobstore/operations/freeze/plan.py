"""What is to be frozen: the blobs of some models, those by which they are coded, and what must stay hot."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from typing import TYPE_CHECKING, Literal

from blobstore.core.digest import BlobId
from blobstore.errors import BlobstoreError, ModelNotFound
from blobstore.manifests import media_types
from blobstore.operations.freeze.base_search import BaseFinder, tensor_layers
from blobstore.operations.freeze.duplicates import DuplicateFinder
from blobstore.store.reachability import ReachableBlobs

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from blobstore.core.digest import Digest
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.manifests.model import Manifest
    from blobstore.manifests.reference import Reference
    from blobstore.operations.freeze.blob_encoder import SizeEstimator
    from blobstore.store.local import LocalStore

Need = Literal["shared", "in use"]
"""Why a blob must stay hot."""


class FreezePlan:
    """The blobs that are to be frozen. A name counts as frozen if any of its blobs is cold only."""

    def __init__(self, store: LocalStore) -> None:
        self._store = store
        self._marks = ReachableBlobs(store)
        self._frozen: dict[str, tuple[int, ...]] = {}
        """The manifests of what is frozen now, or was before: their blobs need not be hot."""
        self.references: list[Reference] = []
        self.blobs: dict[Digest, Descriptor] = {}
        """The blobs of tensors, each once."""
        self.bases: dict[Reference, Reference] = {}
        """By which model each is coded."""
        self.base_blobs: dict[Digest, BlobId] = {}
        """By which blob each is coded, if it is coded by any."""

    def choose(
        self, names: Sequence[Reference], older_than: float | None, *, must_exist: bool
    ) -> None:
        """Find the blobs of the models, and the names that are frozen already."""
        if not self._store.root.exists() and not must_exist:
            return
        self._marks.update()
        marked = self._marks.by_path()
        for reference in names:
            try:
                manifest = self._store.resolve(reference)
            except ModelNotFound:
                if must_exist:
                    raise
                continue  # removed since it was listed
            path = str(self._store.manifest_path(reference))
            layers = manifest.layers_of(media_types.TENSOR)
            if not layers and not must_exist:
                continue  # a model of Ollama's own
            if older_than is not None and self._age(path, layers) < older_than:
                continue
            self.references.append(reference)
            self.blobs |= {layer.digest: layer for layer in layers}
            if path in marked:
                self._frozen[path] = marked[path].state
        cold_only = {
            digest.hex for digest in self._store.cold_files() if not self._store.has_hot(digest)
        }
        for path, item in marked.items():
            if path not in self._frozen and not cold_only.isdisjoint(item.blobs):
                self._frozen[path] = item.state

    def compare(self, base: Reference | None, estimator: SizeEstimator) -> None:
        """Find the models by which others are coded, ``base`` if that is given, and equal tensors.

        Raises:
            ModelNotFound: there is no such model.
        """
        if base is not None:
            self._store.resolve(base)
        manifests = _manifests(self._store)
        relatives = BaseFinder(self._store, manifests, estimator)
        hot = [item for item in self.references if self._is_any_hot(manifests, item)]
        if base is None:
            self.bases = relatives.find_bases(hot)
        else:
            self.bases = {reference: base for reference in hot if reference != base}
        for reference, other in self.bases.items():
            theirs = tensor_layers(manifests[other]) if other in manifests else {}
            for name, layer in tensor_layers(manifests[reference]).items():
                if name in theirs and theirs[name].digest != layer.digest:
                    blob = BlobId(theirs[name].digest, theirs[name].size)
                    self.base_blobs[layer.digest] = blob
        self._join_equals(manifests, estimator)
        self._drop_chains()

    def _join_equals(
        self, manifests: Mapping[Reference, Manifest], estimator: SizeEstimator
    ) -> None:
        """Let blobs be coded by those whose tensors they have under other names."""
        coded = self._store.cold_bases()
        equals = DuplicateFinder(self._store, estimator, self.blobs, coded)
        others = [item for item in sorted(manifests) if item not in self.references]
        equals.read([tensor_layers(manifests[reference]) for reference in others])
        self.base_blobs = equals.choose_bases(self.base_blobs)

    def _drop_chains(self) -> None:
        """Leave no base that is coded by another itself."""
        cold = self._store.cold_bases()
        for digest in {blob.digest for blob in self.base_blobs.values()} | {*cold.values()}:
            self.base_blobs.pop(digest, None)  # edges are one deep
        for digest, blob in list(self.base_blobs.items()):
            if blob.digest in cold:
                del self.base_blobs[digest]

    def _is_any_hot(self, manifests: Mapping[Reference, Manifest], reference: Reference) -> bool:
        layers = tensor_layers(manifests[reference]).values() if reference in manifests else ()
        return any(self._store.has_hot(layer.digest) for layer in layers)

    def _age(self, path: str, layers: Sequence[Descriptor]) -> float:
        """Return the seconds since a model was created, copied or thawed."""
        times = [
            _modified(path),
            *(_modified(self._store.blob_path(item.digest)) for item in layers),
        ]
        return time.time() - max(times)

    def update(self) -> None:
        """Look at the manifests again. Raises as :meth:`ReachableBlobs.update`."""
        self._marks.update()

    def needed_hot(self, leased: Collection[Digest]) -> dict[str, Need]:
        """Return the blobs that must stay hot, by the digits of their digests, and why."""
        needed: dict[str, Need] = {}
        for path, item in self._marks.by_path().items():
            if self._frozen.get(path) == item.state:
                needed.update(dict.fromkeys(item.others, "shared"))
            else:
                needed.update(dict.fromkeys(item.blobs, "shared"))
        return needed | dict.fromkeys((digest.hex for digest in leased), "in use")


def _manifests(store: LocalStore) -> dict[Reference, Manifest]:
    found: dict[Reference, Manifest] = {}
    for reference in store.references():
        with contextlib.suppress(BlobstoreError):
            found[reference] = store.parse(reference)[1]
    return found


def _modified(path: str) -> float:
    try:
        found = os.lstat(path)
    except OSError:
        return 0
    return found.st_mtime if stat.S_ISREG(found.st_mode) else 0
