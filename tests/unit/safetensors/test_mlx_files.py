"""Files of MLX arrays, saved by value, in all types of MLX."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from blobstore.core.tensor import DType, TensorSpec
from blobstore.safetensors import SafetensorError, safe_open
from blobstore.safetensors.header import encode_file_header
from tests.support.dtypes import without_newer_types

mx: Any = pytest.importorskip("mlx.core")
reference: Any = pytest.importorskip("safetensors.mlx")

from blobstore.safetensors.mlx import load, load_file, save, save_file  # noqa: E402

BACKENDS = ["mmap", "pread"]
DTYPES = [
    "bool_",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "complex64",
]


def array(dtype: str = "float32") -> Any:
    return mx.arange(12).astype(getattr(mx, dtype)).reshape(3, 4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_type_comes_back(tmp_path: Path, dtype: str, backend: str) -> None:
    before = array(dtype)
    save_file({"a": before}, tmp_path / "a", {"x": "y"})

    data = memoryview(save({"a": before}))
    for after in load_file(tmp_path / "a", backend=backend)["a"], load(data)["a"]:
        assert after.dtype == before.dtype
        assert mx.array_equal(after, before)
    with safe_open(tmp_path / "a", "mlx", backend=backend) as file:
        assert mx.array_equal(file.get_slice("a")[1:, ::-2], before[1:, ::-2])
        assert file.metadata() == {"x": "y"}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [DType.F4, DType.F6_E2M3, DType.F6_E3M2])
def test_types_that_mlx_lacks_are_refused_by_its_name(
    tmp_path: Path, dtype: DType, backend: str
) -> None:
    spec = TensorSpec("a", dtype, (4,))
    (tmp_path / "a").write_bytes(encode_file_header([spec], None) + bytes(spec.nbytes))
    file = safe_open(tmp_path / "a", "mlx", backend=backend)

    for read in (
        lambda: file.get_tensor("a"),
        lambda: file.get_slice("a")[2:],
        lambda: file.prefetch().take("a"),
        lambda: load_file(tmp_path / "a", backend=backend),
        lambda: load((tmp_path / "a").read_bytes()),
    ):
        with pytest.raises(SafetensorError, match=f"^tensor 'a': MLX has no packed {dtype.value}$"):
            read()


@pytest.mark.parametrize("value", [1, 2.5, [[1, 2], [3, 4]]])
def test_what_numpy_takes_for_an_array_is_saved_as_the_reference_does(value: Any) -> None:
    assert save({"a": value}) == reference.save({"a": value})


@pytest.mark.parametrize("tensors", [[1], {"a": "x"}, {1: array()}], ids=str)
def test_other_values_are_errors_of_the_reference(tensors: Any) -> None:
    with pytest.raises(Exception) as theirs:  # noqa: PT011 - whatever it is
        reference.save(tensors)

    with pytest.raises(Exception) as ours:  # noqa: PT011 - as above
        save(tensors)

    assert type(ours.value).__name__ == type(theirs.value).__name__
    assert without_newer_types(str(ours.value)) == without_newer_types(str(theirs.value))


def test_doubles_stay_doubles(tmp_path: Path) -> None:
    with mx.stream(mx.cpu):
        found = load(save({"a": mx.array([0.1], dtype=mx.float64)}))["a"]

    assert found.dtype == mx.float64


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lazily_transposed_arrays_are_saved_by_value(dtype: str) -> None:
    before = array(dtype).T

    assert mx.array_equal(load(save({"a": before}))["a"], before)
    assert mx.array_equal(load(save({"a": before[::-1]}))["a"], before[::-1])


def test_files_of_mlx_itself_are_read(tmp_path: Path) -> None:
    before = {"a": array().T, "b": array("bfloat16"), "c": array("uint8")[0, :3]}
    mx.save_safetensors(str(tmp_path / "a.safetensors"), before)

    after = load_file(tmp_path / "a.safetensors")

    assert all(mx.array_equal(after[name], before[name]) for name in before)
    assert safe_open(tmp_path / "a.safetensors", "mlx").metadata() is None


def test_the_bytes_are_those_of_the_reference() -> None:
    arrays = {dtype: array(dtype) for dtype in DTYPES if dtype != "bfloat16"}

    assert save(arrays, {"x": "y"}) == reference.save(arrays, {"x": "y"})
