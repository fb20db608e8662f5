from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from blobstore.errors import CheckpointRefused, DamagedSource, UsageError
from blobstore.sources.base import SourceOptions
from blobstore.sources.sharded import ShardSet, add_indexed, read_weight_map
from tests.support.descriptors import open_files

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def shards() -> Iterator[ShardSet]:
    shards = ShardSet()
    yield shards
    shards.close()


def write(folder: Path, value: Any) -> Path:
    path = folder / INDEX
    path.write_bytes(value if isinstance(value, bytes) else json.dumps(value).encode())
    return path


def model(folder: Path, weight_map: dict[str, str]) -> Path:
    save_file({"a": np.zeros(1), "b": np.zeros(2)}, folder / FIRST)
    save_file({"c": np.zeros(3)}, folder / SECOND)
    return write(folder, {"weight_map": weight_map})


WHOLE = {"a": FIRST, "b": FIRST, "c": SECOND}


def add(shards: ShardSet, index: Path, *, ignore: bool = False) -> list[str]:
    return list(add_indexed(shards, index, read_weight_map(index), prefix="", ignore=ignore))


def test_reads_the_map(tmp_path: Path) -> None:
    weight_map = {"a": "x.safetensors", "b": "..x.safetensors", "": "x y.safetensors"}
    index = write(tmp_path, {"metadata": {"total_size": 1.5}, "weight_map": weight_map})
    assert read_weight_map(index) == weight_map


def test_an_empty_map_is_a_map(tmp_path: Path) -> None:
    assert read_weight_map(write(tmp_path, {"weight_map": {}})) == {}


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"{",
        b"\xff",
        b'{"weight_map":{"a":"x.safetensors","a":"y.safetensors"}}',
        b'{"weight_map":{"\\ud800":"x.safetensors"}}',
        b"[" * 100_000,
    ],
)
def test_rejects_an_index_that_is_not_strict_json(tmp_path: Path, value: bytes) -> None:
    index = write(tmp_path, value)
    with pytest.raises(DamagedSource, match=f"^weight index '{index}': "):
        read_weight_map(index)


@pytest.mark.parametrize(
    "value", [[], "x", None, {}, {"weight_map": []}, {"weight_map": None}, {"weight_map": {"a": 1}}]
)
def test_rejects_an_index_of_another_form(tmp_path: Path, value: Any) -> None:
    with pytest.raises(DamagedSource, match="has no 'weight_map' from tensor to file names"):
        read_weight_map(write(tmp_path, value))


def test_names_in_an_index_may_begin_with_the_folder_itself(tmp_path: Path) -> None:
    index = write(tmp_path, {"weight_map": {"a": "./x.safetensors", "b": "x.safetensors"}})
    assert read_weight_map(index) == {"a": "x.safetensors", "b": "x.safetensors"}


@pytest.mark.parametrize(
    "file",
    [
        *("./../x.safetensors", "././x.safetensors"),
        *("../x.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "..\\x.safetensors"),
        *("x\0.safetensors", "x.safetensors/", "x.safetensors\n", "..", "", "x.bin", "/dev/zero"),
    ],
)
def test_rejects_names_that_are_not_plain_file_names(tmp_path: Path, file: str) -> None:
    with pytest.raises(
        DamagedSource, match="of tensor 'a' is not the plain name of a .safetensors"
    ):
        read_weight_map(write(tmp_path, {"weight_map": {"a": file}}))


def test_rejects_an_index_that_is_not_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / INDEX)
    with pytest.raises(DamagedSource, match="cannot read weight index .* is not a regular file"):
        read_weight_map(tmp_path / INDEX)


def test_an_index_and_files_that_agree_are_taken(shards: ShardSet, tmp_path: Path) -> None:
    assert add(shards, model(tmp_path, WHOLE)) == []
    assert set(shards.specs) == {"a", "b", "c"}


def test_a_missing_shard_is_an_error(shards: ShardSet, tmp_path: Path) -> None:
    index = model(tmp_path, WHOLE)
    (tmp_path / SECOND).unlink()
    with pytest.raises(DamagedSource, match=f"weight file '.*{SECOND}' is missing"):
        add(shards, index)


