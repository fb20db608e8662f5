from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from blobstore.errors import DamagedSource
from blobstore.sources.sharded import ShardSet, add_indexed, read_weight_map

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

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
def test_rejects_an_index_that_is_no_strict_json(tmp_path: Path, value: bytes) -> None:
    index = write(tmp_path, value)
    with pytest.raises(DamagedSource, match=f"cannot read weight index '{index}'"):
        read_weight_map(index)


@pytest.mark.parametrize(
    "value", [[], "x", None, {}, {"weight_map": []}, {"weight_map": None}, {"weight_map": {"a": 1}}]
)
def test_rejects_an_index_of_another_form(tmp_path: Path, value: Any) -> None:
    with pytest.raises(DamagedSource, match="has no 'weight_map' from tensor to file names"):
        read_weight_map(write(tmp_path, value))


@pytest.mark.parametrize(
    "file",
    [
        "../x.safetensors",
        "/etc/x.safetensors",
        "sub/x.safetensors",
        "..\\x.safetensors",
        "x\0.safetensors",
        "..",
        "",
        "x.bin",
        "x.safetensors/",
        "x.safetensors\n",
        "/dev/zero",
    ],
)
def test_rejects_what_is_no_plain_file_name(tmp_path: Path, file: str) -> None:
    with pytest.raises(
        DamagedSource, match="of tensor 'a' is not the plain name of a .safetensors"
    ):
        read_weight_map(write(tmp_path, {"weight_map": {"a": file}}))


def test_an_index_that_is_no_file_is_rejected(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / INDEX)
    with pytest.raises(DamagedSource, match="cannot read weight index .* is not a regular file"):
        read_weight_map(tmp_path / INDEX)


def test_an_index_and_files_that_agree_are_taken(shards: ShardSet, tmp_path: Path) -> None:
    assert add(shards, model(tmp_path, WHOLE)) == []
    assert set(shards.specs) == {"a", "b", "c"}


def test_a_missing_shard_is_an_error(shards: ShardSet, tmp_path: Path) -> None:
    index = model(tmp_path, WHOLE)
    (tmp_path / SECOND).unlink()
    with pytest.raises(
        DamagedSource, match=f"shard '.*{SECOND}' is missing; .* places 1 tensors in"
    ):
        add(shards, index)


def test_a_shard_cut_short_is_an_error(shards: ShardSet, tmp_path: Path) -> None:
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
    with pytest.raises(
        DamagedSource, match="holds tensor 'b' that .*; leave .* --ignore-unindexed"
    ):
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
