"""A program that uses blobstore, for type checkers alone: `.ci/run` shows it to mypy and to pyright.

Each ignored error proves that the checker knows the types: an ignore that is not needed is an error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, assert_type

import blobstore
from blobstore import BlobstoreError, Created, LocalStore, Model, ModelPlan, Reference, Verified


def import_and_load(folder: Path) -> None:
    """Import a model, load it and check it."""
    created = blobstore.create(folder, "llama:1b", store=folder / "store")
    assert_type(created, Created)
    assert_type(blobstore.create(folder, "llama:1b", dry_run=True), ModelPlan)
    assert_type(created.reference, Reference)
    assert_type(created.bytes_written, int)
    with blobstore.open("llama:1b", framework="torch", store=str(folder / "store")) as model:
        assert_type(len(model), int)
        assert_type(model.metadata(), dict[str, str] | None)
    assert_type(blobstore.verify(["llama:1b"], store=LocalStore(folder / "store")), Verified)


def choose_later(framework: Literal["numpy", "torch"]) -> None:
    """Open a model whose tensors have a type that is not known yet."""
    assert_type(blobstore.open("llama", framework=framework), Model)


def make_mistakes() -> None:
    """Do what type checkers must refuse."""
    blobstore.open("llama", framework="tensorflow")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    blobstore.create()  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    raise BlobstoreError(blobstore.nothing_of_that_name)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
