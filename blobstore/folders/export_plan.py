"""Plans a model's Hugging Face folder from its manifest and headers. Nothing is written.

Stacked experts become the tensors that the stack was made of, and tensors of components go to their
folders. A model larger than the shard size becomes several files with an index. Quantized weights get
the names and the config that MLX expects, or are dequantized.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from blobstore.core.escape import escape, quote
from blobstore.core.tensor import TensorSpec
from blobstore.errors import BlobDamaged, BlobstoreError
from blobstore.folders.shards import file_names, index, index_name, split_by_size, weight_file
from blobstore.manifests import media_types
from blobstore.manifests.descriptor import MAX_SIZE
from blobstore.manifests.file_names import check_paths, is_valid_part
from blobstore.models.frameworks import FLOATS, original_dtype
from blobstore.models.source_layers import left_out_tensors, packed_shapes, source_specs
from blobstore.quantization import gpt_oss
from blobstore.quantization.comfy import is_stale
from blobstore.quantization.mlx_layout import exported_config, joined_experts, mlx_name
from blobstore.quantization.recipes import BIAS, GLOBAL_SCALE, SCALE
from blobstore.quantization.source_config import MODELOPT_FILE, modelopt_section
from blobstore.quantization.source_layout import SourceNaming
from blobstore.safetensors.header import in_file_order

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from blobstore.folders.shards import WeightFile
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.manifests.model import Manifest
    from blobstore.manifests.source_record import SourceRecord
    from blobstore.models.contents import ModelContents
    from blobstore.models.tensors import ModelTensors, StoredTensor
    from blobstore.quantization.formats import QuantFormat
    from blobstore.safetensors.header import Header

_TRANSFORMERS_STEM = "model"
_DIFFUSERS_STEM = "diffusion_pytorch_model"
_ADAPTER_STEM = "adapter_model"
"""The stem of PEFT's adapters, such as LoRAs."""
_ADAPTER_PREFIX = "base_model."
"""Prefix of the tensor names of adapters that change modules of their model."""
_ADAPTER_PART = re.compile(r"(.*[._])?(lora|lokr|hada|oft)[._].*")
"""Tensor names of other adapters, such as those of diffusers."""
_VARIANT = re.compile(
    r"((diffusion_)?pytorch_)?model(-\d+-of-\d+)?\.(?P<variant>[A-Za-z0-9_-]+?)(-\d+-of-\d+)?"
    r"\.(safetensors|bin)"
)
"""Names of the weight files of a variant, such as ``model.fp16.safetensors``."""
_MODEL_FILES = ("config.json", "model_index.json", "modules.json")
_OTHER_WEIGHTS = (media_types.MODEL, media_types.PROJECTOR, media_types.ADAPTER)


class FolderTensor(NamedTuple):
    """A tensor of the folder, and its place in a blob."""

    spec: TensorSpec
    layer: Descriptor
    begin: int
    header: Header
    """The header of the blob."""
    packed: StoredTensor | None = None
    """The quantized tensor to compute it from, if it is dequantized."""
    part: int | None = None
    """Its index in the first dimension of ``packed``, if that is a stack."""
    is_transposed: bool = False
    """Whether the matrices computed from ``packed`` have to be transposed."""
    is_reciprocal: bool = False
    """Whether its only value is the reciprocal of the stored one."""


class Component(NamedTuple):
    """The tensors of the model's own folder, or of a component's."""

    prefix: str
    """Prefix of the names in the model, but not in the files: the folder and a slash."""
    stem: str
    """Start of the names of the weight files, including the folder."""
    variant: str
    """The variant that libraries have to be asked for, such as ``fp16``; mostly empty."""
    is_single: bool
    """Whether its library reads a single weight file only."""
    specs: Sequence[TensorSpec]

    def file_names(self, count: int) -> list[str]:
        """Return the names of its weight files; see :func:`file_names`."""
        return file_names(self.stem, count, self.variant)

    @property
    def index_name(self) -> str:
        """The name of the index of its weight files."""
        return index_name(self.stem, self.variant)


