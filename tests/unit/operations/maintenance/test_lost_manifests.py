from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path

import pytest

from blobstore.operations.create.create import create
from blobstore.operations.maintenance.gc import collect_garbage
from blobstore.operations.maintenance.lost_manifests import GRACE, lost_manifests
from blobstore.operations.maintenance.names import remove_models
from blobstore.operations.maintenance.verify import verify_models
from blobstore.store.local import LocalStore
from tests.support.damage import forget_manifests
from tests.support.frozen import put
from tests.support.models import dense_tensors, write_folder


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """A store with a model."""
    store = LocalStore(tmp_path / "store")
    create(write_folder(tmp_path / "source", dense_tensors()), "m", store=store)
    return store


def lose_all(store: LocalStore) -> None:
    shutil.rmtree(store.folder("manifests"))


def make_old(store: LocalStore) -> None:
    for path in store.folder("blobs").iterdir():
        os.utime(path, (time.time() - 2 * GRACE,) * 2)


def test_a_store_that_lost_all_manifests_is_faulty(store: LocalStore) -> None:
    assert lost_manifests(store) == ""
    lose_all(store)
    (fault,) = verify_models(store=store).faults
    folder = store.folder("manifests")
    assert (
        fault.message
        == lost_manifests(store)
        == f"there are no manifests in '{folder}', but 12 blobs"
    )
    assert (fault.reference, fault.blob) == ("", "")
    # The same as gc says, which counts old blobs alone.
    make_old(store)
    assert collect_garbage(store=store, dry_run=True).refusal == fault.message


def test_a_store_that_lost_most_manifests_is_faulty(store: LocalStore) -> None:
    put(store, "small", {"x": 1})
    for number in range(20):
        put(store, f"gone:{number}", {"y": 2 + number})
    forget_manifests(store, "m", *(f"gone:{number}" for number in range(20)))
    assert lost_manifests(store) == ""  # other programs may be about to give them names
    make_old(store)
    assert "so some manifests may be missing" in lost_manifests(store)
    assert not verify_models(["small"], store=store).faults
    assert len(verify_models(store=store).faults) == 1


def test_removed_models_are_not_lost(store: LocalStore) -> None:
    make_old(store)
    remove_models(["m"], store=store)
    assert not verify_models(store=store).faults
    assert collect_garbage(store=store, dry_run=True).refusal


@pytest.mark.parametrize("is_running", [True, False])
def test_blobs_of_an_import_without_a_name_yet_are_not_lost(
    tmp_path: Path, is_running: bool
) -> None:
    store = LocalStore(tmp_path / "store")
    with contextlib.ExitStack() as stack:
        ingest = stack.enter_context(store.ingest())
        ingest.add(3, lambda: [b"abc"])
        ingest.publish()
        if not is_running:
            stack.close()
        assert lost_manifests(store) == ""
        make_old(store)
        assert (lost_manifests(store) == "") == is_running


def test_an_absent_store_has_lost_nothing(tmp_path: Path) -> None:
    assert not lost_manifests(LocalStore(tmp_path / "none"))
