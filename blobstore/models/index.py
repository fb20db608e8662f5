"""Where every tensor of a model lies, by its runtime name: what a loader needs and no more.

Resolving that opens and parses every blob's header, so the result is kept in the store as the header
index: one file a model, named by the digest of the manifest's bytes. It is a cache: it vanishes
without harm, is ignored if it is not what was written, and a blob's size is still checked against
the file when it is mapped. :func:`create` writes it, and a loader that did not find it.

Its seal finds accidents, not forgery: whoever can write to the store can seal anything. So what it
says is checked before it becomes a path or an offset, and who asks for digests does not read it.
"""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, NamedTuple

from blobstore.core.digest import Digest
from blobstore.core.escape import quote
from blobstore.core.gc_pause import gc_paused
from blobstore.core.tensor import DTYPES
from blobstore.errors import BlobDamaged, BlobstoreError
from blobstore.manifests import media_types
from blobstore.manifests.model import Manifest
from blobstore.models.tensors import COMPANIONS, at_layer, only_tensor, read_tensors, tensors_of
from blobstore.safetensors.header import Header

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from blobstore.core.mmap import MappedRegion
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.safetensors.header import TensorEntry
    from blobstore.store.local import LocalStore


_FORM = 2
"""To be raised when the index changes its form, so that older ones are made anew."""


Place = tuple[str, "Sequence[int]", int, int]
"""One tensor: element type by its name on disk, shape, place of its blob in :attr:`Places.blobs`,
and offset in the blob of its first byte. Bare, for it comes from the index as it is."""


class TensorIndex(NamedTuple):
    """The tensors of a model, and the blobs that hold them."""

    tensors: dict[str, Place]
    blobs: list[tuple[Digest, int]]
    quantized: dict[str, tuple[str, int]]
    """Type and group size of the quantized weights; empty and 0 where the blob does not say."""
    is_indexed: bool
    """Whether they came from the index."""
    region: MappedRegion | None = None
    """The memory that all blobs were mapped into, if they had to be opened."""
    is_proven: bool = True
    """Whether the model's config could be read, which proves its manifest."""


def load_index(
    store: LocalStore,
    manifest: bytes,
    *,
    reserve: Callable[[list[int]], MappedRegion] | None = None,
    use_index: bool = True,
) -> TensorIndex:
    """Return where the tensors of the model are whose manifest file has the bytes ``manifest``.

    Without an index every blob is opened for its header. A caller that wants to map them anyway
    gives ``reserve``, which makes the memory for blobs of some sizes, so that each is opened once.
    With ``use_index`` false the headers alone decide. There is an index only for what was proven to
    be the manifest that was written, so that need not be done again.

    Raises:
        InvalidManifest: the manifest breaks the format, or is not the one that was written.
        BlobMissing, BlobDamaged: a blob is not whole, or two tensors have one name.
    """
    places = indexed_places(store, manifest) if use_index else None
    if places is None:
        with gc_paused():
            parsed = Manifest.from_bytes(manifest)
            is_proven = store.check_manifest(manifest, parsed)
            places = _resolve(store, parsed, reserve)._replace(is_proven=is_proven)
    return places


def indexed_places(store: LocalStore, manifest: bytes) -> TensorIndex | None:
    """Return what the header index says, None if there is none for the model."""
    key = Digest.of(manifest)
    with gc_paused():
        return _decode(key, store.read_index(key))


def write_index(store: LocalStore, manifest: bytes, places: TensorIndex) -> None:
    """Keep what :func:`load_index` found of a manifest that is proven, if the store can be written."""
    if not places.is_proven:
        return
    key = Digest.of(manifest)
    data = _encode(key, places)
    if store.read_index(key) != data:
        store.write_index(key, data)


