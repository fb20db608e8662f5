"""Where each tensor of a model lies, by its runtime name.

Finding that out requires opening and parsing the header of every blob. The result is therefore kept
in the store as the *header index*: one file per model, named by the digest of the manifest's bytes.
The index is a cache. Deleting it is harmless, an index that was altered is ignored, and the size of
each blob is still checked when the blob is mapped. :func:`create` writes the index; so does opening
a model that has none.

The index's checksum detects accidents, not forgery: anyone who can write to the store can compute
it. So every value is checked before it becomes a path or an offset, and levels of ``verify`` that
read headers do not trust the index.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from blobstore.core.digest import Digest
from blobstore.core.escape import quote
from blobstore.core.gc_pause import gc_paused
from blobstore.core.tensor import DTYPES, TensorSpec
from blobstore.errors import BlobDamaged, BlobstoreError
from blobstore.manifests import media_types
from blobstore.manifests.model import Manifest
from blobstore.models.tensors import QPARAMS, at_layer, only_tensor, read_tensors, tensors_of
from blobstore.quantization.metadata import stated
from blobstore.safetensors.header import Header
from blobstore.store.notes import NoteKind

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from blobstore.core.mmap import MappedRegion
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.quantization.metadata import Stated
    from blobstore.safetensors.header import TensorEntry
    from blobstore.store.local import LocalStore
    from blobstore.store.protocols import BlobAccess

_INDEX = NoteKind("3")
"""Incremented when the index's format changes, so that older files are ignored."""

Entry = tuple[str, "Sequence[int]", int, int]
"""A tensor in the index: element type by its name on disk, shape, slot and begin.

These are the lists of the JSON file, unchanged: an object per tensor would slow down every open.
"""


class TensorLocation(NamedTuple):
    """A tensor, and where its bytes lie."""

    spec: TensorSpec
    slot: int
    """The position of its blob in :attr:`TensorIndex.blobs`."""
    begin: int
    """The offset in the blob of its first byte."""


@dataclass(frozen=True, slots=True)
class TensorIndex:
    """The tensors of a model by runtime name, and the blobs that hold them."""

    entries: dict[str, Entry]
    """For loops over many tensors; otherwise use the methods."""
    blobs: list[tuple[Digest, int]]
    """Digest and size of each tensor blob, in the manifest's order."""
    quantized: dict[str, Stated]
    """Type and group size of the quantized weights; empty and 0 if the blob does not say. For fp8 also
    what shares a scale."""
    is_cached: bool
    """Whether this comes from the header index, and not from the headers themselves."""
    is_proven: bool = True
    """Whether the model's config was readable, which proves that the manifest is unaltered."""

    def spec(self, name: str) -> TensorSpec:
        """Return the name, element type and shape of a tensor, as stored."""
        dtype, shape, _, _ = self.entries[name]
        return TensorSpec(name, DTYPES[dtype], tuple(shape))

    def location(self, name: str) -> TensorLocation:
        """Return where a tensor lies."""
        dtype, shape, slot, begin = self.entries[name]
        return TensorLocation(TensorSpec(name, DTYPES[dtype], tuple(shape)), slot, begin)

    def slot(self, name: str) -> int:
        """Return the position in :attr:`blobs` of the blob that holds a tensor."""
        return self.entries[name][2]

    def nbytes(self, name: str) -> int:
        """Return the size of a tensor, as stored."""
        return self.spec(name).nbytes

    def names_in_blobs(self) -> dict[tuple[Digest, int], list[str]]:
        """Return the names of the tensors that each blob holds, by its digest and size."""
        names: dict[tuple[Digest, int], list[str]] = {blob: [] for blob in self.blobs}
        for name, (_, _, slot, _) in self.entries.items():
            names[self.blobs[slot]].append(name)
        return names


def load_index(store: BlobAccess, manifest: bytes, *, use_index: bool = True) -> TensorIndex:
    """Return the tensors of the model whose manifest file contains ``manifest``.

    They come from the header index if there is one and ``use_index`` is true, otherwise from the
    headers of all blobs.

    Raises:
        InvalidManifest: the manifest breaks the format, or is not the one that was written.
        BlobMissing, BlobDamaged: a blob is missing or damaged, or two tensors have one name.
    """
    index = load_cached_index(store, manifest) if use_index else None
    return index or read_index(store, manifest)[0]


def load_cached_index(store: BlobAccess, manifest: bytes) -> TensorIndex | None:
    """Return what the header index says, or None if the model has none.

    Only a manifest that was proven to be the one that was written ever gets an index.
    """
    key = Digest.of(manifest)
    with gc_paused():
        text = store.read_note(_INDEX, key)
        if text is None:
            return None
        try:
            # There are no floats in an index: Digest.parse raises an error for any.
            entries, listed, quantized = json.loads(text, parse_float=Digest.parse)
            blobs = [(Digest(spelled), size) for spelled, size in listed]
            _check(entries, blobs, quantized)
        except (AttributeError, KeyError, TypeError, ValueError, IndexError, RecursionError):
            return None
        return TensorIndex(entries, blobs, quantized, is_cached=True)


