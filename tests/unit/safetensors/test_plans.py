"""Prefetching parts of files: the values of any plan, and how few bytes are read for it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blobstore.safetensors import SafetensorError, prefetch, safe_open
from blobstore.safetensors.numpy import save, save_file
from blobstore.safetensors.reader import FileReader
from blobstore.safetensors.sources import StreamSource

FRAMEWORKS = ["np", "pt", "mlx"]
OPENED = ["mmap", "pread"]
TENSORS: dict[str, Any] = {
    "large": np.arange(3 << 20, dtype=np.float32).reshape(768, 4096),
    "cube": np.arange(2 * 3 * 5, dtype=np.int16).reshape(2, 3, 5),
    "scalar": np.array(3.5, np.float32),
    "empty": np.zeros((0, 3), np.float32),
    **{f"small.{number}": np.full(7, number, np.uint8) for number in range(40)},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("plans") / "a.safetensors"
    save_file(TENSORS, found)
    return found


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("backend", OPENED)
def test_a_file_without_a_plan_is_loaded_completely(
    path: Path, framework: str, backend: str
) -> None:
    with (
        safe_open(path, framework, backend=backend) as file,
        file.prefetch(threads=3) as loader,
    ):
        found = dict(loader)
    assert found.keys() == TENSORS.keys()
    for name, tensor in found.items():
        assert type(tensor) is {"np": np.ndarray, "pt": torch.Tensor, "mlx": mx.array}[framework]
        assert np.array_equal(np.asarray(tensor), TENSORS[name])


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("backend", OPENED)
def test_a_plan_has_parts_in_any_dimension(path: Path, framework: str, backend: str) -> None:
    plan: dict[str, Any] = {
        "large": (slice(None), slice(1024, 2048)),
        "cube": (1, ..., slice(None, None, -2)),
        "scalar": None,
        "empty": slice(2),
        "small.3": slice(2, 5),
        "small.4": slice(7, 7),
    }
    with safe_open(path, framework, backend=backend) as file:
        loader = file.prefetch(plan)
    found = dict(loader)  # the file may be closed
    assert found.keys() == plan.keys()
    for name, tensor in found.items():
        expected = TENSORS[name] if plan[name] is None else TENSORS[name][plan[name]]
        assert np.array_equal(np.asarray(tensor), expected)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"absent": None}, "File does not contain tensor absent"),
        ({"cube": 5}, "index 5 out of bounds"),
        ({"cube": "x"}, "Unsupported slice index"),
        ({"scalar": slice(0, 1)}, "more slicing indexes than dimensions"),
    ],
)
def test_plans_that_cannot_be_met_are_refused(path: Path, plan: Any, message: str) -> None:
    with safe_open(path, "np") as file, pytest.raises(SafetensorError, match=message):
        file.prefetch(plan)


@pytest.mark.parametrize("plan", [["cube"], "cube"])
def test_a_plan_is_a_map(path: Path, plan: Any) -> None:
    with safe_open(path, "np") as file, pytest.raises(TypeError, match="argument 'plan'"):
        file.prefetch(plan)


def test_a_file_may_have_several_loaders(path: Path) -> None:
    with safe_open(path, "np") as file:
        one, other = file.prefetch({"cube": None}), file.prefetch({"cube": 1, "scalar": None})
    assert one.names() == ["cube"]
    assert dict(other)["cube"].tolist() == TENSORS["cube"][1].tolist()
    assert one.take("cube").tolist() == TENSORS["cube"].tolist()


def test_a_tensor_that_a_framework_cannot_hold_fails_alone(tmp_path: Path) -> None:
    path = tmp_path / "f6.safetensors"
    entries = {
        "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "odd": {"dtype": "F6_E3M2", "shape": [4], "data_offsets": [8, 11]},
        "z": {"dtype": "U8", "shape": [5], "data_offsets": [11, 16]},
    }
    header = json.dumps(entries).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with safe_open(path, "pt") as file, file.prefetch() as loader:
        assert loader.take("a").tolist() == [0, 0]
        assert loader.take("z").tolist() == [0] * 5
        with pytest.raises(SafetensorError, match="F6_E3M2"):
            loader.take("odd")


def test_a_shape_larger_than_memory_fails_where_it_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "wide.safetensors"
    entry = {"dtype": "U8", "shape": [0, 2**63], "data_offsets": [0, 0]}
    header = json.dumps({"a": entry}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with safe_open(path, "np") as file:
        loader = file.prefetch({"a": slice(None)})
        with pytest.raises(SafetensorError, match="a"):
            loader.take("a")


def test_devices_are_those_of_the_framework(path: Path) -> None:
    with safe_open(path, "np") as file, pytest.raises(SafetensorError, match="cuda:0"):
        file.prefetch(device="cuda")
    with safe_open(path, "pt") as file, file.prefetch({"cube": None}, device="cpu") as loader:
        assert loader.take("cube").device.type == "cpu"


def test_several_files_are_loaded_as_one(path: Path, tmp_path: Path) -> None:
    save_file({"other": np.arange(3)}, tmp_path / "b.safetensors")
    with safe_open(path, "np") as one, safe_open(tmp_path / "b.safetensors", "np") as two:
        found = dict(prefetch([one, two], {"cube": None, "other": slice(1, None)}))
        assert found["other"].tolist() == [1, 2]
        assert found["cube"].tolist() == TENSORS["cube"].tolist()
        with pytest.raises(SafetensorError, match="'cube' is in two files"):
            prefetch([one, one], {"cube": None})


class Counting(StreamSource):
    """Records which bytes are read."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.reads: list[tuple[int, int]] = []

    def read_into(self, memory: memoryview, offset: int) -> None:
        self.reads.append((offset, len(memory)))
        super().read_into(memory, offset)


