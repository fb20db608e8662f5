"""Workflow: a stored model given back as a Hugging Face folder.

First everything is decided from the manifest and the blobs' headers: which tensor goes into which file
at which offset. Then every blob is one independent job on a pool of threads: it is read once, from
its first byte to its last, and each tensor is written to its place. Because a blob is always read
whole and in order, its digest is computed on the way, whatever the order of the tensors in the files
is (stacked experts are split over many places), and a damaged blob is found before the folder has
its name. Memory is one buffer a thread.

The folder is built under a temporary name beside the target, synced, and renamed: the target is
either absent or complete.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from blobstore import strictjson
from blobstore.contents import read_contents
from blobstore.digest import Digester
from blobstore.errors import BlobDamaged, BlobstoreError, InvalidManifest, UsageError
from blobstore.files import sync_folder, write_all
from blobstore.manifests import media_types
from blobstore.manifests.reference import Reference
from blobstore.progress import Meter
from blobstore.safetensors.header import encode_header
from blobstore.safetensors.writer import in_file_order
from blobstore.store.local import LocalStore
from blobstore.tensor import TensorSpec
from blobstore.text import quoted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from typing_extensions import Buffer

    from blobstore.contents import Contents, StoredTensor
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.manifests.model import Manifest
    from blobstore.progress import Progress

SHARD_SIZE = 5 * 10**9
"""Bytes of tensors in one file, unless a single tensor is larger."""
_BUFFER_SIZE = 1 << 20
_METADATA = {"format": "pt"}
"""What transformers demands of a file that it loads."""
_TRANSFORMERS_STEM = "model"
_DIFFUSERS_STEM = "diffusion_pytorch_model"
_PART = re.compile(r"[A-Za-z0-9_.-]+", re.ASCII)
_MAX_DEPTH = 3
_OTHER_WEIGHTS = (media_types.MODEL, media_types.PROJECTOR, media_types.ADAPTER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What :func:`export_model` did."""

    folder: Path
    files: int
    """Files in the folder: weights, weight indexes and small files."""
    tensors: int
    shards: int
    """Files of weights."""
    bytes_written: int
    seconds: float


def export_model(
    reference: str | Reference,
    folder: str | os.PathLike[str],
    *,
    store: LocalStore | None = None,
    shard_size: int = SHARD_SIZE,
    progress: Progress | None = None,
) -> Exported:
    """Write a model as a Hugging Face folder: its tensors bit for bit, and its small files.

    Stacked experts become the tensors that they were made of; quantized tensors and their
    companions are written as stored. Layers that have no place in such a folder (Ollama's template,
    system, parameter and license layers) are left out.

    Args:
        reference: the name, ``[host/][namespace/]model[:tag]``.
        folder: where to; it must not exist, or be an empty folder.
        store: by default the store of ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        shard_size: bytes of tensors in a file; a model of more becomes several, with an index.
        progress: called with what is being done, bytes done and bytes in all.

    Raises:
        ModelNotFound: the store has no such name.
        BlobMissing, BlobDamaged, InvalidManifest: the model is not whole, or names files that
            must not be written.
        UsageError: ``shard_size`` is below 1.
        BlobstoreError: the model has no tensors, or the folder exists or cannot be written.
    """
    started = time.monotonic()
    if isinstance(reference, str):
        reference = Reference.parse(reference)
    if shard_size < 1:
        message = f"the shard size must be at least 1 byte, got {shard_size}"
        raise UsageError(message)
    store = store or LocalStore()
    manifest = store.resolve(reference)
    target = _free_target(folder)
    try:
        _check_kind(manifest)
        layout = _lay_out(store, manifest, shard_size)
        with _building(target) as building:
            _write_tensors(store, layout, building, progress)
            for name, layer in layout.files.items():
                _write_new(building / name, store.read_blob(layer.digest, layer.size))
            for name, content in layout.indexes.items():
                _write_new(building / name, content)
            written = [path for path in building.rglob("*") if path.is_file()]
            size = sum(path.stat().st_size for path in written)
    except BlobstoreError as error:
        where = f"model {reference}"
        raise error.at(where) from error
    return Exported(
        folder=target,
        files=len(written),
        tensors=len(layout.tensors),
        shards=len(layout.weights),
        bytes_written=size,
        seconds=time.monotonic() - started,
    )


