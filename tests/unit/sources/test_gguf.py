"""What a GGUF file is besides its tensors: the bytes around them, and the parts of a split one."""

from __future__ import annotations

import contextlib
import os
import struct
from pathlib import Path

import pytest

from blobstore.errors import DamagedSource, UnsupportedSource
from blobstore.manifests.source_record import Gap
from blobstore.sources.gguf import GgufShard, check_complete
from tests.support.gguf_files import U32, Tensor, gguf_file, gguf_header

WIDE = 1 << 20
BLOCKS: Tensor = ("blocks", 8, [32], bytes(34))


def opened(folder: Path, data: bytes, name: str = "x.gguf") -> GgufShard:
    (folder / name).write_bytes(data)
    return GgufShard(folder / name)


def padded(folder: Path, count: int, padding: bytes) -> GgufShard:
    """Open a file of tensors of 3 bytes, each at a multiple of 1 MiB; ``padding`` follows each of them."""
    values = [("general.alignment", U32, struct.pack("<I", WIDE))]
    tensors = [(f"t{number}", 24, (3,), 3) for number in range(count)]
    start = gguf_header(values, tensors, alignment=WIDE)
    with (folder / "wide.gguf").open("wb") as file:
        file.write(start)
        for number in range(count):
            file.seek(len(start) + number * WIDE)
            file.write(b"abc" + padding)
        file.truncate(len(start) + count * WIDE)
    return GgufShard(folder / "wide.gguf")


def test_zeros_between_tensors_are_not_kept_and_all_behind_the_last_one_are(
    tmp_path: Path,
) -> None:
    tensors: list[Tensor] = [("a", 24, [3], b"abc"), ("b", 24, [32], b"b" * 32)]
    data = gguf_file([], tensors)
    with contextlib.closing(opened(tmp_path, data)) as shard:
        assert shard.gaps == ()
    with contextlib.closing(opened(tmp_path, data + bytes(5))) as shard:
        assert shard.gaps == (Gap(len(data), bytes(5)),)
    at = data.index(b"abc") + 3
    changed = data[:at] + b"p" + data[at + 1 :]
    with contextlib.closing(opened(tmp_path, changed)) as shard:
        assert shard.gaps == (Gap(at, b"p" + bytes(28)),)


def test_a_tail_that_cannot_be_kept_is_refused_before_it_is_read(tmp_path: Path) -> None:
    data = gguf_file([], [BLOCKS])
    end = len(data) - 30  # the last tensor's padding is a part of the tail
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    os.truncate(path, end + (16 << 20))
    with contextlib.closing(GgufShard(path)) as shard:
        assert [len(gap.data) for gap in shard.gaps] == [16 << 20]
    os.truncate(path, end + (64 << 20))
    with pytest.raises(UnsupportedSource, match=f"bytes follow the last tensor at byte {end}"):
        GgufShard(path)


def test_what_is_kept_between_tensors_has_a_limit_together(tmp_path: Path) -> None:
    with contextlib.closing(padded(tmp_path, 16, b"p")) as shard:
        assert len(shard.gaps) == 16
    with contextlib.closing(padded(tmp_path, 40, b"")) as shard:
        assert len(shard.gaps) == 1  # zeros, but for the end of the file
    with pytest.raises(UnsupportedSource, match="more than 16 MiB between its tensors"):
        padded(tmp_path, 18, b"p")


def test_only_quantized_tensors_are_blocks(tmp_path: Path) -> None:
    tensors: list[Tensor] = [BLOCKS, ("plain", 0, [1], bytes(4)), ("other", 99, [1], bytes(32))]
    with contextlib.closing(opened(tmp_path, gguf_file([], tensors))) as shard:
        assert [*shard.block_types()] == [("blocks", "Q8_0")]


def part(folder: Path, number: int, count: int, total: int | None, *names: str) -> GgufShard:
    """Open a part of a split file, which has tensors of these names."""
    values = [("split.no", U32, number), ("split.count", U32, count)]
    values += [] if total is None else [("split.tensors.count", U32, total)]
    packed = [(key, kind, struct.pack("<I", value)) for key, kind, value in values]
    tensors: list[Tensor] = [(name, 24, [1], b"x") for name in names]
    return opened(folder, gguf_file(packed, tensors), f"{number}-{'-'.join(names)}.gguf")


def test_the_parts_of_a_split_file_are_all_there_once(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:

        def made(number: int, total: int | None, *names: str, count: int = 2) -> GgufShard:
            shard = part(tmp_path, number, count, total, *names)
            return stack.enter_context(contextlib.closing(shard))

        first, second = made(0, 3, "a"), made(1, 3, "b", "c")
        check_complete([first, second])
        check_complete([made(0, None, name, count=1) for name in "fg"])  # two complete files
        check_complete([made(0, None, "d"), made(1, None, "e")])  # without a number of tensors
        for shards in ([first], [first, made(0, 3, "x")], [first, second, made(1, 3, "x")]):
            with pytest.raises(DamagedSource, match="is one of 2 parts of a model"):
                check_complete(shards)
        with pytest.raises(DamagedSource, match="2 parts have 3 tensors, and they have 2"):
            check_complete([first, made(1, 3, "x")])
