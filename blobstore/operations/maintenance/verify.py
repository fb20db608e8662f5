"""Workflow: all that models are made of, read again and checked.

Every blob is hashed once, however many models share it. Then each model's tensor blobs are parsed and
compared with what the manifest says of them. Faults are collected, not raised: one damaged blob does
not hide another.

Models may come, change and go meanwhile. What was found of one counts only if its manifest is still
the same afterwards; otherwise it is looked at again, or forgotten if it is gone.
"""

from __future__ import annotations

import contextlib
import functools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blobstore.core import strict_json as strictjson
from blobstore.core.digest import BlobId
from blobstore.core.escape import quote
from blobstore.core.workers import RateLimiter, check_jobs
from blobstore.errors import (
    BlobDamaged,
    BlobMissing,
    BlobstoreError,
    InvalidManifest,
    ModelNotFound,
    UsageError,
)
from blobstore.manifests import media_types
from blobstore.models.checks import indexed_names, name_fault, tensor_name
from blobstore.models.expert_stacks import read_stacks
from blobstore.models.tensors import COMPANIONS, read_tensors
from blobstore.store.local import LocalStore
from blobstore.store.verified_cache import VerifiedBlobs
from blobstore.store.verify_blobs import bases_of, damaged_blobs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from blobstore.core.digest import Digest
    from blobstore.core.progress import Progress
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.manifests.model import Manifest
    from blobstore.manifests.reference import Reference
    from blobstore.models.tensors import ModelTensors


@dataclass(frozen=True, slots=True)
class Fault:
    """Something wrong, and where as far as it is known; empty texts where it is not."""

    reference: str
    layer: str
    """The layer's name, or its media type where it has no name."""
    tensor: str
    message: str
    blob: str = ""
    """The digest of the blob; empty where the fault is none of a blob."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What :func:`verify_models` read and found. Faults are in the order of models and layers."""

    models: int
    blobs: int
    """Blobs that were looked for; those that several models share count once."""
    bytes_read: int
    seconds: float
    faults: tuple[Fault, ...]
    damaged: tuple[Descriptor, ...]
    """Blobs that are missing, or whose size or bytes are wrong, each once."""