# What goes where: decided from the manifest and headers, nothing is written.


class _Tensor(NamedTuple):
    """A tensor under the name that it gets back, and where its bytes begin in its blob."""

    spec: TensorSpec
    layer: Descriptor
    begin: int


@dataclass(frozen=True, slots=True)
class _WeightFile:
    """A file of weights; ``offsets`` are by the model's names, below a component too."""

    name: str
    header: bytes
    offsets: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class _Layout:
    """What the folder will hold. Names are relative to it."""

    tensors: Sequence[_Tensor]
    weights: Sequence[_WeightFile]
    indexes: Mapping[str, bytes]
    files: Mapping[str, Descriptor]


def _check_kind(manifest: Manifest) -> None:
    for layer in manifest.layers:
        if layer.media_type in _OTHER_WEIGHTS:
            message = (
                f"it has weights in a GGUF file (blob {layer.digest.short}, {layer.media_type}); "
                "only models stored as tensors can be exported"
            )
            raise BlobstoreError(message)
    if not manifest.layers_of(media_types.TENSOR):
        message = "it has no tensor layers, so there is nothing to export"
        raise BlobstoreError(message)


def _lay_out(store: LocalStore, manifest: Manifest, shard_size: int) -> _Layout:
    tensors = _source_tensors(read_contents(store, manifest), _read_stacks(store, manifest))
    files = _small_files(manifest)
    stems = _stems(store, files)
    weights: list[_WeightFile] = []
    indexes: dict[str, bytes] = {}
    reserved = list(files)
    for prefix, stem in sorted(stems.items()):
        members = [tensor.spec for tensor in tensors if _prefix(tensor.spec.name, stems) == prefix]
        if not members:
            continue
        shards = _shards(members, prefix, stem, shard_size)
        weights.extend(shards)
        index = f"{prefix}{stem}.safetensors.index.json"
        if len(shards) > 1:
            indexes[index] = _index(shards, members, prefix)
        # The index is reserved even where there is none: a foreign one would mislead readers.
        reserved += [index, *(shard.name for shard in shards)]
    _check_paths(reserved)
    return _Layout(tensors, weights, indexes, files)


def _source_tensors(contents: Contents, stacks: Mapping[str, Sequence[str]]) -> list[_Tensor]:
    """Return the tensors as the source had them, in the order of the layers and their bytes."""
    found: dict[str, _Tensor] = {}
    unused = set(stacks)
    for stored in contents.tensors.values():
        sources = None if stored.companions else stacks.get(stored.name)
        unused.discard(stored.name)
        for tensor in _as_stored(stored) if sources is None else _split(stored, sources):
            if found.setdefault(tensor.spec.name, tensor) is not tensor:
                message = f"two tensors would both be exported as {quoted(tensor.spec.name)}"
                raise BlobDamaged(message)
    if unused:
        message = f"the list of stacked tensors names {quoted(min(unused))}, which does not exist"
        raise BlobDamaged(message)
    return list(found.values())


def _as_stored(stored: StoredTensor) -> Iterator[_Tensor]:
    for suffix, entry in {"": stored.entry, **stored.companions}.items():
        spec = TensorSpec(stored.name + suffix, entry.spec.dtype, entry.spec.shape)
        yield _Tensor(spec, stored.layer, stored.header.data_start + entry.begin)


