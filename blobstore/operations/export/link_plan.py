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

from blobstore.operations.export.folder import check_file_names, folder_contents
from blobstore.operations.export.shards import (
    SHARD_SIZE,
    file_names,
    index,
    index_name,
    split_by_size,
    weight_file,
)
from blobstore.safetensors.header import in_file_order

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from blobstore.core.tensor import TensorSpec
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.manifests.model import Manifest
    from blobstore.operations.export.folder import Component, FolderContents, FolderTensor
    from blobstore.operations.export.shards import WeightFile
    from blobstore.store.local import LocalStore


class Link(NamedTuple):
    """A blob that is a valid weight file."""

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


class Repacked(NamedTuple):
    """Weight files with tensors of several blobs, or in another order."""

    files: Sequence[WeightFile]
    tensors: Sequence[FolderTensor]
    """All tensors of the files, grouped by blob."""


@dataclass(frozen=True, slots=True)
class LinkPlan:
    """The contents of the folder. Names are relative to it."""

    links: Sequence[Link]
    relabelled: Sequence[WithNewHeader]
    gathered: Repacked
    written: Mapping[str, bytes]
    """Generated files: weight indexes and configs that have to change."""
    files: Mapping[str, Descriptor]
    """Files of the model that are written unchanged."""
    tensors: int


class _Blob(NamedTuple):
    """A blob whose data can be that of a weight file, and the tensors of the file in order."""

    tensors: Sequence[FolderTensor]
    specs: Sequence[TensorSpec]


class _Rest(NamedTuple):
    """The tensors that have to be gathered into other files."""

    tensors: list[FolderTensor]
    names: set[str]
    """The names in the folder."""


def plan_links(store: LocalStore, manifest: Manifest) -> LinkPlan:
    """Return the contents of a model's folder of links.

    Raises as :func:`folder_contents`.
    """
    contents = folder_contents(store, manifest)
    blobs, rest = _classify(contents)
    parts = [
        _plan_component(component, blobs[component.prefix], rest.names, contents.joins)
        for component in contents.components
    ]
    check_file_names(contents, [name for part in parts for name in part.contents])
    written = dict(contents.configs)
    for part in parts:
        written |= part.indexes
    return LinkPlan(
        links=[link for part in parts for link in part.links],
        relabelled=[file for part in parts for file in part.relabelled],
        gathered=Repacked([file for part in parts for file in part.gathered], rest.tensors),
        written=written,
        files={name: file for name, file in contents.files.items() if name not in written},
        tensors=len(contents.tensors),
    )


class _ComponentPlan(NamedTuple):
    """The files of one component."""

    links: list[Link]
    relabelled: list[WithNewHeader]
    gathered: list[WeightFile]
    contents: dict[str, Sequence[str]]
    """Tensor names by file."""
    indexes: dict[str, bytes]


def _plan_component(
    component: Component,
    blobs: Sequence[_Blob],
    scattered: Collection[str],
    joins: Mapping[str, Sequence[str]],
) -> _ComponentPlan:
    prefix, stem, specs = component
    others = [spec for spec in specs if spec.name in scattered]
    gathered = [in_file_order(part) for part in split_by_size(others, SHARD_SIZE)] if others else []
    plan = _ComponentPlan([], [], [], {}, {})
    names = iter(file_names(stem, len(blobs) + len(gathered)))
    for blob in blobs:
        name, first = next(names), blob.tensors[0]
        local = [spec._replace(name=spec.name.removeprefix(prefix)) for spec in blob.specs]
        plan.contents[name] = [spec.name for spec in local]
        if local == [entry.spec for entry in first.header.tensors.values()]:
            plan.links.append(Link(name, first.layer))
            continue
        file = weight_file(name, blob.specs, joins, prefix)
        plan.relabelled.append(
            WithNewHeader(file, first.layer, first.header.data_start, blob.tensors)
        )
    for gathered_specs in gathered:
        file = weight_file(next(names), gathered_specs, joins, prefix)
        plan.gathered.append(file)
        plan.contents[file.name] = file.tensors
    if len(plan.contents) > 1:
        files = {name.removeprefix(prefix): held for name, held in plan.contents.items()}
        plan.indexes[index_name(stem)] = index(files, sum(spec.nbytes for spec in specs))
    return plan


def _classify(contents: FolderContents) -> tuple[dict[str, list[_Blob]], _Rest]:
    """Return the blobs that can be weight files, by component prefix, and the other tensors."""
    joined = {member: name for name, members in contents.joins.items() for member in members}
    homes = {
        spec.name: (component.prefix, spec)
        for component in contents.components
        for spec in component.specs
    }
    blobs: dict[str, list[_Blob]] = {component.prefix: [] for component in contents.components}
    rest = _Rest([], set())
    # The tensors are grouped by layer.
    for _, group in groupby(contents.tensors, key=attrgetter("layer")):
        tensors = sorted(group, key=attrgetter("begin"))
        members = [tensor.spec.name for tensor in tensors]
        names = list(dict.fromkeys(joined.get(name, name) for name in members))
        prefixes = {homes[name][0] for name in names}
        # This differs if a tensor of the folder is not contiguous in the blob, or in several blobs.
        expected = [member for name in names for member in contents.joins.get(name, (name,))]
        if members == expected and len(prefixes) == 1:
            blobs[prefixes.pop()].append(_Blob(tensors, [homes[name][1] for name in names]))
        else:
            rest.tensors.extend(tensors)
            rest.names.update(names)
    return blobs, rest
