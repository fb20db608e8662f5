"""What a farm of links holds: decided from the manifest and headers, nothing is written.

A farm is the Hugging Face folder of a model in which blobs are weight files. A blob can be one if it
holds every tensor under the name that the folder has for it. Where only names or the bounds of tensors
differ (a quantized weight's scales, stacked experts, a blob that calls its tensor ``data``), the
same bytes under another header will do. All else, such as the packed experts of a quantized model,
of which MLX has one tensor, has to be gathered into files like those of an export.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from blobstore.operations.export.folder import check_beside, folder_contents
from blobstore.operations.export.shards import (
    SHARD_SIZE,
    divided,
    file_names,
    index,
    index_name,
    weight_file,
)
from blobstore.safetensors.writer import in_file_order

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from blobstore.core.tensor import TensorSpec
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.manifests.model import Manifest
    from blobstore.operations.export.folder import Component, FolderContents, FolderTensor
    from blobstore.operations.export.shards import WeightFile
    from blobstore.store.local import LocalStore


class Link(NamedTuple):
    """A blob that is a weight file as it is."""

    name: str
    layer: Descriptor


class WithNewHeader(NamedTuple):
    """A weight file with the data of one blob under another header."""

    file: WeightFile
    layer: Descriptor
    data_start: int
    """Where the blob's data begins."""
    tensors: Sequence[FolderTensor]


class Repacked(NamedTuple):
    """Weight files with the tensors of several blobs, or in another order."""

    files: Sequence[WeightFile]
    tensors: Sequence[FolderTensor]
    """Blob by blob."""


@dataclass(frozen=True, slots=True)
class LinkPlan:
    """What the farm will hold. Names are relative to its folder."""

    links: Sequence[Link]
    relabelled: Sequence[WithNewHeader]
    gathered: Repacked
    written: Mapping[str, bytes]
    """Files made for the folder: weight indexes, and configs that must say something else."""
    files: Mapping[str, Descriptor]
    """Files kept as they were."""
    tensors: int


class _Blob(NamedTuple):
    """A blob whose data is that of a weight file, and what the file holds in the order of the data."""

    tensors: Sequence[FolderTensor]
    specs: Sequence[TensorSpec]


class _Rest(NamedTuple):
    """What of all blobs has to be gathered."""

    tensors: list[FolderTensor]
    names: set[str]
    """The names that it has in the folder."""


def lay_out_farm(store: LocalStore, manifest: Manifest) -> LinkPlan:
    """Return what the farm of a model will hold, quantized weights packed.

    Raises:
        BlobstoreError: the model has no tensors, or weights of another kind, or that cannot be had
            so.
        BlobMissing, BlobDamaged, InvalidManifest: it is not whole, or names files that must not be
            written.
    """
    contents = folder_contents(store, manifest)
    blobs, rest = _sorted_out(contents)
    parts = [
        _part(component, blobs[component.prefix], rest.names, contents.joins)
        for component in contents.components
    ]
    check_beside(contents, [name for part in parts for name in part.held])
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


class _Part(NamedTuple):
    """What a farm holds of one component."""

    links: list[Link]
    relabelled: list[WithNewHeader]
    gathered: list[WeightFile]
    held: dict[str, Sequence[str]]
    """The tensors of each file, by its place in the farm."""
    indexes: dict[str, bytes]


def _part(
    component: Component,
    blobs: Sequence[_Blob],
    scattered: Collection[str],
    joins: Mapping[str, Sequence[str]],
) -> _Part:
    prefix, stem, specs = component
    others = [spec for spec in specs if spec.name in scattered]
    gathered = [in_file_order(part) for part in divided(others, SHARD_SIZE)] if others else []
    part = _Part([], [], [], {}, {})
    names = iter(file_names(stem, len(blobs) + len(gathered)))
    for blob in blobs:
        name, first = next(names), blob.tensors[0]
        local = [spec._replace(name=spec.name.removeprefix(prefix)) for spec in blob.specs]
        part.held[name] = [spec.name for spec in local]
        if local == [entry.spec for entry in first.header.tensors.values()]:
            part.links.append(Link(name, first.layer))
            continue
        file = weight_file(name, blob.specs, joins, prefix)
        part.relabelled.append(
            WithNewHeader(file, first.layer, first.header.data_start, blob.tensors)
        )
    for gathered_specs in gathered:
        file = weight_file(next(names), gathered_specs, joins, prefix)
        part.gathered.append(file)
        part.held[file.name] = file.tensors
    if len(part.held) > 1:
        files = {name.removeprefix(prefix): held for name, held in part.held.items()}
        part.indexes[index_name(stem)] = index(files, sum(spec.nbytes for spec in specs))
    return part


def _sorted_out(contents: FolderContents) -> tuple[dict[str, list[_Blob]], _Rest]:
    """Return the blobs that can be weight files, by their component's prefix, and all else."""
    joined = {member: name for name, members in contents.joins.items() for member in members}
    homes = {
        spec.name: (component.prefix, spec)
        for component in contents.components
        for spec in component.specs
    }
    blobs: dict[str, list[_Blob]] = {component.prefix: [] for component in contents.components}
    rest = _Rest([], set())
    # The tensors of a layer follow each other.
    for _, group in groupby(contents.tensors, key=attrgetter("layer")):
        tensors = sorted(group, key=attrgetter("begin"))
        members = [tensor.spec.name for tensor in tensors]
        names = list(dict.fromkeys(joined.get(name, name) for name in members))
        prefixes = {homes[name][0] for name in names}
        # Of a tensor of the folder that lies in pieces, or in other blobs too, this differs.
        expected = [member for name in names for member in contents.joins.get(name, (name,))]
        if members == expected and len(prefixes) == 1:
            blobs[prefixes.pop()].append(_Blob(tensors, [homes[name][1] for name in names]))
        else:
            rest.tensors.extend(tensors)
            rest.names.update(names)
    return blobs, rest