@dataclass(frozen=True, slots=True)
class FolderContents:
    """The contents of the folder, before its weights are divided into files."""

    tensors: Sequence[FolderTensor]
    components: Sequence[Component]
    joins: Mapping[str, Sequence[str]]
    """For tensors of the files that are stacks: the names of their members in ``tensors``, in order."""
    configs: Mapping[str, bytes]
    """Configs that have to change."""
    files: Mapping[str, Descriptor]
    """All files of the model, including those that ``configs`` replaces."""
    constants: Mapping[str, bytes]
    """The bytes of tensors that no blob holds, such as scales of activations, by name."""


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """The contents of the folder. Names are relative to it."""

    tensors: Sequence[FolderTensor]
    weights: Sequence[WeightFile]
    written: Mapping[str, bytes]
    """Generated files: weight indexes and configs that have to change."""
    files: Mapping[str, Descriptor]
    """Files of the model that are written unchanged."""
    is_original: bool = False
    """Whether they are those of the source, byte for byte."""


def plan_export(model: ModelContents, shard_size: int, *, dequantize: bool = False) -> ExportPlan:
    """Return the files of a model's folder, with quantized weights packed or dequantized.

    Raises as :func:`folder_contents`.
    """
    contents = folder_contents(model, dequantize=dequantize)
    weights: list[WeightFile] = []
    written: dict[str, bytes] = {}
    for component in contents.components:
        prefix, specs = component.prefix, component.specs
        size = MAX_SIZE if component.is_single else shard_size
        parts = [in_file_order(part) for part in split_by_size(specs, size)]
        shards = [
            weight_file(name, part, contents.joins, prefix, contents.constants)
            for name, part in zip(component.file_names(len(parts)), parts, strict=True)
        ]
        weights += shards
        if len(shards) > 1:
            tensors = {shard.name.removeprefix(prefix): shard.tensors for shard in shards}
            written[component.index_name] = index(tensors, sum(spec.nbytes for spec in specs))
    check_file_names(contents, [shard.name for shard in weights])
    written |= contents.configs
    kept = {name: file for name, file in contents.files.items() if name not in written}
    return ExportPlan(contents.tensors, weights, written, kept)


def check_no_gguf(manifest: Manifest) -> None:
    """Check that no layer is a GGUF file of Ollama. Raises BlobstoreError if one is."""
    for layer in manifest.layers:
        if layer.media_type in _OTHER_WEIGHTS:
            raise BlobstoreError(
                f"it has weights in a GGUF file (blob {layer.digest.short}, {layer.media_type}); "
                "only models stored as tensors have such a folder",
                advice="import it with 'blobstore create ollama://MODEL NAME', and export NAME",
            )


