"""What a model's Hugging Face folder holds: decided from the manifest and headers, nothing is written.

Stacked experts become the tensors that they were made of, tensors of components go into their
folders, and a model over the shard size becomes several files with an index.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from blobstore import strictjson
from blobstore.contents import read_contents
from blobstore.errors import BlobDamaged, BlobstoreError, InvalidManifest
from blobstore.manifests import media_types
from blobstore.safetensors.header import encode_header
from blobstore.safetensors.writer import in_file_order
from blobstore.tensor import TensorSpec
from blobstore.text import quoted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from blobstore.contents import Contents, StoredTensor
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.manifests.model import Manifest
    from blobstore.store.local import LocalStore

_METADATA = {"format": "pt"}
"""What transformers demands of a file that it loads."""
_TRANSFORMERS_STEM = "model"
_DIFFUSERS_STEM = "diffusion_pytorch_model"
_PART = re.compile(r"[A-Za-z0-9_.-]+", re.ASCII)
_MAX_DEPTH = 3
_OTHER_WEIGHTS = (media_types.MODEL, media_types.PROJECTOR, media_types.ADAPTER)


class FolderTensor(NamedTuple):
    """A tensor under the name that it gets back, and where its bytes begin in its blob."""

    spec: TensorSpec
    layer: Descriptor
    begin: int


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A file of weights; ``offsets`` are by the model's names, below a component too."""

    name: str
    header: bytes
    offsets: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class FolderLayout:
    """What the folder will hold. Names are relative to it."""

    tensors: Sequence[FolderTensor]
    weights: Sequence[WeightFile]
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


def lay_out(store: LocalStore, manifest: Manifest, shard_size: int) -> FolderLayout:
    """Return what the folder of a model will hold.

    Raises:
        BlobstoreError: the model has no tensors, or has weights of another kind.
        BlobMissing, BlobDamaged, InvalidManifest: it is not whole, or names files that must not be
            written.
    """
    _check_kind(manifest)
    tensors = _source_tensors(read_contents(store, manifest), _read_stacks(store, manifest))
    files = _small_files(manifest)
    stems = _stems(store, files)
    weights: list[WeightFile] = []
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
    return FolderLayout(tensors, weights, indexes, files)


def _source_tensors(contents: Contents, stacks: Mapping[str, Sequence[str]]) -> list[FolderTensor]:
    """Return the tensors as the source had them, in the order of the layers and their bytes."""
    found: dict[str, FolderTensor] = {}
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


def _as_stored(stored: StoredTensor) -> Iterator[FolderTensor]:
    for suffix, entry in {"": stored.entry, **stored.companions}.items():
        spec = TensorSpec(stored.name + suffix, entry.spec.dtype, entry.spec.shape)
        yield FolderTensor(spec, stored.layer, stored.header.data_start + entry.begin)


def _split(stored: StoredTensor, sources: Sequence[str]) -> Iterator[FolderTensor]:
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
        yield FolderTensor(TensorSpec(name, spec.dtype, spec.shape[1:]), stored.layer, offset)


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
) -> list[WeightFile]:
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


def _weight_file(path: str, specs: Iterable[TensorSpec], prefix: str) -> WeightFile:
    ordered = in_file_order(specs)
    local = [TensorSpec(spec.name.removeprefix(prefix), spec.dtype, spec.shape) for spec in ordered]
    header = encode_header(local, _METADATA)
    offsets: dict[str, int] = {}
    offset = len(header)
    for spec in ordered:
        offsets[spec.name] = offset
        offset += spec.nbytes
    return WeightFile(path, header, offsets)


def _index(shards: Iterable[WeightFile], specs: Iterable[TensorSpec], prefix: str) -> bytes:
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
