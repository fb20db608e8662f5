"""The operation ``verify``: hashes every blob of models and checks their manifests and headers.

It uses ``store.verify_blobs``, which hashes blobs in parallel, and ``store.verified_cache``, which
remembers the result for ``models.checks``, the checks of ``open(verify=...)``.

A blob that several models share is hashed once. Then the tensor blobs of each model are parsed and
compared with the manifest. Faults are collected, not raised, so that one damaged blob does not hide
another.

Other processes may add, change and remove models at the same time. The faults of a model count only
if its manifest has not changed since. Otherwise the model is checked again, or skipped if it is gone.
"""

from __future__ import annotations

import contextlib
import functools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blobstore.core import interrupts, strict_json
from blobstore.core.escape import quote
from blobstore.core.gc_pause import gc_paused
from blobstore.core.rate_limit import RateLimiter
from blobstore.core.sample import ALL, NONE, Sample
from blobstore.core.workers import check_jobs
from blobstore.errors import (
    BlobDamaged,
    BlobMissing,
    BlobstoreError,
    InvalidManifest,
    ModelNotFound,
    UsageError,
)
from blobstore.folders.original import plan_original
from blobstore.manifests import media_types
from blobstore.models.checks import indexed_names, name_fault, tensor_name
from blobstore.models.contents import ModelContents
from blobstore.models.source_layers import read_source_record, read_stacks
from blobstore.models.tensors import QPARAMS, read_headers, read_tensors
from blobstore.operations.describe.show import check_options
from blobstore.operations.maintenance.lost_manifests import lost_manifests
from blobstore.safetensors.header import Header
from blobstore.store.local import LocalStore, StoreLike
from blobstore.store.name_patterns import named_models
from blobstore.store.verified_cache import VerifiedBlobs
from blobstore.store.verify_blobs import bases_of, damaged_blobs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from blobstore.core.digest import BlobId, Digest
    from blobstore.core.progress import Progress
    from blobstore.errors import StoreError
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.manifests.model import Manifest
    from blobstore.manifests.reference import Names, Reference
    from blobstore.models.tensors import Headers, ModelTensors


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault and its place. Parts of the place that are unknown are empty."""

    reference: str
    layer: str
    """The layer's name, or its media type if it has no name."""
    tensor: str
    message: str
    """What is wrong, without advice."""
    blob: str = ""
    """The digest of the faulty blob; empty if the fault is in the manifest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """The result of :func:`blobstore.verify`. Faults are in the order of models and layers."""

    models: int = 0
    blobs: int = 0
    """Blobs that were checked. A blob that several models share counts once."""
    hashed: int = 0
    """Those of them whose bytes were read."""
    bytes_read: int = 0
    seconds: float = 0.0
    faults: tuple[Fault, ...] = ()
    damaged: tuple[Descriptor, ...] = ()
    """Blobs that are missing, or have a wrong size or digest, each once."""
    lost: tuple[Reference, ...] = ()
    """Names of the store whose manifest is lost, though their blobs are there; only if all models are verified."""

    @property
    def ok(self) -> bool:
        """Whether there are no faults."""
        return not self.faults


def verify_models(
    references: Names = (),
    *,
    store: StoreLike = None,
    quick: bool = False,
    sample: str | float | None = None,
    rate: float | str | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
    on_error: Callable[[StoreError], object] | None = None,
) -> Verified:
    """Check models completely: manifests, digests of all blobs, headers of tensors, the config.

    If all models are checked, it is a fault, too, if the manifest of a name is lost, or if manifests seem to be
    lost by the blobs that are there.

    Every blob is hashed, even if it was verified before. Blobs that are intact are noted, so that
    ``open(verify="digest")`` need not hash them again. JSON files are checked by digest only, because
    they are stored as the source had them, valid or not.

    Args:
        references: the models; none means all of the store. A model that is removed in the meantime
            is not a fault.
        store: the store or its path; by default ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        quick: check sizes and headers only, and the content of the config and other files that must
            be parsed anyway.
        sample: the blobs to hash; the others are checked as by ``quick``. ``"5%"``, or 0.05, chooses other
            blobs each time, ``"2/7"`` the second of seven parts.
        rate: the most bytes per second to read, by all threads together, or a text such as ``50MB``.
        jobs: number of threads; by default one per processor.
        progress: called with the current blob, bytes done and bytes in total.
        on_error: called with the error of each folder of manifests that cannot be read, whose models
            are then not checked; by default the first of these errors is raised.

    Returns:
        the numbers of models, blobs and bytes, and the faults with their places.

    Raises:
        ModelNotFound: a model in ``references`` does not exist.
        NotFound: all models are to be checked, and there is no store.
        StoreError: the store cannot be listed.
        UsageError: ``jobs`` is below 1, ``rate`` is not above 0, ``sample`` is no sample, or one of the latter
            is given together with ``quick``.
    """
    started = time.monotonic()
    check_jobs(jobs)
    if quick and (rate is not None or sample is not None):
        what = "a rate" if rate is not None else "a sample"
        raise UsageError(f"{what} cannot be combined with a quick check, which hashes nothing")
    store = LocalStore.of(store)
    names = named_models(store, references)
    is_whole = not names
    if is_whole:
        store.check_there()
    else:
        store = LocalStore.to_read(store)
    limiter = None if rate is None else RateLimiter(rate)
    hashed = NONE if quick else ALL if sample is None else Sample.parse(sample)
    check = _BlobCheck(store, jobs, progress, limiter, hashed)
    must_exist, is_first = bool(names), True
    names = names or tuple(store.references(on_error=on_error))
    faults: dict[Reference, list[Fault]] = {reference: [] for reference in names}
    while names:
        manifests = _parse(store, faults, names, must_exist=must_exist)
        check.add(manifest for _, manifest in manifests.values())
        doubted = []
        for reference, (data, manifest) in manifests.items():
            with gc_paused():  # a model has thousands of tensors
                headers = read_headers(store, manifest)
                faults[reference] = list(
                    _model_faults(store, reference, data, manifest, check, headers)
                ) or list(_record_faults(store, reference, manifest, headers))
            # A blob that is frozen or thawed at this moment may be missed in both places.
            if faults[reference] and (is_first or not _is_unchanged(store, reference, data)):
                doubted.append(reference)
        names, must_exist, is_first = tuple(doubted), False, False
    broken: list[InvalidManifest] = []
    lost = tuple(_lost_names(store, broken) if is_whole else ())
    every = (
        *(_store_faults(store, lost, has_models=bool(faults)) if is_whole else ()),
        *(Fault("", "", "", str(error)) for error in broken),
        *(fault for of_model in faults.values() for fault in of_model),
    )
    faulty = {fault.blob for fault in every}
    return Verified(
        models=len(faults),
        blobs=len(check.seen),
        hashed=sum(key.digest in hashed for key in check.seen),
        bytes_read=check.bytes_read,
        seconds=time.monotonic() - started,
        faults=every,
        damaged=tuple(
            check.seen[key]
            for key, error in check.damaged.items()
            if isinstance(error, BlobMissing | BlobDamaged) and str(key.digest) in faulty
        ),
        lost=lost,
    )


def _lost_names(store: LocalStore, broken: list[InvalidManifest]) -> Iterable[Reference]:
    # Some readers may not read all folders.
    with contextlib.suppress(BlobstoreError, OSError):
        return sorted(store.names.published.lost(on_error=broken.append))
    return ()


def _store_faults(
    store: LocalStore, lost: Iterable[Reference], *, has_models: bool
) -> Iterator[Fault]:
    """Yield the fault of a store whose blobs say that manifests are lost, and those of names that are."""
    why = ""
    # A manifest that cannot be read is a fault of its model, and some readers may not read all folders.
    with contextlib.suppress(BlobstoreError, OSError):
        why = lost_manifests(store) if store.root.exists() else ""
    if why:
        yield Fault("", "", "", why)
    if has_models or not why:  # otherwise the folder of all manifests is lost
        for name in lost:
            yield Fault(
                str(name), "", "", f"the manifest {quote(store.manifest_path(name))} is lost"
            )


class _BlobCheck:
    """Checks blobs, each once for all models, and keeps the errors."""

    def __init__(
        self,
        store: LocalStore,
        jobs: int | None,
        progress: Progress | None,
        limiter: RateLimiter | None,
        sample: Sample,
    ) -> None:
        self._store = store
        self._jobs = jobs
        self._progress = progress
        self._limiter = limiter
        self._sample = sample
        # By size too: layers of one manifest may contradict each other about the size.
        self.seen: dict[BlobId, Descriptor] = {}
        self.damaged: dict[BlobId, BlobstoreError] = {}
        self.bases: dict[Digest, Descriptor] = {}
        """The bases of delta-encoded blobs, by the digest of the blob."""
        self.of_models: set[BlobId] = set()
        """Blobs that are listed by a checked model, and are not only a base."""
        self.bytes_read = 0

    def add(self, manifests: Iterable[Manifest]) -> None:
        """Check the blobs of manifests and their bases, except blobs that were found intact."""
        blobs = {
            blob.id: blob
            for manifest in manifests
            for blob in (manifest.config, *manifest.layers)
            if blob.id not in self.seen or blob.id in self.damaged or self.base_fault(blob)
        }
        for key in blobs:
            # A blob that was frozen again may have another base.
            self.bases.pop(key.digest, None)
        self.of_models.update(blobs)
        self._check(blobs, as_bases=False)
        bases = bases_of(self._store, blobs.values())
        self.bases |= bases
        unchecked = {
            base.id: base
            for base in bases.values()
            if (base.id not in self.seen or base.id in self.damaged)
            and base.id not in self.of_models
        }
        # A base that no checked model lists may be here by its second hard link alone.
        self._check(unchecked, as_bases=True)

    def base_fault(self, blob: Descriptor) -> tuple[BlobId, str] | None:
        """Return the base of a delta-encoded blob and its fault; None if there is no fault."""
        base = self.bases.get(blob.digest)
        error = self.damaged.get(base.id) if base is not None else None
        if base is None or error is None:
            return None
        return base.id, f"its base is at fault: {_without_advice(error)}"

    def _check(self, blobs: Mapping[BlobId, Descriptor], *, as_bases: bool) -> None:
        self.seen |= blobs
        for key in blobs:
            self.damaged.pop(key, None)
        hashed = [blob for key, blob in blobs.items() if key.digest in self._sample]
        for key in blobs.keys() - {blob.id for blob in hashed}:
            try:
                self._store.check_size(*key, as_base=as_bases)
                if self._store.has_cold(key.digest):  # false if the folder cannot be read
                    with contextlib.suppress(BlobMissing):  # thawed since
                        self._store.open_cold(*key)
            except BlobstoreError as error:
                self.damaged[key] = error
        before = self.bytes_read

        def count(what: str, done: int, total: int) -> None:
            self.bytes_read = before + done
            if self._progress is not None:
                self._progress(what, done, total)

        found = damaged_blobs(
            self._store,
            hashed,
            jobs=self._jobs,
            progress=count,
            verified=VerifiedBlobs(self._store),
            pace=self._limiter,
            cold_files_of=self._store,
            as_bases=as_bases,
        )
        self.damaged |= {blob.id: error for blob, error in found}


def _parse(
    store: LocalStore,
    faults: dict[Reference, list[Fault]],
    names: Sequence[Reference],
    *,
    must_exist: bool,
) -> dict[Reference, tuple[bytes, Manifest]]:
    """Return the manifests that can be parsed, and record the errors of the others in ``faults``.

    Names that no longer exist are removed from ``faults``, unless they ``must_exist``.
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
            faults[reference] = [Fault(str(reference), "", "", error.message)]
    return manifests


