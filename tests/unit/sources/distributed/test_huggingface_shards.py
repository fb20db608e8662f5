"""The shards of the Hugging Face writer are joined."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from blobstore.core.tensor import DType
from blobstore.errors import DamagedSource, UnsupportedSource, UsageError
from blobstore.sources.base import SourceOptions
from blobstore.sources.distributed.huggingface_shards import HuggingFaceShards
from blobstore.sources.open import open_source
from tests.support.torch_files import raw

MATRIX = torch.arange(24.0).reshape(4, 6)


def write(path: Path, tensors: dict[str, tuple[torch.Tensor, list[Any]]], info: Any = None) -> None:
    """Write a shard as torch's writer does: with the offsets of its pieces in the metadata."""
    offsets = {name: {"saved_offsets": offsets} for name, (_, offsets) in tensors.items()}
    metadata = {"DCP_SHARDING_INFO": json.dumps(offsets if info is None else info)}
    metadata |= {"format": "pt", "DCP_VERSION": "1.0"}
    pieces = {name: tensor.contiguous() for name, (tensor, _) in tensors.items()}
    save_file(pieces, path, metadata)


def shard(rank: int, number: int = 1, count: int = 1) -> str:
    return f"shard-{rank:05}-model-{number:05}-of-{count:05}.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"hidden_size": 6}')
    write(tmp_path / shard(1), {"w": (MATRIX[:3], [0, 0]), "s": (torch.tensor(2.0), [])})
    write(tmp_path / shard(2), {"w": (MATRIX[3:], [3, 0]), "e": (torch.zeros(0, 2), [0, 0])})
    return tmp_path


def contents(folder: Path, **options: Any) -> dict[str, bytes]:
    source = open_source(folder, SourceOptions(**options))
    assert isinstance(source, HuggingFaceShards)
    buffer = memoryview(bytearray(16))
    found = {name: b"".join(map(bytes, source.read(name, buffer))) for name in source.specs}
    source.check_unchanged()
    return found


def test_joins_the_pieces_of_all_shards(folder: Path) -> None:
    assert contents(folder) == {"w": raw(MATRIX), "s": raw(torch.tensor(2.0)), "e": b""}
    source = open_source(folder)
    assert source.specs["w"].shape == (4, 6)
    assert source.config == {"hidden_size": 6}
    assert [file.name for file in source.files] == ["config.json"]
    (notice,) = source.notices
    assert notice.startswith("joined 2 shards; the files do not say how many there were")
    assert [file.format for file in source.record().files] == ["safetensors"] * 2
    assert set(source.reopen().specs) == set(source.specs)


def test_several_files_of_a_process_are_joined(tmp_path: Path) -> None:
    for number, name in enumerate("ab", 1):
        for rank in (1, 2):
            piece = (MATRIX[:, 3 * rank - 3 : 3 * rank], [0, 3 * rank - 3])
            write(tmp_path / shard(rank, number, 2), {name: piece})
    assert contents(tmp_path) == {"a": raw(MATRIX), "b": raw(MATRIX)}


def test_missing_files_between_others_are_named(tmp_path: Path) -> None:
    write(tmp_path / shard(1, 1, 2), {"a": (MATRIX[:2], [0, 0])})
    write(tmp_path / shard(2, 1, 2), {"a": (MATRIX[2:], [2, 0])})
    write(tmp_path / shard(1, 2, 2), {"b": (MATRIX[:2], [0, 0])})
    _, notice = open_source(tmp_path).notices
    assert notice.startswith(f"not there: '{shard(2, 2, 2)}'; if their processes")
    write(tmp_path / shard(2, 2, 2), {"b": (MATRIX[2:], [2, 0])})
    source = open_source(tmp_path)
    assert source.specs["b"].shape == (4, 6)
    assert len(source.notices) == 1


@pytest.mark.parametrize("dimension", [0, 1])
def test_pairs_of_f4_are_joined(tmp_path: Path, dimension: int) -> None:
    pairs = torch.arange(32, dtype=torch.uint8).reshape(4, 8)
    for rank, part in enumerate(pairs.chunk(2, dimension)):
        offsets = [0, 0]
        offsets[dimension] = rank * part.shape[dimension]
        typed = part.contiguous().view(torch.float4_e2m1fn_x2)
        write(tmp_path / shard(rank + 1), {"w": (typed, offsets)})
    assert contents(tmp_path) == {"w": raw(pairs)}
    spec = open_source(tmp_path).specs["w"]
    assert (spec.dtype, spec.shape) == (DType.F4, (4, 16))