def folder_contents(model: ModelContents, *, dequantize: bool = False) -> FolderContents:
    """Return the contents of a model's folder, with quantized weights packed or dequantized.

    Raises:
        BlobstoreError: the model has no tensors, or weights of another kind, or weights that cannot
            be dequantized.
        BlobMissing, BlobDamaged, InvalidManifest: the model is damaged, or names files that must not
            be written.
    """
    manifest = model.manifest
    check_no_gguf(manifest)
    kinds = {layer.media_type for layer in manifest.layers}
    if kinds.isdisjoint((media_types.TENSOR, media_types.FILE, media_types.JSON)):
        raise BlobstoreError(
            "it has no tensors and no files, so there is nothing to put into a folder"
        )
    contents, stacks, record = model.tensors, model.stacks, model.record
    files = dict(model.files)
    packed = [(t.name, t.shape, t.item) for t in contents.tensors.values() if t.is_quantized]
    config = model.decoded("config.json")
    scheme = model.scheme
    if scheme and dequantize:
        raise BlobstoreError(
            f"its weights ({escape(scheme)}) are kept as published and cannot be dequantized; export "
            "it without dequantizing"
        )
    _check_no_blocks(packed, dequantize=dequantize)
    is_gpt_oss = gpt_oss.is_gpt_oss(config, packed)
    # The weights and the config are then those of the source.
    is_as_source = not dequantize and (
        is_gpt_oss or any(map(_needs_source_layout, contents.tensors.values()))
    )
    naming = None
    if is_as_source and not is_gpt_oss:
        naming = SourceNaming(config, source_specs(record))
    tensors = _source_tensors(
        contents, stacks, dequantize=dequantize, is_gpt_oss=is_gpt_oss, naming=naming
    )
    left_out = {} if naming is None else _left_out(record, contents)
    # The record has the exact value, and not a reciprocal that was rounded twice.
    tensors = [one for one in tensors if not (one.is_reciprocal and one.spec.name in left_out)]
    if twice := left_out.keys() & {tensor.spec.name for tensor in tensors}:
        raise BlobDamaged(f"the source layer has tensor {quote(min(twice))}, which a blob has too")
    types: dict[str, tuple[QuantFormat, int]] = {}
    if not dequantize and not is_as_source:
        types = {
            name: (stored.item, stored.group_size)
            for stored in contents.tensors.values()
            if stored.item is not None
            for name in stacks.get(stored.name, (stored.name,))
        }
    stems = _stems(model)
    specs, joins = _joined([tensor.spec for tensor in tensors], types)
    specs += (spec for spec, _ in left_out.values())
    components = _components(model, specs, stems)
    renamed = {member: name for name, members in joins.items() for member in members}
    types = {renamed.get(name, name): known for name, known in types.items()}
    configs: dict[str, bytes] = {}
    if not (is_as_source or scheme):
        configs = _changed_configs(model, stems, types)
        if modelopt_section(model.decoded(MODELOPT_FILE)):
            del files[MODELOPT_FILE]  # it describes the weights of the source
    constants = {name: data for name, (_, data) in left_out.items()}
    return FolderContents(tensors, components, joins, configs, files, constants)


def _check_no_blocks(
    packed: Iterable[tuple[str, Sequence[int], QuantFormat | None]], *, dequantize: bool
) -> None:
    """Check that a folder can hold all quantized weights. Raises BlobstoreError if it cannot."""
    if not dequantize and any(item.block_bytes for _, _, item in packed if item is not None):
        raise BlobstoreError(
            "it has weights of a GGUF file, which no folder of safetensors files holds",
            advice="export it with --dequantize",
        )


def is_adapter(manifest: Manifest) -> bool:
    """Return whether a model is an adapter, such as a LoRA, which libraries read from a single file."""
    kinds = (media_types.JSON, media_types.FILE)
    files = {layer.name for layer in manifest.layers if layer.media_type in kinds}
    names = [layer.name for layer in manifest.layers_of(media_types.TENSOR)]
    if "adapter_config.json" in files:
        return "config.json" not in files or all(n.startswith(_ADAPTER_PREFIX) for n in names)
    return files.isdisjoint(_MODEL_FILES) and any(map(_ADAPTER_PART.fullmatch, names))


def _variants(record: SourceRecord | None) -> dict[str, str]:
    """Return the variant of the weight files that a model was imported from, by component prefix."""
    found: dict[str, set[str]] = {}
    for file in record.files if record is not None and record.kind != "file" else ():
        folder, slash, name = file.name.rpartition("/")
        match = _VARIANT.fullmatch(name)
        if file.format != "index":
            found.setdefault(folder + slash, set()).add(match["variant"] if match else "")
    return {prefix: variants.pop() for prefix, variants in found.items() if len(variants) == 1}


def _needs_source_layout(tensor: StoredTensor) -> bool:
    """Return whether only its source's layout can hold a weight: MLX's cannot."""
    item = tensor.item
    return item is not None and (
        item.float8 is not None
        or item.mode == "symmetric"
        or item.is_tiled
        or GLOBAL_SCALE in tensor.qparams
    )


