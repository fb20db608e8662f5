from __future__ import annotations

import contextlib
import errno
import os
import shutil
from pathlib import Path

import pytest

from blobstore.errors import InvalidManifest, ModelNotFound, NameTaken, StoreError
from blobstore.manifests.reference import Reference
from blobstore.operations.create.create import create
from blobstore.operations.describe.disk_usage import measure_usage
from blobstore.operations.maintenance.gc import collect_garbage
from blobstore.operations.maintenance.history import restore_model
from blobstore.operations.maintenance.names import copy_model, remove_models, rename_model
from blobstore.operations.maintenance.repair import repair_models
from blobstore.operations.maintenance.verify import verify_models
from blobstore.store import names
from blobstore.store.local import LocalStore
from tests.support.models import dense_tensors, moe_tensors, write_folder

A, B = map(Reference.parse, ("a", "team/b:tag"))


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """A store with two models."""
    store = LocalStore(tmp_path / "store")
    create(write_folder(tmp_path / "dense", dense_tensors()), A, store=store)
    create(write_folder(tmp_path / "moe", moe_tensors()), B, store=store)
    return store


def lost(store: LocalStore) -> list[Reference]:
    return list(store.names.published.lost())


def links(store: LocalStore) -> set[Reference]:
    return set(store.names.published.references())


def remove_as_ollama(store: LocalStore, reference: Reference) -> None:
    """Remove a model as Ollama does: its manifest, and the blobs that no other model references."""
    manifest = store.resolve(reference)
    store.manifest_path(reference).unlink()
    needed = {blob.digest for name in store.references() for blob in store.resolve(name).blobs}
    for digest in {blob.digest for blob in manifest.blobs} - needed:
        Path(store.blob_path(digest)).unlink()


def test_a_lost_name_is_a_fault_and_restored_without_a_source(store: LocalStore) -> None:
    data = store.read_manifest(B)
    store.manifest_path(B).unlink()
    verified = verify_models(store=store)
    (fault,) = verified.faults
    assert (fault.reference, verified.lost) == (str(B), (B,))
    assert "is lost" in fault.message
    assert [item.reference for item in repair_models(store=store, dry_run=True).restored] == [B]
    assert lost(store) == [B]
    repaired = repair_models(store=store)
    assert ([item.reference for item in repaired.restored], repaired.faults) == ([B], ())
    assert store.read_manifest(B) == data
    assert not lost(store)


def test_a_lost_name_is_restored_by_name(store: LocalStore) -> None:
    for name in (A, B):
        store.manifest_path(name).unlink()
    assert len(repair_models([B], store=store).restored) == 1
    assert lost(store) == [A]


def test_says_what_to_do_about_a_lost_name(store: LocalStore) -> None:
    store.manifest_path(B).unlink()
    with pytest.raises(
        ModelNotFound,
        match="its manifest was lost, or removed by another program; 'blobstore repair team/b:tag'",
    ):
        store.resolve(B)
    (error,) = measure_usage(store=store).unreadable
    assert str(error) == "the manifest of 'team/b:tag' is lost"


@pytest.mark.parametrize("is_last", [True, False])
def test_gc_keeps_the_blobs_of_lost_names_until_they_are_forgotten(
    store: LocalStore, *, is_last: bool
) -> None:
    if is_last:
        remove_models([A], store=store)
    store.manifest_path(B).unlink()
    collected = collect_garbage(store=store, older_than=0, dry_run=is_last)
    kept = {blob.reason for blob in collected.kept_blobs}
    assert kept == {"lost manifest"}
    assert bool(collected.refusal) == is_last
    assert lost(store) == [B]
    remove_models([B], store=store)
    assert not verify_models(store=store).faults
    if is_last:
        assert restore_model(B, store=store).digest
        remove_models([B], store=store)
    assert len(collect_garbage(store=store, older_than=0, force=True).blobs) >= 2


def test_gc_by_force_forgets_lost_names(store: LocalStore) -> None:
    store.manifest_path(B).unlink()
    assert collect_garbage(store=store, older_than=0, force=True).blobs
    assert links(store) == {A}
    assert not verify_models(store=store).faults


def test_a_store_without_its_folder_of_manifests_gets_all_names_back(store: LocalStore) -> None:
    shutil.rmtree(store.folder("manifests"))
    (fault,) = verify_models(store=store).faults
    assert fault.message.startswith("there are no manifests in")
    assert not repair_models(store=store).faults
    assert set(store.references()) == {A, B}


