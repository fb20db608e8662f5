"""Where every tensor of a model lies, by its runtime name: what a loader needs and no more.

Resolving that opens and parses every blob's header, so the result is kept in the store as the header
index: one file a model, named by the digest of the manifest's bytes. It is a cache. It vanishes
without harm, is ignored if it is not what was written, and a blob's size is still checked against
the file when it is mapped.
"""

from __future__ import annotations

import contextlib
import gc
import json
from typing import TYPE_CHECKING, Any, NamedTuple

from blobstore.contents import COMPANIONS, read_contents
from blobstore.digest import Digest
from blobstore.errors import BlobDamaged, BlobstoreError
from blobstore.manifests import media_types
from blobstore.manifests.model import Manifest
from blobstore.text import quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from blobstore.mapping import Region
    from blobstore.safetensors.header import TensorEntry
    from blobstore.store.local import LocalStore


_FORM = 1
"""To be raised when the index changes its form, so that older ones are made anew."""


class Place(NamedTuple):
    """One tensor: element type by its name on disk, shape, and where its bytes are."""

    dtype: str
    shape: Sequence[int]
    blob: int
    """Place of the blob in :attr:`Places.blobs`."""
    begin: int
    """Offset in the blob of the first byte."""


class Places(NamedTuple):
    """The tensors of a model, and the blobs that hold them."""

    tensors: dict[str, Place]
    blobs: list[tuple[Digest, int]]
    region: Region | None = None
    """The memory that all blobs were mapped into, if they had to be opened."""


def find_places(
    store: LocalStore,
    manifest: bytes,
    *,
    reserve: Callable[[list[int]], Region] | None = None,
) -> Places:
    """Return where the tensors of the model are whose manifest file has the bytes ``manifest``.

    Without an index every blob is opened for its header. A caller that wants to map them anyway
    gives ``reserve``, which makes the memory for blobs of some sizes, so that each is opened once.

    Raises:
        InvalidManifest: the manifest breaks the format.
        BlobMissing, BlobDamaged: a blob is not whole, or two tensors have one name.
    """
    key = Digest.of(manifest)
    with _collector_paused():
        places = _decode(key, store.read_index(key))
        if places is None:
            places = _resolve(store, Manifest.from_bytes(manifest), reserve)
            store.write_index(key, _encode(key, places))
    return places


def _resolve(
    store: LocalStore, manifest: Manifest, reserve: Callable[[list[int]], Region] | None
) -> Places:
    blobs = [(layer.digest, layer.size) for layer in manifest.layers_of(media_types.TENSOR)]
    slots = {digest: slot for slot, (digest, _) in enumerate(blobs)}
    try:
        region = reserve([size for _, size in blobs]) if reserve is not None else None
    except BlobstoreError:  # most likely a claimed size is absurd, and the blob's file will tell
        region = None
    tensors: dict[str, Place] = {}

    def add(name: str, entry: TensorEntry, blob: int, start: int) -> None:
        spec, begin, _ = entry
        if name in tensors:
            message = f"two tensors of the model would both be called {quoted(name)}"
            raise BlobDamaged(message)
        tensors[name] = Place(spec.dtype.value, spec.shape, blob, start + begin)

    for name, tensor in read_contents(store, manifest, region=region).tensors.items():
        slot, start = slots[tensor.layer.digest], tensor.header.data_start
        add(name, tensor.entry, slot, start)
        for suffix, entry in tensor.companions.items():
            add(name + COMPANIONS[suffix], entry, slot, start)
    return Places(tensors, blobs, region)


def _encode(key: Digest, places: Places) -> bytes:
    blobs = [(digest.hex, size) for digest, size in places.blobs]
    text = json.dumps([places.tensors, blobs], separators=(",", ":")).encode()
    return f"{_seal(key, text)}\n".encode() + text


def _decode(key: Digest, data: bytes | None) -> Places | None:
    if data is None:
        return None
    digest, _, text = data.partition(b"\n")
    if digest != str(_seal(key, text)).encode():
        return None
    tensors: dict[str, Any]
    tensors, blobs = json.loads(text)
    return Places(
        {name: Place._make(row) for name, row in tensors.items()},
        [(Digest(spelled), size) for spelled, size in blobs],
    )


def _seal(key: Digest, text: bytes) -> Digest:
    # With the key, so that the index of another model does not pass for this one's.
    return Digest.of(f"{_FORM} {key}\n".encode() + text)


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    # Tens of thousands of new objects start full collections, which in a process with torch
    # loaded take several times as long as the work itself. None of the objects is in a cycle.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
