"""Whose a model is: the user's own, or fetched for clients of a server, whatever happens to it and to the records."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blobstore.core.digest import Digest
from blobstore.errors import NameTaken
from blobstore.manifests.reference import Reference
from blobstore.operations.archive.pack import pack_models
from blobstore.operations.archive.unpack import unpack_archive
from blobstore.operations.create.create import create, import_source
from blobstore.operations.export.export import export_model
from blobstore.operations.maintenance.copy_to_store import copy_to_store
from blobstore.operations.maintenance.gc import collect_garbage
from blobstore.operations.maintenance.history import restore_model
from blobstore.operations.maintenance.names import copy_model, remove_models, rename_model
from blobstore.operations.maintenance.repair import repair_models
from blobstore.planning.import_options import ImportOptions
from blobstore.serve.asked import Asked, check_given, hidden_versions
from blobstore.serve.library import Library
from blobstore.serve.pulled import Origin, PulledModels
from blobstore.serve.rights import Right, Rights
from blobstore.serve.unprepared import prepared
from blobstore.serve.visible import Visible
from blobstore.sources.open import open_source
from blobstore.store.fetched import mark_of
from blobstore.store.local import LocalStore
from blobstore.store.names import replace_any
from tests.support.models import write_folder
from tests.support.serve import ask

NAME, COPY = Reference.parse("org/gated"), Reference.parse("my/copy")
COMMIT = ("org/gated", "a" * 40)
ORIGIN = Origin(*COMMIT)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "source", {"weight": np.arange(64, dtype=np.float32)})


@pytest.fixture
def cache(store: LocalStore, source: Path) -> LocalStore:
    """A store with a restricted model that a server has fetched."""
    fetch(store, source, NAME)
    return store


def fetch(store: LocalStore, source: Path, name: Reference) -> None:
    """Do what a server does when it fetches a restricted model for a client."""
    pulled = PulledModels(store)
    pulled.keep(ORIGIN, is_public=False)
    import_as(store, source, name, mark_of(COMMIT))


def import_as(store: LocalStore, source: Path, name: Reference, mark: str = "") -> None:
    """Import a model from the commit, as a user does who may read it; with a mark, as a server does."""
    opened: Any = open_source(source)
    opened.repository, opened.commit = COMMIT
    with contextlib.closing(opened):
        update = replace(replace_any(name), is_fetched=bool(mark))
        if mark:
            PulledModels(store).names.giving(name)
        import_source(opened, update, store, ImportOptions(), mark=mark)


def is_shown(store: LocalStore, name: Reference) -> bool:
    """Return whether a server without an upstream shows a model to everyone, in each way to ask."""
    library = Library(store)
    visible = Visible.of(library)
    digest = store.resolve(name).layers[0].digest
    commits = prepared(lambda: visible.commits(name))
    found = {
        prepared(lambda: visible.model(name)) is not None,
        prepared(lambda: visible.artifact(name)) is not None,
        name in prepared(visible.models),
        name in prepared(lambda: visible.tags(name)),
        name in [it.reference for it in prepared(lambda: list(visible.artifacts(name, digest)))],
        name in commits,
    }
    assert len(found) == 1
    return found.pop()


def archive(store: LocalStore, name: Reference, folder: Path) -> Path:
    pack_models([name], folder / "model.bsar", store=store)
    return folder / "model.bsar"


# What a fetch has brought


def restore(store: LocalStore, folder: Path) -> Reference:
    remove_models([NAME], store=store)
    restore_model(NAME, store=store)
    return NAME


def repair(store: LocalStore, folder: Path) -> Reference:
    store.manifest_path(NAME).unlink()
    repair_models(store=store)
    return NAME


def copy(store: LocalStore, folder: Path) -> Reference:
    copy_model(NAME, COPY, store=store)
    return COPY


def rename(store: LocalStore, folder: Path) -> Reference:
    rename_model(NAME, COPY, store=store)
    return COPY


def damage_source(store: LocalStore, folder: Path) -> Reference:
    layer = store.resolve(NAME).layers[-1]
    Path(store.blob_path(layer.digest)).chmod(0o600)
    Path(store.blob_path(layer.digest)).write_bytes(b"damaged")
    return NAME


LOSSES: dict[str, Callable[[Path], bool]] = {
    "nothing": lambda path: False,
    "the commit's record": lambda path: b'"commit"' in path.read_bytes(),
    "the repository's record": lambda path: b'"commit"' not in path.read_bytes(),
    "all files": lambda path: True,
    "the folder": lambda path: True,
}


@pytest.mark.parametrize("lost", LOSSES)
@pytest.mark.parametrize("change", [restore, repair, copy, rename, damage_source])
def test_a_fetched_model_is_shown_to_nobody_unasked_whatever_is_done_or_lost(
    cache: LocalStore,
    tmp_path: Path,
    change: Callable[[LocalStore, Path], Reference],
    lost: str,
) -> None:
    for path in list(cache.folder("pulled").iterdir()):
        if LOSSES[lost](path):
            path.unlink()
    if lost == "the folder":
        cache.folder("pulled").rmdir()
    if change is damage_source:  # then it cannot be prepared, but could be listed
        change(cache, tmp_path)
        assert prepared(Visible.of(Library(cache)).models) == []
    else:
        assert not is_shown(cache, change(cache, tmp_path))


@pytest.mark.parametrize("is_evicted", [False, True])
def test_an_archive_of_a_fetched_model_opens_nothing_in_the_same_store(
    cache: LocalStore, tmp_path: Path, *, is_evicted: bool
) -> None:
    packed = archive(cache, NAME, tmp_path)
    if is_evicted:
        cache.manifest_path(NAME).unlink()
        cache.names.published.remove([NAME])
        PulledModels(cache).forget(ORIGIN)
    unpack_archive(packed, store=cache)
    assert not is_shown(cache, NAME)


def test_damaged_bytes_in_place_of_a_fetched_manifest_are_not_the_users(cache: LocalStore) -> None:
    path = cache.manifest_path(NAME)
    path.unlink()
    path.write_bytes(b"{")
    assert not Library(cache).is_own(NAME)
    # One that no fetch has given is the user's, damaged as it is.
    remove_models([NAME], store=cache)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"{")
    assert Library(cache).is_own(NAME)


def test_a_fetched_model_is_public_if_its_repository_is_and_its_commit_is_recorded(
    cache: LocalStore,
) -> None:
    copy_model(NAME, COPY, store=cache)
    PulledModels(cache).note_public(COMMIT[0], is_public=True)
    assert is_shown(cache, NAME)
    assert is_shown(cache, COPY)
    # The public repository may not have this commit, such as one that the server of a shared store has fetched.
    pulled = PulledModels(cache)
    pulled._path(*COMMIT).unlink()
    assert not is_shown(cache, NAME)
    assert not is_shown(cache, COPY)


def test_records_of_a_store_say_nothing_about_the_models_of_another(
    cache: LocalStore, tmp_path: Path
) -> None:
    """The shared store below has the model, and a peer of the store above has named its commit."""
    above = LocalStore(tmp_path / "above")
    PulledModels(above).keep(replace(ORIGIN, peer="http://peer"), is_public=None)
    target = "/org/gated/resolve/main/config.json"
    response = ask(Library(above), target, shared=Library(cache))
    assert response == ask(Library(above), target)
    PulledModels(cache).keep(ORIGIN, is_public=True)
    PulledModels(above).note_public("org/gated", is_public=False)
    assert ask(Library(above), target, shared=Library(cache)).status == 200


def test_the_record_of_a_giver_is_about_what_came_from_it_alone(
    cache: LocalStore, source: Path
) -> None:
    """A peer names the commit of a restricted model, whose record is lost or comes only then."""
    shutil.rmtree(cache.folder("pulled"))
    PulledModels(cache).keep(replace(ORIGIN, peer="http://peer"), is_public=None)
    import_as(cache, source, COPY, mark_of(COMMIT, is_of_peer=True))
    assert [is_shown(cache, one) for one in (NAME, COPY)] == [False, True]
    PulledModels(cache).keep(ORIGIN, is_public=True)
    assert [is_shown(cache, one) for one in (NAME, COPY)] == [True, False]


# What is the user's


def test_a_model_that_the_user_imports_is_shown_before_and_after_a_fetch_of_its_commit(
    store: LocalStore, source: Path
) -> None:
    import_as(store, source, NAME)
    assert is_shown(store, NAME)
    other = Reference.parse("org/gated:v1")
    fetch(store, source, other)
    assert is_shown(store, NAME)
    assert not is_shown(store, other)
    copy_model(NAME, COPY, store=store)
    assert is_shown(store, COPY)
    PulledModels(store)._path(*COMMIT).write_bytes(b"{")
    assert is_shown(store, COPY)
    fetch(store, source, other)
    assert is_shown(store, COPY)


def test_a_copy_becomes_the_users_by_way_of_a_folder(cache: LocalStore, tmp_path: Path) -> None:
    copy_model(NAME, COPY, store=cache)
    export_model(COPY, tmp_path / "folder", store=cache)
    create(tmp_path / "folder", COPY, store=cache)
    assert is_shown(cache, COPY)
    assert not is_shown(cache, NAME)


@pytest.mark.parametrize("is_noted", [False, True])
def test_a_model_that_the_user_imports_while_a_fetch_gives_the_name_is_his(
    store: LocalStore, source: Path, *, is_noted: bool
) -> None:
    pulled = PulledModels(store)
    pulled.keep(ORIGIN, is_public=False)
    if is_noted:
        pulled.names.giving(NAME)
    import_as(store, source, NAME)
    assert not pulled.names.has_given(NAME)
    assert is_shown(store, NAME)


def test_a_name_that_the_user_gives_the_fetched_manifest_is_his_whenever_a_fetch_gives_it_too(
    cache: LocalStore, source: Path
) -> None:
    pulled, manifest = PulledModels(cache), cache.resolve(NAME)
    for is_given in (False, True):
        pulled.names.giving(COPY)
        if is_given:
            import_as(cache, source, COPY, mark_of(COMMIT))
        update = replace(cache.names.seen(COPY), is_fetched=True)
        copy_model(NAME, COPY, store=cache)
        with pytest.raises(NameTaken):
            cache.names.publish(update, manifest)
        assert not pulled.names.has_given(COPY)
        remove_models([COPY], store=cache)


@pytest.mark.parametrize("how", ["import", "copy", "archive"])
def test_a_name_that_the_user_gives_is_his_even_if_a_fetch_has_given_it(
    cache: LocalStore, source: Path, tmp_path: Path, how: str
) -> None:
    assert not Library(cache).is_own(NAME)
    if how == "import":
        import_as(cache, source, NAME)
    elif how == "copy":
        copy_model(NAME, COPY, store=cache)
        copy_model(COPY, NAME, store=cache)
    else:
        unpack_archive(archive(cache, NAME, tmp_path), store=cache)
    assert Library(cache).is_own(NAME)
    assert is_shown(cache, NAME) == (how == "import")


def test_a_name_whose_manifest_is_lost_is_the_users_unless_a_fetch_has_given_it(
    cache: LocalStore, source: Path
) -> None:
    import_as(cache, source, own := Reference.parse("org/own"))
    copy_model(NAME, COPY, store=cache)
    library = Library(cache)
    for name in (NAME, COPY, own):
        cache.manifest_path(name).unlink()
    check_given(library, NAME)
    for name in (COPY, own):
        with pytest.raises(NameTaken):
            check_given(library, name)
    remove_models([own], store=cache)
    check_given(library, own)


@pytest.mark.parametrize("how", ["archive", "copy"])
@pytest.mark.parametrize("is_cache", [False, True])
def test_a_model_that_the_user_brings_from_the_store_of_a_server_is_his(
    cache: LocalStore,
    other: LocalStore,
    source: Path,
    tmp_path: Path,
    how: str,
    *,
    is_cache: bool,
) -> None:
    if is_cache:
        PulledModels(other).keep(Origin("org/else", "b" * 40), is_public=True)
    if how == "archive":
        unpack_archive(archive(cache, NAME, tmp_path), store=other)
    else:
        copy_to_store(NAME, other.root, store=cache)
    copy_model(NAME, COPY, store=other)
    for name in (NAME, COPY):
        assert is_shown(other, name)
        assert Library(other).is_own(name)
    # Still so after clients have fetched the commit here, too.
    PulledModels(other).keep(ORIGIN, is_public=False)
    assert is_shown(other, COPY)
    # No cache has it, and it stays as long as a manifest can be had back.
    shutil.rmtree(other.folder("headers"), ignore_errors=True)
    remove_models([COPY], store=other)
    other.manifest_path(NAME).unlink()
    collect_garbage(store=other, older_than=0)
    repair_models(store=other)
    assert is_shown(other, NAME)
    (note,) = other.folder("pulled").glob(".brought-*")
    note.unlink()
    assert not is_shown(other, NAME)


def test_what_a_user_has_brought_and_removed_is_restricted_once_a_server_fetches_it(
    cache: LocalStore, other: LocalStore, source: Path, tmp_path: Path
) -> None:
    unpack_archive(archive(cache, NAME, tmp_path), store=other)
    remove_models([NAME], store=other)
    fetch(other, source, NAME)
    assert not is_shown(other, NAME)


def test_gc_removes_the_note_of_a_model_that_is_gone_for_good(
    cache: LocalStore, other: LocalStore, tmp_path: Path
) -> None:
    unpack_archive(archive(cache, NAME, tmp_path), store=other)
    remove_models([NAME], store=other)
    for _ in range(2):  # what can be restored goes first
        collect_garbage(store=other, older_than=0, force=True)
    assert not any(other.folder("pulled").iterdir())


def test_a_forged_mark_makes_no_model_a_commit_of_the_upstream(
    cache: LocalStore, other: LocalStore, tmp_path: Path
) -> None:
    forged = Reference(*NAME.parts[:3], "a")  # before the tag of the right one
    weights = write_folder(tmp_path / "forged", {"weight": np.ones(64, np.float32)})
    import_as(other, weights, forged, mark_of(COMMIT))
    unpack_archive(archive(other, forged, tmp_path), store=cache)
    PulledModels(cache).note_public(COMMIT[0], is_public=True)
    visible = Visible.of(Library(cache))
    found = prepared(lambda: visible.at_commit(NAME, COMMIT[1]))
    assert found is not None
    assert found.key == Digest.of(cache.read_manifest(NAME))
    assert prepared(lambda: visible.model(forged)) is not None


def test_a_store_that_was_copied_without_hard_links_knows_which_names_a_server_has_given(
    cache: LocalStore, source: Path, tmp_path: Path
) -> None:
    fetch(cache, source, COPY)
    copied = LocalStore(shutil.copytree(cache.root, tmp_path / "copied"))
    PulledModels(copied).own()
    assert not any(Library(copied).is_own(name) for name in (NAME, COPY))
    # What its user has given since is his.
    again = archive(copied, NAME, tmp_path)
    remove_models([NAME], store=copied)
    unpack_archive(again, store=copied)
    PulledModels(copied).own()
    assert Library(copied).is_own(NAME)
    assert not Library(copied).is_own(COPY)


def test_the_upstream_is_asked_about_the_original_of_a_copy_and_not_twice_about_that(
    cache: LocalStore,
) -> None:
    copy_model(NAME, COPY, store=cache)
    library = Library(cache)
    for repository, expected in ((COPY, [COMMIT]), (NAME, [])):
        asked = Asked.of(repository, COMMIT[1])
        assert asked is not None
        find = partial(hidden_versions, library, repository, asked, Visible.of(library))
        assert [(one.repository, one.revision) for one in prepared(find)] == expected


# Names of repositories


def test_a_repository_that_was_renamed_is_public_as_long_as_the_present_one_is(
    store: LocalStore,
) -> None:
    pulled = PulledModels(store)
    pulled.keep(ORIGIN, is_public=True)
    pulled.note_called("org/never", "org/new")
    assert not (store.folder("pulled") / pulled._path("org/never").name).exists()
    pulled.note_called(COMMIT[0], "org/new")
    assert not pulled.is_public(COMMIT[0]), "nothing is known of the present one"
    pulled.keep(Origin("org/new", "b" * 40), is_public=True)
    for is_public in (True, False, True):
        pulled.note_public("org/new", is_public=is_public)
        for one in (pulled, PulledModels(store)):
            assert one.is_public(COMMIT[0]) is is_public
            assert (COMMIT[0] in one.open()) is is_public
    pulled.note_called("org/new", COMMIT[0])  # a circle
    assert not pulled.open()
    pulled.note_public(COMMIT[0], is_public=True)  # another repository has that name now
    pulled.note_public("org/new", is_public=False)
    for one in (pulled, PulledModels(store)):
        assert one.open() == {COMMIT[0]}
    pulled.note_called("org/new", COMMIT[0])
    for one in (pulled, PulledModels(store)):
        assert not one.open(), "the upstream has to show that everyone may read the commits of both"
    pulled.note_public(COMMIT[0], is_public=True)
    assert "org/new" in pulled.open()
    pulled.own()  # from now on, it does not read what it writes
    pulled.note_public("org/new", is_public=False)  # what the upstream has refused is not that one
    for one in (pulled, PulledModels(store)):
        assert one.open() == {COMMIT[0]}


def test_a_right_opens_the_commits_that_came_with_it_and_no_other(store: LocalStore) -> None:
    pulled = PulledModels(store)
    rights, other = Rights(pulled), (COMMIT[0], "b" * 40)
    pulled.keep(ORIGIN, is_public=False)
    pulled.keep(Origin(*other), is_public=False)
    rights.give(Right("", "reader", COMMIT[0], "", 1, 1e99), [COMMIT[1]])
    assert rights.of("reader", *COMMIT) is not None
    assert rights.of("reader", *other) is None
    assert rights.opened("reader", COMMIT[0], [COMMIT[1], other[1]]) == {COMMIT}
    assert rights.opened("stranger", COMMIT[0], [COMMIT[1], other[1]]) == frozenset()
