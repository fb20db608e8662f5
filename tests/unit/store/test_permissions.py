from __future__ import annotations

import os
from pathlib import Path

import pytest

from blobstore.manifests.reference import Reference
from blobstore.store.local import LocalStore
from blobstore.store.permissions import folder_warnings, name_concerns
from tests.support.models import add_blobs, blob
from tests.support.sandbox import NOBODY

A = Reference.parse("a")


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "store")
    add_blobs(store, "a", {"x": blob(("x", "U8", (3,), b"abc"))})
    return store


def test_a_store_of_the_same_user_causes_no_warning(store: LocalStore) -> None:
    assert list(folder_warnings(store)) == []
    assert list(name_concerns(store, [A, Reference.parse("absent")])) == []


def test_an_absent_store_causes_no_warning(tmp_path: Path) -> None:
    assert list(folder_warnings(LocalStore(tmp_path / "absent"))) == []


@pytest.mark.parametrize("folder", ["", "blobs", "manifests"])
def test_warns_of_a_folder_that_every_user_can_write_to(store: LocalStore, folder: str) -> None:
    path = store.root / folder
    path.chmod(0o1777)
    (found,) = folder_warnings(store)
    assert found == f"every user may write to '{path}'; remove that permission with chmod o-w"


def test_a_folder_that_a_group_can_write_to_causes_no_warning(store: LocalStore) -> None:
    store.root.chmod(0o2775)
    assert list(folder_warnings(store)) == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_warns_of_a_name_that_another_user_published(store: LocalStore) -> None:
    os.chown(store.manifest_path(A), NOBODY, NOBODY)
    (found,) = name_concerns(store, [A])
    assert found.startswith(f"'a:latest' was put into the store by another user (number {NOBODY})")
    assert list(folder_warnings(store)) == []
