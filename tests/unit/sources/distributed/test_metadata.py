"""The metadata of a folder are parsed without executing them, and every number in them is checked."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import PosixPath
from typing import Any

import pytest
import torch
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OldProperties
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from blobstore.core.tensor import DType
from blobstore.errors import BlobstoreError, CheckpointRefused, DamagedSource, UnsupportedSource
from blobstore.sources.distributed import metadata as module
from blobstore.sources.distributed.metadata import Stored, parse_metadata
from blobstore.sources.distributed.pieces import Box

HUGE = 2**63


def size(*sizes: Any) -> torch.Size:
    return torch.Size(sizes)


def example() -> Metadata:
    """Return the metadata of a matrix in two pieces, one of which is empty, and a value."""
    chunks = [
        ChunkStorageMetadata(size(2, 0), size(0, 3)),
        ChunkStorageMetadata(size(0, 0), size(2, 3)),
    ]
    properties = TensorProperties(dtype=torch.bfloat16)
    return Metadata(
        {"m.a": TensorStorageMetadata(properties, size(2, 3), chunks), "n": BytesStorageMetadata()},
        {"m.a": ("m", "a"), "n": ("n", 0)},
        {
            MetadataIndex("m.a", size(0, 0), 1): _StorageInfo("x.distcp", 10, 20),
            MetadataIndex("m.a", size(2, 0), 0): _StorageInfo("y.distcp", 0, 5),
            MetadataIndex("n"): _StorageInfo("y.distcp", 5, 7),
        },
        StorageMeta(PosixPath("/x"), "id"),
        "1.0.0",
    )


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_parses_what_torch_writes(protocol: int) -> None:
    found = parse_metadata(pickle.dumps(example(), protocol))
    tensor = found.tensors["m.a"]
    assert (tensor.dtype, tensor.type_name, tensor.shape) == (DType.BF16, "bfloat16", (2, 3))
    assert tensor.pieces == ((Box((0, 0), (2, 3)), Stored("x.distcp", 10, 20)),)
    assert found.values == {"n": Stored("y.distcp", 5, 7)}
    assert found.paths == {"m.a": ("m", "a"), "n": ("n", 0)}


def test_an_entry_that_is_nested_too_deeply_is_refused() -> None:
    metadata = example()
    metadata.planner_data = {"n": ("n",) * 100}
    assert parse_metadata(pickle.dumps(metadata)).paths == metadata.planner_data
    metadata.planner_data["m.a"] = ("m",) * 101
    with pytest.raises(
        UnsupportedSource, match=r"entry 'm\.a' is nested too deeply: 101 keys lead"
    ):
        parse_metadata(pickle.dumps(metadata))


def test_parses_what_old_versions_wrote() -> None:
    metadata = example()
    entry: Any = metadata.state_dict_metadata["m.a"]
    entry.properties = OldProperties(dtype=torch.float16)
    metadata.planner_data = None
    found = parse_metadata(pickle.dumps(metadata))
    assert found.tensors["m.a"].dtype is DType.F16
    assert found.paths == {}


def test_the_plans_of_the_processes_are_not_needed() -> None:
    """Megatron-Core keeps them with the metadata."""
    metadata: Any = example()
    properties = tensor_of(metadata).properties
    chunk = ChunkStorageMetadata(size(0, 0), size(2, 3))
    data = TensorWriteData(chunk, properties, size(2, 3))
    items = [
        WriteItem(MetadataIndex("m.a", size(0, 0)), WriteItemType.SHARD, None, data),
        WriteItem(MetadataIndex("n"), WriteItemType.BYTE_IO, BytesIOWriteData(7)),
    ]
    metadata.all_local_plans = [SavePlan(items)]
    assert parse_metadata(pickle.dumps(metadata)) == parse_metadata(pickle.dumps(example()))


@pytest.mark.parametrize(
    ("name", "is_known"),
    [
        (("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"), True),
        (("torch.distributed._shard.checkpoint.metadata", "Metadata"), True),
        (("torch.distributed.checkpoint.metadata", "Other"), False),
        (("os", "Metadata"), False),
    ],
)
def test_a_class_is_known_by_its_complete_name(name: tuple[str, str], is_known: bool) -> None:
    written = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    data = pickle.dumps(example(), 2)
    assert data.count(written) == 1
    data = data.replace(written, "c{}\n{}\n".format(*name).encode())
    if is_known:
        assert set(parse_metadata(data).tensors) == {"m.a"}
        return
    with pytest.raises(CheckpointRefused, match=f"uses '{name[0]}.{name[1]}', which .* no code"):
        parse_metadata(data)


def test_types_that_safetensors_lacks_are_known() -> None:
    metadata = example()
    entry: Any = metadata.state_dict_metadata["m.a"]
    entry.properties = TensorProperties(dtype=torch.complex128)
    tensor = parse_metadata(pickle.dumps(metadata)).tensors["m.a"]
    assert (tensor.dtype, tensor.type_name) == (None, "complex128")


def tensor_of(metadata: Metadata) -> Any:
    return metadata.state_dict_metadata["m.a"]


def set_chunk(metadata: Metadata, offsets: Any, sizes: Any) -> None:
    tensor_of(metadata).chunks[1] = ChunkStorageMetadata(offsets, sizes)


def set_place(metadata: Metadata, *place: Any, name: str = "n") -> None:
    index = next(key for key in metadata.storage_data if key.fqn == name)
    metadata.storage_data[index] = _StorageInfo(*place)


def shared_pieces() -> dict[str, TensorStorageMetadata]:
    empty = ChunkStorageMetadata(size(0), size(0))
    pieces = [empty] * 2**15
    properties = TensorProperties()
    return {str(number): TensorStorageMetadata(properties, size(0), pieces) for number in range(40)}


def with_attribute(owner: Any, name: str, value: Any) -> None:
    owner.__dict__[name] = value


WRONG: dict[str, tuple[Callable[[Metadata], object], str]] = {
    "no dict of entries": (
        lambda it: with_attribute(it, "state_dict_metadata", [1]),
        "state_dict_metadata is not a dict",
    ),
    "no dict of places": (lambda it: with_attribute(it, "storage_data", None), "storage_data is"),
    "a key that is not an index": (
        lambda it: it.storage_data.update({"x": _StorageInfo("x", 0, 1)}),
        "a key of storage_data is not a MetadataIndex",
    ),
    "an index without a name": (
        lambda it: it.storage_data.update({MetadataIndex(5): _StorageInfo("x", 0, 1)}),  # type: ignore[arg-type]
        "the name of an entry is not a string",
    ),
    "a place of another class": (
        lambda it: it.storage_data.update({MetadataIndex("n"): 5}),
        "entry 'n': the place of an item is not a _StorageInfo",
    ),
    "a name that is not a string": (
        lambda it: it.state_dict_metadata.update({5: BytesStorageMetadata()}),
        "the name of an entry is not a string",
    ),
    "an entry of another class": (
        lambda it: it.state_dict_metadata.update({"m.a": StorageMeta()}),
        "entry 'm.a': it is not a TensorStorageMetadata",
    ),
    "a value without an item": (
        lambda it: it.storage_data.pop(MetadataIndex("n")),
        "entry 'n': it has 0 items, not one",
    ),
    "a value with two items": (
        lambda it: it.storage_data.update({MetadataIndex("n", (0,)): _StorageInfo("x", 0, 1)}),
        "entry 'n': it has 2 items, not one",
    ),
    "no type": (
        lambda it: with_attribute(tensor_of(it), "properties", 5),
        "its properties are not TensorProperties",
    ),
    "a type of another class": (
        lambda it: with_attribute(tensor_of(it).properties, "dtype", torch.Size),
        "its properties are not TensorProperties",
    ),
    "no sizes": (lambda it: with_attribute(tensor_of(it), "size", None), "its sizes are not a tup"),
    "a negative size": (
        lambda it: with_attribute(tensor_of(it), "size", (2, -3)),
        r"its sizes are not all integers from 0 to 2\^63",
    ),
    "a size that is not an integer": (
        lambda it: with_attribute(tensor_of(it), "size", (True, 3)),
        "its sizes are not all integers",
    ),
    "too many dimensions": (
        lambda it: with_attribute(tensor_of(it), "size", (1,) * 33),
        "a tuple of at most 32 integers",
    ),
    "a huge size": (
        lambda it: with_attribute(tensor_of(it), "size", (HUGE,)),
        "its sizes are not all integers",
    ),
    "a huge product": (
        lambda it: with_attribute(tensor_of(it), "size", (2**31, 2**31, 2)),
        r"more than 2\^63 - 1 bytes",
    ),
    "a name that is too long": (
        lambda it: it.state_dict_metadata.update({"x" * 4097: BytesStorageMetadata()}),
        "not a string of at most 4096 characters",
    ),
    "keys that are too long": (
        lambda it: with_attribute(it, "planner_data", {str(n): ("x" * 2**20,) for n in range(17)}),
        "the keys of its entries are over 16777216 characters",
    ),
    "no pieces": (
        lambda it: with_attribute(tensor_of(it), "chunks", (1,)),
        "its pieces are not a list",
    ),
    "a piece of another class": (
        lambda it: tensor_of(it).chunks.append(5),
        "a piece is not a ChunkStorageMetadata",
    ),
    "a piece without offsets": (
        lambda it: set_chunk(it, None, size(2, 3)),
        "the offsets of a piece are not a tuple",
    ),
    "a piece without an item": (
        lambda it: set_chunk(it, size(0, 1), size(2, 2)),
        r"there is no item for its piece at \[0, 1\]",
    ),
    "a piece after the last item": (
        lambda it: set_chunk(it, size(5, 0), size(2, 3)),
        r"there is no item for its piece at \[5, 0\]",
    ),
    "an item without its offsets": (
        lambda it: it.storage_data.update(
            {MetadataIndex("m.a", ()): it.storage_data.pop(MetadataIndex("m.a", size(0, 0), 1))}  # type: ignore[arg-type]
        ),
        r"there is no item for its piece at \[0, 0\]",
    ),
    "offsets of an item that are negative": (
        lambda it: it.storage_data.update({MetadataIndex("n", (-1,)): _StorageInfo("x", 0, 1)}),
        "the offsets of an item are not all integers",
    ),
    "a place before the file": (
        lambda it: set_place(it, "x", -1, 5),
        "entry 'n': its offset and length",
    ),
    "a place of huge length": (
        lambda it: set_place(it, "x", 0, HUGE),
        "entry 'n': its offset and length",
    ),
} | {
    f"the file name {name!r}": (
        lambda it, name=name: set_place(it, name, 0, 5),
        "is not the plain name of a file",
    )
    for name in ("", ".", "..", "../x", "/x", "a/b", "a\\b", "a\0", "\x1b[2J", None, b"x")
}


@pytest.mark.parametrize("case", WRONG)
def test_refuses_what_torch_does_not_write(case: str) -> None:
    change, message = WRONG[case]
    metadata = example()
    change(metadata)
    data = pickle.dumps(metadata)
    with pytest.raises(DamagedSource, match=message) as it:
        parse_metadata(data)
    assert str(it.value).isprintable()


def test_a_list_of_pieces_of_many_tensors_is_too_large() -> None:
    metadata = example()
    metadata.state_dict_metadata.update(shared_pieces())
    with pytest.raises(
        UnsupportedSource, match="'.*': the checkpoint is too large: over 1048576 p"
    ):
        parse_metadata(pickle.dumps(metadata))


def test_the_objects_of_a_large_file_are_limited_by_its_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_LEAST_OBJECTS", 0)
    metadata = example()
    for number in range(200):
        name = f"model.layers.{number}.self_attn.q_proj.weight"
        chunks = [ChunkStorageMetadata(size(row, 0), size(1, 5)) for row in range(8)]
        properties = TensorProperties(dtype=torch.bfloat16)
        entry = TensorStorageMetadata(properties, size(8, 5), chunks)
        metadata.state_dict_metadata[name] = entry
        for row in range(8):
            place = _StorageInfo(f"__{row}_0.distcp", 100 * number, 100)
            metadata.storage_data[MetadataIndex(name, size(row, 0), row)] = place
    data = pickle.dumps(metadata)
    assert len(parse_metadata(data).tensors) == 201
    with pytest.raises(UnsupportedSource, match=r"too large: .* needs more than 10\d+ objects"):
        parse_metadata(b"\x80\x02](" + b"}" * 50_000 + b"e.")


def test_items_that_are_transformed_are_refused() -> None:
    metadata = example()
    set_place(metadata, "x", 0, 5, ["zstd"])
    with pytest.raises(UnsupportedSource, match="entry 'n': it is transformed by an extension"):
        parse_metadata(pickle.dumps(metadata))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no pickle",
        pickle.dumps({"state_dict_metadata": {}}),
        pickle.dumps(5),
        pickle.dumps(example())[:-10],
        pickle.dumps(example()) + b"x",
        pickle.dumps([[[[[example()]]]]]),
    ],
)
def test_refuses_other_pickles(data: bytes) -> None:
    with pytest.raises(DamagedSource):
        parse_metadata(data)


def test_refuses_a_call_of_a_class() -> None:
    name = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    with pytest.raises(BlobstoreError, match="the pickle is not a Metadata"):
        parse_metadata(b"\x80\x02" + name + b")R.")
    with pytest.raises(BlobstoreError, match="the pickle has no attributes"):
        parse_metadata(b"\x80\x02" + name + b")\x81.")


def test_refuses_an_object_that_is_made_with_arguments() -> None:
    data = pickle.dumps(example(), 2)
    made = b"Metadata\nq\x00)\x81"
    assert data.count(made) == 1
    with pytest.raises(DamagedSource, match="the pickle is not a Metadata, as torch writes it"):
        parse_metadata(data.replace(made, b"Metadata\nq\x00K\x01\x85\x81"))