def test_what_ollama_has_removed_is_not_lost(store: LocalStore) -> None:
    remove_as_ollama(store, B)
    assert not verify_models(store=store).faults
    assert not repair_models(store=store).restored
    assert not collect_garbage(store=store, older_than=0).kept_blobs
    assert links(store) == {A}


def test_a_manifest_that_was_moved_by_hand_is_not_lost(store: LocalStore) -> None:
    store.manifest_path(B).rename(store.manifest_path("team/b:new"))
    assert not verify_models(store=store).faults
    collect_garbage(store=store)
    assert links(store) == {A}


def test_removed_renamed_and_replaced_names_are_not_lost(store: LocalStore) -> None:
    copy_model(A, "copy", store=store)
    rename_model("copy", "moved", store=store)
    copy_model(B, A, store=store, force=True)
    restore_model(A, store=store)
    remove_models([B], store=store)
    assert links(store) == set(store.references()) == {A, Reference.parse("moved")}
    assert {path.name for path in store.folder("published").glob("*/*")} == {"library"}
    for name in (A, Reference.parse("moved")):
        assert store.names.published.read_manifest(name) == store.read_manifest(name)
        store.manifest_path(name).unlink()
    assert len(lost(store)) == 2


def test_a_name_without_a_link_gets_one_when_it_is_given_again(
    store: LocalStore, tmp_path: Path
) -> None:
    folder, store = (
        write_folder(tmp_path / "source", dense_tensors()),
        LocalStore(tmp_path / "store"),
    )
    create(folder, A, store=store)
    shutil.rmtree(store.folder("published"))
    create(folder, A, store=store)
    assert links(store) == {A}


