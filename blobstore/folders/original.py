"""Plans the folder that a model was imported from, byte for byte. Nothing is written.

The source layer has the headers of the weight files, which say where each tensor lies; the bytes of the
tensors are in the blobs. The layer is not trusted: a tensor of a header must be one that an import stores as
the blobs have it, with its own name, type and shape. So a forged layer cannot exchange tensors.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from blobstore.core.escape import quote
from blobstore.core.tensor import DType, TensorSpec
from blobstore.errors import BlobDamaged, BlobstoreError, InvalidHeader
from blobstore.folders.export_plan import ExportPlan, FolderTensor, check_no_gguf, symmetric_shapes
from blobstore.folders.shards import WeightFile
from blobstore.manifests import media_types
from blobstore.manifests.file_names import check_paths
from blobstore.models.tensors import at_layer, only_tensor
from blobstore.quantization.formats import LEFT_OUT, PACKED_SHAPE
from blobstore.quantization.recipes import GLOBAL_SCALE
from blobstore.quantization.source_layout import is_renamed_to, packed_shape
from blobstore.safetensors.header import PREFIX_SIZE, Header, header_size, parse_header
from blobstore.sources.sharded import FORMATS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from blobstore.manifests.descriptor import Descriptor
    from blobstore.manifests.source_record import RecordedFile, SourceRecord
    from blobstore.models.contents import ModelContents
    from blobstore.sources.file_shard import FileShard
    from blobstore.store.protocols import BlobAccess


_FORMATS: dict[str, type[FileShard]] = {
    kind.format: kind for kind in FORMATS if kind.format != "safetensors"
}
"""The formats whose tensors are never renamed or left out."""
_MAX_DOTS = 100
"""Dots of a tensor's name that the number of an expert may stand at."""


class _Place(NamedTuple):
    """Where the bytes of a source tensor are."""

    layer: Descriptor
    header: Header
    spec: TensorSpec
    """As stored; of a member of a stack, with its own shape."""
    begin: int
    """Offset in the blob."""


def plan_original(model: ModelContents) -> ExportPlan | None:
    """Return the files that a model was imported from.

    Returns None if they cannot be written: the import converted tensors or read a PyTorch checkpoint,
    or an earlier version made it.

    Raises:
        BlobMissing, BlobDamaged, InvalidManifest: the model is damaged, its source layer does not fit
            its blobs, or a file has a name that must not be written.
    """
    manifest, record = model.manifest, model.record
    if record is None or record.is_converted:
        return None
    may_be_empty = any(file.format in _FORMATS for file in record.files)
    if not may_be_empty and not manifest.layers_of(media_types.TENSOR):
        return None
    check_no_gguf(manifest)
    places = _places(model)
    shapes: Mapping[str, tuple[int, ...]] = {}
    if any(name.endswith(PACKED_SHAPE) for name in record.left_out):
        shapes = symmetric_shapes(model.tensors)
    tensors: list[FolderTensor] = []
    weights: list[WeightFile] = []
    written: dict[str, bytes] = {}
    for file in record.files:
        if file.format == "index":
            written[file.name] = file.start
            continue
        if kind := _FORMATS.get(file.format):
            weights.append(_plan_layout(file, kind, places, tensors))
            continue
        weights.append(_plan_file(model.store, file, record, places, tensors, shapes))
    if places:
        raise BlobDamaged(f"the source layer does not say where tensor {quote(min(places))} was")
    files = model.files
    check_paths([*files, *(file.name for file in record.files)])
    order = {layer.digest: number for number, layer in enumerate(manifest.layers)}
    tensors.sort(key=lambda tensor: (order[tensor.layer.digest], tensor.begin))
    return ExportPlan(tensors, weights, written, files, is_original=True)


