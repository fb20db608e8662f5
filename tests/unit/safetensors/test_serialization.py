"""serialize, serialize_file and deserialize: the reference's bytes, errors and files."""

from __future__ import annotations

import errno
import math
import os
import stat
import threading
import tracemalloc
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blobstore.core import files, system
from blobstore.core.tensor import DTYPES_BY_LIBRARY_NAME
from blobstore.errors import BlobstoreError, InvalidHeader
from blobstore.safetensors import (
    SafetensorError,
    SafetensorsWriter,
    TensorSpec,
    deserialize,
    header,
    safe_open,
    serialization,
    serialize,
    serialize_file,
)
from blobstore.safetensors.numpy import load, save, save_file
from tests.support.dtypes import IN_REFERENCE, without_newer_types
from tests.support.samples import samples

LIBRARY_NAMES = [dtype.library_name for dtype in IN_REFERENCE if dtype.library_name]
ARRAY = np.arange(6, dtype=np.float32).reshape(2, 3)


def arguments(array: np.ndarray[Any, Any], dtype: str | None = None) -> dict[str, Any]:
    return {
        "dtype": dtype or array.dtype.name,
        "shape": list(array.shape),
        "data_ptr": array.ctypes.data,
        "data_len": array.nbytes,
    }


def spec(array: np.ndarray[Any, Any], dtype: str | None = None) -> TensorSpec:
    return TensorSpec(**arguments(array, dtype))


def itemsize(dtype: str) -> int:
    return 1 if dtype == "float4_e2m1fn_x2" else DTYPES_BY_LIBRARY_NAME[dtype].bits // 8


# The bytes


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=20).filter(
    lambda name: name != "__metadata__"
)
tensors = st.dictionaries(
    names,
    st.tuples(st.sampled_from(LIBRARY_NAMES), st.lists(st.integers(0, 4), max_size=4)),
    max_size=8,
)
few_facts = st.one_of(st.none(), st.dictionaries(names, names, min_size=1, max_size=1))


@pytest.mark.slow
@settings(max_examples=samples(2000), deadline=None)
@given(tensors, few_facts)
def test_the_bytes_are_those_of_the_reference(
    found: dict[str, tuple[str, list[int]]], metadata: dict[str, str] | None
) -> None:
    given_bytes, ours, theirs = [], {}, {}
    for name, (dtype, dims) in found.items():
        is_half_a_byte = dtype == "float4_e2m1fn_x2" and not dims
        shape = [1] if is_half_a_byte else dims
        size = math.prod(shape) * itemsize(dtype)
        data = np.frombuffer(os.urandom(size + 1), np.uint8)[:size]
        given_bytes.append(data)
        fields = {**arguments(data, dtype), "shape": shape}
        ours[name], theirs[name] = TensorSpec(**fields), safetensors.TensorSpec(**fields)

    written = serialize(ours, metadata)

    assert written == safetensors.serialize(theirs, metadata)
    assert {name: bytes(entry["data"]) for name, entry in deserialize(written)} == {
        name: data.tobytes() for name, data in zip(found, given_bytes, strict=True)
    }


@pytest.mark.slow
@given(st.dictionaries(names, names, min_size=2, max_size=5), st.randoms())
def test_equal_metadata_gives_equal_bytes_in_any_order(facts: dict[str, str], random: Any) -> None:
    items = list(facts.items())
    random.shuffle(items)

    assert serialize({}, dict(items)) == serialize({}, facts)


def test_metadata_is_sorted() -> None:
    assert b'{"__metadata__":{"a":"1","b":"2"}}' in serialize({}, {"b": "2", "a": "1"})


def test_writes_no_tensors_as_the_reference_does() -> None:
    assert serialize({}) == safetensors.serialize({}) == b"\x08" + bytes(7) + b"{}      "


def test_writes_the_bytes_of_the_format() -> None:
    text = b'{"test":{"dtype":"I32","shape":[2,2],"data_offsets":[0,16]}}    '

    assert serialize({"test": spec(np.zeros((2, 2), np.int32))}) == b"".join(
        [b"\x40", bytes(7), text, bytes(16)]
    )


def test_every_character_is_written_as_the_reference_writes_it() -> None:
    characters = "".join(map(chr, [*range(0x250), 0x2028, 0xFEFF, 0xFFFD, 0x1F600]))
    array = np.zeros(1, np.uint8)
    fields = arguments(array)
    name, facts = f"__metadata__{characters}", {characters: characters}

    written = serialize({name: spec(array)}, facts)

    assert written == safetensors.serialize({name: safetensors.TensorSpec(**fields)}, facts)
    assert safe_open(written, "np").keys() == [name]


