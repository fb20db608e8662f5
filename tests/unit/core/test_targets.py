"""Paths inside a store, which users must not write to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import blobstore
import blobstore.safetensors.numpy
import blobstore.safetensors.torch
from blobstore.core.targets import check_target
from blobstore.errors import BlobstoreError
from blobstore.safetensors import SafetensorsWriter, edit_file
from blobstore.store.local import LocalStore
from tests.support.models import add_blobs, blob

BLOB = blob(("x", "F32", (2,), np.ones(2, "f4").tobytes()))


@pytest.fixture
def written(store: LocalStore) -> LocalStore:
    add_blobs(store, "a", {"x": BLOB})
    return store


@pytest.fixture
def path(written: LocalStore) -> Path:
    (layer,) = written.resolve("a").layers_of("application/vnd.ollama.image.tensor")
    return Path(written.blob_path(layer.digest))


def refused(path: Path) -> bool:
    try:
        check_target(path)
    except BlobstoreError:
        return True
    return False


def test_every_path_inside_a_store_is_refused(written: LocalStore, path: Path) -> None:
    assert refused(path)
    assert refused(written.folder("blobs") / "new.safetensors")
    assert refused(written.folder("blobs"))
    assert refused(written.manifest_path("a"))
    assert refused(written.root / ".blobstore" / "cold" / "x")


def test_a_path_next_to_a_store_is_free(written: LocalStore, tmp_path: Path) -> None:
    assert not refused(tmp_path / "model.safetensors")
    assert not refused(written.root / "model.safetensors")


@pytest.mark.parametrize(
    ("folders", "is_store"),
    [
        (("blobs",), False),
        (("manifests", ".blobstore"), False),
        (("blobs", "manifests"), True),
        (("blobs", ".blobstore"), True),
    ],
)
def test_a_store_has_blobs_and_another_folder(
    tmp_path: Path, folders: tuple[str, ...], is_store: bool
) -> None:
    for name in folders:
        (tmp_path / name).mkdir()
    assert [refused(tmp_path / name / "x") for name in folders] == [is_store] * len(folders)


def test_a_folder_that_links_into_a_store_is_inside_it(
    written: LocalStore, path: Path, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(written.folder("blobs"))
    assert refused(tmp_path / "link" / "new.safetensors")
    (tmp_path / "file").symlink_to(path)
    assert not refused(tmp_path / "file")  # the link is replaced


def test_a_blob_is_known_by_its_name_where_the_store_is_not(path: Path, tmp_path: Path) -> None:
    with pytest.raises(BlobstoreError, match="has the name of a blob, .* choose another name"):
        check_target(tmp_path / path.name)


WRITERS: dict[str, Callable[[LocalStore, Path], object]] = {
    "save_file": lambda _, path: blobstore.safetensors.numpy.save_file({"x": np.ones(1)}, path),
    "edit_file": lambda _, path: edit_file(path, metadata={}),
    "edit_file in place": lambda _, path: edit_file(path, {"x": np.zeros(2, "f4")}, in_place=True),
    "SafetensorsWriter": lambda _, path: SafetensorsWriter(path, {}),
    "pack": lambda store, path: blobstore.pack("a", path, store=store, force=True),
    "convert": lambda _, path: blobstore.convert(path, path, force=True),
    "sign": lambda store, path: blobstore.sign("a", "key", out=path, store=store, force=True),
    "page": lambda store, path: blobstore.page(path, store=store),
    "export": lambda store, path: blobstore.export("a", path.with_suffix(".folder"), store=store),
    "link": lambda store, path: blobstore.link("a", path.with_suffix(".folder"), store=store),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_no_writer_writes_into_a_store(written: LocalStore, path: Path, writer: str) -> None:
    path.chmod(0o644)
    before = sorted(written.folder("blobs").iterdir())
    with pytest.raises(BlobstoreError, match="is inside a store, .* choose a path outside of it"):
        WRITERS[writer](written, path)
    assert path.read_bytes() == BLOB
    assert sorted(written.folder("blobs").iterdir()) == before
