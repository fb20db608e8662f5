"""The operation ``push --as slime``: writes a model as the next version of a trainer's folder.

A version has the changes since the one before, or the whole model. It is written under another name, synced,
and renamed when it is complete. So receivers that look for its index never see a part of it.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from blobstore.core import strict_json
from blobstore.core.arguments import local_path
from blobstore.core.digest import Digest
from blobstore.core.escape import quote
from blobstore.core.files import write_file
from blobstore.core.mmap import new_buffer
from blobstore.core.tensor import DType, TensorSpec
from blobstore.core.workers import WorkerPool, check_jobs
from blobstore.errors import InvalidDigest, ModelNotFound, UnsupportedSource, UsageError
from blobstore.folders import writer
from blobstore.manifests.model import Manifest
from blobstore.manifests.reference import Reference
from blobstore.operations.export.export import export_model
from blobstore.operations.follow.patched_model import TrainedModel
from blobstore.operations.follow.trainer import (
    check_blobs,
    current_version,
    find_manifest,
)
from blobstore.safetensors.header import encode_file_header, in_file_order
from blobstore.sources.weight_deltas import encode_change, new_checksum
from blobstore.sources.weight_versions import INDEX, SINGLE, WeightVersions, version_name
from blobstore.store.local import LocalStore, StoreLike

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from blobstore.core.progress import Progress
    from blobstore.sources.weight_versions import WeightVersion

Receiver = Literal["slime", "sglang", "modelexpress"]
RECEIVERS: Final = ("slime", "sglang", "modelexpress")
_CHECKSUMS: Final = {"slime": "xxh3-128", "sglang": "xxh3-128", "modelexpress": "adler32"}
_MANIFEST: Final = "blobstore_manifest"
"""The key of the digest of a version's manifest in its index. Receivers ignore it."""
_FILE_SIZE: Final = 2**32
"""Bytes of tensors whose changes are held in memory, and become one file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushedVersion:
    """The result of :func:`blobstore.push_version`."""

    reference: Reference
    folder: Path
    """Of the version."""
    version: int
    is_full: bool
    """Whether it has the whole model, not only changes."""
    digest: Digest
    """Of the model's manifest."""
    is_unchanged: bool
    """Whether the newest version was this model already, so that nothing was written."""
    tensors: int
    """Tensors that change."""
    bytes_written: int
    seconds: float


class _Change(NamedTuple):
    spec: TensorSpec
    frame: bytes
    checksum: str


