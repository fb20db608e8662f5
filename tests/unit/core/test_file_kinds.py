from __future__ import annotations

import io
import struct
import zipfile

import numpy as np
import pytest

from blobstore.core.file_kinds import (
    CHECKPOINT,
    EMPTY,
    ERROR,
    GGUF,
    HEAD,
    PAGE,
    SAFETENSORS,
    ZEROS,
    ZIP,
    FileKind,
    absence,
    kind_of,
    kind_of_name,
)

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"ab" * 32 + b"\nsize 4976\n"
ABSENT = {
    "lfs": (POINTER, "git lfs pull"),
    "older lfs": (b"version https://hawser.github.com/spec/v1\n", "git lfs pull"),
    "lfs of PowerShell": (POINTER.decode().encode("utf-16"), "git lfs pull"),
    "lfs with a mark": (b"\xef\xbb\xbf" + POINTER, "git lfs pull"),
    "macOS": (b"\0\5\x16\7\0\2\0\0Mac OS X", "what macOS notes"),
    "xet": (b"# xet version 0\nfilesize = 10\nhash = 'ab'\n", "Xet"),
    "annex": (b"/annex/objects/SHA256E-s104--ab.bin\n", "git annex get"),
    "annex link": (b"../.git/annex/objects/a/b/SHA256E-s104--ab.bin", "git annex get"),
    "link of a cache": (b"../../blobs/" + b"d" * 64, "the text of a link"),
    "page": (b"\xef\xbb\xbf \n<!doctype HTML><html>", "a web page"),
    "error of S3": (
        b'<?xml version="1.0"?>\n<Error><Code>AccessDenied</Code></Error>',
        "a web page",
    ),
    "error of the Hub": (b'{"error": "Repository not found"}', "an error message"),
    "error of GitHub": (b'{"message": "Not Found", "status": "404"}', "an error message"),
    "no entry": (b"Entry not found", "an error message"),
    "no page": (b"404: Not Found\n", "an error message"),
    "gated": (b"Access to model org/x is restricted. You must log in.", "an error message"),
    "login": (b"Invalid username or password.", "an error message"),
    "busy": (b"error code: 1015", "an error message"),
    "nothing": (b"", "an empty file"),
    "zeros": (bytes(HEAD), "an unfinished download"),
}
STORED = {
    "ctranslate2": (struct.pack("<IH", 6, 12) + b"WhisperSpec\0" + bytes(50), "a model of CTranslate2"),
    "whisper.cpp": (b"lmgg" + struct.pack("<I", 51864), "a ggml file"),
    "ggjt": (b"tjgg\3\0\0\0", "a ggjt file"),
    "openvino": (b'<?xml version="1.0"?>\n<net name="Model0" version="11">', "a model of OpenVINO"),
    "xml": (b'<?xml version="1.0"?>\n<a/>', "an XML file"),
    "saved model": (b"\x08\x01\x12\xe5\x03\n\x20", "a SavedModel of TensorFlow"),
    "graph": (b"\n\x1e\n\x05input\x12\x0bPlaceholder", "a TensorFlow graph"),
    "core ml": (b"\x08\x07\x12\xe5\x03\n\x20", "a Core ML file"),
    "core ml weights": (bytes(64) + b"\xef\xbe\xad\xde", "the weights of a Core ML package"),
    "onnx": (b"\x08\x08\x12\x07pytorch", "an ONNX file"),
    "gpt-sovits": (b"05\3\4" + bytes(30), "GPT-SoVITS"),
    "rar": (b"Rar!\x1a\x07\1\0", "a RAR archive"),
    "bsar": (b"\x8fBSARCH\1", "an archive of models"),
    "llamafile": (b"MZqFpD='\n", "a llamafile"),
}  # fmt: skip


@pytest.mark.parametrize("name", ABSENT)
def test_names_what_a_download_left_in_the_place_of_a_file(name: str) -> None:
    head, what = ABSENT[name]
    kind = kind_of(head)
    assert kind is not None
    assert kind.use == "absent"
    assert kind.advice
    assert what in kind.what + kind.advice


@pytest.mark.parametrize("name", STORED)
def test_names_intact_files_of_other_formats(name: str) -> None:
    head, what = STORED[name]
    kind = kind_of(head)
    assert kind is not None
    assert kind.use == "stored"
    assert what in kind.what


def test_knows_the_formats_that_are_read() -> None:
    assert kind_of(b"GGUF\3\0\0\0") is GGUF
    assert kind_of(struct.pack("<Q", 40) + b'{"a":') is SAFETENSORS
    assert kind_of(b"\x80\2\x8a\x0a") is CHECKPOINT
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("x/data.pkl", b"")
    assert kind_of(archive.getvalue()) is CHECKPOINT
    assert kind_of(archive.getvalue().replace(b"x/data.pkl", b"x/conf.txt")) is ZIP
    assert kind_of(archive.getvalue().replace(b"x/data.pkl", b"/extra/.md")) is CHECKPOINT
    npz = io.BytesIO()
    np.savez(npz, a=np.zeros(2))
    assert kind_of(npz.getvalue()) == FileKind("a NumPy archive")


@pytest.mark.parametrize(
    "head",
    [
        b"hello",
        b'{"model_type": "llama"}',
        b'{"error_rate": 3, "message": "x"}',
        b'{"code": 3}',
        b'{"error": "' + b"x" * HEAD,  # cut, so it may have anything
        b"# Not found is a model\n",
        b"Forbidden uses\n\nYou agree",
        b"[[" * 2000,
        b"version 2",
    ],
)
def test_other_texts_are_of_no_known_kind(head: bytes) -> None:
    assert kind_of(head[:HEAD]) is None


@pytest.mark.parametrize("letter", [b" ", b"\n", b"<", b"\xff", b"../", b"<?xml <net"])
def test_long_repetitions_take_no_time(letter: bytes) -> None:
    for _ in range(100):
        kind_of((letter * HEAD)[:HEAD])


def test_pages_and_empty_files_are_right_under_some_names() -> None:
    page = b"<html></html>"
    assert absence("tokenizer.json", page) is PAGE
    assert absence("vocab.txt", page) is PAGE
    assert absence("README.md", page) is absence("index.HTML", page) is None
    assert absence("merges.txt", b"Entry not found") is ERROR
    assert absence("tokenizer.json", b"") is EMPTY
    assert absence("model.safetensors", bytes(20)) is ZEROS
    assert absence("__init__.py", b"") is absence("weights.bin", bytes(20)) is None
    for name in ("tokenizer.json", "README.md", "x", "weights.bin"):
        found = absence(name, POINTER)
        assert found is not None
        assert "git-lfs" in found.what
    assert absence("x.onnx", b"\x08\x08\x12\x07pytorch") is None


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("x/model.ONNX", "an ONNX file"),
        ("model.onnx_data", "an ONNX file"),
        ("model.ckpt.data-00000-of-00001", "the data of a TensorFlow checkpoint"),
        ("model.safetensors.dvc", "a pointer of DVC, not the file itself"),
    ],
)
def test_some_formats_are_known_by_the_names_of_their_files(name: str, what: str) -> None:
    kind = kind_of_name(name)
    assert kind is not None
    assert kind.what == what


def test_other_names_say_nothing() -> None:
    assert kind_of_name("model.safetensors") is kind_of_name("onnx") is kind_of_name("") is None