def _split(stored: StoredTensor, sources: Sequence[str]) -> Iterator[_Tensor]:
    spec, begin, end = stored.entry
    if spec.shape[:1] != (len(sources),):
        message = (
            f"tensor {quoted(stored.name)} of shape {list(spec.shape)} is said to be made of "
            f"{len(sources)} tensors"
        )
        raise BlobDamaged(message)
    size = (end - begin) // len(sources)
    for number, name in enumerate(sources):
        offset = stored.header.data_start + begin + number * size
        yield _Tensor(TensorSpec(name, spec.dtype, spec.shape[1:]), stored.layer, offset)


def _read_stacks(store: LocalStore, manifest: Manifest) -> dict[str, list[str]]:
    """Return the names of the tensors that each stacked tensor was made of.

    Raises:
        BlobDamaged: the list is not of that form.
    """
    stacks: dict[str, list[str]] = {}
    for layer in manifest.layers_of(media_types.STACKS):
        try:
            value = strictjson.loads(store.read_blob(layer.digest, layer.size))
        except ValueError as error:
            message = f"the list of stacked tensors, blob {layer.digest.short}, is {error}"
            raise BlobDamaged(message) from None
        if not isinstance(value, dict) or not all(map(_is_list_of_names, value.values())):
            message = (
                f"the list of stacked tensors, blob {layer.digest.short}, is not an object of "
                "lists of names"
            )
            raise BlobDamaged(message)
        stacks.update(value)
    return stacks


def _is_list_of_names(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(name, str) for name in value)


def _small_files(manifest: Manifest) -> dict[str, Descriptor]:
    """Return the layers that are files, by their checked names."""
    layers = [
        layer
        for layer in manifest.layers
        if layer.media_type in (media_types.JSON, media_types.FILE)
    ]
    for layer in layers:
        parts = layer.name.split("/")
        if len(parts) > _MAX_DEPTH or not all(map(_is_part, parts)):
            message = (
                f"layer {quoted(layer.name)} is no file name: expected at most {_MAX_DEPTH} parts "
                "of letters, digits, '_', '.' and '-'"
            )
            raise InvalidManifest(message)
    _check_paths(layer.name for layer in layers)  # a map would lose the second of one name
    return {layer.name: layer for layer in layers}


def _is_part(part: str) -> bool:
    return _PART.fullmatch(part) is not None and part not in (".", "..")


def _check_paths(names: Iterable[str]) -> None:
    """Check that all files can exist beside each other."""
    files: set[str] = set()
    folders: set[str] = set()
    for name in names:
        if name in files:
            message = f"two files would both be {quoted(name)}"
            raise InvalidManifest(message)
        files.add(name)
        folders.update(str(parent) for parent in Path(name).parents)
    if both := files & folders:
        message = f"{quoted(min(both))} would be both a file and a folder"
        raise InvalidManifest(message)


def _stems(store: LocalStore, files: Mapping[str, Descriptor]) -> dict[str, str]:
    """Return what the weights below each prefix are called: ``""`` and the component folders.

    The lists may be of any form, as the files of a source are kept as they were; what is no list
    of components lists none.
    """

    def decoded(name: str) -> Any:
        if name not in files:
            return None
        try:
            return json.loads(store.read_blob(files[name].digest, files[name].size))
        except (ValueError, RecursionError):
            return None

    def stem(folder: str) -> str:
        # Only diffusers writes this key into the config.json of its models.
        config = decoded(f"{folder}config.json")
        is_diffusers = isinstance(config, dict) and "_diffusers_version" in config
        return _DIFFUSERS_STEM if is_diffusers else _TRANSFORMERS_STEM

    stems = {"": stem("")}
    modules = decoded("modules.json")
    for module in modules if isinstance(modules, list) else ():
        path = module.get("path") if isinstance(module, dict) else None
        if isinstance(path, str) and _is_part(path):
            stems[f"{path}/"] = _TRANSFORMERS_STEM
    pipeline = decoded("model_index.json")
    for name, value in pipeline.items() if isinstance(pipeline, dict) else ():
        if _is_part(name) and isinstance(value, list) and len(value) == 2 and value[1] is not None:  # noqa: PLR2004 - [library, class]
            known = {"diffusers": _DIFFUSERS_STEM, "transformers": _TRANSFORMERS_STEM}
            library = value[0] if isinstance(value[0], str) else ""
            # Others are modules of a pipeline, with classes of either library.
            stems[f"{name}/"] = known.get(library) or stem(f"{name}/")
    return stems


