"""A store with a model whose files are known."""

from __future__ import annotations

from pathlib import Path

import pytest

from blobstore.operations.create.create import create
from blobstore.serve.library import Library
from blobstore.sources.base import SourceOptions
from blobstore.store.local import LocalStore
from tests.support.models import dense_tensors, write_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The source of the model ``org/model``: two shards, an index, and files in a folder."""
    return write_folder(
        tmp_path / "source",
        dense_tensors(),
        shards=2,
        files={"tokenizer.json": b"{}", "extra/notes.txt": b"notes\n"},
    )


@pytest.fixture
def library(store: LocalStore, folder: Path) -> Library:
    """A library of a store that has ``org/model``."""
    create(folder, "org/model", store=store, source_options=SourceOptions(keep=("*.txt",)))
    return Library(store)
