"""A store that is copied file by file while others write to it, as docs/guides/backup.md says."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import blobstore
from blobstore.core.tensor import DType
from blobstore.store.local import LocalStore
from tests.support.cold import weights
from tests.support.models import add_blobs, blob

NAMES = ("kept", "removed", "tuned")
IN_ORDER = ("manifests", "blobs", ".blobstore/cold", ".blobstore/bases")


def write(store: LocalStore, name: str, seed: int) -> None:
    data = blob(("w", "BF16", (64, 64), weights(DType.BF16, 64 * 64, seed)))
    add_blobs(store, name, {"w": data})


def models(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "store")
    for seed, name in enumerate(NAMES):
        write(store, name, seed)
    return store


def copied(
    store: LocalStore, target: Path, folders: tuple[str, ...], between: Callable[[str], None]
) -> LocalStore:
    """Copy folders in order. ``between`` is called with the folder before and after each file."""
    for folder in folders:
        between(folder)
        for path in sorted((store.root / folder).rglob("*")):
            if path.is_file():
                to = target / path.relative_to(store.root)
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, to)
                between(folder)
    return LocalStore(target)


def test_a_copy_of_manifests_and_then_of_blobs_is_complete_whatever_is_written(
    tmp_path: Path,
) -> None:
    store, written = models(tmp_path), iter(range(100, 10_000))

    def write_more(_: str) -> None:
        write(store, f"new{next(written)}", next(written))
        write(store, "kept", next(written))  # replaces the model

    copy = copied(store, tmp_path / "copy", IN_ORDER, write_more)

    assert len(list(copy.references())) >= len(NAMES)
    assert blobstore.verify(store=copy).ok
    blobs_first = copied(store, tmp_path / "other", ("blobs", "manifests"), write_more)
    assert not blobstore.verify(store=blobs_first).ok


def test_what_was_removed_or_changed_its_form_between_is_named_and_can_be_repaired(
    tmp_path: Path,
) -> None:
    store = models(tmp_path)
    blobstore.freeze(["tuned"], store=store)
    steps = {"blobs": lambda: remove(store), ".blobstore/cold": lambda: thaw(store)}

    def step(folder: str) -> None:
        if folder in steps:
            steps.pop(folder)()

    copy = copied(store, tmp_path / "copy", IN_ORDER, step)

    faults = blobstore.verify(store=copy).faults
    assert {fault.reference for fault in faults} == {"removed:latest", "tuned:latest"}
    left = blobstore.repair(source=store.root, store=copy).faults
    assert {fault.reference for fault in left} == {"removed:latest"}
    assert not store.has_model("removed")


def remove(store: LocalStore) -> None:
    """Remove a model and its blobs."""
    blobstore.remove(["removed"], store=store)
    assert blobstore.gc(store=store, older_than=0).blobs


def thaw(store: LocalStore) -> None:
    assert blobstore.thaw(["tuned"], store=store).blobs
