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
from blobstore.errors import BlobDamaged
from blobstore.manifests.model import Manifest
from blobstore.text import quoted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from blobstore.store.local import LocalStore


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


def find_places(store: LocalStore, manifest: bytes) -> Places:
    """Return where the tensors of the model are whose manifest file has the bytes ``manifest``.

    Raises:
        InvalidManifest: the manifest breaks the format.
        BlobMissing, BlobDamaged: a blob is not whole, or two tensors have one name.
    """
    key = Digest.of(manifest)
    with _collector_paused():
        places = _decode(store.read_index(key))
        if places is None:
            places = _resolve(store, Manifest.from_bytes(manifest))
            store.write_index(key, _encode(places))
    return places


def _resolve(store: LocalStore, manifest: Manifest) -> Places:
    tensors: dict[str, Place] = {}
    blobs: dict[tuple[Digest, int], int] = {}
    for tensor in read_contents(store, manifest).tensors.values():
        blob = blobs.setdefault((tensor.layer.digest, tensor.layer.size), len(blobs))
        start = tensor.header.data_start
        entries = {tensor.name: tensor.entry} | {
            tensor.name + COMPANIONS[suffix]: entry for suffix, entry in tensor.companions.items()
        }
        for name, (spec, begin, _) in entries.items():
            if name in tensors:
                message = f"two tensors of the model would both be called {quoted(name)}"
                raise BlobDamaged(message)
            tensors[name] = Place(spec.dtype.value, spec.shape, blob, start + begin)
    return Places(tensors, list(blobs))


def _encode(places: Places) -> bytes:
    blobs = [(digest.hex, size) for digest, size in places.blobs]
    text = json.dumps([places.tensors, blobs], separators=(",", ":")).encode()
    return f"{Digest.of(text)}\n".encode() + text


def _decode(data: bytes | None) -> Places | None:
    if data is None:
        return None
    digest, _, text = data.partition(b"\n")
    if digest != str(Digest.of(text)).encode():
        return None
    tensors: dict[str, Any]
    tensors, blobs = json.loads(text)
    return Places(
        {name: Place._make(row) for name, row in tensors.items()},
        [(Digest(spelled), size) for spelled, size in blobs],
    )


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