def test_empty_metadata_without_tensors_is_readable(tmp_path: Path) -> None:
    path = tmp_path / "empty.safetensors"
    serialize_file({}, path, metadata={})

    with safe_open(path, "np") as file:
        assert file.metadata() == {}
        assert file.keys() == []
    assert deserialize(path.read_bytes()) == []


def test_a_tensor_of_the_name_of_the_metadata_is_refused() -> None:
    with pytest.raises(SafetensorError, match="cannot have the name '__metadata__'"):
        serialize({"__metadata__": spec(ARRAY)})
    with pytest.raises(SafetensorError, match="__metadata__"):
        save({"__metadata__": ARRAY})


def test_a_header_over_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header, "MAX_HEADER_SIZE", 1024)
    size = 1024 - len('{"__metadata__":{"a":""}}')

    assert len(serialize({}, {"a": "x" * size})) == 8 + 1024
    with pytest.raises(InvalidHeader, match="Error while serializing: header too large"):
        serialize({}, {"a": "x" * (size + 1)})


# TensorSpec


def test_a_spec_describes_itself_as_the_reference_does() -> None:
    fields: Any = {"dtype": "float4_e2m1fn_x2", "shape": (2, 3), "data_ptr": 5, "data_len": 6}
    ours, theirs = TensorSpec(**fields), safetensors.TensorSpec(**fields)

    assert repr(ours) == repr(theirs)
    for name in ("dtype", "shape", "data_ptr", "data_len"):
        assert getattr(ours, name) == getattr(theirs, name)


def test_a_spec_cannot_be_changed() -> None:
    for name in "dtype", "shape", "data_ptr", "data_len", "other":
        with pytest.raises(AttributeError):
            setattr(spec(ARRAY), name, 1)


def test_specs_are_compared_by_identity() -> None:
    assert spec(ARRAY) != spec(ARRAY)


@pytest.mark.parametrize(
    "shape", [(2, 3), np.array([2, 3]), torch.Size([2, 3]), [True, np.int8(6)]]
)
def test_a_shape_is_any_sequence_of_integers(shape: Any) -> None:
    fields = arguments(ARRAY) | {"shape": shape}

    assert TensorSpec(**fields).shape == safetensors.TensorSpec(**fields).shape


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": 3},
        {"dtype": None},
        {"shape": 3},
        {"shape": None},
        {"shape": "12"},
        {"shape": [1.5]},
        {"shape": [2**64]},
        {"data_ptr": 1.5},
        {"data_ptr": 2**64},
        {"data_len": "4"},
        {"data_len": 2**64},
        {"more": 1},
    ],
    ids=str,
)
def test_wrong_fields_are_errors_as_in_the_reference(fields: dict[str, Any]) -> None:
    with pytest.raises((TypeError, OverflowError)) as theirs:
        safetensors.TensorSpec(**arguments(ARRAY) | fields)

    with pytest.raises(theirs.type):
        TensorSpec(**arguments(ARRAY) | fields)


def test_a_spec_takes_keywords_alone() -> None:
    with pytest.raises(TypeError, match="positional"):
        TensorSpec("float32", [1], 0, 4)  # type: ignore[misc]


@pytest.mark.parametrize("dtype", ["F32", "foo", "str32", "complex128"])
def test_an_unknown_type_is_an_error_that_lists_the_known_ones(dtype: str) -> None:
    fields: Any = {"shape": [1], "data_ptr": 0, "data_len": 4}
    with pytest.raises(safetensors.SafetensorError) as theirs:
        safetensors.TensorSpec(dtype=dtype, **fields)

    with pytest.raises(SafetensorError) as ours:
        TensorSpec(dtype=dtype, **fields)

    assert without_newer_types(str(ours.value)) == without_newer_types(str(theirs.value))


@pytest.mark.parametrize("field", ["shape", "data_ptr", "data_len"])
def test_negative_numbers_overflow(field: str) -> None:
    fields = arguments(ARRAY) | {field: [-1] if field == "shape" else -1}

    with pytest.raises(OverflowError, match="can't convert negative int to unsigned"):
        TensorSpec(**fields)


def test_a_length_that_differs_from_the_shape_is_refused() -> None:
    short = TensorSpec(**arguments(ARRAY) | {"data_len": 4})

    with pytest.raises(SafetensorError, match="invalid shape, data type, or offset for tensor"):
        serialize({"a": short})


def test_no_memory_is_read_at_address_zero() -> None:
    with pytest.raises(SafetensorError, match="at address 0"):
        serialize({"a": TensorSpec(dtype="float32", shape=[1], data_ptr=0, data_len=4)})


def test_half_a_byte_is_refused() -> None:
    values = TensorSpec(dtype="float4_e2m1fn_x2", shape=[], data_ptr=ARRAY.ctypes.data, data_len=0)

    with pytest.raises(SafetensorError):
        serialize({"a": values})


# Arguments