def push_version(
    reference: str | Reference,
    folder: str | os.PathLike[str],
    *,
    receiver: Receiver = "slime",
    base: str | Reference | None = None,
    store: StoreLike = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> PushedVersion:
    """Write a model as the next version of the folder of a trainer.

    It has the changes since the version before, which the store must still have under a name or in the history
    of one. The first version has the whole model, unless ``base`` is the model that receivers start from.

    Args:
        reference: the model.
        folder: the folder of the versions, which is made if it does not exist.
        receiver: the program that reads the folder, which needs its own kind of checksum.
        base: the model of the newest version, or, if there is no version, the one that receivers start from.
        store: the store or its folder; by default ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        jobs: number of threads; by default one per processor.
        progress: called with the current tensor, bytes done and total bytes.

    Returns:
        the folder and number of the version, and the bytes that were written.

    Raises:
        ModelNotFound: the store has no such model, or not the version before.
        BlobMissing, BlobDamaged, InvalidManifest: a model is damaged.
        UnsupportedSource: a model was converted when it was imported, or has other tensors than the version
            before.
        DamagedSource: the folder has versions that are malformed.
        MissingLibrary: the library of the checksums is not installed.
        UsageError: ``base`` is not the newest version, or an argument is invalid.
        BlobstoreError: the folder cannot be written.
    """
    started = time.monotonic()
    check_jobs(jobs)
    if receiver not in RECEIVERS:
        raise UsageError(f"unknown receiver {quote(receiver)}; expected {', '.join(RECEIVERS)}")
    local, reference = LocalStore.of(store), Reference.of(reference)
    data, manifest = local.parse(reference)
    digest = Digest.of(data)
    versions = WeightVersions(local_path(folder))
    newest = versions.newest() if versions.folder.exists() else None
    number = 1 if newest is None else newest.number + 1
    former = _former(local, reference, versions, newest, base)
    target = versions.folder / version_name(number)
    is_unchanged = newest is not None and former == digest
    tensors = 0
    if newest is not None and is_unchanged:
        number, target = newest.number, newest.folder
    else:
        target = writer.resolve_target(target)
        check_blobs(local, manifest, jobs)
        with writer.atomic_folder(target) as new:
            if former is None:
                _write_full(local, reference, digest, new, jobs, progress)
            else:
                before = _manifest(local, reference, former)
                pair = _Pair(local, before, manifest, _CHECKSUMS[receiver])
                blobs = (blob.digest for blob in (*before.blobs, *manifest.blobs))
                with local.lease_if_writable(blobs):
                    check_blobs(local, before, jobs)
                    tensors = _write_changes(pair, new, number, digest, jobs, progress)
    return PushedVersion(
        reference=reference,
        folder=target,
        version=number,
        is_full=former is None,
        digest=digest,
        is_unchanged=is_unchanged,
        tensors=tensors,
        bytes_written=0 if is_unchanged else _size(target),
        seconds=time.monotonic() - started,
    )


def _size(folder: Path) -> int:
    return sum(file.lstat().st_size for file in folder.rglob("*") if file.is_file())


def _former(
    store: LocalStore,
    reference: Reference,
    versions: WeightVersions,
    newest: WeightVersion | None,
    base: str | Reference | None,
) -> Digest | None:
    """Return the manifest of the version before; None if the next one has to be the whole model."""
    stated = None if base is None else Digest.of(store.read_manifest(base))
    if newest is None:
        return stated
    try:
        written: Digest | None = Digest.parse(str(newest.metadata.get(_MANIFEST)))
    except InvalidDigest:
        written = None  # a trainer has written it
    if written is None and stated is not None:
        chain = versions.chain(newest, None)
        manifest = _manifest(store, reference, stated)
        if newest.base is None or current_version(store, manifest, chain) != len(chain):
            raise UsageError(f"{quote(base)} is not version {newest.number} of the folder")
        return stated
    if stated not in (None, written):
        raise UsageError(f"{quote(base)} is not version {newest.number} of the folder")
    if written is None:
        raise ModelNotFound(
            f"version {newest.number} of {quote(versions.folder)} does not say which model it is",
            advice="name it with --base",
        )
    return written


def _manifest(store: LocalStore, reference: Reference, digest: Digest) -> Manifest:
    data = find_manifest(store, reference, digest)
    if data is None:
        raise ModelNotFound(
            f"the version before is the model {digest.short}, which the store does not have any more",
            advice="begin a new folder, and keep each version under a tag until the next one is there",
        )
    return Manifest.from_bytes(data)


def _write_full(
    store: LocalStore,
    reference: Reference,
    digest: Digest,
    new: Path,
    jobs: int | None,
    progress: Progress | None,
) -> None:
    """Write the whole model, and its digest into the index, which receivers of a single file do not need."""
    export_model(reference, new, store=store, jobs=jobs, progress=progress)
    index = new / INDEX
    if index.exists():
        value: dict[str, Any] = strict_json.loads(index.read_bytes())
    elif (new / SINGLE).exists():
        tensors = TrainedModel(store, store.resolve(reference)).tensors
        value = {"weight_map": dict.fromkeys(sorted(tensors), SINGLE)}
    else:
        raise UnsupportedSource(f"{reference} has no {SINGLE}, which receivers load")
    value["metadata"] = {**value.get("metadata", {}), _MANIFEST: str(digest)}
    write_file(index, [json.dumps(value).encode()])


class _Pair:
    """The version before and the next one, tensor by tensor."""

    def __init__(
        self, store: LocalStore, before: Manifest, after: Manifest, checksums: str
    ) -> None:
        new_checksum(checksums)  # fails without its library
        self.checksums = checksums
        self._before = TrainedModel(store, before)
        self._after = TrainedModel(store, after)
        old, new = self._before.tensors, self._after.tensors
        for name in sorted(old.keys() | new.keys()):
            if name not in old or name not in new or old[name].spec != new[name].spec:
                raise UnsupportedSource(
                    f"tensor {quote(name)} is not in both versions with one type and shape",
                    advice="begin a new folder, whose first version is the whole model",
                )
        self.names = [
            name
            for name, tensor in new.items()
            if (tensor.layer.digest, tensor.begin) != (old[name].layer.digest, old[name].begin)
        ]
        """The tensors that may differ."""

    def nbytes(self, name: str) -> int:
        """Return the bytes of a tensor."""
        return self._after.tensors[name].spec.nbytes

    def change(self, name: str) -> _Change | None:
        """Return the frame that changes a tensor; None if it is the same."""
        old, new = new_buffer(self.nbytes(name)), new_buffer(self.nbytes(name))
        self._before.read(name, old)
        self._after.read(name, new)
        frame = encode_change(old, new, "xor")
        if frame is None:
            return None
        checksum = new_checksum(self.checksums)
        checksum.update(new)
        return _Change(TensorSpec(name, DType.U8, (len(frame),)), frame, checksum.hexdigest())


def _write_changes(
    pair: _Pair,
    new: Path,
    number: int,
    digest: Digest,
    jobs: int | None,
    progress: Progress | None,
) -> int:
    """Write the files of a version and its index; return how many tensors change."""
    workers = WorkerPool(jobs, progress, sum(map(pair.nbytes, pair.names)))

    def change(name: str) -> _Change | None:
        found = pair.change(name)
        workers.report(pair.nbytes(name), name)
        return found

    written: list[list[str]] = []
    for names in _groups(pair):
        part = [one for one in workers.run(names, change) if one is not None]
        if part:
            _write_part(new / str(len(written)), part)
            written.append([one.spec.name for one in part])
    weight_map: dict[str, str] = {}
    for at, names in enumerate(written):
        file = f"model-{at:05d}-of-{len(written):05d}.safetensors"
        (new / str(at)).rename(new / file)
        weight_map |= dict.fromkeys(names, file)
    metadata = {
        "version": f"{number:06d}",
        "base_version": f"{number - 1:06d}",
        "delta_encoding": "xor",
        "compression_format": "zstd",
        "checksum_format": pair.checksums,
        _MANIFEST: str(digest),
    }
    index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    write_file(new / INDEX, [json.dumps(index).encode()])
    return len(weight_map)


def _groups(pair: _Pair) -> Iterator[list[str]]:
    """Yield the tensors that may differ, in groups that become one file each."""
    group: list[str] = []
    for name in pair.names:
        if group and sum(map(pair.nbytes, (*group, name))) > _FILE_SIZE:
            yield group
            group = []
        group.append(name)
    yield group


def _write_part(path: Path, part: Sequence[_Change]) -> None:
    frames = {one.spec.name: one.frame for one in part}
    specs = in_file_order(one.spec for one in part)
    checksums = {one.spec.name: one.checksum for one in part}
    header = encode_file_header(specs, checksums)
    write_file(path, [header, *(frames[spec.name] for spec in specs)])
