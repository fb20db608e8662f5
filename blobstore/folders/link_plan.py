"""Plans a Hugging Face folder of links: which blobs can be its weight files. Nothing is written.

A blob can be a weight file if it has its tensors under the names that the folder needs. If only names
or bounds of tensors differ (the scales of quantized weights, stacked experts, a blob that calls its
tensor ``data``), the file has the same bytes under another header. All other tensors are gathered into
files like those of an export. One example is quantized experts that are stored separately: MLX has one
tensor for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from blobstore.folders.export_plan import check_file_names, folder_contents, is_adapter
from blobstore.folders.original import plan_original
from blobstore.folders.shards import SHARD_SIZE, index, split_by_size, weight_file
from blobstore.manifests.descriptor import MAX_SIZE
from blobstore.models.source_layers import is_from_gguf
from blobstore.safetensors.header import in_file_order
from blobstore.sources.small_files import MAX_SMALL_FILE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from blobstore.core.tensor import TensorSpec
    from blobstore.folders.export_plan import ExportPlan, FolderContents, FolderTensor
    from blobstore.folders.shards import WeightFile
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.models.contents import ModelContents


class Link(NamedTuple):
    """A blob that is a valid weight file, or a large file that the model keeps."""

    name: str
    layer: Descriptor


class WithNewHeader(NamedTuple):
    """A weight file with the data of one blob after another header."""

    file: WeightFile
    layer: Descriptor
    data_start: int
    """Offset of the data in the blob."""
    tensors: Sequence[FolderTensor]

    @property
    def data_size(self) -> int:
        """Bytes after the header."""
        return self.layer.size - self.data_start


@dataclass(frozen=True, slots=True)
class LinkPlan:
    """The contents of the folder. Names are relative to it."""

    links: Sequence[Link]
    relabelled: Sequence[WithNewHeader]
    gathered: Sequence[WeightFile]
    """Files with tensors of several blobs, or in another order."""
    gathered_tensors: Sequence[FolderTensor]
    """All tensors of the gathered files, grouped by blob."""
    written: Mapping[str, bytes]
    """Generated files: weight indexes and configs that have to change."""
    files: Mapping[str, Descriptor]
    """Files of the model that are written unchanged."""
    tensors: int

    def names(self) -> set[str]:
        """Return the names of all files."""
        weights = (*self.gathered, *(item.file for item in self.relabelled))
        links = (link.name for link in self.links)
        return {*self.written, *self.files, *links, *(file.name for file in weights)}


class _Blob(NamedTuple):
    """A blob whose data can be that of a weight file, and the tensors of the file in order."""

    tensors: Sequence[FolderTensor]
    specs: Sequence[TensorSpec]


class _Rest(NamedTuple):
    """The tensors that have to be gathered into other files."""

    tensors: list[FolderTensor]
    names: set[str]
    """The names in the folder."""


def plan_links(model: ModelContents) -> LinkPlan:
    """Return the contents of a model's folder of links.

    Raises as :func:`folder_contents`.
    """
    is_gguf = is_from_gguf(model.record)
    original = plan_original(model) if is_gguf or is_adapter(model.manifest) else None
    if original is not None and (is_gguf or len(original.tensors) > 1):
        return _plan_copies(original)
    contents = folder_contents(model)
    blobs, rest = _classify(contents)
    links: list[Link] = []
    relabelled: list[WithNewHeader] = []
    gathered: list[WeightFile] = []
    weights: list[str] = []
    written: dict[str, bytes] = {}
    for component in contents.components:
        prefix, specs = component.prefix, component.specs
        own = blobs[prefix]
        others = [spec for spec in specs if spec.name in rest.names]
        if component.is_single and len(specs) > 1:
            rest.tensors.extend(tensor for blob in own for tensor in blob.tensors)
            own, others = [], list(specs)
        size = MAX_SIZE if component.is_single else SHARD_SIZE
        parts = split_by_size(others, size) if others else []
        names = iter(component.file_names(len(own) + len(parts)))
        tensors: dict[str, Sequence[str]] = {}  # by file
        for blob in own:
            name, (first, *_) = next(names), blob.tensors
            local = [spec._replace(name=spec.name.removeprefix(prefix)) for spec in blob.specs]
            tensors[name] = [spec.name for spec in local]
            if local == [entry.spec for entry in first.header.tensors.values()]:
                links.append(Link(name, first.layer))
                continue
            file = weight_file(name, blob.specs, contents.joins, prefix, {})
            start = first.header.data_start
            relabelled.append(WithNewHeader(file, first.layer, start, blob.tensors))
        for part in parts:
            file = weight_file(
                next(names), in_file_order(part), contents.joins, prefix, contents.constants
            )
            tensors[file.name] = file.tensors
            gathered.append(file)
        weights += tensors
        if len(tensors) > 1:
            held = {name.removeprefix(prefix): own for name, own in tensors.items()}
            written[component.index_name] = index(held, sum(spec.nbytes for spec in specs))
    check_file_names(contents, weights)
    written |= contents.configs
    files = {name: file for name, file in contents.files.items() if name not in written}
    links += _take_large(files)
    count = len(contents.tensors) + len(contents.constants)
    return LinkPlan(links, relabelled, gathered, rest.tensors, written, files, count)


def _plan_copies(original: ExportPlan) -> LinkPlan:
    """Return the contents of a folder whose weight files are those of the source.

    Libraries read an adapter from one file, with the metadata of its header: diffusers has the scale
    of a LoRA there. A GGUF file has its tensors behind one header.
    """
    files = dict(original.files)
    weights, tensors, written = original.weights, original.tensors, original.written
    return LinkPlan(_take_large(files), [], weights, tensors, written, files, len(tensors))


def _take_large(files: dict[str, Descriptor]) -> list[Link]:
    """Remove the large files, and return the links that they become."""
    large = [name for name, file in files.items() if file.size > MAX_SMALL_FILE]
    return [Link(name, files.pop(name)) for name in large]


def _classify(contents: FolderContents) -> tuple[dict[str, list[_Blob]], _Rest]:
    """Return the blobs that can be weight files, by component prefix, and the other tensors."""
    joined = {member: name for name, members in contents.joins.items() for member in members}
    homes = {
        spec.name: (component.prefix, spec)
        for component in contents.components
        for spec in component.specs
    }
    blobs: dict[str, list[_Blob]] = {component.prefix: [] for component in contents.components}
    rest = _Rest([], set(contents.constants))
    # The tensors are grouped by layer.
    for _, group in groupby(contents.tensors, key=attrgetter("layer")):
        tensors = sorted(group, key=attrgetter("begin"))
        members = [tensor.spec.name for tensor in tensors]
        names = list(dict.fromkeys(joined.get(name, name) for name in members))
        prefixes = {homes[name][0] for name in names}
        # This differs if a tensor of the folder is not contiguous in the blob, or in several blobs.
        expected = [member for name in names for member in contents.joins.get(name, (name,))]
        layer, header = tensors[0].layer, tensors[0].header
        is_whole = sum(tensor.spec.nbytes for tensor in tensors) == layer.size - header.data_start
        is_changed = not is_whole or any(tensor.is_reciprocal for tensor in tensors)
        if members == expected and len(prefixes) == 1 and not is_changed:
            blobs[prefixes.pop()].append(_Blob(tensors, [homes[name][1] for name in names]))
        else:
            rest.tensors.extend(tensors)
            rest.names.update(names)
    return blobs, rest