def _is_unchanged(store: LocalStore, reference: Reference, data: bytes) -> bool:
    try:
        return store.read_manifest(reference) == data
    except BlobstoreError:
        return False


def _model_faults(
    store: LocalStore,
    reference: Reference,
    data: bytes,
    manifest: Manifest,
    check: _BlobCheck,
    headers: Headers,
) -> Iterator[Fault]:
    try:
        store.check_manifest(data, manifest)
    except InvalidManifest as changed:
        path = quote(store.manifest_path(reference))
        yield Fault(str(reference), "", "", changed.at(path).message)
    reported: set[BlobId] = set()
    indexed = functools.cache(lambda: indexed_names(store, data))  # read only if needed
    for layer in (manifest.config, *manifest.layers):
        interrupts.check()
        error = check.damaged.get(layer.id)
        base_fault = check.base_fault(layer)
        if base_fault is not None:
            base, message = base_fault
            error = error and BlobDamaged(f"cold blob {layer.digest} cannot be decoded: {message}")
            if base not in check.of_models:  # otherwise it is reported as a blob of its own model
                yield Fault(str(reference), layer.name, "", message, str(base.digest))
        if layer.media_type in media_types.WEIGHTS:
            found = _tensor_fault(layer, headers[layer.id], error)
        else:
            found = _layer_fault(store, manifest, layer, error)
        if found is not None:
            reported.add(layer.id)
            tensor = found[0] or tensor_name(layer, indexed().get(layer.id, ()))
            where = (str(reference), layer.name or layer.media_type, tensor)
            yield Fault(*where, found[1], str(layer.digest))
    try:
        contents = read_tensors(store, manifest, headers=headers, collect_faults=True)
    except BlobstoreError as twice:  # a tensor in two layers; the message names both
        yield Fault(str(reference), "", "", _without_advice(twice))
        return
    for layer in manifest.layers_of(*media_types.WEIGHTS):
        fault = contents.faults.get(layer.id)
        if fault is not None and layer.id not in reported:  # the metadata contradicts the tensors
            tensor = tensor_name(layer, indexed().get(layer.id, ()))
            message = _without_advice(fault)
            yield Fault(str(reference), layer.name, tensor, message, str(layer.digest))
    yield from _clashes(str(reference), contents)


