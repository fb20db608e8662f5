from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from safetensors.numpy import save_file

from blobstore.errors import DamagedSource, SourceError, UnsupportedSource
from blobstore.sources.safetensors import SafetensorsShard
from blobstore.sources.sharded import ShardSet
from tests.support import sandbox
from tests.support.descriptors import open_files


@pytest.fixture
def shards(tmp_path: Path) -> Iterator[ShardSet]:
    shards = ShardSet()
    yield shards
    shards.close()
    assert open_files(tmp_path) == []


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file(
        {"a": np.arange(100, dtype=np.uint8), "b": np.arange(3.0)}, tmp_path / "x.safetensors"
    )
    return tmp_path / "x.safetensors"


def read(shards: ShardSet, name: str, size: int = 7) -> bytes:
    return b"".join(bytes(part) for part in shards.read(name, memoryview(bytearray(size))))


def test_reads_tensors_in_pieces_of_the_buffer(shards: ShardSet, path: Path) -> None:
    shards.add(path)
    assert read(shards, "a") == bytes(range(100))
    assert read(shards, "a", 1) == read(shards, "a", 1000) == bytes(range(100))
    assert read(shards, "b") == np.arange(3.0).tobytes()
    assert max(map(len, shards.read("a", memoryview(bytearray(7))))) == 7


def test_specs_are_in_the_order_of_the_bytes(shards: ShardSet, path: Path) -> None:
    shards.add(path)
    assert list(shards.specs) == ["b", "a"]
    assert shards.specs["a"].shape == (100,)


def test_a_prefix_goes_before_the_names(shards: ShardSet, path: Path) -> None:
    shards.add(path, prefix="vae/")
    assert list(shards.specs) == ["vae/b", "vae/a"]
    assert shards.specs["vae/a"].name == "vae/a"
    assert read(shards, "vae/a") == bytes(range(100))
    assert shards.names_in(path) == {"a", "b"}


def test_takes_only_the_names_that_are_asked_for(shards: ShardSet, path: Path) -> None:
    shards.add(path, names={"a", "c"})
    assert list(shards.specs) == ["a"]


def test_a_tensor_in_two_files_is_an_error(shards: ShardSet, path: Path) -> None:
    other = path.with_name("y.safetensors")
    save_file({"a": np.zeros(1)}, other)
    shards.add(path)
    with pytest.raises(DamagedSource, match=f"tensor 'a' is in both '{path}' and '{other}'"):
        shards.add(other)


def test_a_rename_does_not_swap_the_bytes(shards: ShardSet, path: Path) -> None:
    shards.add(path)
    save_file({"a": np.zeros(100, np.uint8), "b": np.zeros(3)}, path.with_name("y.safetensors"))
    path.with_name("y.safetensors").replace(path)
    assert read(shards, "a") == bytes(range(100))


def test_a_header_that_is_truncated_after_it_was_checked_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"x": np.arange(100)}, path)
    with contextlib.closing(SafetensorsShard(path)) as shard:
        assert len(shard.header()) == path.stat().st_size - 800
        os.truncate(path, 20)
        with pytest.raises(DamagedSource, match="ended at byte 20, in its header of"):
            shard.header()


def test_a_file_that_is_truncated_while_it_is_read_is_an_error(
    shards: ShardSet, path: Path
) -> None:
    shards.add(path)
    parts = shards.read("a", memoryview(bytearray(40)))
    next(parts)
    os.truncate(path, path.stat().st_size - 50)
    assert len(next(parts)) == 10
    with pytest.raises(
        DamagedSource, match="ended at byte .*, in tensor 'a' with 50 bytes missing"
    ):
        next(parts)


def test_a_missing_file_is_an_incomplete_source(shards: ShardSet, tmp_path: Path) -> None:
    with pytest.raises(
        DamagedSource, match=f"weight file '{tmp_path}/none.safetensors' is missing"
    ):
        shards.add(tmp_path / "none.safetensors")


def test_a_dangling_link_is_an_incomplete_source(shards: ShardSet, tmp_path: Path) -> None:
    (tmp_path / "link.safetensors").symlink_to("gone")
    with pytest.raises(DamagedSource, match="is missing"):
        shards.add(tmp_path / "link.safetensors")


def test_links_are_followed(shards: ShardSet, path: Path) -> None:
    link = path.with_name("link.safetensors")
    link.symlink_to(path.name)
    shards.add(link)
    assert read(shards, "a") == bytes(range(100))


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_only_files_are_read(
    shards: ShardSet, tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "x.safetensors")
    with pytest.raises(SourceError, match="is not a regular file"):
        shards.add(tmp_path / "x.safetensors")


def test_a_damaged_header_names_the_file(shards: ShardSet, tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(
        UnsupportedSource, match=f"^'{tmp_path}/x.safetensors': this is not a safetensors file, nor"
    ):
        shards.add(tmp_path / "x.safetensors")


def test_foreign_bytes_after_the_data_are_damage(shards: ShardSet, path: Path) -> None:
    with path.open("ab") as file:
        file.write(bytes(65))
    message = "the header describes 124 bytes, the file has 189"
    with pytest.raises(DamagedSource, match=message) as caught:
        shards.add(path)
    assert caught.value.exit_code == 4


def test_an_unreadable_file_is_not_damaged() -> None:
    with sandbox.common_folder() as folder:
        save_file({"a": np.zeros(1)}, folder / "x.safetensors")
        (folder / "x.safetensors").chmod(0)
        outcome = sandbox.call(lambda: ShardSet().add(folder / "x.safetensors"), unprivileged=True)
    assert outcome == f"SourceError: cannot open '{folder}/x.safetensors': Permission denied"


def test_a_read_error_is_reported_with_offset_and_tensor(shards: ShardSet, path: Path) -> None:
    shards.add(path)
    start = path.stat().st_size - 100
    folder = os.open(path.parent, os.O_RDONLY)
    os.dup2(
        folder, cast("Any", shards._shards[path])._descriptor
    )  # reading a folder fails, as a bad disk does
    os.close(folder)
    with pytest.raises(
        DamagedSource, match=f"cannot read '{path}' at byte {start}, in tensor 'a': Is a directory"
    ):
        read(shards, "a")