def _left_out(
    record: SourceRecord | None, contents: ModelTensors
) -> dict[str, tuple[TensorSpec, bytes]]:
    """Return the tensors of the source that no blob holds, and their bytes."""
    found = left_out_tensors(record)
    return found | packed_shapes(symmetric_shapes(contents), found)


def symmetric_shapes(contents: ModelTensors) -> dict[str, tuple[int, ...]]:
    """Return the logical shapes of the weights of symmetric integers."""
    return {
        name: stored.shape
        for name, stored in contents.tensors.items()
        if stored.item is not None and stored.item.mode == "symmetric"
    }


def check_file_names(contents: FolderContents, weights: Iterable[str]) -> None:
    """Check that the names of weight files do not clash with those of the model's own files.

    Raises:
        InvalidManifest: they do.
    """
    # Names of indexes are reserved even if there is none: another file there would mislead readers.
    indexes = [component.index_name for component in contents.components]
    check_paths([*contents.files, *indexes, *weights])


def _source_tensors(
    contents: ModelTensors,
    stacks: Mapping[str, Sequence[str]],
    *,
    dequantize: bool,
    is_gpt_oss: bool,
    naming: SourceNaming | None,
) -> list[FolderTensor]:
    """Return the tensors as the source had them, in the order of layers and bytes.

    Markers of quantized weights are left out if the weights are dequantized.
    """
    found: dict[str, FolderTensor] = {}
    unused = set(stacks)
    for stored in contents.tensors.values():
        unused.discard(stored.name)
        made = _folder_tensors(stored, stacks.get(stored.name), naming, dequantize=dequantize)
        if is_gpt_oss and stored.qparams:  # quantized weights and their scales
            made = (
                tensor._replace(
                    spec=gpt_oss.folder_spec(tensor.spec), is_transposed=tensor.packed is not None
                )
                for tensor in made
            )
        for tensor in made:
            if found.setdefault(tensor.spec.name, tensor) is not tensor:
                raise BlobDamaged(
                    f"two tensors would both be exported as {quote(tensor.spec.name)}"
                )
    if unused:
        raise BlobDamaged(
            f"the list of stacked tensors names {quote(min(unused))}, which does not exist"
        )
    is_dequantized = any(tensor.packed is not None for tensor in found.values())
    return [one for name, one in found.items() if not (is_dequantized and is_stale(name))]


def _folder_tensors(
    stored: StoredTensor,
    sources: Sequence[str] | None,
    naming: SourceNaming | None,
    *,
    dequantize: bool,
) -> Iterator[FolderTensor]:
    """Yield a tensor dequantized, or it and its quantization parameters as stored, with MLX's or other names."""
    entries = {"": stored.entry, **stored.qparams}
    packed = None
    if dequantize and stored.is_quantized:
        if stored.item is None:
            raise BlobstoreError(
                f"tensor {quote(stored.name)} is quantized, but its blob does not say how"
            )
        scale = stored.qparams.get(SCALE)
        dtype = FLOATS[original_dtype(stored.item, scale and scale.spec.dtype)]
        plain = TensorSpec(stored.name, dtype, stored.shape)
        packed, entries = stored, {"": stored.entry._replace(spec=plain)}
    for suffix, (spec, begin, end) in entries.items():
        start = stored.header.data_start + begin
        if naming is not None and stored.item is not None:
            named = naming.spec(stored.name, suffix, spec, stored.item)
            is_reciprocal = naming.is_reciprocal(suffix)
            yield FolderTensor(
                named, stored.layer, start, stored.header, is_reciprocal=is_reciprocal
            )
            continue
        if sources is None:
            named = spec._replace(name=mlx_name(stored.name, suffix))
            yield FolderTensor(named, stored.layer, start, stored.header, packed)
            continue
        if spec.shape[:1] != (len(sources),):
            raise BlobDamaged(
                f"tensor {quote(stored.name)} of shape {list(spec.shape)} is listed as a stack of "
                f"length {len(sources)}"
            )
        size = (end - begin) // len(sources)
        for part, name in enumerate(sources):
            own = TensorSpec(mlx_name(name, suffix), spec.dtype, spec.shape[1:])
            place = start + part * size
            yield FolderTensor(own, stored.layer, place, stored.header, packed, part)