def test_a_truncated_shard_is_an_error(shards: ShardSet, tmp_path: Path) -> None:
    index = model(tmp_path, WHOLE)
    os.truncate(tmp_path / SECOND, (tmp_path / SECOND).stat().st_size - 1)
    with pytest.raises(DamagedSource, match="data is cut short"):
        add(shards, index)


def test_a_promised_tensor_that_is_not_there_is_an_error(shards: ShardSet, tmp_path: Path) -> None:
    index = model(tmp_path, WHOLE | {"d": SECOND, "e": SECOND})
    with pytest.raises(DamagedSource, match=f"{SECOND}' lacks tensor 'd' and 1 more that"):
        add(shards, index)


@pytest.mark.parametrize("ignore", [True, False])
def test_a_tensor_in_the_wrong_shard_is_an_error(
    shards: ShardSet, tmp_path: Path, ignore: bool
) -> None:
    index = model(tmp_path, WHOLE | {"b": SECOND})
    with pytest.raises(DamagedSource, match="'b'"):
        add(shards, index, ignore=ignore)


def test_a_tensor_that_no_index_names_is_an_error_unless_ignored(
    shards: ShardSet, tmp_path: Path
) -> None:
    index = model(tmp_path, {"a": FIRST, "c": SECOND})
    with pytest.raises(DamagedSource, match=r"has tensor 'b' that .*; leave .* --ignore-unindexed"):
        add(shards, index)
    again = ShardSet()
    (notice,) = add(again, index, ignore=True)
    assert notice.startswith("left out: shard ")
    assert "'b'" in notice
    assert set(again.specs) == {"a", "c"}
    again.close()


def test_names_are_compared_exactly(shards: ShardSet, tmp_path: Path) -> None:
    index = model(tmp_path, {"A": FIRST, "b": FIRST, "c": SECOND})
    with pytest.raises(DamagedSource, match="lacks tensor 'A'"):
        add(shards, index)


# PyTorch checkpoints


BINS = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]


def checkpoints(folder: Path, **weight_map: str) -> Path:
    torch.save({"a": torch.zeros(1), "b": torch.arange(2.0)}, folder / BINS[0])
    torch.save({"c": torch.arange(6.0).view(2, 3).t()}, folder / BINS[1])
    index = folder / "pytorch_model.bin.index.json"
    weight_map = weight_map or {"a": BINS[0], "b": BINS[0], "c": BINS[1]}
    index.write_text(json.dumps({"weight_map": weight_map}))
    return index


def test_reads_shards_that_are_checkpoints(shards: ShardSet, tmp_path: Path) -> None:
    assert add(shards, checkpoints(tmp_path)) == []
    assert {name: spec.shape for name, spec in shards.specs.items()} == {
        "a": (1,),
        "b": (2,),
        "c": (3, 2),
    }
    buffer = memoryview(bytearray(5))
    content = b"".join(bytes(piece) for piece in shards.read("c", buffer))
    assert content == torch.arange(6.0).view(2, 3).t().contiguous().numpy().tobytes()


def test_checkpoints_can_lie_below_a_prefix(shards: ShardSet, tmp_path: Path) -> None:
    checkpoints(tmp_path)
    shards.add(tmp_path / BINS[0], prefix="unet/")
    assert [spec.name for spec in shards.specs.values()] == ["unet/a", "unet/b"]
    assert shards.names_in(tmp_path / BINS[0]) == {"a", "b"}
    (piece,) = shards.read("unet/b", memoryview(bytearray(100)))
    assert bytes(piece) == torch.arange(2.0).numpy().tobytes()


@pytest.mark.parametrize(
    "file", ["x.safetensors", "../x.bin", "x.bin/", "x.pt", "x.bin.safetensors"]
)
def test_an_index_of_checkpoints_names_such_files_only(tmp_path: Path, file: str) -> None:
    with pytest.raises(DamagedSource, match="is not the plain name of a .bin file"):
        read_weight_map(checkpoints(tmp_path, a=file))


def test_a_missing_checkpoint_is_an_error(shards: ShardSet, tmp_path: Path) -> None:
    index = checkpoints(tmp_path)
    (tmp_path / BINS[1]).unlink()
    with pytest.raises(DamagedSource, match=f"weight file '.*{BINS[1]}' is missing"):
        add(shards, index)
    with pytest.raises(DamagedSource, match=f"^weight file '{tmp_path}/{BINS[1]}' is missing$"):
        shards.add(tmp_path / BINS[1])


