"""How closely a model is looked at before its tensors are used.

Each level finds what the one before it finds, and more: that a blob is not there or has another size;
that its header is another than when the model was stored; that any bit of it is another.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Literal, get_args

from blobstore.core.escape import quote
from blobstore.errors import BlobDamaged, BlobstoreError, UsageError
from blobstore.manifests import media_types
from blobstore.manifests.model import Manifest
from blobstore.models.index import indexed_places, load_index
from blobstore.models.tensors import at_layer
from blobstore.store.verified_cache import VerifiedBlobs
from blobstore.store.verify_blobs import damaged_blobs

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from blobstore.core.digest import Digest
    from blobstore.core.progress import Progress
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.models.index import TensorIndex
    from blobstore.store.local import LocalStore

Verify = Literal["none", "size", "header", "digest", "rehash"]

_CONSTANT_KEY = "data"
"""The key of the only tensor in blobs that Ollama wrote before February 2026."""


def check_level(verify: str) -> None:
    """Check that ``verify`` is a level.

    Raises:
        UsageError: it is none.
    """
    if verify not in get_args(Verify):
        raise UsageError(
            f"verify must be none, size, header, digest or rehash, got {quote(verify)}"
        )


def reads_headers(verify: str) -> bool:
    """Tell whether a level reads the headers themselves, and not the header index alone."""
    return verify in ("header", "digest", "rehash")


def check_blobs(
    store: LocalStore,
    manifest: bytes,
    places: TensorIndex,
    verify: str,
    progress: Progress | None = None,
) -> None:
    """Check the blobs of a model to a level that reads from them; for others do nothing.

    Args:
        store: the store of the model.
        manifest: the bytes of its manifest.
        places: what the model is used with.
        verify: the level.
        progress: told of the bytes that are hashed.

    Raises:
        BlobMissing, BlobDamaged: a blob is not whole; the message names the layer. Or the header
            index is wrong that ``places`` are from.
    """
    if not reads_headers(verify):
        return
    parsed = Manifest.from_bytes(manifest)
    index = places if places.is_indexed else indexed_places(store, manifest)
    found = load_index(store, manifest, use_index=False) if places.is_indexed else places
    _check_headers(store, parsed.layers_of(media_types.TENSOR), index, found)
    if verify != "header":
        _check_digests(store, parsed.blobs, anew=verify == "rehash", progress=progress)
    if places.is_indexed and _differing(places, found):
        raise BlobDamaged(
            "the header index is wrong; open the model with verify='header' to make it anew"
        )


def _check_headers(
    store: LocalStore, layers: Sequence[Descriptor], index: TensorIndex | None, found: TensorIndex
) -> None:
    """Check what headers say against the layers of the manifest and the header index."""
    names: list[list[str]] = [[] for _ in layers]
    for name, (_, _, slot, _) in found.tensors.items():
        names[slot].append(name)
    for layer, held in zip(layers, names, strict=True):
        fault = name_fault(layer, held)
        if fault is not None:
            raise at_layer(BlobDamaged(fault[1]), layer)
    # Where index and header differ, the digest tells which of them is wrong.
    for slot in sorted(_differing(index, found) if index else ()):
        try:
            store.check_digest(layers[slot].digest, layers[slot].size)
        except BlobstoreError as error:
            raise at_layer(error, layers[slot]) from None


def _check_digests(
    store: LocalStore, blobs: Sequence[Descriptor], *, anew: bool, progress: Progress | None
) -> None:
    """Hash blobs; unless ``anew``, not those whose files are as they were when found whole."""
    verified = VerifiedBlobs(store)
    if not anew:
        blobs = [blob for blob in blobs if not verified.has(blob.digest, blob.size)]
    for blob, error in damaged_blobs(store, blobs, progress=progress, verified=verified):
        where = f"layer {quote(blob.name or blob.media_type)}"
        raise error.at(where)


def name_fault(layer: Descriptor, names: Sequence[str]) -> tuple[str, str] | None:
    """Check that a layer's name is a tensor of its blob, or a prefix of all of them.

    Returns the tensor, empty where it is not known, and what is wrong; None if nothing is.
    """
    if not names:
        return "", f"blob {layer.digest} holds no tensor"
    if layer.name in names or names == [_CONSTANT_KEY]:
        return None
    foreign = [name for name in names if not name.startswith(f"{layer.name}.")]
    if not foreign:
        return None
    message = f"blob {layer.digest} holds tensor {quote(foreign[0])}, which is not of this layer"
    return foreign[0], message


def tensor_name(layer: Descriptor, names: Collection[str]) -> str:
    """Return the one tensor of a blob, whose header may be damaged; empty for a group of them."""
    if layer.name in names:
        return layer.name  # the others are its companions
    if len(names) != 1:
        return ""
    (name,) = names
    return name if name.startswith(f"{layer.name}.") else layer.name


class IndexedNames:
    """The names of tensors by the header index, for blobs whose own headers cannot be read."""

    def __init__(self, store: LocalStore, manifest: Manifest) -> None:
        self._store = store
        self._manifest = manifest
        self._names: dict[tuple[Digest, int], list[str]] | None = None

    def of(self, layer: Descriptor) -> Collection[str]:
        """Return the names that a layer's blob holds; none where that is not known."""
        if self._names is None:
            self._names = defaultdict(list)
            places = indexed_places(self._store, self._manifest.to_bytes())
            if places is not None:
                for name, (_, _, slot, _) in places.tensors.items():
                    self._names[places.blobs[slot]].append(name)
        return self._names.get((layer.digest, layer.size), ())


def _differing(index: TensorIndex, found: TensorIndex) -> set[int]:
    """Return the slots of the blobs of which two say different things."""
    if index.blobs != found.blobs:
        return set(range(len(found.blobs)))
    known, real = dict(_sayings(index)), dict(_sayings(found))
    return {
        slot
        for name in known.keys() | real.keys()
        if known.get(name) != real.get(name)
        for slot in {said[0] for said in (known.get(name), real.get(name)) if said}
    }


def _sayings(places: TensorIndex) -> Iterator[tuple[str, tuple[int, tuple[object, ...]]]]:
    """Yield all that is said of each tensor, the slot of its blob first; from lists, some of it."""
    for name, (dtype, shape, slot, begin) in places.tensors.items():
        yield name, (slot, (begin, dtype, *shape, *places.quantized.get(name, ())))
