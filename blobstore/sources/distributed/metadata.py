"""Parses ``.metadata``, the pickle that describes a folder of ``torch.distributed.checkpoint``.

The classes are defined in ``torch/distributed/checkpoint/metadata.py`` and ``filesystem.py``. torch itself
unpickles the file without any restriction. Here the pickle may use only the names in a closed list, and
nothing of it is executed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from blobstore.core.escape import join_some, quote
from blobstore.core.gc_pause import gc_paused
from blobstore.core.tensor import DTYPES_BY_LIBRARY_NAME
from blobstore.errors import (
    CheckpointDamaged,
    CheckpointUnsupported,
    DamagedSource,
    UnsupportedSource,
)
from blobstore.sources.distributed.pieces import Box
from blobstore.unpickler.machine import Limits, run
from blobstore.unpickler.state import LimitReached
from blobstore.unpickler.values import Global, Key, Number, Record, Use

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Final

    from blobstore.core.tensor import DType
    from blobstore.sources.pytorch.state_dict import Part, Path

MAX_METADATA_SIZE: Final = 64 * 2**20
"""Bytes of the file. torch writes 200 for each tensor, and 150 for each piece."""
_LEAST_OBJECTS = 1 << 22
_BYTES_PER_OBJECT = 5
"""The objects of a large file are limited to one for this many bytes. torch writes at least 5.2."""
_MAX_RANK = 32
_MAX_PIECES = 1 << 20
_MAX_NAME = 1 << 12
_MAX_KEYS = 100
"""Keys that lead to an entry; as many as the record of a step may have."""
_MAX_LETTERS = 16 * 2**20
"""Characters of all keys that lead to entries."""
_LARGEST = 2**63 - 1
_SHOWN = 8
_MODULES = "torch.distributed.checkpoint.metadata", "torch.distributed._shard.checkpoint.metadata"
_OLD_PROPERTIES = "torch.distributed._shard.sharded_tensor.metadata"
_METADATA = (
    *((module, "Metadata") for module in _MODULES),
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"),
)
_TENSOR = tuple((module, "TensorStorageMetadata") for module in _MODULES)
_BYTES = tuple((module, "BytesStorageMetadata") for module in _MODULES)
_CHUNK = tuple((module, "ChunkStorageMetadata") for module in _MODULES)
_INDEX = tuple((module, "MetadataIndex") for module in _MODULES)
_STORED = (
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed._shard.checkpoint.filesystem", "_StorageInfo"),
)
_PLAN = "torch.distributed.checkpoint.planner"
_ALLOWED: Final = frozenset(
    {
        *_METADATA,
        *_TENSOR,
        *_BYTES,
        *_CHUNK,
        *_INDEX,
        *_STORED,
        (_MODULES[0], "TensorProperties"),
        (_OLD_PROPERTIES, "TensorProperties"),
        (_MODULES[0], "_MEM_FORMAT_ENCODING"),
        (_OLD_PROPERTIES, "MEM_FORMAT_ENCODING"),
        (_MODULES[0], "StorageMeta"),
        # Megatron-Core keeps what each process has written, which is not needed.
        (_PLAN, "SavePlan"),
        (_PLAN, "WriteItem"),
        (_PLAN, "WriteItemType"),
        (_PLAN, "TensorWriteData"),
        (_PLAN, "BytesIOWriteData"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("collections", "OrderedDict"),
        ("pathlib", "PosixPath"),
        ("pathlib", "WindowsPath"),
        ("pathlib._local", "PosixPath"),
        ("pathlib._local", "WindowsPath"),
    }
)
"""The names that a pickle may use, besides the element types of torch."""


class Stored(NamedTuple):
    """The place of an item: a file that ``torch.save`` would write, in a data file."""

    file: str
    """The name of the data file."""
    begin: int
    size: int


class StoredPiece(NamedTuple):
    """A piece of a tensor that is not empty, and the place of its item."""

    box: Box
    stored: Stored


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint."""

    dtype: DType | None
    """None if the safetensors format has no such type."""
    type_name: str
    """The type's name in torch."""
    shape: tuple[int, ...]
    """In elements of torch, which are pairs for F4."""
    pieces: tuple[StoredPiece, ...]


class Metadata(NamedTuple):
    """What ``.metadata`` says about a checkpoint. That pieces tile their tensors is not checked."""

    tensors: Mapping[str, StoredTensor]
    values: Mapping[str, Stored]
    """The items that are not tensors, by name."""
    paths: Mapping[str, Path]
    """The keys that lead to tensors and values, where they are known."""


