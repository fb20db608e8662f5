"""Models and folders that neither an export nor a folder of links accepts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blobstore.core.tensor import DType, TensorSpec
from blobstore.errors import (
    BlobDamaged,
    BlobMissing,
    BlobstoreError,
    InvalidHeader,
    InvalidManifest,
    UsageError,
)
from blobstore.manifests import media_types
from blobstore.operations.export.export import export_model
from blobstore.operations.export.link import link_model
from blobstore.safetensors.header import encode_header
from blobstore.store.local import LocalStore
from tests.support.damage import blob_path, flip, lengthen, truncate
from tests.support.folders import contents
from tests.unit.operations.export.folders import (
    NAME,
    add_layers,
    add_old_model,
    assert_holds,
    remove_layers,
)

pytestmark = pytest.mark.parametrize("write", [export_model, link_model], ids=["export", "link"])
Write = Any


def assert_nothing_is_left(out: Path) -> None:
    assert_holds(out.parent, {"source", "store"})


# Folders


def test_rejects_a_folder_that_holds_something(
    write: Write, dense: Path, store: LocalStore
) -> None:
    before = contents(dense)
    with pytest.raises(BlobstoreError, match=r"'.*/source' exists already; choose a new"):
        write(NAME, dense, store=store)
    assert contents(dense) == before


def test_rejects_a_file_in_the_place_of_the_folder(
    write: Write, dense: Path, store: LocalStore, out: Path
) -> None:
    out.write_text("mine")
    with pytest.raises(BlobstoreError, match="exists already"):
        write(NAME, out, store=store)
    assert out.read_text() == "mine"


def test_rejects_the_name_of_a_file(write: Write, dense: Path, store: LocalStore) -> None:
    for name in ("out.gguf", "out.safetensors"):
        with pytest.raises(UsageError, match=f"{name}' would be a folder with the name of a file"):
            write(NAME, dense.parent / name, store=store)
    assert_nothing_is_left(dense)


def test_rejects_the_working_directory(
    write: Write, dense: Path, store: LocalStore, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out.mkdir()
    monkeypatch.chdir(out)
    with pytest.raises(BlobstoreError, match="working directory"):
        write(NAME, ".", store=store)


def test_rejects_a_name_that_no_folder_can_have(
    write: Write, dense: Path, store: LocalStore
) -> None:
    with pytest.raises(BlobstoreError, match="cannot access"):
        write(NAME, "a\0b", store=store)


def test_names_the_folder_that_cannot_be_written(
    write: Write, dense: Path, store: LocalStore, out: Path
) -> None:
    out.write_text("")
    with pytest.raises(BlobstoreError, match=r"cannot write '.*/out/inner': "):
        write(NAME, out / "inner", store=store)


# Manifests


@pytest.mark.parametrize("kind", [media_types.MODEL, media_types.PROJECTOR, media_types.ADAPTER])
def test_rejects_models_with_weights_in_gguf_files(
    write: Write, kind: str, dense: Path, store: LocalStore, out: Path
) -> None:
    add_layers(store, (kind, "", b"GGUF"))
    with pytest.raises(BlobstoreError, match="model m:latest: it has weights in a GGUF file"):
        write(NAME, out, store=store)


def test_rejects_a_model_without_tensors_and_files(
    write: Write, dense: Path, store: LocalStore, out: Path
) -> None:
    for kind in (media_types.TENSOR, media_types.JSON, media_types.FILE):
        remove_layers(store, kind)
    with pytest.raises(BlobstoreError, match="no tensors and no files"):
        write(NAME, out, store=store)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", "../x.json", "/etc/x.json", "/etc/x", "a//b.json", "a/", "a/b/c/d.json"),
        *("a/b/c/d", "a\\b.json", "a b.json", f"{'a' * 251}.json", "a\n.json", "é.json", "a\0b"),
        "x.json\n",
    ],
)
@pytest.mark.parametrize("kind", [media_types.JSON, media_types.FILE])
def test_rejects_layers_with_invalid_file_names(
    write: Write, kind: str, name: str, dense: Path, store: LocalStore, out: Path
) -> None:
    add_layers(store, (kind, name, b"{}"))
    with pytest.raises(InvalidManifest, match="is not a file name"):
        write(NAME, out, store=store)
    assert_nothing_is_left(out)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["config.json"], r"two files would both be 'config\.json'"),  # of another media type
        (["model.safetensors.index.json"], "two files would both be"),
        (["a", "a/b.json"], "would be both a file and a folder"),
        (["config.json/x"], "would be both a file and a folder"),
    ],
)
def test_rejects_files_that_clash(
    write: Write, names: list[str], message: str, dense: Path, store: LocalStore, out: Path
) -> None:
    add_layers(store, *((media_types.FILE, name, b"{}") for name in names))
    with pytest.raises(InvalidManifest, match=message):
        write(NAME, out, store=store)
    assert_nothing_is_left(out)


GATE = "model.layers.0.mlp.experts.gate_proj.weight"
NAMES = [f"x.{number}" for number in range(12)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"\xff", "not valid UTF-8"),
        (b"{", "not valid JSON"),
        (b"[]", "not an object of lists"),
        (b'{"a": "b"}', "not an object of lists"),
        (b'{"a": {}}', "not an object of lists"),
        (b'{"a": [1]}', "not an object of lists"),
        (b'{"a": []}', "not an object of lists"),
        (b'{"a": ["b"]}', "names 'a', which does not exist"),
        ({GATE: NAMES[:-1]}, r"of shape \[12, 6, 4\] is listed as a stack of length 11"),
        ({GATE: [*NAMES, "more"]}, "is listed as a stack of length 13"),
        ({GATE: [*NAMES[:-1], "x.0"]}, "two tensors would both be exported as 'x.0'"),
        (
            {GATE: [*NAMES[:-1], "model.layers.0.mlp.gate.weight"]},
            "both be exported as 'model.layers.0.mlp.gate.weight'",
        ),
    ],
)
def test_rejects_an_invalid_list_of_stacked_tensors(
    write: Write, content: Any, complaint: str, stacked: Path, store: LocalStore, out: Path
) -> None:
    remove_layers(store, media_types.STACKS)
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    add_layers(store, (media_types.STACKS, "", data))
    with pytest.raises(BlobDamaged, match=complaint):
        write(NAME, out, store=store)
    assert_nothing_is_left(out)


def test_rejects_a_scalar_in_the_list_of_stacked_tensors(
    write: Write, dense: Path, store: LocalStore, out: Path
) -> None:
    add_layers(store, (media_types.STACKS, "", b'{"scalar": ["a"]}'))
    with pytest.raises(
        BlobDamaged, match=r"'scalar' of shape \[\] is listed as a stack of length 1"
    ):
        write(NAME, out, store=store)


def test_rejects_a_stack_whose_members_do_not_begin_at_a_byte(
    write: Write, dense: Path, store: LocalStore, out: Path
) -> None:
    stack = encode_header([TensorSpec("f", DType.F4, (2, 3))]) + b"abc"
    listed = (media_types.STACKS, "", b'{"f": ["f.0", "f.1"]}')
    add_layers(store, (media_types.TENSOR, "f", stack), listed)
    with pytest.raises(InvalidHeader, match=r"'f\.0': 3 elements of 4 bits are not whole bytes"):
        write(NAME, out, store=store)


# Damage and interruption


def test_rejects_a_model_with_a_missing_blob(
    write: Write, dense: Path, store: LocalStore, out: Path
) -> None:
    path = blob_path(store, "scalar")
    path.unlink()
    message = f"m:latest: layer 'scalar': blob '.*{path.name}' is missing"
    with pytest.raises(BlobMissing, match=message):
        write(NAME, out, store=store)
    assert_nothing_is_left(out)


@pytest.mark.parametrize("damage", [truncate, lengthen])
def test_rejects_a_blob_of_another_size(
    write: Write, damage: Callable[[Path], None], dense: Path, store: LocalStore, out: Path
) -> None:
    damage(blob_path(store, "mask"))
    with pytest.raises(BlobDamaged, match=r"layer 'mask': blob .* bytes, expected \d+"):
        write(NAME, out, store=store)
    assert_nothing_is_left(out)


def test_rejects_a_damaged_small_file(
    write: Write, dense: Path, store: LocalStore, out: Path
) -> None:
    flip(blob_path(store, "config.json"), 3)
    with pytest.raises(BlobDamaged, match="have digest"):
        write(NAME, out, store=store)
    assert_nothing_is_left(out)


@pytest.mark.parametrize("exists", [False, True], ids=["new folder", "empty folder"])
def test_an_interrupt_leaves_nothing(
    write: Write, exists: bool, store: LocalStore, out: Path
) -> None:
    def interrupt(_what: str, _done: int, _total: int) -> None:
        raise KeyboardInterrupt

    add_old_model(store)
    if exists:
        out.mkdir()
    with pytest.raises(KeyboardInterrupt):
        write(NAME, out, store=store, progress=interrupt)
    assert_holds(out.parent, {"out", "store"} if exists else {"store"})
    assert not exists or list(out.iterdir()) == []
