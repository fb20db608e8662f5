from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import blobstore
from blobstore.manifests.reference import Reference
from blobstore.relatives import Relatives
from blobstore.store.local import LocalStore
from tests.frozen import layer, put, tuned, weights
from tests.models import add_blobs

if TYPE_CHECKING:
    from pathlib import Path

MINE = Reference.parse("mine")


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """A store with a model, what it was made from, and others."""
    store = LocalStore(tmp_path / "store")
    add_blobs(store, "mine", {"x": layer("x", tuned(10, 1))})
    put(store, "unlike", {"x": 7})
    put(store, "base", {"x": 1})
    put(store, "elsewhere", {"y": 1})
    return store


def found(store: LocalStore, *excluded: str) -> str | None:
    relatives = Relatives(store, list(store.references()), "fast")
    base = relatives.base_of(MINE, [Reference.parse(name) for name in excluded])
    return None if base is None else base.model


def test_the_nearest_is_found_by_its_bytes(store: LocalStore) -> None:
    assert found(store) == "base"


def test_what_is_excluded_is_not_found(store: LocalStore) -> None:
    assert found(store, "base") is None


def test_of_several_the_nearest_is_found(store: LocalStore) -> None:
    add_blobs(store, "far", {"x": layer("x", tuned(11, 1)[:40_000] + weights(3)[40_000:])})
    assert found(store) == "base"


def test_a_manifest_that_cannot_be_read_is_no_relative(store: LocalStore) -> None:
    store.layout.manifest(Reference.parse("unlike")).write_bytes(b"{}")
    assert found(store) == "base"


@pytest.mark.parametrize(
    "file",
    [
        ("README.md", "---\nbase_model: org/Unlike\n---\n"),
        ("README.md", "---\nlicense: mit\nbase_model:\n  - 'org/un-like'\ntags: []\n---\n# Text\n"),
        ("config.json", '{"_name_or_path": "models/unlike"}'),
        ("config.json", '{"base_model": "unlike"}'),
    ],
)
def test_a_model_says_what_it_was_made_from(
    store: LocalStore, tmp_path: Path, file: tuple[str, str]
) -> None:
    assert found_in_folder(store, tmp_path, file) == "unlike"


@pytest.mark.parametrize(
    "file",
    [
        ("README.md", "base_model: org/unlike\n"),
        ("README.md", "---\nbase_model: org/none\n---\n"),
        ("README.md", "---\nbase_model:\n---\n"),
        ("config.json", "not JSON"),
        ("config.json", "[1]"),
        ("config.json", '{"_name_or_path": ["unlike"], "base_model": ""}'),
    ],
)
def test_what_it_does_not_say_is_found_by_its_bytes(
    store: LocalStore, tmp_path: Path, file: tuple[str, str]
) -> None:
    assert found_in_folder(store, tmp_path, file) == "base"


def found_in_folder(store: LocalStore, tmp_path: Path, file: tuple[str, str]) -> str | None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(layer("x", tuned(10, 1)))
    (folder / file[0]).write_text(file[1])
    blobstore.create(folder, "mine", store=store)
    return found(store)