@pytest.mark.parametrize(
    ("dtype", "shape"), [("F6_E2M3", (4, 8)), ("F6_E3M2", (4,)), ("F4", (2, 3))]
)
def test_other_types_of_less_than_a_byte_are_refused(
    tmp_path: Path, dtype: str, shape: tuple[int, ...]
) -> None:
    size = math.prod(shape) * DType[dtype].bits // 8
    header = {
        "__metadata__": {
            "DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [0] * len(shape)}})
        },
        "w": {"dtype": dtype, "shape": shape, "data_offsets": [0, size]},
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (tmp_path / shard(1)).write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
    with pytest.raises(
        UnsupportedSource, match=f"'w' is {dtype} .*, whose pieces cannot be joined"
    ):
        open_source(tmp_path)


def test_a_prefix_can_be_stripped(folder: Path) -> None:
    write(folder / shard(3), {"module.x": (MATRIX, [0, 0])})
    assert set(contents(folder, strip_prefix="module.")) == {"w", "s", "e", "x"}
    with pytest.raises(UsageError, match="tensor 'w' of '.*' would have no name of its own"):
        contents(folder, strip_prefix="w")


@pytest.mark.parametrize("missing", [shard(1), shard(2)])
def test_a_gap_in_the_numbers_is_noticed(folder: Path, missing: str) -> None:
    write(folder / shard(3), {"x": (MATRIX, [0, 0])})
    (folder / missing).unlink()
    with pytest.raises(DamagedSource, match=f"complete set: {missing[:11]} is missing; copy"):
        open_source(folder)


def test_a_missing_file_of_all_processes_is_noticed(tmp_path: Path) -> None:
    write(tmp_path / shard(1, 2, 2), {"x": (MATRIX, [0, 0])})
    with pytest.raises(DamagedSource, match="complete set: model-00001 is missing"):
        open_source(tmp_path)


def test_a_missing_last_file_of_all_processes_is_noticed(tmp_path: Path) -> None:
    write(tmp_path / shard(1, 1, 2), {"x": (MATRIX, [0, 0])})
    with pytest.raises(DamagedSource, match="complete set: model-00002 is missing"):
        open_source(tmp_path)


def test_shards_of_two_checkpoints_are_noticed(folder: Path) -> None:
    write(folder / shard(1, 1, 2), {"x": (MATRIX, [0, 0])})
    with pytest.raises(DamagedSource, match="complete set: "):
        open_source(folder)
    write(folder / shard(1, 2, 2), {"y": (MATRIX, [0, 0])})
    with pytest.raises(DamagedSource, match="complete set: the names have different counts"):
        open_source(folder)


@pytest.mark.parametrize(
    ("piece", "offsets", "message"),
    [
        (MATRIX[3:], [2, 0], "tensor 'w': its 2 pieces overlap|leave a hole"),
        (MATRIX[3:], [5, 0], "tensor 'w': its 2 pieces leave a hole"),
        (MATRIX[3:, 1:], [3, 1], "tensor 'w': its 2 pieces leave a hole"),
        (MATRIX[3], [3], "the pieces of tensor 'w' have different dimensions"),
        (MATRIX[3:], [3], "no valid offsets for tensor 'w'"),
        (MATRIX[3:], [3, -1], "no valid offsets for tensor 'w'"),
        (MATRIX[3:], [3, 2**63], "no valid offsets for tensor 'w'"),
        (MATRIX[3:], [3, 0.0], "no valid offsets for tensor 'w'"),
        (MATRIX[3:].half(), [3, 0], "tensor 'w' is F32 in one shard and F16 in"),
    ],
)
def test_pieces_must_fit(
    folder: Path, piece: torch.Tensor, offsets: list[Any], message: str
) -> None:
    write(folder / shard(2), {"w": (piece, offsets)})
    with pytest.raises(DamagedSource, match=message):
        open_source(folder)


@pytest.mark.parametrize("info", [[], {"w": 5}, {}, {"w": {}}, 5])
def test_the_offsets_must_be_there(folder: Path, info: Any) -> None:
    write(folder / shard(2), {"w": (MATRIX[3:], [3, 0])}, info)
    with pytest.raises(DamagedSource, match="DCP_SHARDING_INFO"):
        open_source(folder)


def test_other_metadata_are_refused(folder: Path) -> None:
    save_file({"w": MATRIX[3:].contiguous()}, folder / shard(2))
    with pytest.raises(DamagedSource, match="has no DCP_SHARDING_INFO"):
        open_source(folder)
    save_file({"w": MATRIX[3:].contiguous()}, folder / shard(2), {"DCP_SHARDING_INFO": "{"})
    with pytest.raises(DamagedSource, match="DCP_SHARDING_INFO: "):
        open_source(folder)


def test_a_damaged_shard_is_noticed(folder: Path) -> None:
    path = folder / shard(2)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedSource, match="shard-00002"):
        open_source(folder)


def test_there_are_no_parts_to_choose(folder: Path) -> None:
    with pytest.raises(UsageError, match="no parts for --subtree"):
        open_source(folder, SourceOptions(subtree="w"))