def read_index(
    store: BlobAccess,
    manifest: bytes,
    reserve: Callable[[list[int]], MappedRegion | None] | None = None,
) -> tuple[TensorIndex, MappedRegion | None]:
    """Read the headers of all blobs.

    Args:
        store: the store that holds the model.
        manifest: the bytes of its manifest file.
        reserve: returns a region for blobs of these sizes, or None. Each blob is then mapped into it
            while its header is read, so that each file is opened once.

    Returns:
        The index, and the region, if one could be reserved.

    Raises:
        As :func:`load_index`.
    """
    with gc_paused():
        parsed = Manifest.from_bytes(manifest)
        is_proven = store.check_manifest(manifest, parsed)
        layers = parsed.layers_of(*media_types.WEIGHTS)
        blobs = [(layer.digest, layer.size) for layer in layers]
        try:
            region = reserve([size for _, size in blobs]) if reserve is not None else None
        except BlobstoreError:  # most likely a stated size is absurd; opening that blob reports it
            region = None
        entries: dict[str, Entry] = {}
        quantized: dict[str, Stated] = {}
        headers = store.read_headers(blobs, region)
        for slot, (layer, header) in enumerate(zip(layers, headers, strict=True)):
            if not isinstance(header, Header):
                raise at_layer(header, layer)
            for name, (spec, begin, _) in _runtime_names(layer, header, quantized):
                if name in entries:
                    read_tensors(store, parsed)  # names both layers if the stored names collide
                    raise BlobDamaged(
                        f"two tensors of the model would both be called {quote(name)}"
                    )
                entries[name] = (
                    _DTYPE_NAMES[spec.dtype],
                    spec.shape,
                    slot,
                    header.data_start + begin,
                )
    return TensorIndex(entries, blobs, quantized, is_cached=False, is_proven=is_proven), region


def write_index(store: BlobAccess, manifest: bytes, index: TensorIndex) -> None:
    """Write the header index, if the manifest is proven and the store is writable."""
    if not index.is_proven:
        return
    key = Digest.of(manifest)
    blobs = [(digest.hex, size) for digest, size in index.blobs]
    text = json.dumps([index.entries, blobs, index.quantized], separators=(",", ":")).encode()
    if store.read_note(_INDEX, key) != text:
        store.write_note(_INDEX, key, text)


def rewrite_indexes(store: LocalStore, replaced: Collection[Digest]) -> None:
    """Rewrite the header indexes of the models that use one of the blobs, which were damaged before."""
    for reference in store.references() if replaced else ():
        with contextlib.suppress(BlobstoreError):
            data, manifest = store.parse(reference)
            if any(blob.digest in replaced for blob in manifest.blobs):
                write_index(store, data, load_index(store, data, use_index=False))


def _runtime_names(
    layer: Descriptor, header: Header, quantized: dict[str, Stated]
) -> Sequence[tuple[str, TensorEntry]]:
    """Return a blob's tensors by runtime name; add the quantized ones to ``quantized``."""
    if len(header.tensors) == 1 and not header.metadata:
        return (only_tensor(layer, header),)
    try:
        group = tensors_of(layer, header)
    except BlobDamaged as error:
        raise at_layer(error, layer) from None
    named: list[tuple[str, TensorEntry]] = []
    for name, _, _, entry, qparams, item, group_size in group:
        named.append((name, entry))
        if qparams or item is not None:
            quantized[name] = stated(item, group_size) if item else ("", 0)
            is_kept = item is not None and item.float8 is not None
            named += [
                (other.spec.name if is_kept else name + QPARAMS[suffix], other)
                for suffix, other in qparams.items()
            ]
    return named


_HEX = re.compile(r"[0-9a-f]*", re.ASCII)
_HEX_LENGTH = 64
_BITS = {name: dtype.bits for name, dtype in DTYPES.items()}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""Reading a member's ``value`` takes ten times as long."""


def _check(
    entries: Mapping[str, Entry],
    blobs: Sequence[tuple[Digest, int]],
    quantized: Mapping[str, Stated],
) -> None:
    """Check that digests are digests, and that every tensor lies inside its blob."""
    # A model has thousands of tensors, so values are checked in bulk where possible. A value of an
    # unexpected type raises any of the exceptions that load_cached_index() catches.
    spelled = [digest.hex for digest, _ in blobs]
    sizes = [size + 0 for _, size in blobs]
    if sizes and min(sizes) < 0:
        raise ValueError
    is_sound = set(map(len, spelled)) <= {_HEX_LENGTH}
    is_sound = is_sound and _HEX.fullmatch("".join(spelled)) is not None
    prod, bits = math.prod, _BITS
    for dtype, shape, slot, begin in entries.values():
        end = begin + (prod(shape) * bits[dtype] >> 3)
        if end > sizes[slot] or begin < 0 or slot < 0 or (shape and min(shape) < 0):
            raise ValueError
    for name, (quant_type, group_size, *rest) in quantized.items():
        is_sound = is_sound and name in entries and len(rest) <= 1
        is_sound = is_sound and type(quant_type) is str and type(group_size) is int
        is_sound = is_sound and all(type(value) is str for value in rest)
    if not is_sound:
        raise ValueError