def verify_models(
    references: Sequence[Reference] = (),
    *,
    store: LocalStore | None = None,
    quick: bool = False,
    rate: float | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Verified:
    """Check models whole: manifests, digests of all blobs, headers of tensors, the config.

    Everything is hashed, whatever was found before. What is found whole now is noted, so that models
    need not be hashed again when they are opened with ``verify="digest"``.

    JSON files are compared by digest only, since what a source held is kept as it was, valid or not.

    Args:
        references: the models; none means all of the store. A model that is removed meanwhile is
            no fault.
        store: by default the store of ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        quick: look at sizes and headers only, and at the content of what must be parsed anyway.
        rate: bytes to read a second at most, by all threads together.
        jobs: threads; by default the machine's processors.
        progress: called with what is being done, bytes done and bytes in all.

    Raises:
        ModelNotFound: a model that was asked for does not exist.
        StoreError: the store cannot be listed.
        UsageError: ``jobs`` is below 1, or ``rate`` not above 0, or given where nothing is hashed.
    """
    started = time.monotonic()
    check_jobs(jobs)
    if quick and rate is not None:
        raise UsageError("a rate means nothing for a quick look, which reads next to nothing")
    store = store or LocalStore()
    check = _Check(
        store, jobs, progress, None if rate is None else RateLimiter(rate), is_quick=quick
    )
    names = tuple(dict.fromkeys(references)) or tuple(store.references())
    faults: dict[Reference, list[Fault]] = {reference: [] for reference in names}
    must_exist, is_first = bool(references), True
    while names:
        manifests = _parse(store, faults, names, must_exist=must_exist)
        check.add(manifest for _, manifest in manifests.values())
        doubted = []
        for reference, (data, manifest) in manifests.items():
            of_manifest = _manifest_faults(store, reference, data, manifest)
            of_layers = _model_faults(store, reference, data, manifest, check)
            faults[reference] = [*of_manifest, *of_layers]
            # What others freeze or thaw meanwhile may be in neither place where it is looked for.
            if faults[reference] and (is_first or not _is_still(store, reference, data)):
                doubted.append(reference)
        names, must_exist, is_first = tuple(doubted), False, False
    found = tuple(fault for of_model in faults.values() for fault in of_model)
    told = {fault.blob for fault in found}
    return Verified(
        models=len(faults),
        blobs=len(check.seen),
        bytes_read=check.bytes_read,
        seconds=time.monotonic() - started,
        faults=found,
        damaged=tuple(
            check.seen[key]
            for key, error in check.damaged.items()
            if isinstance(error, BlobMissing | BlobDamaged) and str(key.digest) in told
        ),
    )


class _Check:
    """What was found of blobs by themselves."""

    def __init__(
        self,
        store: LocalStore,
        jobs: int | None,
        progress: Progress | None,
        pace: RateLimiter | None,
        *,
        is_quick: bool,
    ) -> None:
        self._store = store
        self._jobs = jobs
        self._progress = progress
        self._pace = pace
        self._is_quick = is_quick
        # Not by digest alone: layers of one manifest may contradict each other about the size.
        self.seen: dict[BlobId, Descriptor] = {}
        self.damaged: dict[BlobId, BlobstoreError] = {}
        self.bases: dict[Digest, Descriptor] = {}
        """By what cold blobs are coded."""
        self.of_models: set[BlobId] = set()
        """What is in models that are looked at, and not only a base."""
        self.bytes_read = 0

    def add(self, manifests: Iterable[Manifest]) -> None:
        """Look at the blobs of manifests, but at none again that was whole, and its base too."""
        blobs = {
            _key(blob): blob
            for manifest in manifests
            for blob in (manifest.config, *manifest.layers)
            if _key(blob) not in self.seen or _key(blob) in self.damaged or self.of_base(blob)
        }
        for key in blobs:
            self.bases.pop(key.digest, None)
        self.of_models |= blobs.keys()
        self._add(blobs, as_bases=False)
        coded = bases_of(self._store, blobs.values())
        self.bases |= coded
        bases = {_key(base): base for base in coded.values()}
        fresh = [key for key in bases if key not in self.seen or key in self.damaged]
        self._add({key: bases[key] for key in fresh if key not in self.of_models}, as_bases=True)

    def of_base(self, blob: Descriptor) -> tuple[BlobId, str] | None:
        """Return by what a blob is coded, and what is wrong with that; None if nothing is."""
        base = self.bases.get(blob.digest)
        error = self.damaged.get(_key(base)) if base is not None else None
        if base is None or error is None:
            return None
        return _key(base), f"its base, {base.digest}, is damaged: {_said(error)}"

    def _add(self, blobs: Mapping[BlobId, Descriptor], *, as_bases: bool) -> None:
        self.seen |= blobs
        for key in blobs:
            self.damaged.pop(key, None)
        look = self._look if self._is_quick else self._hash
        found = look(list(blobs.values()), as_bases=as_bases)
        self.damaged |= {_key(blob): error for blob, error in found}

    def _hash(
        self, blobs: Sequence[Descriptor], *, as_bases: bool
    ) -> Iterator[tuple[Descriptor, BlobstoreError]]:
        before = self.bytes_read

        def count(what: str, done: int, total: int) -> None:
            self.bytes_read = before + done
            if self._progress is not None:
                self._progress(what, done, total)

        return damaged_blobs(
            self._store,
            blobs,
            jobs=self._jobs,
            progress=count,
            verified=VerifiedBlobs(self._store),
            pace=self._pace,
            both_forms=True,
            as_bases=as_bases,
        )

    def _look(
        self, blobs: Sequence[Descriptor], *, as_bases: bool
    ) -> Iterator[tuple[Descriptor, BlobstoreError]]:
        for blob in blobs:
            try:
                self._store.check_size(blob.digest, blob.size, as_base=as_bases)
                with contextlib.suppress(BlobMissing):  # most are not cold
                    self._store.open_cold(blob.digest, blob.size)
            except BlobstoreError as error:
                yield blob, error


def _parse(
    store: LocalStore,
    faults: dict[Reference, list[Fault]],
    names: Sequence[Reference],
    *,
    must_exist: bool,
) -> dict[Reference, tuple[bytes, Manifest]]:
    """Return the manifests that can be read; note what is wrong with the others in ``faults``.

    Unless they ``must_exist``, names that are gone since they were listed leave ``faults``.
    """
    manifests: dict[Reference, tuple[bytes, Manifest]] = {}
    for reference in names:
        try:
            manifests[reference] = store.parse(reference)
        except ModelNotFound:
            if must_exist:
                raise
            del faults[reference]
        except BlobstoreError as error:
            faults[reference] = [Fault(str(reference), "", "", str(error))]
    return manifests


def _is_still(store: LocalStore, reference: Reference, data: bytes) -> bool:
    try:
        return store.read_manifest(reference) == data
    except BlobstoreError:
        return False


def _key(blob: Descriptor) -> BlobId:
    return BlobId(blob.digest, blob.size)


def _manifest_faults(
    store: LocalStore, reference: Reference, data: bytes, manifest: Manifest
) -> Iterator[Fault]:
    try:
        store.check_manifest(data, manifest)
    except InvalidManifest as error:
        path = quote(store.manifest_path(reference))
        yield Fault(str(reference), "", "", str(error.at(path)))


def _model_faults(
    store: LocalStore,
    reference: Reference,
    data: bytes,
    manifest: Manifest,
    check: _Check,
) -> Iterator[Fault]:
    told: set[BlobId] = set()
    indexed = functools.cache(lambda: indexed_names(store, data))  # read only if needed
    for layer in (manifest.config, *manifest.layers):
        error = check.damaged.get(_key(layer))
        of_base = check.of_base(layer)
        if of_base is not None:
            base, message = of_base
            error = error and BlobDamaged(f"cold blob {layer.digest} cannot be decoded: {message}")
            if base not in check.of_models:  # it is told there
                yield Fault(str(reference), layer.name, "", message, str(base.digest))
        found = _layer_fault(store, manifest, layer, error)
        if found is not None:
            told.add(_key(layer))
            tensor = found[0] or tensor_name(layer, indexed().get(_key(layer), ()))
            where = (str(reference), layer.name or layer.media_type, tensor)
            yield Fault(*where, found[1], str(layer.digest))
    try:
        contents = read_tensors(store, manifest, collect_faults=True)
    except BlobstoreError as twice:  # a tensor in two layers; the message names both
        yield Fault(str(reference), "", "", _said(twice))
        return
    for layer in manifest.layers_of(media_types.TENSOR):
        fault = contents.faults.get(_key(layer))
        if fault is not None and _key(layer) not in told:  # what metadata says is not so
            tensor = tensor_name(layer, indexed().get(_key(layer), ()))
            yield Fault(str(reference), layer.name, tensor, _said(fault), str(layer.digest))
    yield from _clashes(str(reference), contents)


def _clashes(reference: str, contents: ModelTensors) -> Iterator[Fault]:
    """Yield what no loader could tell apart: companions are called otherwise at run time."""
    names = set(contents.tensors)
    for tensor in contents.tensors.values():
        for suffix in tensor.companions:
            name = tensor.name + COMPANIONS[suffix]
            if name in names:
                message = f"two tensors of the model would both be called {quote(name)}"
                digest = str(tensor.layer.digest)
                yield Fault(reference, tensor.layer.name, tensor.name, message, digest)
            names.add(name)


# A fault of a blob: the tensor, empty where it is not known, and the message.


def _layer_fault(
    store: LocalStore, manifest: Manifest, layer: Descriptor, error: BlobstoreError | None
) -> tuple[str, str] | None:
    """Return what is wrong with a layer; ``error`` is what its digest told."""
    if layer.media_type == media_types.TENSOR:
        return _tensor_fault(store, layer, error)
    if error is not None:
        return "", _said(error)
    if layer.media_type == media_types.STACKS:
        return _stacks_fault(store, manifest)
    return _config_fault(store, layer) if layer is manifest.config else None


def _stacks_fault(store: LocalStore, manifest: Manifest) -> tuple[str, str] | None:
    try:
        read_stacks(store, manifest)
    except BlobstoreError as error:
        return "", _said(error)
    return None


def _config_fault(store: LocalStore, layer: Descriptor) -> tuple[str, str] | None:
    try:
        value = strictjson.loads(store.read_blob(layer.digest, layer.size))
    except (ValueError, BlobstoreError) as error:
        return "", f"the config, blob {layer.digest}, cannot be read: {_said(error)}"
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
            return "", _said(broken)
        return "", f"{_said(error)} ({_said(broken)})"
    names = list(header.tensors)
    if error is None:
        return name_fault(layer, names)
    tensor = tensor_name(layer, names)
    group = "" if tensor else f"; which of its {len(names)} tensors is damaged cannot be told"
    return tensor, _said(error) + group


def _said(error: Exception) -> str:
    """Return a message without the advice, which is given once for all faults."""
    return error.message if isinstance(error, BlobstoreError) else str(error)