def _resolve(
    store: LocalStore, manifest: Manifest, reserve: Callable[[list[int]], MappedRegion] | None
) -> TensorIndex:
    layers = manifest.layers_of(media_types.TENSOR)
    blobs = [(layer.digest, layer.size) for layer in layers]
    try:
        region = reserve([size for _, size in blobs]) if reserve is not None else None
    except BlobstoreError:  # most likely a claimed size is absurd, and the blob's file will tell
        region = None
    tensors: dict[str, Place] = {}
    quantized: dict[str, tuple[str, int]] = {}
    headers = store.read_headers(blobs, region)
    for slot, (layer, header) in enumerate(zip(layers, headers, strict=True)):
        if not isinstance(header, Header):
            raise at_layer(header, layer)
        for name, (spec, begin, _) in _named(layer, header, quantized):
            if name in tensors:
                raise _clash(store, manifest, name)
            tensors[name] = (_NAMES[spec.dtype], spec.shape, slot, header.data_start + begin)
    return TensorIndex(tensors, blobs, quantized, is_indexed=False, region=region)


def _named(
    layer: Descriptor, header: Header, quantized: dict[str, tuple[str, int]]
) -> Sequence[tuple[str, TensorEntry]]:
    """Return a blob's tensors by their runtime names; note in ``quantized`` which of them are."""
    if len(header.tensors) == 1:
        return (only_tensor(layer, header),)
    try:
        group = tensors_of(layer, header)
    except BlobDamaged as error:
        raise at_layer(error, layer) from None
    named: list[tuple[str, TensorEntry]] = []
    for name, _, _, entry, companions, item, group_size in group:
        named.append((name, entry))
        if companions:
            named += [(name + COMPANIONS[suffix], other) for suffix, other in companions.items()]
            quantized[name] = (item.name, group_size) if item else ("", 0)
    return named


def _clash(store: LocalStore, manifest: Manifest, name: str) -> BlobDamaged:
    read_tensors(store, manifest)  # tells the layers, where the blobs too have that name twice
    return BlobDamaged(f"two tensors of the model would both be called {quote(name)}")


def _encode(key: Digest, places: TensorIndex) -> bytes:
    blobs = [(digest.hex, size) for digest, size in places.blobs]
    text = json.dumps([places.tensors, blobs, places.quantized], separators=(",", ":")).encode()
    return f"{_seal(key, text)}\n".encode() + text


def _decode(key: Digest, data: bytes | None) -> TensorIndex | None:
    if data is None:
        return None
    digest, _, text = data.partition(b"\n")
    if digest != str(_seal(key, text)).encode():
        return None
    try:
        tensors, blobs, quantized = json.loads(text, parse_float=Digest.parse)
        known = [(Digest(spelled), size) for spelled, size in blobs]
        _check(tensors, known, quantized)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, RecursionError):
        return None
    return TensorIndex(tensors, known, quantized, is_indexed=True)


_HEX = re.compile(r"[0-9a-f]*", re.ASCII)
_HEX_LENGTH = 64
_BITS = {name: dtype.bits for name, dtype in DTYPES.items()}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""Names by type: the look-up of a member's value in :mod:`enum` takes ten times as long."""


def _check(
    tensors: dict[str, Place],
    blobs: Sequence[tuple[Digest, int]],
    quantized: dict[str, tuple[str, int]],
) -> None:
    """Check that digests are digests, and that every tensor lies inside its blob.

    At once where that can be, for a model has thousands; a wrong form raises what it happens to.
    """
    spelled = [digest.hex for digest, _ in blobs]
    sizes = [size + 0 for _, size in blobs]
    if sizes and min(sizes) < 0:
        raise ValueError
    is_sound = set(map(len, spelled)) <= {_HEX_LENGTH}
    is_sound = is_sound and _HEX.fullmatch("".join(spelled)) is not None
    prod, bits = math.prod, _BITS
    for dtype, shape, blob, begin in tensors.values():
        end = begin + (prod(shape) * bits[dtype] >> 3)
        if end > sizes[blob] or begin < 0 or blob < 0 or (shape and min(shape) < 0):
            raise ValueError
    for name, (quant_type, group_size) in quantized.items():
        is_sound = is_sound and name in tensors
        is_sound = is_sound and type(quant_type) is str and type(group_size) is int
    if not is_sound:
        raise ValueError


def _seal(key: Digest, text: bytes) -> Digest:
    # With the key, so that the index of another model does not pass for this one's.
    return Digest.of(f"{_FORM} {key}\n".encode() + text)
