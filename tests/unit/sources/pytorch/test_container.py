from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import tarfile
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save as to_safetensors

from blobstore.errors import CheckpointRefused, UnsupportedSource
from blobstore.sources.pytorch.container import open_container
from blobstore.sources.pytorch.storages import Container
from tests.support.checkpoints import legacy_file, mapping, pickled, tensor, zip_file
from tests.support.zip_files import opened

PICKLE = pickled(mapping(a=tensor()))


def container_of(data: bytes) -> Container:
    with opened(data) as (descriptor, size):
        return open_container(descriptor, size)


def refusal(data: bytes) -> str:
    with pytest.raises((CheckpointRefused, UnsupportedSource)) as caught:
        container_of(data)
    return str(caught.value)


def tar() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("storages"), io.BytesIO(b""))
    return file.getvalue()


def numpy_file() -> bytes:
    file = io.BytesIO()
    np.save(file, np.zeros(3))
    return file.getvalue()


def numpy_archive() -> bytes:
    file = io.BytesIO()
    np.savez(file, a=np.zeros(3))
    return file.getvalue()


OTHERS: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "an empty file"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "run git lfs pull"),
    "hdf5": (b"\x89HDF\r\n\x1a\n", "an HDF5 file, as Keras writes it"),
    "numpy": (numpy_file(), "a numpy array"),
    "npz": (numpy_archive(), "a NumPy archive"),
    "onnx": (b"\x08\x08\x12\x07pytorch\x1a\x052.1.0", "an ONNX file"),
    "tflite": (b"\x1c\0\0\0TFL3\x14\0", "a TensorFlow Lite file"),
    "executorch": (b"\x1c\0\0\0ET12\x14\0", "an ExecuTorch program"),
    "gzip": (gzip.compress(PICKLE), "compressed with gzip; decompress it first"),
    "bzip2": (bz2.compress(PICKLE), "compressed with bzip2; decompress it first"),
    "zstd": (b"\x28\xb5\x2f\xfd\4", "compressed with zstd; decompress it first"),
    "xz": (lzma.compress(PICKLE), "compressed with xz; decompress it first"),
    "7z": (b"7z\xbc\xaf\x27\x1c\0\4", "a 7z archive; unpack it first"),
    "joblib, compressed": (b"ZF\x31", "a joblib file: a pickle"),
    "joblib": (
        b"\x80\x04\x95\xab\0\0\0\0\0\0\0\x8c\x13joblib.numpy_pickle\x94",
        "a joblib file: a pickle",
    ),
    "page": (b"<!DOCTYPE html><html></html>", "a web page, probably an error"),
    "lower-case page": (b"\n  <html>", "a web page"),
    "head": (b"<head>", "a web page"),
    "xml": (b'<?xml version="1.0"?><Error><Code>AccessDenied', "a web page"),
    "tar": (tar(), "a tar archive: a checkpoint of torch before 0.2"),
    "safetensors": (to_safetensors({"a": np.zeros(2)}), "give it the ending .safetensors"),
    "empty safetensors": (to_safetensors({}), "give it the ending .safetensors"),
    "spaced safetensors": (b"\x08\0\0\0\0\0\0\0{      }", "give it the ending .safetensors"),
    "bare pickle": (
        pickle.dumps({"a": 1}),
        "a pickle of Python objects that torch.save did not write",
    ),
    "old pickle": (
        pickle.dumps({"a": 1}, 2),
        "a pickle of Python objects that torch.save did not write",
    ),
    "text": (b"hello", "not a PyTorch checkpoint, nor any other format that blobstore knows"),
    "json": (json.dumps({"a": 1}).encode(), "not a PyTorch checkpoint, nor"),
    "zeros": (bytes(5000), "an unfinished download: it begins with zeros"),
    "split archive": (b"PK\7\10PK\3\4", "not a PyTorch checkpoint, nor"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_names_other_formats(name: str) -> None:
    data, what = OTHERS[name]
    message = refusal(data)
    assert message.startswith("this is ")
    assert what in message


def test_does_not_show_the_values_of_a_foreign_pickle() -> None:
    message = refusal(pickle.dumps({"password": "secret"}, 2))
    assert "secret" not in message
    assert "blobstore inspect" in message


@pytest.mark.parametrize(
    ("data", "kind"),
    [(zip_file(PICKLE), "zip checkpoint"), (legacy_file(PICKLE), "legacy stream")],
    ids=["zip", "legacy"],
)
def test_opens_both_containers(data: bytes, kind: str) -> None:
    container = container_of(data)
    assert container.kind == kind
    assert container.pickle_size == len(PICKLE)
    assert list(container.result.value) == ["a"]
    assert not container.is_swapped


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_knows_the_magic_number_in_every_protocol(protocol: int) -> None:
    magic = pickle.dumps(0x1950A86A20F9469CFC6C, protocol)
    rest = legacy_file(PICKLE).partition(b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.")[2]
    assert container_of(magic + rest).kind == "legacy stream"


@pytest.mark.parametrize(
    "value",
    [True, -0x1950A86A20F9469CFC6C, 0x1950A86A20F9469CFC6D, "1950A86A20F9469CFC6C"],
    ids=str,
)
def test_another_number_is_not_the_magic_number(value: Any) -> None:
    data = pickle.dumps(value, 2) + legacy_file(PICKLE)
    assert "a pickle of Python objects that torch.save did not write" in refusal(data)


def test_a_pickle_with_a_call_is_a_bare_pickle() -> None:
    assert "a pickle of Python objects" in refusal(b"\x80\x02cposix\nsystem\nX\x02\0\0\0id\x85R.")