@pytest.mark.parametrize(
    ("tensor_dict", "metadata"),
    [
        ([1], None),
        ({1: 2}, None),
        ({"a": {"dtype": "float32", "shape": [1], "data": b"1234"}}, None),
        ({}, {"a": 1}),
        ({}, {1: "a"}),
        ({}, []),
    ],
)
def test_wrong_types_are_type_errors_as_in_the_reference(tensor_dict: Any, metadata: Any) -> None:
    with pytest.raises(TypeError) as theirs:
        safetensors.serialize(tensor_dict, metadata)

    with pytest.raises(TypeError) as ours:
        serialize(tensor_dict, metadata)

    if not (isinstance(tensor_dict, dict) and 1 in tensor_dict):
        assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("metadata", [{"\ud800": "a"}, {"a": "\udfff"}])
def test_lone_surrogates_cannot_be_encoded(metadata: dict[str, str]) -> None:
    with pytest.raises(UnicodeEncodeError):
        serialize({}, metadata)
    with pytest.raises(UnicodeEncodeError):
        serialize({next(iter(metadata)) + "\ud800": spec(ARRAY)})


def test_arguments_have_the_names_of_the_reference() -> None:
    data = serialize(tensor_dict={"a": spec(ARRAY)}, metadata={"b": "c"})

    assert deserialize(bytes=data)[0][0] == "a"


# Files


def test_a_file_has_the_bytes_of_serialize(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    serialize_file({"a": spec(ARRAY)}, path, {"b": "c"})

    assert path.read_bytes() == serialize({"a": spec(ARRAY)}, {"b": "c"})


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_the_mode_follows_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        save_file({"a": ARRAY}, tmp_path / "a")
    finally:
        os.umask(before)

    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o666 & ~umask


def test_a_symlink_is_replaced_and_its_target_stays(tmp_path: Path) -> None:
    for module in safetensors.numpy.save_file, save_file:
        target, link = tmp_path / "real" / "a", tmp_path / f"{module.__module__} link"
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(b"old")
        link.symlink_to(Path("real") / "a")

        module({"a": ARRAY}, link)

        assert not link.is_symlink()
        assert link.read_bytes() == save({"a": ARRAY})
        assert target.read_bytes() == b"old"
        assert list(target.parent.iterdir()) == [target]


def test_another_name_of_a_file_keeps_its_bytes(tmp_path: Path) -> None:
    for module in safetensors.numpy.save_file, save_file:
        old, other = tmp_path / f"{module.__module__} old", tmp_path / f"{module.__module__} other"
        old.write_bytes(b"old")
        other.hardlink_to(old)

        module({"a": ARRAY}, old)

        assert other.read_bytes() == b"old"
        assert old.read_bytes() == save({"a": ARRAY})


def test_a_device_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    with pytest.raises(SafetensorError, match="is not a regular file"):
        save_file({"a": ARRAY}, pipe)

    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_bytes_are_durable_before_they_get_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = []
    flush, replace = system.flush, Path.replace

    def noted_flush(descriptor: int) -> None:
        done.append("sync")
        flush(descriptor)

    def noted_replace(path: Path, target: Path) -> Path:
        done.append("rename")
        return replace(path, target)

    monkeypatch.setattr(files, "flush", noted_flush)
    monkeypatch.setattr(Path, "replace", noted_replace)

    save_file({"a": ARRAY}, tmp_path / "a")

    assert done == ["sync", "rename", "sync"]


def test_a_full_disk_is_an_error_and_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "a").write_bytes(b"old")
    monkeypatch.setattr(os, "writev", refuse)
    with pytest.raises(
        SafetensorError,
        match=r"^Error while serializing: I/O error: No space left on device \(os error 28\)$",
    ):
        save_file({"a": ARRAY}, tmp_path / "a")

    assert (tmp_path / "a").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("name", [".", "missing/a"])
def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path, name: str) -> None:
    path = str(tmp_path / name)
    with pytest.raises(safetensors.SafetensorError) as theirs:
        safetensors.serialize_file({}, path)

    with pytest.raises(SafetensorError) as ours:
        serialize_file({}, path)

    assert str(theirs.value).startswith(str(ours.value))


def test_nothing_remains_of_a_file_whose_tensor_fails(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")

    class Broken:
        dtype, shape = ARRAY.dtype, (2, 3)

        def __array__(self, *_: Any, **__: Any) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_file({"a": ARRAY, "b": Broken()}, tmp_path / "a")  # type: ignore[dict-item]

    assert (tmp_path / "a").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {f"t{number}": np.full(number, number, np.int16) for number in range(700)}
    write = os.writev
    monkeypatch.setattr(os, "writev", lambda fd, parts: write(fd, [parts[0][:1000]]))

    save_file(found, tmp_path / "a")

    assert (tmp_path / "a").read_bytes() == save(found)


def test_tensors_are_copied_when_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serialization, "_BATCH_SIZE", 1 << 20)
    arrays = {str(n): np.zeros((512, 128), np.float32, "F") for n in range(40)}
    tracemalloc.start()
    try:
        save_file(arrays, tmp_path / "a")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak < 3 << 20 < sum(array.nbytes for array in arrays.values())