def _places(model: ModelContents) -> dict[str, _Place]:
    """Return where the source tensors are, by the names of the blobs, or of the sources of stacks."""
    stacks, headers = dict(model.stacks), model.headers
    places: dict[str, _Place] = {}
    for layer in model.manifest.layers_of(media_types.TENSOR):
        header = headers[layer.id]
        if not isinstance(header, Header):
            raise at_layer(header, layer)
        entries = header.tensors
        if len(entries) == 1:
            entries = dict([only_tensor(layer, header)])
        for name, (spec, begin, end) in entries.items():
            start = header.data_start + begin
            sources = stacks.pop(name, None) or [name]
            if sources != [name]:
                if spec.shape[:1] != (len(sources),) or not _are_experts(name, sources):
                    raise BlobDamaged(
                        f"tensor {quote(name)} of shape {list(spec.shape)} is listed as a stack of "
                        f"length {len(sources)}, of tensors that are not its experts in order"
                    )
                spec = spec._replace(shape=spec.shape[1:])  # noqa: PLW2901
            size = (end - begin) // len(sources)
            for number, source in enumerate(sources):
                place = _Place(layer, header, spec, start + number * size)
                if places.setdefault(source, place) is not place:
                    raise BlobDamaged(f"two tensors would both be exported as {quote(source)}")
    if stacks:
        raise BlobDamaged(
            f"the list of stacked tensors names {quote(min(stacks))}, which does not exist"
        )
    return places


def _are_experts(name: str, sources: Sequence[str]) -> bool:
    """Return whether the names are that of a stack with the numbers from 0 on at one dot."""
    parts = name.split(".", _MAX_DOTS)
    for count in range(1, len(parts)):
        start, end = ".".join(parts[:count]), ".".join(parts[count:])
        if all(source == f"{start}.{number}.{end}" for number, source in enumerate(sources)):
            return True
    return False


def _plan_file(
    store: BlobAccess,
    file: RecordedFile,
    record: SourceRecord,
    places: dict[str, _Place],
    tensors: list[FolderTensor],
    shapes: Mapping[str, tuple[int, ...]],
) -> WeightFile:
    """Return a weight file, add its tensors to ``tensors``, and remove them from ``places``.

    ``shapes`` are the logical shapes of weights of which the record has a tensor with the shape.
    """
    place = f"the source layer: file {quote(file.name)}"
    try:
        end = PREFIX_SIZE + header_size(file.start, file.size)
        if end != len(file.start):
            raise BlobDamaged(f"{place}: it holds {len(file.start)} bytes of a header of {end}")
        header = parse_header(file.start[PREFIX_SIZE:], file.size)
    except InvalidHeader as error:
        raise BlobDamaged(f"{place}: {error}") from None
    folder, slash, _ = file.name.rpartition("/")
    offsets: dict[str, int] = {}
    constants: list[tuple[int, bytes]] = []
    for name, (spec, begin, end) in header.tensors.items():
        full = folder + slash + name
        offset, size = header.data_start + begin, end - begin
        named = TensorSpec(full, spec.dtype, spec.shape) if folder else spec
        stored_name = record.stored_names.get(full, full)
        found = places.pop(stored_name, None)
        constant = record.left_out.get(full)
        fits = found is not None and (
            (stored_name == full and spec[1:] == found.spec[1:] and constant is None)
            or _fits(store, named, found, constant)
        )
        if constant is not None:
            if found is not None and not fits:
                raise BlobDamaged(f"{place}: it holds tensor {quote(full)}, which a blob has too")
            if not _is_left_out(named, constant, shapes):
                raise BlobDamaged(f"{place}: it holds tensor {quote(full)}, which imports store")
            constants.append((offset, constant))
        elif found is not None and fits:
            offsets[full] = offset
            tensors.append(FolderTensor(named, found.layer, found.begin, found.header))
        else:
            raise BlobDamaged(
                f"{place}: no blob has the {size} bytes of tensor {quote(full)}, {spec.dtype.value} of "
                f"shape {list(spec.shape)}"
            )
    return WeightFile(
        file.name, list(header.tensors), file.start, offsets, tuple(constants), file.sha256
    )


