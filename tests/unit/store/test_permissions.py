from __future__ import annotations

import os
from pathlib import Path

import pytest

from blobstore.core.files import give_to_owner
from blobstore.manifests.reference import Reference
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.operations.freeze.thaw import thaw_models
from blobstore.operations.maintenance.gc import collect_garbage
from blobstore.operations.maintenance.names import remove_models
from blobstore.operations.maintenance.repair import repair_models
from blobstore.store.local import LocalStore
from blobstore.store.permissions import folder_warnings, name_concerns
from tests.support import sandbox
from tests.support.frozen import flip, layer, layers, put, tuned, weights
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


only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root writes to the stores of others")


@pytest.mark.slow
@only_root
def test_what_root_adds_to_the_store_of_another_user_locks_that_user_out_of_nothing() -> None:
    with sandbox.common_folder() as folder:
        store = LocalStore(folder / "store", lock_timeout=0.05)
        store.root.mkdir()
        os.chown(store.root, NOBODY, NOBODY)
        put(store, "base", {"x": 1})
        add_blobs(store, "a", {"x": layer("x", tuned(10, 1))})
        add_blobs(store, "ns/b", {"y": layer("y", weights(2))})
        freeze_models(["a"], store=store, base="base")
        add_blobs(store, "ns/b", {"y": layer("y", weights(3))})  # which has a history now
        damaged = Path(store.blob_path(layers(store, "ns/b")["y"].digest))
        intact = damaged.read_bytes()
        flip(str(damaged))
        restore = LocalStore(folder / "other")
        add_blobs(restore, "b", {"y": intact})
        assert len(repair_models(source=restore.root, store=store).repaired) == 1
        folders = {path for path in store.root.rglob("*") if path.is_dir()}
        blobs = {path for name in ("blobs", "cold") for path in store.folder(name).iterdir()}
        others = {store._layout.lock, store._layout.cold_index}
        assert {path.stat().st_uid for path in folders | blobs | others} == {NOBODY}

        def use() -> object:
            thaw_models(["a"], store=store)
            freeze_models(["ns/b"], store=store)
            add_blobs(store, "ns/c", {"z": layer("z", weights(4))})
            remove_models(["a", "ns/b"], store=store)
            collect_garbage(store=store, older_than=0, force=True)
            return sorted(map(str, store.references()))

        assert sandbox.call(use, unprivileged=True) == "['base:latest', 'ns/c:latest']"


@only_root
def test_root_takes_nothing_from_other_users() -> None:
    with sandbox.common_folder() as folder:
        os.chown(folder, NOBODY, NOBODY)
        new = folder / "new"
        new.touch()
        os.chown(new, NOBODY - 1, NOBODY - 1)
        give_to_owner(new)
        assert new.stat().st_uid == NOBODY - 1


@only_root
@pytest.mark.parametrize("trap", ["link", "hard link", "content", "folder with content"])
def test_root_gives_nothing_away_that_another_user_has_put_in_the_place_of_a_new_file(
    trap: str,
) -> None:
    with sandbox.common_folder() as folder:
        secret, home = folder / "secret", folder / "home"
        home.mkdir()
        os.chown(home, NOBODY, NOBODY)
        if trap == "folder with content":
            (home / "lock").mkdir()
            (home / "lock" / "x").touch()
        elif trap == "content":
            (home / "lock").write_bytes(b"secret")
        else:
            secret.touch()
            (os.link if trap == "hard link" else os.symlink)(secret, home / "lock")
        give_to_owner(home / "lock")
        assert (home / "lock").stat().st_uid == 0


@only_root
def test_root_gives_nothing_away_through_a_folder_that_has_become_a_link() -> None:
    with sandbox.common_folder() as folder:
        (folder / "etc").mkdir()
        os.chown(folder / "etc", NOBODY, NOBODY)
        (folder / "etc" / "lock").touch()
        (folder / "home").symlink_to(folder / "etc")
        give_to_owner(folder / "home" / "lock")
        assert (folder / "etc" / "lock").stat().st_uid == 0


@only_root
def test_a_new_store_of_root_in_the_folder_of_another_user_belongs_to_root() -> None:
    with sandbox.common_folder() as folder:
        os.chown(folder, NOBODY, NOBODY)
        store = LocalStore(folder / "store")
        put(store, "a", {"x": 1})
        assert {path.stat().st_uid for path in (store.root, *store.root.rglob("*"))} == {0}