@pytest.mark.parametrize("call", ["write_file", "unlink", "link"])
def test_a_crash_at_any_step_loses_no_name_and_invents_none(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """A name is given, given to another model, and removed; the process dies at the step that is named."""

    def dying(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    new = Reference.parse("new")
    with monkeypatch.context() as patch:
        patch.setattr(
            names if call == "write_file" else os if call == "link" else Path, call, dying
        )
        for step in (
            lambda: copy_model(A, new, store=store),
            lambda: copy_model(B, A, store=store, force=True),
            lambda: remove_models([B], store=store),
        ):
            with pytest.raises(KeyboardInterrupt):
                step()
                raise KeyboardInterrupt
    assert not lost(store)
    assert not verify_models(store=store).faults


def test_file_systems_without_hard_links_keep_copies(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", link)
    rename_model(A, "moved", store=store)
    store.manifest_path("moved").unlink()
    assert lost(store) == [Reference.parse("moved")]
    assert len(repair_models(store=store).restored) == 1


def test_a_full_disk_leaves_a_name_without_a_link(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("blobstore.store.published.make_folders", full)
    copy_model(A, "copy", store=store)
    assert links(store) == {A, B}
    assert store.resolve("copy")


@pytest.mark.parametrize("damage", ["cut", "fifo", "huge", "a layer", "the config is gone"])
def test_a_lost_name_with_a_damaged_link_stops_gc_until_it_is_forgotten(
    store: LocalStore, damage: str
) -> None:
    link = store.names.published.path(B)
    manifest = store.resolve(B)
    data = store.read_manifest(B)
    store.manifest_path(B).unlink()
    if damage == "the config is gone":
        Path(store.blob_path(manifest.config.digest)).unlink()
    else:
        link.unlink()
        if damage == "fifo":
            os.mkfifo(link)
        else:
            digest = manifest.layers[0].digest.hex.encode()
            link.write_bytes(data.replace(digest, digest[::-1]) if damage == "a layer" else b"{")
            if damage == "huge":
                os.truncate(link, 1 << 40)
    (fault,) = verify_models(store=store).faults
    assert "does not replace it" in fault.message
    for is_dry in (True, False):
        with pytest.raises(InvalidManifest, match="'blobstore rm team/b:tag'"):
            collect_garbage(store=store, older_than=0, dry_run=is_dry)
    with pytest.raises(NameTaken):
        copy_model(A, B, store=store)
    assert links(store) == {A, B}
    copy_model(A, B, store=store, force=True)
    assert collect_garbage(store=store, older_than=0).blobs


def test_foreign_files_and_folders_mean_nothing(store: LocalStore) -> None:
    store.folder("published").joinpath("notes.txt").write_text("foreign")
    link = store.names.published.path(B)
    link.unlink()
    link.mkdir()
    assert not verify_models(store=store).faults
    remove_models([B], store=store)
    collect_garbage(store=store)


def test_a_lost_name_is_not_given_away(store: LocalStore) -> None:
    data = store.read_manifest(B)
    store.manifest_path(B).unlink()
    with pytest.raises(NameTaken, match="has the name 'team/b:tag', and its manifest is lost"):
        copy_model(A, B, store=store)
    copy_model(A, B, store=store, force=True)
    assert [former.data for former in store.names.former(B)] == [data]
    restore_model(B, store=store)
    assert store.read_manifest(B) == data


def test_the_same_model_may_get_its_lost_name_again(store: LocalStore) -> None:
    copy_model(B, "spare", store=store)
    data = store.read_manifest(B)
    store.manifest_path(B).unlink()
    copy_model("spare", B, store=store)
    assert store.read_manifest(B) == data
    assert links(store) == set(store.references())


def test_a_name_is_not_lost_if_another_has_the_same_model(store: LocalStore) -> None:
    copy_model(B, "alias", store=store)
    remove_as_ollama(store, B)
    assert not verify_models(store=store).faults
    assert not repair_models(store=store).restored
    collect_garbage(store=store, older_than=0)
    assert links(store) == set(store.references()) == {A, Reference.parse("alias")}


def test_gc_forgets_no_name_while_the_blobs_are_elsewhere(store: LocalStore) -> None:
    blobs = store.folder("blobs")
    store.manifest_path(B).unlink()
    away = blobs.rename(blobs.with_name("away"))
    blobs.mkdir()
    collect_garbage(store=store, older_than=0)
    blobs.rmdir()
    away.rename(blobs)
    assert lost(store) == [B]


def test_a_link_follows_a_manifest_that_another_program_has_replaced(store: LocalStore) -> None:
    data = store.read_manifest(A)
    path = store.manifest_path(B)
    path.unlink()
    path.write_bytes(data)
    collect_garbage(store=store, older_than=0)
    assert store.names.published.read_manifest(B) == data


def test_a_lost_name_that_conflicts_does_not_stop_the_repair_of_others(
    store: LocalStore, tmp_path: Path
) -> None:
    other = Reference.parse("z")
    create(
        write_folder(tmp_path / "other", dict(list(dense_tensors().items())[:1])),
        other,
        store=store,
    )
    for name in (B, other):
        store.manifest_path(name).unlink()
    copy_model(A, "Team/B:tag", store=store)
    assert [one.reference for one in repair_models(store=store).restored] == [other]
    assert lost(store) == [B]


def test_a_lost_name_may_be_given_again_in_another_case(store: LocalStore) -> None:
    store.manifest_path(B).unlink()
    copy_model(A, "Team/B:tag", store=store)
    assert not repair_models([A], store=store).faults
    remove_models([B], store=store)
    assert not lost(store)


def test_a_manifest_that_was_replaced_by_a_damaged_file_is_restored_from_its_link(
    tmp_path: Path,
) -> None:
    folder, store = (
        write_folder(tmp_path / "source", dense_tensors()),
        LocalStore(tmp_path / "store"),
    )
    create(folder, A, store=store)
    data = store.read_manifest(A)
    path = store.manifest_path(A)
    path.unlink()
    path.write_bytes(data.replace(b"image.tensor", b"image.tenror", 1))
    assert verify_models(store=store).faults
    assert not repair_models(store=store).faults
    assert store.read_manifest(A) == data


@pytest.mark.parametrize("place", [".", "registry.ollama.ai", "registry.ollama.ai/team"])
def test_nothing_is_removed_or_written_through_a_link_in_place_of_a_folder(
    store: LocalStore, tmp_path: Path, place: str
) -> None:
    inner, outside = store.folder("published") / place, tmp_path / "outside"
    inner.rename(outside)
    inner.symlink_to(outside)
    there = {path: path.stat().st_ino for path in outside.rglob("*")}
    with contextlib.suppress(StoreError):  # a link in place of all of it is refused at once
        remove_models([B], store=store)
    with contextlib.suppress(StoreError):
        copy_model(A, "team/new", store=store)
    store.names.published.update(forget_lost=True)
    assert {path: path.stat().st_ino for path in outside.rglob("*")} == there
