"""The names that fetches have given, and what is left of them when a server is killed."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from blobstore.errors import NameTaken
from blobstore.manifests.reference import Reference
from blobstore.operations.create.create import create
from blobstore.operations.maintenance.names import copy_model, remove_models
from blobstore.serve.pulled import PulledModels
from blobstore.store.local import LocalStore
from tests.support.models import dense_tensors, write_folder
from tests.unit.serve.test_pulled import ORIGIN, import_as

NAME = Reference.parse("org/model")


@pytest.fixture
def own(store: LocalStore, tmp_path: Path) -> Reference:
    """A model of the operator's."""
    create(write_folder(tmp_path / "own", dense_tensors()), "own", store=store)
    return Reference.parse("own")


def has_given(store: LocalStore) -> bool:
    """Return whether a fetch has given the name, as the next process sees it."""
    return PulledModels(store).names.has_given(NAME)


def notes(store: LocalStore) -> list[Path]:
    return list(store.folder("pulled").glob(".name-*"))


def test_a_name_has_what_a_fetch_gave_it_until_the_operator_gives_or_removes_it(
    store: LocalStore, own: Reference, tmp_path: Path
) -> None:
    pulled = PulledModels(store)
    assert not pulled.names.has_given(NAME)
    import_as(store, tmp_path, ORIGIN)
    assert pulled.names.has_given(NAME)
    import_as(store, tmp_path, replace(ORIGIN, commit="e" * 40))
    assert pulled.names.has_given(NAME)
    manifest = store.resolve(NAME)
    copy_model(own, NAME, store=store, force=True)
    assert not pulled.names.has_given(NAME)
    assert not notes(store)
    late = replace(store.names.seen(NAME), is_fetched=True)
    with pytest.raises(NameTaken):
        store.names.publish(late, manifest)
    copy_model(NAME, "mine", store=store)
    import_as(store, tmp_path, ORIGIN)
    copy_model(NAME, "mine", store=store, force=True)
    copy_model("mine", NAME, store=store)  # the same manifest
    assert not pulled.names.has_given(NAME)
    import_as(store, tmp_path, ORIGIN)
    remove_models([NAME], store=store)
    assert not pulled.names.has_given(NAME)
    assert not notes(store)


@pytest.mark.parametrize("is_copied", [False, True])
def test_a_name_stays_one_of_fetches_when_its_manifest_is_damaged_or_lost(
    store: LocalStore, tmp_path: Path, *, is_copied: bool
) -> None:
    import_as(store, tmp_path, ORIGIN)
    if is_copied:  # without hard links
        store = LocalStore(shutil.copytree(store.root, tmp_path / "copied"))
    path = store.manifest_path(NAME)
    path.chmod(0o644)
    path.write_bytes(b"damaged")
    assert has_given(store)
    path.unlink()
    path.symlink_to(path)
    assert has_given(store)
    path.unlink()
    assert has_given(store)


def test_a_note_makes_no_model_of_the_operators_one_of_fetches(
    store: LocalStore, own: Reference
) -> None:
    """The fetch was killed, or has failed, and another program than this has written the manifest."""
    PulledModels(store).names.giving(NAME)
    assert not has_given(store)
    path = store.manifest_path(NAME)
    path.parent.mkdir(parents=True)
    path.write_bytes(store.read_manifest(own))
    assert not has_given(store)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")
def test_a_name_that_another_user_has_given_is_his_although_the_note_stays(
    store: LocalStore, tmp_path: Path
) -> None:
    import_as(store, tmp_path, ORIGIN)
    os.chown(store.manifest_path(NAME), 12345, -1)
    assert not has_given(store)
    PulledModels(store).names.giving(NAME)
    os.chown(notes(store)[0], 12345, -1)
    assert has_given(store)