def _components(
    model: ModelContents, specs: Iterable[TensorSpec], stems: Mapping[str, str]
) -> list[Component]:
    """Return the tensors of each folder that has some, and the names of its weight files."""
    is_single, variants = is_adapter(model.manifest), _variants(model.record)
    members: dict[str, list[TensorSpec]] = {prefix: [] for prefix in sorted(stems)}
    for spec in specs:
        members[_prefix(spec.name, stems)].append(spec)
    return [
        Component(prefix, prefix + stems[prefix], variants.get(prefix, ""), is_single, own)
        for prefix, own in members.items()
        if own
    ]


def _changed_configs(
    model: ModelContents,
    stems: Mapping[str, str],
    types: Mapping[str, tuple[QuantFormat, int]],
) -> dict[str, bytes]:
    """Return the configs whose description of the quantization has to change."""
    changed: dict[str, bytes] = {}
    for prefix in stems:
        name = f"{prefix}config.json"
        # A single-file model has none, and then nothing else describes the types of its weights.
        config = model.decoded(name) if name in model.files else {}
        own = {
            tensor.removeprefix(prefix): known
            for tensor, known in types.items()
            if _prefix(tensor, stems) == prefix
        }
        value = exported_config(config, own, name)
        if value is not None:
            changed[name] = f"{json.dumps(value, indent=2)}\n".encode()
    return changed


def _stems(model: ModelContents) -> dict[str, str]:
    """Return the stem of weight files by prefix: ``""`` and the component folders.

    The lists of components are files of the source, and may have any content. Malformed ones list
    no components.
    """

    def stem(folder: str) -> str:
        # Only diffusers writes this key to config.json.
        config = model.decoded(f"{folder}config.json")
        is_diffusers = isinstance(config, dict) and "_diffusers_version" in config
        return _DIFFUSERS_STEM if is_diffusers else _TRANSFORMERS_STEM

    stems = {"": stem("")}
    modules = model.decoded("modules.json")
    for module in modules if isinstance(modules, list) else ():
        path = module.get("path") if isinstance(module, dict) else None
        if isinstance(path, str) and is_valid_part(path):
            stems[f"{path}/"] = _TRANSFORMERS_STEM
    pipeline = model.decoded("model_index.json")
    for name, value in pipeline.items() if isinstance(pipeline, dict) else ():
        if (
            is_valid_part(name)
            and isinstance(value, list)
            and len(value) == 2  # [library, class]
            and value[1] is not None
        ):
            known = {"diffusers": _DIFFUSERS_STEM, "transformers": _TRANSFORMERS_STEM}
            library = value[0] if isinstance(value[0], str) else ""
            # Other libraries are modules of a pipeline, with classes of either library.
            stems[f"{name}/"] = known.get(library) or stem(f"{name}/")
    if is_adapter(model.manifest) and "adapter_config.json" in model.files:
        stems[""] = _ADAPTER_STEM
    return stems


def _prefix(name: str, stems: Mapping[str, str]) -> str:
    """Return the prefix of the component that a tensor belongs to."""
    folder, slash, _ = name.partition("/")
    return folder + slash if slash and folder + slash in stems else ""


def _joined(
    specs: Iterable[TensorSpec], types: Mapping[str, tuple[QuantFormat, int]]
) -> tuple[list[TensorSpec], dict[str, list[str]]]:
    """Return the tensors of the files, and the members of those that are stacks, by name."""
    found = {spec.name: spec for spec in specs}
    if not types:  # faster for plain models with thousands of experts
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
