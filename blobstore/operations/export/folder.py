"""What a model's Hugging Face folder holds: decided from the manifest and headers, nothing is written.

Stacked experts become the tensors that they were made of, tensors of components go into their
folders, and a model over the shard size becomes several files with an index. Quantized weights get
the names and the config that MLX reads, or become plain numbers.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from blobstore.core.escape import quote
from blobstore.core.tensor import TensorSpec
from blobstore.errors import BlobDamaged, BlobstoreError, InvalidManifest
from blobstore.manifests import media_types
from blobstore.models.expert_stacks import read_stacks
from blobstore.models.frameworks import FLOATS, original_dtype
from blobstore.models.tensors import read_tensors
from blobstore.operations.export.shards import (
    file_names,
    index,
    index_name,
    split_by_size,
    weight_file,
)
from blobstore.quantization import gpt_oss
from blobstore.quantization.mlx_layout import exported_config, joined_experts, mlx_name
from blobstore.quantization.recipes import BIAS, SCALE
from blobstore.safetensors.writer import in_file_order

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from blobstore.manifests.descriptor import Descriptor
    from blobstore.manifests.model import Manifest
    from blobstore.models.tensors import ModelTensors, StoredTensor
    from blobstore.operations.export.shards import WeightFile
    from blobstore.quantization.formats import QuantFormat
    from blobstore.safetensors.header import Header
    from blobstore.store.local import LocalStore

_TRANSFORMERS_STEM = "model"
_DIFFUSERS_STEM = "diffusion_pytorch_model"
_PART = re.compile(r"[A-Za-z0-9_.-]{1,255}", re.ASCII)
_MAX_DEPTH = 3
_OTHER_WEIGHTS = (media_types.MODEL, media_types.PROJECTOR, media_types.ADAPTER)


class FolderTensor(NamedTuple):
    """A tensor under the name that it gets back, and where its bytes begin in its blob."""

    spec: TensorSpec
    layer: Descriptor
    begin: int
    header: Header
    """That of the blob."""
    packed: StoredTensor | None = None
    """What it is to be computed from, if it is quantized and shall be plain."""
    part: int | None = None
    """Its place in the first dimension of ``packed``, if it was stacked."""
    is_transposed: bool = False
    """Whether its matrices are those computed from ``packed``, transposed."""


class Component(NamedTuple):
    """The tensors of one folder of weights: of the model's own, or of a component's."""

    prefix: str
    """What their names begin with in the model and not in the files: the folder and a slash."""
    stem: str
    """What the files are called, with the folder in front."""
    specs: Sequence[TensorSpec]


@dataclass(frozen=True, slots=True)
class FolderContents:
    """What a folder of the model has to hold, in whatever files its weights are."""

    tensors: Sequence[FolderTensor]
    components: Sequence[Component]
    joins: Mapping[str, Sequence[str]]
    """The tensors of the files that hold several of ``tensors``, and those in their order."""
    configs: Mapping[str, bytes]
    """Configs that must say something else than those kept."""
    files: Mapping[str, Descriptor]
    """All files of the model, those that ``configs`` are instead of among them."""


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """What the folder will hold. Names are relative to it."""

    tensors: Sequence[FolderTensor]
    weights: Sequence[WeightFile]
    written: Mapping[str, bytes]
    """Files made for the folder: weight indexes, and configs that must say something else."""
    files: Mapping[str, Descriptor]
    """Files kept as they were."""


def _check_kind(manifest: Manifest) -> None:
    for layer in manifest.layers:
        if layer.media_type in _OTHER_WEIGHTS:
            raise BlobstoreError(
                f"it has weights in a GGUF file (blob {layer.digest.short}, {layer.media_type}); "
                "only models stored as tensors have such a folder"
            )
    if not manifest.layers_of(media_types.TENSOR):
        raise BlobstoreError("it has no tensor layers, so there is nothing to put into a folder")


def plan_export(
    store: LocalStore, manifest: Manifest, shard_size: int, *, dequantize: bool = False
) -> ExportPlan:
    """Return what the folder of a model will hold, quantized weights packed or as plain numbers.

    Raises as :func:`folder_contents`.
    """
    contents = folder_contents(store, manifest, dequantize=dequantize)
    weights: list[WeightFile] = []
    written: dict[str, bytes] = {}
    for prefix, stem, specs in contents.components:
        parts = [in_file_order(part) for part in split_by_size(specs, shard_size)]
        shards = [
            weight_file(name, part, contents.joins, prefix)
            for name, part in zip(file_names(stem, len(parts)), parts, strict=True)
        ]
        weights += shards
        if len(shards) > 1:
            tensors = {shard.name.removeprefix(prefix): shard.tensors for shard in shards}
            written[index_name(stem)] = index(tensors, sum(spec.nbytes for spec in specs))
    check_beside(contents, [shard.name for shard in weights])
    written |= contents.configs
    kept = {name: file for name, file in contents.files.items() if name not in written}
    return ExportPlan(contents.tensors, weights, written, kept)


def folder_contents(
    store: LocalStore, manifest: Manifest, *, dequantize: bool = False
) -> FolderContents:
    """Return what a folder of a model has to hold, quantized weights packed or as plain numbers.

    Raises:
        BlobstoreError: the model has no tensors, or has weights of another kind, or that cannot be
            had so.
        BlobMissing, BlobDamaged, InvalidManifest: it is not whole, or names files that must not be
            written.
    """
    _check_kind(manifest)
    contents, stacks = read_tensors(store, manifest), read_stacks(store, manifest)
    files = small_files(manifest)
    packed = [(t.name, t.shape, t.item) for t in contents.tensors.values() if t.companions]
    is_gpt_oss = gpt_oss.is_form_of(_decoded(store, files, "config.json"), packed)
    tensors = _source_tensors(contents, stacks, dequantize=dequantize, is_gpt_oss=is_gpt_oss)
    types = {} if dequantize or is_gpt_oss else _packed_types(contents, stacks)
    stems = _stems(store, files)
    specs, joins = _joined([tensor.spec for tensor in tensors], types)
    members: dict[str, list[TensorSpec]] = {prefix: [] for prefix in sorted(stems)}
    for spec in specs:
        members[_prefix(spec.name, stems)].append(spec)
    components = [
        Component(prefix, prefix + stems[prefix], own) for prefix, own in members.items() if own
    ]
    renamed = {member: name for name, members in joins.items() for member in members}
    types = {renamed.get(name, name): known for name, known in types.items()}
    configs: dict[str, bytes] = {}
    if dequantize or not is_gpt_oss:  # or its config is right as it is
        configs = _changed_configs(store, files, stems, types)
    return FolderContents(tensors, components, joins, configs, files)


def check_beside(contents: FolderContents, weights: Iterable[str]) -> None:
    """Check that weight files of these names and the model's own files can be beside each other.

    Raises:
        InvalidManifest: they cannot.
    """
    # The index is reserved even where there is none: a foreign one would mislead readers.
    indexes = [index_name(component.stem) for component in contents.components]
    _check_paths([*contents.files, *indexes, *weights])


def _source_tensors(
    contents: ModelTensors,
    stacks: Mapping[str, Sequence[str]],
    *,
    dequantize: bool,
    is_gpt_oss: bool,
) -> list[FolderTensor]:
    """Return the tensors as the source had them, in the order of the layers and their bytes."""
    found: dict[str, FolderTensor] = {}
    unused = set(stacks)
    make = _plain_tensors if dequantize else _packed_tensors
    for stored in contents.tensors.values():
        sources = stacks.get(stored.name)
        unused.discard(stored.name)
        made = make(stored, sources)
        for tensor in map(_as_gpt_oss, made) if is_gpt_oss and stored.companions else made:
            if found.setdefault(tensor.spec.name, tensor) is not tensor:
                raise BlobDamaged(
                    f"two tensors would both be exported as {quote(tensor.spec.name)}"
                )
    if unused:
        raise BlobDamaged(
            f"the list of stacked tensors names {quote(min(unused))}, which does not exist"
        )
    return list(found.values())


def _packed_tensors(stored: StoredTensor, sources: Sequence[str] | None) -> Iterator[FolderTensor]:
    """Yield a tensor and its companions as stored, under the names that MLX gives them."""
    for suffix, (spec, begin, end) in {"": stored.entry, **stored.companions}.items():
        start = stored.header.data_start + begin
        if sources is None:
            named = spec._replace(name=mlx_name(stored.name, suffix))
            yield FolderTensor(named, stored.layer, start, stored.header)
            continue
        _check_stack(stored, spec.shape, sources)
        size = (end - begin) // len(sources)
        for number, name in enumerate(sources):
            part = TensorSpec(mlx_name(name, suffix), spec.dtype, spec.shape[1:])
            yield FolderTensor(part, stored.layer, start + number * size, stored.header)


def _as_gpt_oss(tensor: FolderTensor) -> FolderTensor:
    """Return a quantized weight, plain or packed, or its scales as gpt-oss has them."""
    is_plain = tensor.packed is not None
    return tensor._replace(spec=gpt_oss.folder_spec(tensor.spec), is_transposed=is_plain)


def _plain_tensors(stored: StoredTensor, sources: Sequence[str] | None) -> Iterator[FolderTensor]:
    """Yield a tensor that is to be plain numbers in the folder."""
    if not stored.companions:
        yield from _packed_tensors(stored, sources)
        return
    if stored.item is None:
        raise BlobstoreError(
            f"tensor {quote(stored.name)} is quantized, but its blob does not say how"
        )
    dtype = FLOATS[original_dtype(stored.item, stored.companions[SCALE].spec.dtype)]
    if sources is None:
        spec = TensorSpec(stored.name, dtype, stored.shape)
        yield FolderTensor(spec, stored.layer, stored.entry.begin, stored.header, stored)
        return
    _check_stack(stored, stored.shape, sources)
    for number, name in enumerate(sources):
        spec = TensorSpec(name, dtype, stored.shape[1:])
        yield FolderTensor(spec, stored.layer, stored.entry.begin, stored.header, stored, number)


def _check_stack(stored: StoredTensor, shape: tuple[int, ...], sources: Sequence[str]) -> None:
    if shape[:1] != (len(sources),):
        raise BlobDamaged(
            f"tensor {quote(stored.name)} of shape {list(shape)} is said to be made of "
            f"{len(sources)} tensors"
        )


def _packed_types(
    contents: ModelTensors, stacks: Mapping[str, Sequence[str]]
) -> dict[str, tuple[QuantFormat, int]]:
    """Return type and group size of the weights that are packed in the folder, by their names."""
    return {
        name: (stored.item, stored.group_size)
        for stored in contents.tensors.values()
        if stored.item is not None
        for name in stacks.get(stored.name, (stored.name,))
    }


def _changed_configs(
    store: LocalStore,
    files: Mapping[str, Descriptor],
    stems: Mapping[str, str],
    types: Mapping[str, tuple[QuantFormat, int]],
) -> dict[str, bytes]:
    """Return the configs that must say something else of quantization than those kept."""
    changed: dict[str, bytes] = {}
    for prefix in stems:
        name = f"{prefix}config.json"
        # A lone file has none, and then nothing else would tell the types of its weights.
        config = _decoded(store, files, name) if name in files else {}
        own = {
            tensor.removeprefix(prefix): known
            for tensor, known in types.items()
            if _prefix(tensor, stems) == prefix
        }
        value = exported_config(config, own, name)
        if value is not None:
            changed[name] = f"{json.dumps(value, indent=2)}\n".encode()
    return changed


def small_files(manifest: Manifest) -> dict[str, Descriptor]:
    """Return the layers that are files, by their checked names.

    Raises:
        InvalidManifest: a name is none for a file below a folder, or two cannot both be there.
    """
    layers = [
        layer
        for layer in manifest.layers
        if layer.media_type in (media_types.JSON, media_types.FILE)
    ]
    for layer in layers:
        parts = layer.name.split("/")
        if len(parts) > _MAX_DEPTH or not all(map(_is_part, parts)):
            raise InvalidManifest(
                f"layer {quote(layer.name)} is no file name: expected at most {_MAX_DEPTH} parts "
                "of letters, digits, '_', '.' and '-'"
            )
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
            raise InvalidManifest(f"two files would both be {quote(name)}")
        files.add(name)
        folders.update(str(parent) for parent in Path(name).parents)
    if both := files & folders:
        raise InvalidManifest(f"{quote(min(both))} would be both a file and a folder")


def _stems(store: LocalStore, files: Mapping[str, Descriptor]) -> dict[str, str]:
    """Return what the weights below each prefix are called: ``""`` and the component folders.

    The lists may be of any form, as the files of a source are kept as they were; what is no list
    of components lists none.
    """

    def decoded(name: str) -> Any:
        return _decoded(store, files, name)

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


def _decoded(store: LocalStore, files: Mapping[str, Descriptor], name: str) -> Any:
    """Return what a file of the model holds, None if there is none or it is not JSON."""
    if name not in files:
        return None
    try:
        return json.loads(store.read_blob(files[name].digest, files[name].size))
    except (ValueError, RecursionError):
        return None


def _prefix(name: str, stems: Mapping[str, str]) -> str:
    """Return the prefix of the component that a tensor belongs to."""
    folder, slash, _ = name.partition("/")
    return folder + slash if slash and folder + slash in stems else ""


def _joined(
    specs: Iterable[TensorSpec], types: Mapping[str, tuple[QuantFormat, int]]
) -> tuple[list[TensorSpec], dict[str, list[str]]]:
    """Return the tensors of the files, and which of them hold several of the model's, by name."""
    found = {spec.name: spec for spec in specs}
    if not types:  # spares plain models with thousands of experts a look at every name
        return list(found.values()), {}
    packed = {mlx_name(name, suffix) for name in types for suffix in ("", SCALE, BIAS)}
    joins = joined_experts(
        (spec for name, spec in found.items() if name in packed), found.keys() - packed
    )
    joins = {name: members for name, members in joins.items() if name not in found}
    for name, members in joins.items():
        first = found[members[0]]
        found[name] = TensorSpec(name, first.dtype, (len(members), *first.shape))
        for member in members:
            del found[member]
    return list(found.values()), joins