def _prefix(name: str, stems: Mapping[str, str]) -> str:
    """Return the prefix of the component that a tensor belongs to."""
    folder, slash, _ = name.partition("/")
    return folder + slash if slash and folder + slash in stems else ""


def _shards(
    specs: Iterable[TensorSpec], prefix: str, stem: str, shard_size: int
) -> list[_WeightFile]:
    """Return the files of one component, filled in the order of the names."""
    parts: list[list[TensorSpec]] = [[]]
    room = shard_size
    for spec in sorted(specs, key=attrgetter("name")):
        if spec.nbytes > room and parts[-1]:
            parts.append([])
            room = shard_size
        parts[-1].append(spec)
        room -= spec.nbytes
    if len(parts) == 1:
        return [_weight_file(f"{prefix}{stem}.safetensors", parts[0], prefix)]
    return [
        _weight_file(f"{prefix}{stem}-{number:05}-of-{len(parts):05}.safetensors", part, prefix)
        for number, part in enumerate(parts, start=1)
    ]


def _weight_file(path: str, specs: Iterable[TensorSpec], prefix: str) -> _WeightFile:
    ordered = in_file_order(specs)
    local = [TensorSpec(spec.name.removeprefix(prefix), spec.dtype, spec.shape) for spec in ordered]
    header = encode_header(local, _METADATA)
    offsets: dict[str, int] = {}
    offset = len(header)
    for spec in ordered:
        offsets[spec.name] = offset
        offset += spec.nbytes
    return _WeightFile(path, header, offsets)


def _index(shards: Iterable[_WeightFile], specs: Iterable[TensorSpec], prefix: str) -> bytes:
    weight_map = {
        name.removeprefix(prefix): shard.name.removeprefix(prefix)
        for shard in shards
        for name in shard.offsets
    }
    value = {
        "metadata": {"total_size": sum(spec.nbytes for spec in specs)},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return f"{json.dumps(value, indent=2)}\n".encode()


# Bytes from the store into the folder.


def _write_tensors(
    store: LocalStore, layout: _Layout, building: Path, progress: Progress | None
) -> None:
    places: dict[str, tuple[Path, int]] = {}
    for file in layout.weights:
        path = building / file.name
        _write_new(path, file.header)
        places.update((name, (path, offset)) for name, offset in file.offsets.items())
    total = sum(tensor.spec.nbytes for tensor in layout.tensors)
    copying = _Copying(store, places, Meter(progress, total))
    with ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="blobstore-export") as pool:
        jobs = [
            pool.submit(copying.copy, layer, sorted(tensors, key=attrgetter("begin")))
            # The tensors of a layer follow each other.
            for layer, tensors in groupby(layout.tensors, key=attrgetter("layer"))
        ]
        try:
            for job in as_completed(jobs):
                job.result()
        except BaseException:  # also Ctrl-C: stop the threads before their files are removed
            copying.stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    for file in layout.weights:
        _sync(building / file.name)