def _plan_layout(
    file: RecordedFile,
    kind: type[FileShard],
    places: dict[str, _Place],
    tensors: list[FolderTensor],
) -> WeightFile:
    """Return a file of another format, add its tensors to ``tensors``, and remove them from ``places``."""
    place = f"the source layer: file {quote(file.name)}"
    try:
        layout = kind.layout_of(file.start, file.size)
    except kind.invalid as error:
        raise BlobDamaged(f"{place}: {error}") from None
    if layout.data_start != len(file.start):
        raise BlobDamaged(
            f"{place}: it holds {len(file.start)} bytes of a header of {layout.data_start}"
        )
    folder, slash, _ = file.name.rpartition("/")
    # A companion of a model has such names if they are those of the model's tensors without them.
    prefixes = (f"{PurePosixPath(file.name).stem}/", folder + slash, "")
    offsets: dict[str, int] = {}
    for name, (local, begin, end) in layout.tensors.items():
        prefix = next((it for it in prefixes if it + name in places), "")
        spec = local._replace(name=prefix + name)
        found = places.pop(spec.name, None)
        if found is None or found.spec[1:] != spec[1:]:
            raise BlobDamaged(
                f"{place}: no blob has the {end - begin} bytes of tensor {quote(spec.name)}, "
                f"{spec.dtype.value} of shape {list(spec.shape)}"
            )
        offsets[spec.name] = begin
        tensors.append(FolderTensor(spec, found.layer, found.begin, found.header))
    kept = dict(file.gaps)
    constants: list[tuple[int, bytes]] = []
    for begin, end in layout.gaps(file.size):
        data = kept.pop(begin, None)
        if data is None and end - begin < layout.alignment:
            data = bytes(end - begin)
        if data is None or len(data) != end - begin:
            raise BlobDamaged(f"{place}: it lacks the {end - begin} bytes from byte {begin} on")
        constants.append((begin, data))
    if kept:
        raise BlobDamaged(
            f"{place}: it holds bytes from byte {min(kept)} on, where the file has no gap"
        )
    return WeightFile(
        file.name, list(layout.tensors), file.start, offsets, tuple(constants), file.sha256
    )


def _is_left_out(source: TensorSpec, data: bytes, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether imports leave out a tensor; ``data`` are its bytes in the record."""
    if len(data) != source.nbytes or not source.name.endswith(LEFT_OUT):
        return False
    weight = source.name.removesuffix(PACKED_SHAPE)
    if weight == source.name:
        return True
    return weight in shapes and packed_shape(weight, shapes[weight], source.dtype) == (source, data)


def _fits(store: BlobAccess, source: TensorSpec, found: _Place, constant: bytes | None) -> bool:
    """Return whether imports rename a tensor like that, or store the reciprocal of ``constant``.

    Raises:
        BlobMissing, BlobDamaged: the tensor does not fit because its blob is damaged.
    """
    layer = found.layer
    if is_renamed_to(source, found.spec, found.header.tensors) and (
        constant is None or _is_reciprocal(store, found, constant)
    ):
        return True
    try:
        store.check_digest(layer.digest, layer.size)
    except BlobstoreError as error:
        raise at_layer(error, layer) from error
    return False


def _is_reciprocal(store: BlobAccess, found: _Place, data: bytes) -> bool:
    """Return whether the blob has a global scale that is the reciprocal of ``data``."""
    import numpy as np

    stored = bytearray(DType.F32.bits // 8)
    is_scale = found.spec.name.endswith(GLOBAL_SCALE) and found.spec.dtype is DType.F32
    if not is_scale or len(data) != len(stored) or found.spec.elements != 1:
        return False
    store.read_into(found.layer.digest, found.layer.size, found.begin, memoryview(stored))
    with np.errstate(all="ignore"):
        return (np.float32(1) / np.frombuffer(data, "<f4")).tobytes() == stored
