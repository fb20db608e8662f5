from __future__ import annotations

from pathlib import Path

import pytest

import blobstore
from blobstore.errors import ModelNotFound
from blobstore.store.local import LocalStore
from tests.support.models import dense_tensors, write_folder

CARD = b"---\nlicense: apache-2.0\nbase_model: org/base\n---\n# A model\n"


@pytest.fixture
def model(tmp_path: Path, store: LocalStore) -> str:
    files = {"README.md": CARD, "config.json": b'{"_name_or_path": "org/other"}'}
    folder = write_folder(tmp_path / "model", dense_tensors(), files=files)
    blobstore.create(folder, "m", store=store)
    return "m"


def test_collects_what_the_model_card_and_the_store_say(model: str, store: LocalStore) -> None:
    named = blobstore.copy(model, "again", store=store)
    info = blobstore.info(model, store=store)
    assert (info.license, info.bases) == ("apache-2.0", ("org/base", "org/other"))
    assert info.digest == named.digest
    assert list(map(str, info.aliases)) == ["again:latest"]
    assert info.source is not None
    assert info.source.kind == "folder"
    assert sum(count for _, count, _ in info.types) == len(info.description.tensors)


def test_bytes_that_only_aliases_share_are_unique(model: str, store: LocalStore) -> None:
    blobstore.copy(model, "again", store=store)
    info = blobstore.info(model, store=store)
    assert info.disk_size == info.unique_size == blobstore.du(model, store=store).together.size


def test_a_model_that_is_absent_is_not_found(store: LocalStore) -> None:
    with pytest.raises(ModelNotFound, match="'none:latest'"):
        blobstore.info("none", store=store)