def counted(path: Path, plan: Any) -> list[int]:
    """Return how many bytes each request for a plan has."""
    with path.open("rb") as stream, safe_open(stream, "np") as file:
        reader = file._tensors._reader
        assert isinstance(reader, FileReader)
        source = reader._source = Counting(stream)
        list(file.prefetch(plan))
    return [count for _, count in source.reads]


def test_only_the_bytes_of_the_plan_are_read(path: Path) -> None:
    assert counted(path, {"large": slice(10, 20)}) == [10 * 4096 * 4]
    assert counted(path, {"large": (slice(3), slice(2))}) == [8, 8, 8]
    assert counted(path, {"large": slice(0, 0), "empty": None}) == []


def test_small_neighbours_are_read_together_and_large_tensors_in_parts(path: Path) -> None:
    assert counted(path, {f"small.{number}": None for number in range(40)}) == [7 * 40]
    assert counted(path, {"large": None}) == [4 << 20] * 3


@pytest.mark.slow
@given(st.data())
def test_any_part_of_any_tensor_has_the_values_of_numpy(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 5), max_size=3))
    kind = data.draw(st.sampled_from([np.uint8, np.float32, ml_dtypes.bfloat16]))
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(kind)
    bounds = st.none() | st.integers(-6, 6)
    steps = st.none() | st.integers(-3, 3).filter(bool)
    index = tuple(data.draw(st.builds(slice, bounds, bounds, steps)) for _ in shape)
    with safe_open(save({"a": array}), "np") as file:
        found = file.prefetch({"a": index}).take("a")
    assert np.array_equal(found, array[index])


def test_packed_values_are_selected(tmp_path: Path) -> None:
    values = np.arange(16).astype(ml_dtypes.float4_e2m1fn).reshape(4, 4)
    with safe_open(save({"a": values}), "np") as file:
        found = file.prefetch({"a": (slice(1, 3), slice(1, 2))}).take("a")
    assert np.array_equal(found.view(np.uint8), values[1:3, 1:2].view(np.uint8))


@pytest.mark.slow
def test_maps_that_are_loaded_ask_for_large_pages(tmp_path: Path) -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("the system has no large pages")
    path = tmp_path / "large.safetensors"
    save_file({"a": np.zeros(4 << 20, np.uint8)}, path)

    def flags() -> list[str]:
        text = Path("/proc/self/smaps").read_text()
        return re.findall(rf"{re.escape(str(path))}\n(?:.*\n)*?VmFlags: (.*)\n", text)

    with safe_open(path, "numpy") as file:
        assert flags()
        assert not any("hg" in each.split() for each in flags())
        with file.prefetch() as loader:
            loader.take("a")
            assert any("hg" in each.split() for each in flags())