def test_a_file_is_saved_while_another_one_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, may_end = os.writev, threading.Event()

    def slow(descriptor: int, parts: Any) -> int:
        if threading.current_thread() is other:
            assert may_end.wait()
        return write(descriptor, parts)

    other = threading.Thread(target=save_file, args=({"a": ARRAY}, tmp_path / "slow"))
    monkeypatch.setattr(os, "writev", slow)
    other.start()
    try:
        save_file({"a": ARRAY}, tmp_path / "quick")
        assert not (tmp_path / "slow").exists()
    finally:
        may_end.set()
        other.join()

    assert (tmp_path / "slow").read_bytes() == (tmp_path / "quick").read_bytes()


def test_threads_save_files_at_once(tmp_path: Path) -> None:
    threads = [
        threading.Thread(target=save_file, args=({"a": ARRAY + n}, tmp_path / str(n)))
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert all((load((tmp_path / str(n)).read_bytes())["a"] == ARRAY + n).all() for n in range(8))


# Reading


@pytest.mark.parametrize(
    "kind", [bytes, bytearray, memoryview, lambda data: np.frombuffer(data, "u1")]
)
def test_any_buffer_is_read_without_a_copy(kind: Any) -> None:
    data = kind(save({"a": ARRAY}))

    ((name, entry),) = deserialize(data)

    assert (name, entry["dtype"], entry["shape"]) == ("a", "F32", [2, 3])
    assert entry["data"] == ARRAY.tobytes()
    assert np.shares_memory(np.frombuffer(entry["data"], "u1"), np.frombuffer(data, "u1"))


def test_tensors_are_taken_apart_as_by_the_reference() -> None:
    data = save({"b": ARRAY, "a": ARRAY[0], "empty": ARRAY[:0], "c": np.array(True)})

    ours, theirs = dict(deserialize(data)), dict(safetensors.deserialize(data))

    assert ours == theirs
    assert all(type(entry["shape"]) is list for entry in ours.values())


@pytest.mark.parametrize("data", [b"", b"123", b"\xff" * 8, b"\x09" + bytes(7) + b"{}"])
def test_errors_begin_as_those_of_the_reference(data: bytes) -> None:
    with pytest.raises(safetensors.SafetensorError) as theirs:
        safetensors.deserialize(data)

    with pytest.raises(SafetensorError) as ours:
        deserialize(data)

    assert str(ours.value).startswith(str(theirs.value))
    assert isinstance(ours.value, BlobstoreError)


def test_a_value_that_is_not_a_buffer_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="'str' object is not an instance of 'bytes'"):
        deserialize("text")  # type: ignore[arg-type]


ALIGNED: dict[str, Any] = {
    "even": np.arange(64, dtype=np.uint8),
    "odd": np.arange(3, dtype=np.float64),
    "page": np.zeros(1024, np.float32),
}


@pytest.mark.parametrize("alignment", [16, 64, 4096])
@pytest.mark.parametrize("library", ["numpy", "torch", "mlx", "writer"])
def test_data_and_tensors_are_aligned_as_far_as_the_format_allows(
    alignment: int, library: str, tmp_path: Path
) -> None:
    path = tmp_path / "a"
    if library == "writer":
        kinds = {"even": ("U8", [64]), "odd": ("F64", [3]), "page": ("F32", [1024])}
        with SafetensorsWriter(path, kinds, alignment=alignment) as writer:
            for name, array in ALIGNED.items():
                writer.write(name, array)
    else:
        module = import_module(f"blobstore.safetensors.{library}")
        named = module.load(save(ALIGNED))
        module.save_file(named, path, alignment=alignment)
        assert module.save(named, alignment=alignment) == path.read_bytes()
    assert {name for name, _ in safetensors.deserialize(path.read_bytes())} == ALIGNED.keys()
    with safe_open(path, "np") as file:
        size = 8 + int.from_bytes(path.read_bytes()[:8], "little")
        assert size % alignment == 0
        for name, array in ALIGNED.items():
            assert np.array_equal(file[name], array)
            if array.nbytes % alignment == 0:
                assert file.get_tensor_meta(name).data_offsets[0] % alignment == 0


@pytest.mark.parametrize("alignment", [0, 4, 12, 1 << 21])
def test_other_alignments_are_refused(alignment: int) -> None:
    with pytest.raises(SafetensorError, match="power of two from 8 to 1048576"):
        save(ALIGNED, alignment=alignment)
