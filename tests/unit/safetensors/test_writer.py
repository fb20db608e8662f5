"""SafetensorsWriter: files written tensor by tensor, complete or not at all."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from blobstore.safetensors import SafetensorError, SafetensorsWriter, safe_open
from blobstore.safetensors.numpy import save
from blobstore.safetensors.torch import save as save_torch

FOUND: dict[str, Any] = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(4, dtype=np.int8),
    "c": np.zeros((0, 2), np.int64),
    "d": np.array([3.5]),
}
KINDS: dict[str, tuple[str, tuple[int, ...]]] = {
    "a": ("F32", (2, 3)),
    "b": ("I8", (4,)),
    "c": ("I64", (0, 2)),
    "d": ("F64", (1,)),
}


@pytest.mark.parametrize("order", ["abcd", "dcba", "bdac"])
def test_any_order_gives_the_bytes_of_save(tmp_path: Path, order: str) -> None:
    with SafetensorsWriter(tmp_path / "a", KINDS, {"x": "y"}) as writer:
        for name in order:
            writer.write(name, FOUND[name])
            assert not (tmp_path / "a").exists()

    assert (tmp_path / "a").read_bytes() == save(FOUND, {"x": "y"})


def test_threads_may_write_at_once(tmp_path: Path) -> None:
    arrays = {f"t{n}": np.full((n, 100), n, np.int32) for n in range(1, 200)}
    kinds = {name: ("I32", array.shape) for name, array in arrays.items()}

    with SafetensorsWriter(tmp_path / "a", kinds) as writer, ThreadPoolExecutor(8) as pool:
        list(pool.map(writer.write, arrays, arrays.values()))

    assert (tmp_path / "a").read_bytes() == save(arrays)


@pytest.mark.parametrize(
    "value",
    [
        FOUND["a"].tobytes(),
        bytearray(FOUND["a"].tobytes()),
        memoryview(FOUND["a"]),
        np.asfortranarray(FOUND["a"]),
        torch.from_numpy(FOUND["a"]),
    ],
    ids=["bytes", "bytearray", "memoryview", "fortran", "torch"],
)
def test_a_tensor_is_an_array_or_its_bytes(tmp_path: Path, value: Any) -> None:
    with SafetensorsWriter(tmp_path / "a", {"a": ("F32", [2, 3])}) as writer:
        writer.write("a", value)

    assert (tmp_path / "a").read_bytes() == save({"a": FOUND["a"]})


def test_bfloat16_of_torch_and_mlx_is_written(tmp_path: Path) -> None:
    mx: Any = pytest.importorskip("mlx.core")
    tensor = torch.arange(4).to(torch.bfloat16)
    kinds = {"a": ("BF16", [4]), "b": ("BF16", [4])}

    with SafetensorsWriter(tmp_path / "a", kinds) as writer:
        writer.write("a", tensor)
        writer.write("b", mx.arange(4).astype(mx.bfloat16))

    assert (tmp_path / "a").read_bytes() == save_torch({"a": tensor, "b": tensor.clone()})


@pytest.mark.parametrize(
    "value",
    [
        b"123",
        FOUND["a"].T,
        FOUND["a"].astype(np.int32),
        FOUND["a"][:1],
        torch.zeros(2, 3, dtype=torch.float16),
    ],
    ids=["bytes", "shape", "type", "size", "torch"],
)
def test_another_tensor_than_declared_is_refused_and_can_be_written_again(
    tmp_path: Path, value: Any
) -> None:
    with SafetensorsWriter(tmp_path / "a", {"a": ("F32", (2, 3))}) as writer:
        with pytest.raises(SafetensorError):
            writer.write("a", value)
        writer.write("a", FOUND["a"])

    assert (tmp_path / "a").read_bytes() == save({"a": FOUND["a"]})


def test_a_file_without_all_tensors_is_not_published(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    writer = SafetensorsWriter(tmp_path / "a", KINDS)
    writer.write("a", FOUND["a"])

    with pytest.raises(SafetensorError, match="tensors not written: 3, 'b', 'c', 'd'; the file"):
        writer.close()

    assert (tmp_path / "a").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


def test_closing_waits_for_a_tensor_that_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = SafetensorsWriter(tmp_path / "a", {"a": ("F32", (2, 3))})
    write, is_writing, may_end = os.pwrite, threading.Event(), threading.Event()

    def slow(*arguments: Any) -> int:
        is_writing.set()
        may_end.wait()
        return write(*arguments)

    monkeypatch.setattr(os, "pwrite", slow)
    with ThreadPoolExecutor(2) as pool:
        written = pool.submit(writer.write, "a", FOUND["a"])
        is_writing.wait()
        closed = pool.submit(writer.close)
        assert not closed.done()
        may_end.set()
        written.result()
        closed.result()

    assert (tmp_path / "a").read_bytes() == save({"a": FOUND["a"]})


def test_nothing_remains_after_an_error(tmp_path: Path) -> None:
    def fail() -> None:
        with SafetensorsWriter(tmp_path / "a", KINDS) as writer:
            writer.write("a", FOUND["a"])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()

    assert os.listdir(tmp_path) == []


def test_unknown_and_repeated_tensors_are_refused(tmp_path: Path) -> None:
    with SafetensorsWriter(tmp_path / "a", {"a": ("F32", (2, 3))}) as writer:
        writer.write("a", FOUND["a"])
        with pytest.raises(SafetensorError, match="has not been declared"):
            writer.write("z", FOUND["a"])
        with pytest.raises(SafetensorError, match="is written twice"):
            writer.write("a", FOUND["a"])
    with pytest.raises(SafetensorError, match="^File is closed$"):
        writer.write("a", FOUND["a"])
    writer.close()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a", ("float32", [1])),
        ("a", ("F32", [-1])),
        ("a", ("F32", [True])),
        ("a", ("F4", [3])),
        ("a", ("F64", [2**63, 2**63])),
        ("__metadata__", ("F32", [1])),
    ],
)
def test_a_declaration_that_no_file_can_have_is_refused(
    tmp_path: Path, name: str, kind: tuple[str, list[int]]
) -> None:
    with pytest.raises(SafetensorError):
        SafetensorsWriter(tmp_path / "a", {name: kind})

    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SafetensorError, match="No such file or directory"):
        SafetensorsWriter(tmp_path / "missing" / "a", KINDS)


class Pipe:
    """A file object that cannot seek, and takes few bytes at once."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: memoryview) -> int:
        self.data += bytes(data[:7])
        return min(7, len(data))


