"""safe_open: what it opens, what it refuses, and what it reads."""

from __future__ import annotations

import copy
import errno
import gc
import hashlib
import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch

from blobstore.safetensors import SafetensorError, safe_open
from blobstore.safetensors.numpy import save, save_file
from tests.support.descriptors import open_files

FOUND: dict[str, Any] = {
    "b": np.arange(6, dtype=np.float32).reshape(2, 3),
    "a": np.arange(4, dtype=np.int8),
    "c": np.zeros((0, 2), np.float32),
}
BACKENDS = ["mmap", "pread"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file(FOUND, tmp_path / "a.safetensors", {"x": "y"})
    return tmp_path / "a.safetensors"


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_open_file_answers_as_in_the_reference(path: Path, backend: str) -> None:
    theirs = safetensors.safe_open(path, "np", backend=backend)
    with safe_open(path, "np", backend=backend) as ours:
        assert ours.keys() == theirs.keys() == ["a", "b", "c"]
        assert ours.offset_keys() == theirs.offset_keys() == ["b", "c", "a"]
        assert ours.metadata() == theirs.metadata() == {"x": "y"}
        for name in ours.keys():  # noqa: SIM118 - the method
            assert np.array_equal(ours.get_tensor(name), theirs.get_tensor(name))
            assert ours.get_tensor(name).dtype == theirs.get_tensor(name).dtype
        assert list(ours.get_tensors()) == list(theirs.get_tensors())


def test_a_handle_is_a_collection_of_names(path: Path) -> None:
    with safe_open(path, "np") as file:
        assert len(file) == 3
        assert "a" in file
        assert "z" not in file
        assert list(file) == ["a", "b", "c"]
        assert np.array_equal(file["a"], FOUND["a"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_header_says_what_a_tensor_is(path: Path, backend: str) -> None:
    with safe_open(path, "np", backend=backend) as file:
        meta = file.get_tensor_meta("a")

    assert meta == ("I8", [4], (24, 28))
    assert (meta.dtype, meta.shape, meta.data_offsets) == meta


def test_no_metadata_is_none(tmp_path: Path) -> None:
    save_file(FOUND, tmp_path / "a")

    assert safe_open(tmp_path / "a", "np").metadata() is None


def test_metadata_of_null_is_none(tmp_path: Path) -> None:
    text = b'{"__metadata__":null}'
    (tmp_path / "a").write_bytes(len(text).to_bytes(8, "little") + text)

    assert safe_open(tmp_path / "a", "np").metadata() is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_after_the_end_the_file_is_closed(path: Path, backend: str) -> None:
    with safe_open(path, "np", backend=backend) as file:
        tensor = file.get_tensor("a")
    calls = [
        file.keys,
        file.offset_keys,
        file.metadata,
        file.get_tensors,
        lambda: file.get_tensor("a"),
        lambda: file.get_slice("a"),
        lambda: file.get_tensor_meta("a"),
        lambda: len(file),
        lambda: "a" in file,
        lambda: list(file),
    ]

    for call in calls:
        with pytest.raises(SafetensorError, match="^File is closed$"):
            call()
    file.close()
    assert np.array_equal(tensor, FOUND["a"])


def test_closing_closes_the_descriptor(path: Path) -> None:
    mapped, read = safe_open(path, "np"), safe_open(path, "np", backend="pread")
    assert open_files(path.parent) == [str(path)]
    read.close()
    mapped.close()

    assert open_files(path.parent) == []


def test_a_mapped_tensor_can_be_written_to_and_the_file_does_not_change(path: Path) -> None:
    before = path.read_bytes()
    with safe_open(path, "np") as file:
        tensor = file.get_tensor("b")
        tensor += 1

    assert np.array_equal(tensor, FOUND["b"] + 1)
    assert path.read_bytes() == before


def test_tensors_that_were_read_do_not_share_memory(path: Path) -> None:
    with safe_open(path, "np", backend="pread") as file:
        one, other = file.get_tensor("b"), file.get_tensor("b")

    one[:] = 0
    assert np.array_equal(other, FOUND["b"])


@pytest.mark.parametrize("framework", ["np", "pt"])
def test_two_reads_of_a_mapped_tensor_return_the_same_memory(path: Path, framework: str) -> None:
    with safe_open(path, framework) as file:
        file.get_tensor("b")[0, 0] = 7

        assert file.get_tensor("b")[0, 0] == file.get_slice("b")[0, 0] == 7
        assert file.get_tensors()["b"][0, 0] == 7


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_an_open_file_is_not_copied(path: Path, backend: str, copied: Any) -> None:
    with safe_open(path, "np", backend=backend) as file:
        for each in file, file.get_slice("b"), file.prefetch():
            with pytest.raises(TypeError, match="cannot be|cannot pickle"):
                copied(each)
        gc.collect()
        assert np.array_equal(file.get_tensor("b"), FOUND["b"])


def test_names_of_equal_offsets_have_the_order_of_the_header(tmp_path: Path) -> None:
    names = ["e", "b", "f", "a", "d", "c"]
    entries = {name: {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for name in names}
    text = json.dumps(entries).encode()
    (tmp_path / "a").write_bytes(len(text).to_bytes(8, "little") + text)

    with safe_open(tmp_path / "a", "np") as file:
        assert file.offset_keys() == list(file.get_tensors()) == names
        assert file.keys() == sorted(names)


def test_a_file_can_be_replaced_while_it_is_mapped(path: Path) -> None:
    with safe_open(path, "np") as file:
        tensors = file.get_tensors()
        save_file(tensors, path)

    assert path.read_bytes() == save(FOUND)
    assert np.array_equal(tensors["b"], FOUND["b"])


def test_a_file_that_shrinks_is_an_error(path: Path) -> None:
    file = safe_open(path, "np", backend="pread")
    os.truncate(path, 100)

    with pytest.raises(SafetensorError, match="has become shorter"):
        file.get_tensor("b")


# Arguments


@pytest.mark.parametrize("framework", ["np", "numpy", "pt", "torch", "pytorch", "mlx"])
def test_frameworks_have_the_names_of_the_reference(path: Path, framework: str) -> None:
    tensor: Any = safe_open(filename=path, framework=framework).get_tensor("b")

    assert type(tensor).__module__.partition(".")[0] in ("numpy", "torch", "mlx")
    assert tensor.tolist() == FOUND["b"].tolist()


def both_fail(*args: Any, **options: Any) -> tuple[Exception, Exception]:
    """Return what safe_open raises in the reference and here."""
    with pytest.raises(Exception) as theirs:  # noqa: PT011 - whatever it is
        safetensors.safe_open(*args, **options)
    with pytest.raises(Exception) as ours:  # noqa: PT011 - as above
        safe_open(*args, **options)
    return theirs.value, ours.value


@pytest.mark.parametrize("framework", ["jax", "flax", "tf", "tensorflow", "paddle"])
def test_frameworks_that_numpy_serves_are_refused(path: Path, framework: str) -> None:
    with pytest.raises(SafetensorError, match=f"^framework {framework} is invalid$"):
        safe_open(path, framework)


@pytest.mark.parametrize("framework", ["foo", "", "Numpy", 3, b"np", None])
def test_other_frameworks_are_refused(path: Path, framework: Any) -> None:
    theirs, ours = both_fail(path, framework)

    assert type(ours).__name__ == type(theirs).__name__
    assert str(ours) == str(theirs)


NO_DEVICES: list[Any] = [
    "meta",
    "CPU",
    "cpu:0",
    "mps:1",
    -1,
    1.5,
    torch.device("cpu"),
    "cuda:x",
    "cuda:-1",
]
NO_DEVICES += ["cuda:", "cuda:1:2", f"cuda:{2**64}", 2**64, "mps:x", "mps:", "cuda1", ""]


@pytest.mark.parametrize("framework", ["np", "pt"])
@pytest.mark.parametrize("device", NO_DEVICES)
def test_other_devices_are_refused(path: Path, framework: str, device: Any) -> None:
    theirs, ours = both_fail(path, framework, device)

    assert type(ours).__name__ == type(theirs).__name__
    assert str(ours) == str(theirs)


DEVICES = ["cuda", "cuda:1", "cuda:+1", "cuda:01", "mps", "mps:0", "musa", "npu:3", "xpu:2"]
DEVICES += ["xla", "mlu", "hpu:1"]
NUMBERS = [0, 3, True, np.int64(1)]


@pytest.mark.parametrize("framework", ["np", "mlx"])
@pytest.mark.parametrize("device", [*DEVICES, *NUMBERS])
def test_numpy_and_mlx_have_no_devices(path: Path, framework: str, device: Any) -> None:
    theirs, ours = both_fail(path, framework, device)

    assert type(ours).__name__ == type(theirs).__name__
    assert str(ours) == str(theirs)


@pytest.mark.parametrize("device", [*DEVICES, *NUMBERS])
def test_torch_judges_whether_a_device_is_there(path: Path, device: Any) -> None:
    safetensors.safe_open(path, "pt", device)
    file = safe_open(path, "pt", device)

    try:
        found = file.get_tensor("a")
    except (RuntimeError, AssertionError, ImportError):
        return
    assert found.device.type != "cpu"


@pytest.mark.parametrize("device", [None, "cpu"])
def test_no_device_is_the_processor(path: Path, device: Any) -> None:
    assert safe_open(path, "pt", device).get_tensor("a").device.type == "cpu"


@pytest.mark.parametrize("backend", ["x", 3])
def test_other_backends_are_refused(path: Path, backend: Any) -> None:
    theirs, ours = both_fail(path, "np", backend=backend)

    assert type(ours).__name__ == type(theirs).__name__
    assert str(ours) == str(theirs)


class Named:
    """A path whose name may be bytes."""

    def __init__(self, name: str | bytes) -> None:
        self.name = name

    def __fspath__(self) -> str | bytes:
        return self.name


@pytest.mark.parametrize(
    "filename", [3, None, ["a"], Named(b"a")], ids=["3", "None", "list", "bytes"]
)
def test_a_filename_is_text_or_a_path(path: Path, filename: Any) -> None:
    theirs, ours = both_fail(filename, "np")

    assert type(ours) is type(theirs) is TypeError
    assert str(ours).startswith("argument 'filename': ")
    assert len(safe_open(Named(str(path)), "np")) == 3


@pytest.mark.parametrize("framework", ["np", "pt"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_filename_may_be_no_utf8(path: Path, framework: str, backend: str) -> None:
    odd = path.rename(path.with_name(os.fsdecode(b"\xff.safetensors")))

    with safe_open(odd, framework, backend=backend) as file:
        assert file.get_tensor("a").tolist() == [0, 1, 2, 3]


def test_a_file_that_may_not_be_read_is_an_error_of_its_own(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "open", refuse)  # root may read every file
    with pytest.raises(PermissionError, match="Permission denied"):
        safe_open(path, "np")


@pytest.mark.parametrize("name", ["missing", "a.safetensors/inside", "nul\0"])
def test_a_missing_file_is_an_error_of_the_reference(path: Path, name: str) -> None:
    theirs, ours = both_fail(str(path.parent / name), "np")

    assert type(ours) is type(theirs) is FileNotFoundError
    assert str(ours) == str(theirs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_folder_is_no_file(tmp_path: Path, backend: str) -> None:
    with pytest.raises(OSError, match="No such device"):
        safe_open(tmp_path, "np", backend=backend)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")

    with pytest.raises(OSError, match="No such device"):
        safe_open(tmp_path / "pipe", "np")


@pytest.mark.parametrize("method", ["get_tensor", "get_slice", "get_tensor_meta"])
def test_an_unknown_tensor_is_an_error_of_the_reference(path: Path, method: str) -> None:
    with pytest.raises(SafetensorError, match="^File does not contain tensor zz$"):
        getattr(safe_open(path, "np"), method)("zz")
    for name, found in (3, "'int' object"), (b"a", "'bytes' object"), (None, "'None'"):
        with pytest.raises(
            TypeError, match=f"^argument 'name': {found} is not an instance of 'str'$"
        ):
            getattr(safe_open(path, "np"), method)(name)


@pytest.mark.parametrize(
    "data", [b"", b"123", b"\xff" * 8, b"\x09" + bytes(7) + b"{}", b"\x04" + bytes(7) + b"{\xff }"]
)
def test_errors_of_a_header_begin_as_those_of_the_reference(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a").write_bytes(data)

    theirs, ours = both_fail(tmp_path / "a", "np")

    assert type(ours).__mro__[1:]
    assert isinstance(ours, SafetensorError)
    assert str(ours).startswith(str(theirs).partition(": invalid utf-8")[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_digest_of_a_tensor_is_that_of_its_bytes(path: Path, backend: str) -> None:
    with safe_open(path, "np", backend=backend) as file:
        for name, array in FOUND.items():
            assert file.sha256(name) == hashlib.sha256(array.tobytes()).hexdigest()
        with pytest.raises(SafetensorError, match="does not contain"):
            file.sha256("z")
