"""A store with a read-only one below it: ``BLOBSTORE_SHARED``."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load

import blobstore
from blobstore.errors import BlobMissing, ModelNotFound
from blobstore.manifests.reference import Reference
from blobstore.operations.bench.bench import measure_reading
from blobstore.operations.open import Verify
from blobstore.serve.library import Library
from blobstore.store.local import LocalStore
from tests.support import sandbox
from tests.support.folders import contents
from tests.support.models import Arrays, dense_tensors, write_folder
from tests.support.serve import ask, body_of

BASE = dense_tensors()
TUNED = {**BASE, "model.layers.0.norm.weight": np.ones(4, np.float32)}
"""A fine-tune that shares all but one of the tensors."""


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalStore:
    """Return the store below, with the model ``base``, which nobody can write."""
    root = tmp_path / "shared"
    monkeypatch.setenv("BLOBSTORE_HOME", str(tmp_path / "own"))
    monkeypatch.setenv("BLOBSTORE_SHARED", str(root))
    blobstore.create(write_folder(tmp_path / "base", BASE), "base", store=root)
    return LocalStore(root)


@pytest.fixture
def tuned(shared: LocalStore, tmp_path: Path) -> LocalStore:
    """Return the personal store with the model ``tuned``."""
    blobstore.create(write_folder(tmp_path / "tuned", TUNED), "tuned")
    return LocalStore()


def blobs(store: LocalStore) -> set[str]:
    return {path.name for path in store.folder("blobs").glob("*")}


def values(name: str, verify: Verify = "size") -> Arrays:
    with blobstore.open(name, verify=verify) as model:
        return {key: np.array(value) for key, value in model.tensors().items()}


def same(one: Arrays, other: Arrays) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[key], other[key]) for key in one)


def test_models_of_the_shared_store_are_read_by_their_names(
    shared: LocalStore, tmp_path: Path
) -> None:
    before = contents(shared.folder("manifests")) | contents(shared.folder("blobs"))
    assert same(values("base"), BASE)
    assert blobstore.show("base").tensors
    assert blobstore.export("base", tmp_path / "out").folder.exists()
    assert blobstore.link("base", tmp_path / "links").links
    assert [(str(it.reference), it.store) for it in blobstore.list()] == [
        ("base:latest", shared.root)
    ]
    assert not blobs(LocalStore())
    assert before == contents(shared.folder("manifests")) | contents(shared.folder("blobs"))


def test_no_byte_is_stored_twice(shared: LocalStore, tuned: LocalStore, tmp_path: Path) -> None:
    assert blobs(tuned)
    assert not blobs(tuned) & blobs(shared)
    assert same(values("tuned"), TUNED)
    assert same(values("tuned", verify="digest"), TUNED)
    assert blobstore.verify().ok
    assert blobstore.gc(older_than=0).blobs == ()
    assert blobstore.link("tuned", tmp_path / "links").links
    assert all(path.exists() for path in (tmp_path / "links").rglob("*"))
    assert [it.name for it in blobstore.diff("base", "tuned").tensors if not it.is_same] == [
        "model.layers.0.norm.weight"
    ]


def test_what_is_pulled_or_saved_is_stored_once(shared: LocalStore, tmp_path: Path) -> None:
    bucket = (tmp_path / "bucket").as_uri()
    blobstore.push("base", bucket, store=shared)
    assert blobstore.pull(f"{bucket}/base", "pulled").bytes_fetched == 0
    blobstore.save(TUNED, "saved")
    assert same(values("pulled"), BASE)
    assert same(values("saved"), TUNED)
    assert not blobs(LocalStore()) & blobs(shared)


def test_what_is_asked_about_a_shared_model_is_answered(
    shared: LocalStore, tuned: LocalStore, tmp_path: Path
) -> None:
    info = blobstore.info("base")
    assert info == replace(blobstore.info("base", store=shared), store=shared.root)
    assert info.modified
    assert info.disk_size == info.unique_size
    assert blobstore.compare("tuned", "base").tensors
    for name in ("base", "tuned"):
        assert measure_reading(Reference.parse(name), device="none").measurements
    found = [str(place.reference) for place in blobstore.find("*").places]
    assert {"base:latest", "tuned:latest"} == set(found)
    blobstore.create(write_folder(tmp_path / "other", TUNED), "base")
    assert blobstore.info("base").store is None
    found = [str(place.reference) for place in blobstore.find("bas").places]
    assert found == ["base:latest"]


def test_what_is_in_the_shared_store_is_counted_apart_and_freed_by_nobody(
    shared: LocalStore, tuned: LocalStore
) -> None:
    blobstore.copy("base", "mine")
    usage = blobstore.du()
    needed = {blob.id for name in ("mine", "tuned") for blob in tuned.resolve(name).blobs}
    here = {blob for blob in needed if tuned.has_hot(blob.digest)}
    assert usage.referenced == (len(here), sum(blob.size for blob in here))
    below = needed - here
    assert usage.below == (len(below), sum(blob.size for blob in below))
    sizes = {model.name: model.size - model.shared for model in blobstore.list()}
    assert sizes["mine:latest"] == 0
    assert sizes["tuned:latest"] == usage.referenced.size


def test_the_names_of_the_store_itself_win(shared: LocalStore, tmp_path: Path) -> None:
    blobstore.create(write_folder(tmp_path / "tuned", TUNED), "base")
    assert same(values("base"), TUNED)
    assert [it.store for it in blobstore.list()] == [None]
    blobstore.remove(["base"])
    assert same(values("base"), BASE)


def test_the_shared_store_is_never_written(shared: LocalStore) -> None:
    with pytest.raises(ModelNotFound, match="the shared store"):
        blobstore.remove(["base"])
    with pytest.raises(ModelNotFound, match="the shared store"):
        blobstore.rename("base", "other")
    blobstore.copy("base", "mine")
    assert shared.has_model("base")
    assert not shared.has_model("mine")
    assert not blobs(LocalStore())
    assert same(values("mine"), BASE)


def test_blobs_that_the_shared_store_has_lost_are_named_and_repaired(
    shared: LocalStore, tuned: LocalStore, tmp_path: Path
) -> None:
    blobstore.remove(["base"], store=shared)
    removed = blobstore.gc(store=shared, older_than=0, force=True).blobs

    faults = blobstore.verify().faults
    assert len(faults) == len(removed) - 2  # the changed tensor, and the record of the source
    assert all("not in the shared store" in fault.message for fault in faults)
    with pytest.raises(BlobMissing, match="not in the shared store"):
        values("tuned")
    assert not blobstore.repair("tuned", tmp_path / "tuned").faults
    assert blobstore.verify().ok
    shutil.rmtree(shared.root)
    assert same(values("tuned"), TUNED)


def test_a_damaged_blob_of_the_shared_store_gets_a_copy(
    shared: LocalStore, tuned: LocalStore, tmp_path: Path
) -> None:
    (digest,) = (
        blob.digest
        for blob in shared.resolve("base").layers
        if blob.name == "model.embed_tokens.weight"
    )
    path = Path(shared.blob_path(digest))
    data = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(data[:-1] + b"X")

    assert [fault.tensor for fault in blobstore.verify().faults] == ["model.embed_tokens.weight"]
    assert not blobstore.repair("tuned", tmp_path / "tuned").faults

    assert blobstore.verify().ok
    assert path.read_bytes() == data[:-1] + b"X"


@pytest.mark.parametrize("frozen", ["own", "shared"])
def test_frozen_blobs_are_read_in_both(
    frozen: str, shared: LocalStore, tuned: LocalStore, tmp_path: Path
) -> None:
    name, store = ("tuned", tuned) if frozen == "own" else ("base", shared)
    result = blobstore.freeze([name], store=store)
    assert not result.faults
    assert (result.count("elsewhere") > 0) == (frozen == "own")
    assert same(values("tuned"), TUNED)
    assert blobstore.verify().ok
    assert blobstore.export("tuned", tmp_path / "out").folder.exists()
    assert not blobstore.thaw([name], store=store).faults


def test_other_stores_have_no_shared_one(shared: LocalStore, tmp_path: Path) -> None:
    assert LocalStore(tmp_path / "backup").shared is None
    assert shared.shared is None
    blobstore.copy_to_store("base", tmp_path / "backup")
    assert blobs(LocalStore(tmp_path / "backup")) == blobs(shared)


def test_a_server_has_the_models_of_both(shared: LocalStore, tuned: LocalStore) -> None:
    blobstore.freeze(["base"], store=shared)
    library, below = Library(LocalStore()), Library(shared)
    for name, tensors in (("base", BASE), ("tuned", TUNED)):
        response = ask(library, f"/{name}/resolve/main/model.safetensors", shared=below)
        assert response.status == 200
        assert same(load(body_of(library.store, response)), tensors)


def test_users_of_a_group_write_to_one_store() -> None:
    with sandbox.common_folder() as folder:
        write_as_two_users(folder)


def write_as_two_users(folder: Path) -> None:
    """Write to a store as two users of a group: as this user alone unless that is root."""
    is_root = os.geteuid() == 0
    group = 1234 if is_root else os.getegid()
    root = folder / "team"
    root.mkdir()
    os.chown(root, -1, group)
    root.chmod(0o2775)
    source = write_folder(folder / "base", BASE)
    for path in source.iterdir():
        path.chmod(0o644)

    def as_user(user: int, work: Callable[[], object]) -> str:
        def call() -> object:
            if is_root:
                os.setgroups([group])
                os.setgid(user)
                os.setuid(user)
            return work()

        return sandbox.call(call, umask=0o002)

    first = as_user(1001, lambda: blobstore.create(source, "a", store=root).reference)
    second = as_user(1002, lambda: blobstore.create(source, "b", store=root).bytes_written)
    assert (first, second) == ("a:latest", "0")
    assert as_user(1002, lambda: blobstore.remove(["a"], store=root) and "removed") == "removed"
    assert as_user(1001, lambda: len(blobstore.gc(store=root, older_than=0).blobs)) == "0"
    folders = [path for path in root.rglob("*") if path.is_dir()]
    assert {path.stat().st_gid for path in folders} == {group}
    assert all(path.stat().st_mode & 0o2070 == 0o2070 for path in folders)
    assert blobstore.verify(store=root).ok