class _Copying:
    """The job of one blob, with what all jobs share."""

    def __init__(
        self, store: LocalStore, places: Mapping[str, tuple[Path, int]], meter: Meter
    ) -> None:
        self.stop = threading.Event()
        self._store = store
        self._places = places
        self._meter = meter

    def copy(self, layer: Descriptor, tensors: Sequence[_Tensor]) -> None:
        """Write the tensors of a blob, all and in its order, to their places; check its digest.

        Raises:
            BlobMissing, BlobDamaged: the blob is not whole.
            OSError: a file cannot be written.
        """
        try:
            descriptor = self._store.open_blob(layer.digest, layer.size)
            try:
                blob = _BlobReader(descriptor, min(layer.size, _BUFFER_SIZE))
                for _ in blob.read(tensors[0].begin):  # the header, only to be hashed
                    pass
                for tensor in tensors:
                    self._write(tensor.spec, blob, layer.name)
            finally:
                os.close(descriptor)
            if blob.digester.digest() != layer.digest:
                message = (
                    f"blob {quoted(self._store.layout.blob(layer.digest))} is damaged: its bytes "
                    f"have digest {blob.digester.digest()}; remove it and create the model again"
                )
                raise BlobDamaged(message)
        except BlobstoreError as error:
            where = f"layer {quoted(layer.name)}"
            raise error.at(where) from error

    def _write(self, spec: TensorSpec, blob: _BlobReader, what: str) -> None:
        path, offset = self._places[spec.name]
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.lseek(descriptor, offset, os.SEEK_SET)
            for buffer in blob.read(spec.nbytes):
                if self.stop.is_set():
                    message = "stopped"
                    raise BlobstoreError(message)
                write_all(descriptor, buffer)
                self._meter.add(len(buffer), what)
        finally:
            os.close(descriptor)


class _BlobReader:
    """The bytes of an open blob from the first to the last, hashed as they are read."""

    def __init__(self, descriptor: int, buffer_size: int) -> None:
        self.digester = Digester()
        self._descriptor = descriptor
        self._buffer = memoryview(bytearray(buffer_size))

    def read(self, size: int) -> Iterator[memoryview]:
        """Yield the next ``size`` bytes in pieces, each good until the next is asked for.

        Raises:
            BlobDamaged: the blob ends before, or cannot be read.
        """
        while size:
            offset = self.digester.size
            try:
                count = os.preadv(self._descriptor, [self._buffer[:size]], offset)
            except OSError as error:
                message = f"the blob cannot be read at byte {offset}: {error.strerror}"
                raise BlobDamaged(message) from error
            if not count:
                message = f"the blob ended at byte {offset}, {size} bytes too early"
                raise BlobDamaged(message)
            self.digester.update(self._buffer[:count])
            yield self._buffer[:count]
            size -= count


# The folder.


def _free_target(folder: str | os.PathLike[str]) -> Path:
    """Return the real path of a folder that can be made.

    Raises:
        BlobstoreError: something is there, or it is a folder that cannot be replaced.
    """
    try:
        target = Path(os.path.realpath(folder))
        if not os.path.lexists(target):
            return target
        is_empty = target.is_dir() and not any(target.iterdir())
        # Neither could be replaced by the finished folder without surprise.
        is_fixed = target.is_mount() or target == Path.cwd()
    except (OSError, ValueError) as error:
        message = f"cannot look at {quoted(os.fspath(folder))}: {error}"
        raise BlobstoreError(message) from error
    if not is_empty:
        message = f"{quoted(target)} exists already; export to a new or an empty folder"
        raise BlobstoreError(message)
    if is_fixed:
        message = (
            f"{quoted(target)} is a mount point or the working directory; export to a new folder "
            "inside it"
        )
        raise BlobstoreError(message)
    return target


@contextlib.contextmanager
def _building(target: Path) -> Iterator[Path]:
    """Give a temporary folder that becomes ``target`` on success and vanishes on an error."""
    building = target.parent / f".{os.getpid()}-{secrets.token_hex(8)}.tmp"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        building.mkdir()
        yield building
        for folder in (*building.rglob("*/"), building):
            sync_folder(folder)
        building.replace(target)
        sync_folder(target.parent)
    except OSError as error:
        message = f"cannot write {quoted(target)}: {error.strerror}"
        raise BlobstoreError(message) from error
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _write_new(path: Path, data: Buffer) -> None:
    """Write a file that must not exist yet, durably."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Exclusively, for a file system may hold two names to be one.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        write_all(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
