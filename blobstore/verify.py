"""Workflow: all that models are made of, read again and checked.

Every blob is hashed once, however many models share it. Then each model's tensor blobs are parsed and
compared with what the manifest says of them. Faults are collected, not raised: one damaged blob does
not hide another.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from blobstore import strictjson
from blobstore.contents import COMPANIONS, read_contents
from blobstore.errors import BlobstoreError, ModelNotFound, UsageError
from blobstore.manifests import media_types
from blobstore.stacks import read_stacks
from blobstore.store.check import damaged_blobs
from blobstore.store.local import LocalStore
from blobstore.text import quoted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from blobstore.contents import Contents
    from blobstore.digest import Digest
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.manifests.model import Manifest
    from blobstore.manifests.reference import Reference
    from blobstore.progress import Progress
    from blobstore.safetensors.header import Header

_CONSTANT_KEY = "data"
"""The key of the only tensor in blobs that Ollama wrote before February 2026."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something wrong, and where as far as it is known; empty texts where it is not."""

    reference: str
    layer: str
    """The layer's name, or its media type where it has no name."""
    tensor: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What :func:`verify_models` read and found. Faults are in the order of models and layers."""

    models: int
    blobs: int
    """Blobs that were looked for; those that several models share count once."""
    bytes_read: int
    seconds: float
    faults: tuple[Fault, ...]


class _BlobKey(NamedTuple):
    """A blob as a manifest promises it: two manifests may contradict each other about the size."""

    digest: Digest
    size: int


def verify_models(
    references: Sequence[Reference] = (),
    *,
    store: LocalStore | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Verified:
    """Check models whole: manifests, digests of all blobs, headers of tensors, the config.

    JSON files are compared by digest only, since what a source held is kept as it was, valid or not.

    Args:
        references: the models; none means all of the store.
        store: by default the store of ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        jobs: threads; by default the machine's processors.
        progress: called with what is being done, bytes done and bytes in all.

    Raises:
        ModelNotFound: a model that was asked for does not exist.
        StoreError: the store cannot be listed.
        UsageError: ``jobs`` is below 1.
    """
    started = time.monotonic()
    if jobs is not None and jobs < 1:
        message = f"jobs must be at least 1, got {jobs}"
        raise UsageError(message)
    store = store or LocalStore()
    asked = tuple(dict.fromkeys(references)) or tuple(store.references())
    faults: dict[Reference, list[Fault]] = {reference: [] for reference in asked}
    manifests = _resolve(store, faults, must_exist=bool(references))
    # Not by digest alone: layers of one manifest may contradict each other about the size.
    blobs = {
        _key(blob): blob
        for manifest in manifests.values()
        for blob in (manifest.config, *manifest.layers)
    }
    bytes_read = 0

    def count(what: str, done: int, total: int) -> None:
        nonlocal bytes_read
        bytes_read = done
        if progress is not None:
            progress(what, done, total)

    found = damaged_blobs(store, list(blobs.values()), jobs=jobs, progress=count)
    damaged = {_key(blob): error for blob, error in found}
    for reference, manifest in manifests.items():
        faults[reference].extend(_model_faults(store, reference, manifest, damaged))
    return Verified(
        models=len(faults),
        blobs=len(blobs),
        bytes_read=bytes_read,
        seconds=time.monotonic() - started,
        faults=tuple(fault for found in faults.values() for fault in found),
    )


def _resolve(
    store: LocalStore, faults: dict[Reference, list[Fault]], *, must_exist: bool
) -> dict[Reference, Manifest]:
    """Return the manifests that can be read; note what is wrong with the others in ``faults``.

    Unless they ``must_exist``, names that are gone since they were listed leave ``faults``.
    """
    manifests: dict[Reference, Manifest] = {}
    for reference in tuple(faults):
        try:
            manifests[reference] = store.resolve(reference)
        except ModelNotFound:
            if must_exist:
                raise
            del faults[reference]
        except BlobstoreError as error:
            faults[reference].append(Fault(str(reference), "", "", str(error)))
    return manifests


def _key(blob: Descriptor) -> _BlobKey:
    return _BlobKey(blob.digest, blob.size)


def _model_faults(
    store: LocalStore,
    reference: Reference,
    manifest: Manifest,
    damaged: Mapping[_BlobKey, BlobstoreError],
) -> Iterator[Fault]:
    told: set[_BlobKey] = set()
    for layer in (manifest.config, *manifest.layers):
        error = damaged.get(_key(layer))
        if layer.media_type == media_types.TENSOR:
            found = _tensor_fault(store, layer, error)
        elif error is not None:
            found = ("", str(error))
        elif layer.media_type == media_types.STACKS:
            found = _stacks_fault(store, manifest)
        else:
            found = _config_fault(store, layer) if layer is manifest.config else None
        if found is not None:
            told.add(_key(layer))
            yield Fault(str(reference), layer.name or layer.media_type, *found)
    try:
        contents = read_contents(store, manifest, collect_faults=True)
    except BlobstoreError as twice:  # a tensor in two layers; the message names both
        yield Fault(str(reference), "", "", str(twice))
        return
    for layer in manifest.layers_of(media_types.TENSOR):
        fault = contents.faults.get(_key(layer))
        if fault is not None and _key(layer) not in told:  # what metadata says is not so
            yield Fault(str(reference), layer.name, "", str(fault))
    yield from _clashes(str(reference), contents)


def _clashes(reference: str, contents: Contents) -> Iterator[Fault]:
    """Yield what no loader could tell apart: companions are called otherwise at run time."""
    names = set(contents.tensors)
    for tensor in contents.tensors.values():
        for suffix in tensor.companions:
            name = tensor.name + COMPANIONS[suffix]
            if name in names:
                message = f"two tensors of the model would both be called {quoted(name)}"
                yield Fault(reference, tensor.layer.name, tensor.name, message)
            names.add(name)


# A fault of a blob: the tensor, empty where it is not known, and the message.


def _stacks_fault(store: LocalStore, manifest: Manifest) -> tuple[str, str] | None:
    try:
        read_stacks(store, manifest)
    except BlobstoreError as error:
        return "", str(error)
    return None


def _config_fault(store: LocalStore, layer: Descriptor) -> tuple[str, str] | None:
    try:
        value = strictjson.loads(store.read_blob(layer.digest, layer.size))
    except (ValueError, BlobstoreError) as error:
        return "", f"the config, blob {layer.digest}, cannot be read: {error}"
    if not isinstance(value, dict):
        return "", f"the config, blob {layer.digest}, is not a JSON object"
    return None


def _tensor_fault(
    store: LocalStore, layer: Descriptor, error: BlobstoreError | None
) -> tuple[str, str] | None:
    """Return what is wrong with a tensor blob; ``error`` is what its digest told."""
    try:
        header = store.read_blob_header(layer.digest, layer.size)
    except BlobstoreError as broken:
        if error is None or str(error) == str(broken):
            return "", str(broken)
        return "", f"{error} ({broken})"
    if error is not None:  # the header can be read, so the damage is most likely in the data
        return (next(iter(header.tensors)) if len(header.tensors) == 1 else ""), str(error)
    return _name_fault(layer, header)


def _name_fault(layer: Descriptor, header: Header) -> tuple[str, str] | None:
    """Check that the layer's name is a tensor of its blob, or a prefix of all of them."""
    names = list(header.tensors)
    if not names:
        return "", f"blob {layer.digest} holds no tensor"
    if layer.name in names or names == [_CONSTANT_KEY]:
        return None
    foreign = [name for name in names if not name.startswith(f"{layer.name}.")]
    if not foreign:
        return None
    message = f"blob {layer.digest} holds tensor {quoted(foreign[0])}, which is not of this layer"
    return foreign[0], message
