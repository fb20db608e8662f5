"""Slices: those of numpy, for every index; and which bytes are read for them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as nst

from blobstore.core.tensor import DType, TensorSpec
from blobstore.safetensors import SafetensorError, safe_open
from blobstore.safetensors.header import encode_file_header
from blobstore.safetensors.numpy import save, save_file
from blobstore.safetensors.slices import select
from tests.support.samples import samples

ARRAY = np.arange(50, dtype=np.int32).reshape(10, 5)
BACKENDS = ["mmap", "pread"]


@pytest.fixture(params=BACKENDS)
def part(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    save_file({"a": ARRAY}, tmp_path / "a")
    return safe_open(tmp_path / "a", "np", backend=request.param).get_slice("a")


@pytest.mark.slow
@settings(max_examples=samples(500), deadline=None)
@given(st.data())
def test_any_index_selects_what_numpy_selects(data: st.DataObject) -> None:
    shape = data.draw(nst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=6))
    index = data.draw(nst.basic_indices(shape, allow_newaxis=False, allow_ellipsis=True))
    array = np.arange(np.prod(shape, dtype=int), dtype=np.uint16).reshape(shape)

    selection = select(shape, index)

    expected = array[index]
    assert selection.shape == np.shape(expected)
    assert np.array_equal(array[selection.array_index], expected)


@pytest.mark.slow
@settings(max_examples=samples(300), deadline=None)
@given(st.data())
def test_a_file_is_sliced_as_numpy_slices_an_array(data: st.DataObject) -> None:
    sides = data.draw(nst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
    width = data.draw(st.sampled_from([1, 3000]))  # near and far elements
    shape = (*sides, width)
    index = data.draw(nst.basic_indices(shape, allow_newaxis=False, allow_ellipsis=True))
    array = np.random.default_rng(1).integers(0, 99, shape, np.int16)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a"
        path.write_bytes(save({"a": array}))
        for backend in BACKENDS:
            with safe_open(path, "np", backend=backend) as file:
                found = file.get_slice("a")[index]
                assert np.array_equal(found, array[index])
                assert found.shape == np.shape(array[index])


@pytest.mark.slow
@pytest.mark.parametrize(
    "index",
    [
        np.s_[-3:],
        np.s_[:-3],
        np.s_[3:2],
        np.s_[:100],
        np.s_[10:],
        np.s_[::-1],
        np.s_[::-2, ::-3],
        np.s_[..., 1],
        np.s_[2, ...],
        np.s_[-1],
        np.s_[()],
        np.s_[1, 2],
        np.s_[np.int64(3)],
    ],
    ids=repr,
)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("framework", ["np", "pt", "mlx"])
def test_python_semantics_hold_where_the_reference_fails(
    tmp_path: Path, framework: str, backend: str, index: Any
) -> None:
    save_file({"a": ARRAY}, tmp_path / "a")

    found = safe_open(tmp_path / "a", framework, backend=backend).get_slice("a")[index]

    assert found.tolist() == ARRAY[index].tolist()
    assert found.shape == ARRAY[index].shape


@pytest.mark.parametrize(
    "index",
    [np.s_[::2], ..., np.s_[2:2], 1, -1, (1, 2), (), np.s_[3:7:3, 1:], [], np.s_[..., 1, :]],
    ids=repr,
)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("framework", ["np", "pt", "mlx"])
def test_slices_are_those_of_the_reference(
    tmp_path: Path, framework: str, backend: str, index: Any
) -> None:
    save_file({"a": ARRAY}, tmp_path / "a")
    theirs = safetensors.safe_open(tmp_path / "a", framework, backend=backend)

    found = safe_open(tmp_path / "a", framework, backend=backend).get_slice("a")[index]

    expected = theirs.get_slice("a")[index]
    assert type(found) is type(expected)
    assert found.shape == expected.shape
    assert found.tolist() == expected.tolist()


TORCH_INDEXES = [
    [0, 1],
    None,
    np.array([1]),
    torch.tensor([3, -1]),
    torch.arange(10) > 4,
    np.s_[:, [0, 2]],
    np.s_[:, None],
    (..., ...),
    range(2),
]


@pytest.mark.parametrize("index", TORCH_INDEXES, ids=repr)
def test_torch_takes_any_index_of_its_own_on_a_map(tmp_path: Path, index: Any) -> None:
    save_file({"a": ARRAY}, tmp_path / "a")
    theirs = safetensors.safe_open(tmp_path / "a", "pt").get_slice("a")

    found = safe_open(tmp_path / "a", "pt").get_slice("a")[index]

    assert torch.equal(found, theirs[index])
    with pytest.raises(SafetensorError):
        _ = safe_open(tmp_path / "a", "pt", backend="pread").get_slice("a")[index]


@pytest.mark.parametrize(
    "index", [10, -11, (0, 0, 0), 1.0, "a", {}, 2**31, 2**63, np.s_[::0], np.s_["a":]], ids=repr
)
def test_errors_of_other_indexes_on_a_map_are_those_of_torch(tmp_path: Path, index: Any) -> None:
    save_file({"a": ARRAY}, tmp_path / "a")
    with pytest.raises(Exception) as theirs:  # noqa: PT011 - whatever it is
        _ = safetensors.safe_open(tmp_path / "a", "pt").get_slice("a")[index]

    with pytest.raises(type(theirs.value)) as ours:
        _ = safe_open(tmp_path / "a", "pt").get_slice("a")[index]

    assert str(ours.value) == str(theirs.value)


def test_an_element_is_an_array_without_dimensions(part: Any) -> None:
    found = part[1, 2]

    assert isinstance(found, np.ndarray)
    assert found.shape == ()


def test_an_empty_list_selects_nothing(part: Any) -> None:
    assert part[[]].shape == (0, 5)


def test_a_bool_is_an_integer(part: Any) -> None:
    assert np.array_equal(part[True], ARRAY[1])


@pytest.mark.parametrize(
    "index",
    ["a", None, 1.0, [0, 1], (..., ...), (1, 2, 3), 10, -11, (0, 5), (0, -6), np.array([1, 2])],
    ids=repr,
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_other_indexes_are_the_errors_of_the_reference(
    tmp_path: Path, index: Any, backend: str
) -> None:
    save_file({"a": ARRAY}, tmp_path / "a")
    with pytest.raises(safetensors.SafetensorError) as theirs:
        _ = safetensors.safe_open(tmp_path / "a", "np").get_slice("a")[index]

    with pytest.raises(SafetensorError) as ours:
        _ = safe_open(tmp_path / "a", "np", backend=backend).get_slice("a")[index]

    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("index", [np.s_[::0], np.s_["a":], np.s_[:1.5], 2**31], ids=repr)
def test_a_slice_that_makes_no_sense_is_an_error(part: Any, tmp_path: Path, index: Any) -> None:
    with pytest.raises(Exception) as theirs:  # noqa: PT011 - whatever it is
        _ = safetensors.safe_open(tmp_path / "a", "np").get_slice("a")[index]

    with pytest.raises(Exception) as ours:  # noqa: PT011 - as above
        _ = part[index]

    assert type(ours.value).__name__ == type(theirs.value).__name__


def test_shape_and_type_are_those_of_the_header(part: Any) -> None:
    assert part.get_shape() == [10, 5]
    assert part.get_dtype() == "I32"


def test_a_slice_of_nothing_is_empty(tmp_path: Path) -> None:
    save_file({"a": np.zeros((0, 3)), "b": np.zeros((2, 0))}, tmp_path / "a")

    for backend in BACKENDS:
        with safe_open(tmp_path / "a", "np", backend=backend) as file:
            assert file.get_slice("a")[:].shape == (0, 3)
            assert file.get_slice("b")[1:].shape == (1, 0)


@pytest.mark.parametrize(
    ("index", "most"),
    [
        (np.s_[7], 4000),
        (np.s_[100:102], 8000),
        (np.s_[::500], 2 * 4000),
        (np.s_[3, 10:20], 40),
        (np.s_[-1, -1], 4),
        (np.s_[5, ::-1], 4000),
        (np.s_[::-999, 3:5], 2 * 8),
        (np.s_[3:3], 0),
    ],
    ids=repr,
)
def test_a_slice_reads_the_bytes_that_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: Any, most: int
) -> None:
    array = np.arange(1_000_000, dtype=np.int32).reshape(1000, 1000)
    save_file({"a": array}, tmp_path / "a")
    file = safe_open(tmp_path / "a", "np", backend="pread")
    sizes = []
    read = os.preadv

    def counted(descriptor: int, buffers: Any, offset: int) -> int:
        sizes.append(read(descriptor, buffers, offset))
        return sizes[-1]

    monkeypatch.setattr(os, "preadv", counted)

    found = file.get_slice("a")[index]

    assert sum(sizes) == most
    assert np.array_equal(found, array[index])


def test_rows_that_are_near_are_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = np.arange(30_000, dtype=np.int32).reshape(10_000, 3)
    save_file({"a": array}, tmp_path / "a")
    file = safe_open(tmp_path / "a", "np", backend="pread")
    reads = []
    read = os.preadv

    def counted(descriptor: int, buffers: Any, offset: int) -> int:
        reads.append(offset)
        return read(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)

    assert np.array_equal(file.get_slice("a")[:, 1], array[:, 1])
    assert len(reads) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_slice_stays_valid_when_the_file_is_closed(tmp_path: Path, backend: str) -> None:
    save_file({"a": ARRAY}, tmp_path / "a")
    with safe_open(tmp_path / "a", "np", backend=backend) as file:
        part = file.get_slice("a")

    assert np.array_equal(part[1:3], ARRAY[1:3])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_shape_that_numpy_cannot_hold_is_an_error(tmp_path: Path, backend: str) -> None:
    specs = [TensorSpec("a", DType.U8, (1,) * 100), TensorSpec("b", DType.U8, (0, 2**62, 2))]
    (tmp_path / "a").write_bytes(encode_file_header(specs, None) + b"x")

    with safe_open(tmp_path / "a", "np", backend=backend) as file:
        for name in file:
            with pytest.raises(SafetensorError):
                file.get_tensor(name)
            with pytest.raises(SafetensorError):
                _ = file.get_slice(name)[...]