def _record_faults(
    store: LocalStore, reference: Reference, manifest: Manifest, headers: Headers
) -> Iterator[Fault]:
    """Yield the fault of a source layer that does not fit the blobs of its model, which are intact."""
    try:
        record = read_source_record(store, manifest)
        if record is not None:
            check_options(record)
            plan_original(ModelContents(store, manifest, headers, record))
    except BlobstoreError as error:
        (*_, layer) = manifest.layers_of(media_types.SOURCE)
        message = _without_advice(error)
        yield Fault(str(reference), layer.media_type, "", message, str(layer.digest))


def _clashes(reference: str, contents: ModelTensors) -> Iterator[Fault]:
    """Yield tensors whose runtime name, which differs for quantization parameters, is the name of another."""
    names = set(contents.tensors)
    for tensor in contents.tensors.values():
        for suffix in tensor.qparams:
            name = tensor.name + QPARAMS[suffix]
            if name in names:
                message = f"two tensors of the model would both be called {quote(name)}"
                digest = str(tensor.layer.digest)
                yield Fault(reference, tensor.layer.name, tensor.name, message, digest)
            names.add(name)


def _layer_fault(
    store: LocalStore, manifest: Manifest, layer: Descriptor, error: BlobstoreError | None
) -> tuple[str, str] | None:
    """Return an empty tensor name and the message of a layer's fault, or None.

    ``error`` is the result of hashing the blob.
    """
    if error is not None:
        return "", _without_advice(error)
    if layer.media_type == media_types.STACKS:
        try:
            read_stacks(store, manifest)
        except BlobstoreError as broken:
            return "", _without_advice(broken)
    elif layer is manifest.config:
        try:
            value = strict_json.loads(store.read_blob(layer.digest, layer.size))
        except (ValueError, BlobstoreError) as broken:
            message = _without_advice(broken)
            return "", f"the config, blob {layer.digest}, cannot be read: {message}"
        if not isinstance(value, dict):
            return "", f"the config, blob {layer.digest}, is not a JSON object"
    return None


def _tensor_fault(
    layer: Descriptor, header: Header | BlobstoreError, error: BlobstoreError | None
) -> tuple[str, str] | None:
    """Return the tensor (empty if unknown) and the message of a tensor layer's fault, or None."""
    if not isinstance(header, Header):
        if error is None or str(error) == str(header):
            return "", _without_advice(header)
        # What it says of another blob, the base, is said already.
        _, is_own, detail = header.message.partition(f"{layer.digest.hex}': ")
        return "", _without_advice(error) + (f" ({detail})" if is_own else "")
    names = list(header.tensors)
    if error is None:
        return name_fault(layer, names)
    tensor = tensor_name(layer, names)
    unknown = "" if tensor else f"; it holds {len(names)} tensors, any of which may be damaged"
    return tensor, _without_advice(error) + unknown


def _without_advice(error: Exception) -> str:
    """Return the message without its advice, which is given once for all faults."""
    return error.message if isinstance(error, BlobstoreError) else str(error)
