"""Damaged and borderline safetensors files: each is accepted or rejected as the format demands."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors

import blobstore
from blobstore.errors import DamagedSource, InvalidHeader, ModelNotFound
from blobstore.manifests.reference import Reference
from blobstore.safetensors import SafetensorError, safe_open
from tests.support.safetensors_file import SafetensorsFile

FOLDER = Path(__file__).parents[1] / "data" / "hostile" / "safetensors"
CASES = json.loads((FOLDER / "index.json").read_bytes())
ACCEPTED = [case for case in CASES if case["spec"] == "accept"]
REJECTED = [case for case in CASES if case["spec"] == "reject"]
OPEN = [case for case in CASES if case["spec"] == "open"]


def name(case: dict[str, Any]) -> str:
    return str(case["file"]).partition(".")[0]


def test_every_file_is_listed_with_a_verdict() -> None:
    files = {path.name for path in FOLDER.glob("*.safetensors")}
    assert files == {case["file"] for case in CASES}
    assert len(CASES) == len(ACCEPTED) + len(REJECTED) + len(OPEN)


@pytest.mark.parametrize("case", ACCEPTED, ids=name)
def test_accepts(case: dict[str, Any], tmp_path: Path) -> None:
    path = FOLDER / case["file"]
    with SafetensorsFile.open(path) as file:
        found = {
            key: [spec.dtype.value, list(spec.shape), begin, end]
            for key, (spec, begin, end) in file.header.tensors.items()
        }
        assert found == case["tensors"]
        assert file.header.metadata == (case["metadata"] or {})
        store = blobstore.LocalStore(tmp_path / "store")
        blobstore.create(path, "m", store=store)
        with blobstore.open("m", store=store) as model:
            assert set(model) == set(case["tensors"])
            assert all(model.view(key).data == file.view(key).data for key in model)


@pytest.mark.parametrize("case", REJECTED, ids=name)
def test_rejects(case: dict[str, Any], tmp_path: Path) -> None:
    path = FOLDER / case["file"]
    with pytest.raises(InvalidHeader) as caught:
        SafetensorsFile.open(path)
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 1000
    store = blobstore.LocalStore(tmp_path / "store")
    with pytest.raises(DamagedSource):
        blobstore.create(path, "m", store=store)
    with pytest.raises(ModelNotFound):
        store.resolve(Reference.parse("m"))
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("case", OPEN, ids=name)
def test_accepts_or_rejects_cleanly(case: dict[str, Any]) -> None:
    try:
        with SafetensorsFile.open(FOLDER / case["file"]) as file:
            assert set(file) == {"a"}
    except InvalidHeader:
        pass


@pytest.mark.parametrize("case", CASES, ids=name)
def test_is_at_least_as_strict_as_the_reference_library(case: dict[str, Any]) -> None:
    data = (FOLDER / case["file"]).read_bytes()
    try:
        theirs = {key for key, _ in safetensors.deserialize(data)}
    except safetensors.SafetensorError:
        with pytest.raises(InvalidHeader):
            SafetensorsFile.open(FOLDER / case["file"])
        return
    try:
        with SafetensorsFile.open(FOLDER / case["file"]) as file:
            assert set(file) == theirs
    except InvalidHeader:
        assert case["spec"] == "reject"


OPENED: dict[str, Callable[[Path], Any]] = {
    "mmap": lambda path: safe_open(path, "np"),
    "pread": lambda path: safe_open(path, "np", backend="pread"),
    "buffer": lambda path: safe_open(path.read_bytes(), "np"),
    "file object": lambda path: safe_open(io.BytesIO(path.read_bytes()), "np"),
}


@pytest.mark.parametrize("way", OPENED)
@pytest.mark.parametrize("case", CASES, ids=name)
def test_the_library_gives_the_same_verdict_in_whatever_way_a_file_is_opened(
    case: dict[str, Any], way: str
) -> None:
    try:
        with OPENED[way](FOLDER / case["file"]) as file:
            found = {key: file.get_tensor_meta(key) for key in file}
            assert case["spec"] != "reject"
            assert (file.metadata() or {}) == (case["metadata"] or {})
    except SafetensorError as error:
        assert case["spec"] != "accept"
        assert str(error).isprintable()
        assert len(str(error)) < 1000
        return
    for key, (dtype, shape, begin, end) in (case["tensors"] or {}).items():
        assert found[key] == (dtype, shape, (begin, end))