def parse_metadata(data: bytes) -> Metadata:
    """Parse the content of a ``.metadata`` file.

    Raises:
        CheckpointDamaged: it is damaged.
        CheckpointUnsupported: it uses a name that is not in the list.
        DamagedSource: it contradicts itself, or has sizes or file names that are not valid.
        UnsupportedSource: items are compressed or encrypted, or the checkpoint is too large.
    """
    limits = Limits(objects=max(_LEAST_OBJECTS, len(data) // _BYTES_PER_OBJECT))
    with gc_paused():
        try:
            result = run(data, limits=limits)
        except LimitReached as error:
            raise UnsupportedSource(f"its metadata are too large: {error}") from None
        # Before the values are looked at, so that the error names the class and not a symptom.
        if refused := [item for item in result.globals if not is_allowed(item)]:
            names = join_some([*map(quote, refused)], _SHOWN)
            raise CheckpointUnsupported(
                f"pickle byte {refused[0].offset}: it uses {names}, which the metadata of checkpoints "
                "do not need; no code was executed"
            )
        if result.end != len(data):
            raise CheckpointDamaged(f"{len(data) - result.end} bytes follow the end of its pickle")
        fields = _fields(result.value, _METADATA, "the pickle")
        listed = fields.get("state_dict_metadata")
        if type(listed) is not dict:
            raise DamagedSource("state_dict_metadata is not a dict")
        stored = _stored_items(fields.get("storage_data"))
        tensors: dict[str, StoredTensor] = {}
        values: dict[str, Stored] = {}
        left = _MAX_PIECES
        for name, entry in listed.items():
            items = stored.get(_name(name), [])
            try:
                if _is_a(entry, _BYTES):
                    values[name] = _only(items)
                    continue
                tensors[name] = _tensor(entry, items, left)
                left -= len(entry.state["chunks"])  # one list can be that of many tensors
            except (DamagedSource, UnsupportedSource) as error:
                raise error.at(f"entry {quote(name)}") from None
        return Metadata(tensors, values, _paths(fields.get("planner_data")))


_Item = tuple[tuple[int, ...] | None, Stored]
"""The offsets of a piece, if it is one, and the place of its item."""


def is_allowed(item: Global) -> bool:
    """Return whether the metadata of a checkpoint may use a global."""
    if (item.module, item.name) in _ALLOWED:
        return True
    return item.module == "torch" and (
        item.use is Use.DTYPE or (item.use is Use.UNREADABLE and not item.name.endswith("Storage"))
    )


def _is_a(value: Any, classes: Sequence[tuple[str, str]]) -> bool:
    return type(value) is Record and (value.cls.module, value.cls.name) in classes


def _fields(value: Any, classes: Sequence[tuple[str, str]], what: str) -> dict[str, Any]:
    """Return the attributes of an object, which must be of one of the classes."""
    if not _is_a(value, classes) or value.arguments or value.entries:
        raise DamagedSource(f"{what} is not a {classes[0][1]}, as torch writes it")
    if type(value.state) is not dict:
        raise DamagedSource(f"{what} has no attributes")
    return value.state


def _numbers(value: Any, what: str) -> tuple[int, ...]:
    if type(value) is not tuple or len(value) > _MAX_RANK:
        raise DamagedSource(f"{what} are not a tuple of at most {_MAX_RANK} integers")
    for number in value:
        if type(number) is not int or not 0 <= number <= _LARGEST:
            raise DamagedSource(f"{what} are not all integers from 0 to 2^63 - 1")
    return value


def _stored_items(value: Any) -> dict[str, list[_Item]]:
    """Return the places of all items, by the name of their entry."""
    if type(value) is not dict:
        raise DamagedSource(
            "storage_data is not a dict, as the writer of torch for folders makes it"
        )
    found: dict[str, list[_Item]] = {}
    for key, place in value.items():
        index = _fields(key.value if type(key) is Key else key, _INDEX, "a key of storage_data")
        name, offsets = _name(index.get("fqn")), index.get("offset")
        try:
            if offsets is not None:
                offsets = _numbers(offsets, "the offsets of an item")
            stored = _place(_fields(place, _STORED, "the place of an item"))
        except (DamagedSource, UnsupportedSource) as error:
            raise error.at(f"entry {quote(name)}") from None
        found.setdefault(name, []).append((offsets, stored))
    return found


def _name(value: Any) -> str:
    if type(value) is not str or len(value) > _MAX_NAME:
        raise DamagedSource(
            f"the name of an entry is not a string of at most {_MAX_NAME} characters"
        )
    return value


def _place(fields: Mapping[str, Any]) -> Stored:
    file = fields.get("relative_path")
    if (
        type(file) is not str
        or not file.isprintable()
        or file in ("", ".", "..")
        or any(mark in file for mark in "/\\")
    ):
        shown = quote(file) if type(file) is str else "missing"
        raise DamagedSource(f"its file {shown} is not the plain name of a file")
    begin, size = _numbers((fields.get("offset"), fields.get("length")), "its offset and length")
    if fields.get("transform_descriptors") is not None:
        raise UnsupportedSource(
            "it is transformed by an extension of the writer, such as a compression; "
            "load it with torch and save it without extensions"
        )
    return Stored(file, begin, size)


def _only(items: list[_Item]) -> Stored:
    if len(items) != 1:
        raise DamagedSource(f"it has {len(items)} items, not one")
    return items[0][1]


def _tensor(entry: Any, items: list[_Item], limit: int) -> StoredTensor:
    fields = _fields(entry, _TENSOR, "it")
    properties = fields.get("properties")
    state = properties.state if type(properties) is Record else None
    cls = state[0] if type(state) is tuple and state else None
    if type(cls) is not Global or cls.use not in (Use.DTYPE, Use.UNREADABLE):
        raise DamagedSource("its properties are not TensorProperties, as torch writes them")
    dtype = DTYPES_BY_LIBRARY_NAME[cls.name] if cls.use is Use.DTYPE else None
    shape = _numbers(fields.get("size"), "its sizes")
    itemsize = 1 if dtype is None else dtype.bits // 8 or 1
    if math.prod(shape) * itemsize > _LARGEST:
        raise DamagedSource("it has more than 2^63 - 1 bytes")
    chunks = fields.get("chunks")
    if type(chunks) is not list:
        raise DamagedSource("its pieces are not a list")
    # Before pieces are made: one long list can be that of many tensors.
    if len(chunks) > limit:
        raise UnsupportedSource(f"the checkpoint is too large: over {_MAX_PIECES} pieces")
    return StoredTensor(dtype, cls.name, shape, tuple(_pieces(chunks, items, len(shape))))


def _pieces(chunks: list[Any], items: list[_Item], rank: int) -> Iterable[StoredPiece]:
    """Yield the pieces that are not empty, with their items."""
    boxes = []
    for chunk in chunks:
        fields = _fields(chunk, _CHUNK, "a piece")
        sizes = _numbers(fields.get("sizes"), "the sizes of a piece")
        offsets = _numbers(fields.get("offsets"), "the offsets of a piece")
        if math.prod(sizes):
            boxes.append(Box(offsets, sizes))
    # Sorted and not in a dict: tuples of a file could be chosen such that their hashes collide.
    boxes.sort()
    origin = (0,) * rank
    places = sorted((origin if offsets is None else offsets, stored) for offsets, stored in items)
    following = 0
    for box in boxes:
        while following < len(places) and places[following][0] < box.offsets:
            following += 1
        if following == len(places) or places[following][0] != box.offsets:
            raise DamagedSource(f"there is no item for its piece at {list(box.offsets)}")
        yield StoredPiece(box, places[following][1])


def _paths(planner_data: Any) -> dict[str, Path]:
    """Return the keys of entries, as the planner of torch for nested dicts lists them."""
    if type(planner_data) is not dict:
        return {}
    paths: dict[str, Path] = {}
    left = _MAX_LETTERS
    for name, path in planner_data.items():
        if type(name) is not str or type(path) is not tuple or not path:
            continue
        if len(path) > _MAX_KEYS:
            raise UnsupportedSource(
                f"entry {quote(name)} is nested too deeply: {len(path)} keys lead to it, "
                f"and at most {_MAX_KEYS} are read"
            )
        if all(type(part) in (str, int) for part in path):
            left -= sum(len(part) for part in path if type(part) is str)
            if left < 0:
                raise DamagedSource(f"the keys of its entries are over {_MAX_LETTERS} characters")
            paths[name] = tuple(map(_part, path))
    return paths


def _part(value: str | int) -> Part:
    return Number(value) if type(value) is int else value