def test_a_checkpoint_and_its_index_must_agree(shards: ShardSet, tmp_path: Path) -> None:
    with pytest.raises(DamagedSource, match="lacks tensor 'x' that"):
        add(shards, checkpoints(tmp_path, x=BINS[0], c=BINS[1]))


def test_a_tensor_of_two_checkpoints_is_an_error(shards: ShardSet, tmp_path: Path) -> None:
    checkpoints(tmp_path)
    shards.add(tmp_path / BINS[0])
    torch.save({"b": torch.zeros(1)}, tmp_path / "x.pt")
    with pytest.raises(DamagedSource, match=f"tensor 'b' is in both '.*{BINS[0]}' and '.*x.pt'"):
        shards.add(tmp_path / "x.pt")


def test_notices_say_which_file_they_are_of(shards: ShardSet, tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    torch.save({"state_dict": {"a": torch.zeros(1)}, "epoch": 1, "key": b"x"}, path)
    shards.add(path)
    assert shards.notices == [
        f"'{path}': left out: 1 value that is neither a tensor nor simple, in 'key'"
    ]
    assert shards.values == {"x.ckpt": {"epoch": 1}}


def test_one_part_is_taken_of_all_checkpoints(tmp_path: Path) -> None:
    for name in BINS:
        value = {"ema": {name: torch.zeros(1)}, "model": {name: torch.zeros(2)}}
        torch.save(value, tmp_path / name)
    shards = ShardSet(SourceOptions(subtree="ema"))
    for name in BINS:
        shards.add(tmp_path / name)
    assert {name: spec.shape for name, spec in shards.specs.items()} == dict.fromkeys(BINS, (1,))
    shards.close()


def test_a_safetensors_file_has_no_parts(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": np.zeros(1)}, path)
    with pytest.raises(UsageError, match=f"'{path}' is not a PyTorch checkpoint"):
        ShardSet(SourceOptions(subtree="model")).add(path)


def test_tensors_that_are_not_read_are_refused_by_name(shards: ShardSet, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    odd = torch.zeros(1, dtype=torch.complex128)
    torch.save({"a": torch.zeros(1), "odd": odd, "other": odd.to_sparse()}, path)
    with pytest.raises(CheckpointRefused) as caught:
        shards.add(path)
    assert str(caught.value).startswith(f"'{path}', tensor 'odd' (and 1 more): pickle byte ")
    assert str(caught.value).endswith(
        "tensors of torch.ComplexDoubleStorage have no type in the safetensors format; "
        "leave such tensors out with --skip-unreadable, or store the file as it is with create --keep x.pt"
    )
    assert not shards.specs
    assert open_files(tmp_path) == []


def test_a_checkpoint_that_cannot_be_opened_leaves_nothing_open(
    shards: ShardSet, tmp_path: Path
) -> None:
    checkpoints(tmp_path)
    os.truncate(tmp_path / BINS[0], 300)
    with pytest.raises(CheckpointRefused):
        shards.add(tmp_path / BINS[0])
    assert open_files(tmp_path) == []


def test_skips_tensors_of_unknown_types_on_request(tmp_path: Path) -> None:
    index = checkpoints(tmp_path, a=BINS[0], b=BINS[0], c=BINS[1], odd=BINS[1])
    torch.save({"c": torch.zeros(3), "odd": torch.eye(2).to_sparse()}, tmp_path / BINS[1])
    shards = ShardSet(SourceOptions(skip_unreadable=True))
    add(shards, index)
    assert set(shards.specs) == {"a", "b", "c"}
    assert shards.notices == [
        f"'{tmp_path}/{BINS[1]}': left out: 1 tensor of kinds that are not read: 'odd'"
    ]
    shards.close()


def test_a_checkpoint_of_unknown_types_alone_is_an_error(tmp_path: Path) -> None:
    torch.save({"odd": torch.eye(2).to_sparse()}, tmp_path / "x.pt")
    with pytest.raises(CheckpointRefused, match=r"'odd': .*are not supported; store"):
        ShardSet(SourceOptions(skip_unreadable=True)).add(tmp_path / "x.pt")
