from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save

from blobstore.core.tensor import DTYPES, DType, TensorSpec
from blobstore.safetensors.header import in_file_order
from tests.support.dtypes import NAMES, ROWS
from tests.support.models import dense_tensors, write_safetensors
from tests.support.safetensors_file import SafetensorsFile
from tests.support.samples import samples

CODES = {name: dtype.value for dtype, name in NAMES.items() if "float8" not in name}
del CODES["bfloat16"]  # the reference library does not write it
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)


def spec_of(name: str, array: np.ndarray) -> TensorSpec:  # type: ignore[type-arg]
    return TensorSpec(name, DTYPES[CODES[array.dtype.name]], array.shape)


def test_the_reference_library_reads_what_is_written(tmp_path: Path) -> None:
    tensors = dense_tensors()
    specs = [spec_of(name, array) for name, array in tensors.items()]
    path = tmp_path / "a.safetensors"
    write_safetensors(path, specs, lambda name: [tensors[name].tobytes()], {"format": "pt"})
    theirs = load_file(path)
    assert set(theirs) == set(tensors)
    for name, array in tensors.items():
        np.testing.assert_array_equal(theirs[name], array)
        assert theirs[name].dtype == array.dtype
    with safetensors.safe_open(path, "numpy") as file:
        assert file.metadata() == {"format": "pt"}


@st.composite
def arrays(draw: st.DrawFn) -> dict[str, np.ndarray]:  # type: ignore[type-arg]
    names = draw(
        st.lists(TEXTS.filter(lambda name: name != "__metadata__"), unique=True, max_size=5)
    )
    found = {}
    for name in names:
        shape = draw(st.lists(st.integers(0, 4), max_size=3).map(tuple))
        dtype = np.dtype(draw(st.sampled_from(list(CODES))))
        size = int(np.prod(shape)) * dtype.itemsize
        data = draw(st.binary(min_size=size, max_size=size))
        found[name] = np.frombuffer(data, dtype).reshape(shape)
    return found


@pytest.mark.slow
@settings(max_examples=samples(100))
@given(arrays(), st.dictionaries(TEXTS, TEXTS, min_size=1, max_size=3))
def test_reads_what_the_reference_library_writes_and_the_other_way_round(
    tmp_path_factory: pytest.TempPathFactory,
    tensors: dict[str, np.ndarray],  # type: ignore[type-arg]
    metadata: dict[str, str],
) -> None:
    folder = tmp_path_factory.getbasetemp()
    theirs, ours = folder / "theirs", folder / "ours"
    theirs.write_bytes(save(tensors, metadata))
    with SafetensorsFile.open(theirs) as file:
        assert file.header.metadata == metadata
        specs = [entry.spec for entry in file.header.tensors.values()]
        assert set(specs) == {spec_of(name, array) for name, array in tensors.items()}
        assert all(bytes(file.view(name).data) == tensors[name].tobytes() for name in tensors)
        write_safetensors(ours, specs, lambda name: [file.view(name).data], metadata)
    assert {
        (name, value["dtype"], tuple(value["shape"]), bytes(value["data"]))
        for name, value in safetensors.deserialize(ours.read_bytes())
    } == {
        (name, CODES[array.dtype.name], array.shape, array.tobytes())
        for name, array in tensors.items()
    }


def test_lays_tensors_out_as_the_reference_library_does(tmp_path: Path) -> None:
    tensors = dense_tensors()
    theirs = tmp_path / "theirs"
    theirs.write_bytes(save(tensors))
    with SafetensorsFile.open(theirs) as file:
        sized = [entry.spec for entry in file.header.tensors.values() if entry.spec.elements]
    ours = in_file_order(spec_of(name, array) for name, array in tensors.items())
    assert [spec for spec in ours if spec.elements] == sized


def test_every_tensor_of_whole_bytes_is_aligned() -> None:
    specs = [TensorSpec(dtype.value, dtype, (5, 8)) for dtype in DType]
    offset = 0
    for spec in in_file_order(specs):
        size = spec.dtype.bits // 8
        if size.bit_count() == 1 and spec.dtype is not DType.BOOL:
            assert offset % size == 0
        offset += spec.nbytes


def test_types_have_the_order_of_the_reference() -> None:
    found = in_file_order(TensorSpec(dtype.value, dtype, (8,)) for dtype in DType)
    assert [spec.name for spec in found] == list(ROWS)[::-1]


def test_the_order_given_does_not_matter() -> None:
    specs = [TensorSpec(f"{dtype.value}{n}", dtype, (8,)) for dtype in DType for n in range(2)]
    assert in_file_order(specs) == in_file_order(specs[::-1])