def test_a_file_object_gets_the_bytes_from_its_position_on() -> None:
    file = io.BytesIO(b"before")
    file.seek(0, io.SEEK_END)
    with SafetensorsWriter(file, {"a": ("U8", [3]), "b": ("F32", [2])}, {"x": "y"}) as writer:
        writer.write("a", np.arange(3, dtype=np.uint8))
        writer.write("b", np.ones(2, np.float32))
    tensors: dict[str, Any] = {"a": np.arange(3, dtype=np.uint8), "b": np.ones(2, np.float32)}
    assert file.getvalue() == b"before" + save(tensors, {"x": "y"})
    assert not file.closed


def test_a_file_object_that_cannot_seek_gets_them_in_order() -> None:
    pipe: Any = Pipe()
    with SafetensorsWriter(pipe, {"a": ("U8", [3]), "b": ("F32", [2])}) as writer:
        assert writer.names() == ["b", "a"]
        writer.write("b", np.ones(2, np.float32))
        writer.write("a", bytes(3))
    assert pipe.data == save({"a": np.zeros(3, np.uint8), "b": np.ones(2, np.float32)})
    with (
        pytest.raises(SafetensorError, match=r"in the order of names\(\)"),
        SafetensorsWriter(pipe, {"a": ("U8", [3]), "b": ("F32", [2])}) as writer,
    ):
        writer.write("a", bytes(3))


@pytest.mark.parametrize("way", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_member_of_an_archive_is_written_and_read(tmp_path: Path, way: int) -> None:
    with (
        zipfile.ZipFile(tmp_path / "a.zip", "w", way) as archive,
        archive.open("model.safetensors", "w") as member,
        SafetensorsWriter(member, KINDS) as writer,
    ):
        for name in writer.names():
            writer.write(name, FOUND[name])
    with (
        zipfile.ZipFile(tmp_path / "a.zip") as archive,
        archive.open("model.safetensors") as member,
        safe_open(member, "np") as file,
    ):
        assert {name: file[name].tolist() for name in file} == {
            name: array.tolist() for name, array in FOUND.items()
        }


def test_a_killed_process_leaves_no_file_under_the_name(tmp_path: Path) -> None:
    code = f"""
import os, signal
from blobstore.safetensors import SafetensorsWriter
writer = SafetensorsWriter({str(tmp_path / "a")!r}, {{"a": ("U8", [3]), "b": ("U8", [2])}})
writer.write("b", bytes(2))
os.kill(os.getpid(), signal.SIGKILL)
"""
    result = subprocess.run([sys.executable, "-c", code], check=False)
    assert result.returncode == -signal.SIGKILL
    assert not (tmp_path / "a").exists()
