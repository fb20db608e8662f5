"""The names that fetches have given, and what is left of them when a server is killed."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from blobstore.errors import NameTaken
from blobstore.manifests.reference import Reference
from blobstore.operations.create.create import create
from blobstore.serve.pulled import PulledModels
from blobstore.store.fetched import giving_name
from blobstore.store.local import LocalStore
from tests.support.models import write_folder
from tests.unit.serve.test_pulled import ORIGIN, import_as


def test_a_name_has_what_a_fetch_gave_it_until_it_gets_another_model(
    store: LocalStore, tmp_path: Path
) -> None:
    import_as(store, tmp_path, ORIGIN)
    reference, pulled = Reference.parse("org/model"), PulledModels(store)
    manifest, path = store.resolve(reference), store.manifest_path(reference)
    assert not pulled.names.has_given(reference)
    pulled.keep(ORIGIN, is_public=True)
    for _ in range(2):
        pulled.names.giving(reference, (ORIGIN.repository, ORIGIN.commit))
        pulled.names.give(reference, manifest)
        assert pulled.names.has_given(reference)
    path.chmod(0o644)
    path.write_bytes(b"damaged")
    assert pulled.names.has_given(reference)
    own = create(write_folder(tmp_path / "own", {"x": np.ones(3, np.float32)}), "own", store=store)
    store.names.publish(store.names.seen(reference), store.resolve("own"))
    assert not pulled.names.has_given(reference)
    pulled.names.give(reference, manifest)  # too late: the name has another model
    assert not pulled.names.has_given(reference)
    assert own.digest
    PulledModels(store).own()
    assert not [path for path in store.folder("pulled").iterdir() if path.name.startswith(".")]


def test_a_name_counts_as_given_though_the_fetch_was_killed_after_it(
    store: LocalStore, tmp_path: Path
) -> None:
    pulled, reference = PulledModels(store), Reference.parse("org/model")
    pulled.names.giving(reference, (ORIGIN.repository, ORIGIN.commit))
    assert not pulled.names.has_given(reference)
    import_as(store, tmp_path, ORIGIN)
    again = PulledModels(store)
    assert again.names.has_given(reference)
    again.own()
    assert not list(store.folder("pulled").glob(".giving-*")), "there is a link now"
    assert again.names.has_given(reference)


def test_a_name_counts_as_given_though_the_fetch_of_its_next_version_was_killed(
    store: LocalStore, tmp_path: Path
) -> None:
    pulled, reference = PulledModels(store), Reference.parse("org/model")
    for commit in (ORIGIN.commit, "e" * 40):
        pulled.names.giving(reference, (ORIGIN.repository, commit))
        import_as(store, tmp_path / commit, replace(ORIGIN, commit=commit))
        if commit == ORIGIN.commit:
            pulled.names.give(reference, store.resolve(reference))
    again = PulledModels(store)
    again.own()
    assert again.names.has_given(reference)


@pytest.mark.parametrize("commit", ["a" * 40, "d" * 40])
def test_a_name_that_was_to_be_given_stays_the_operators(
    commit: str, store: LocalStore, tmp_path: Path
) -> None:
    pulled, reference = PulledModels(store), Reference.parse("org/model")
    pulled.names.giving(reference, (ORIGIN.repository, ORIGIN.commit))
    if commit == ORIGIN.commit:
        pulled.names.not_given(reference, (ORIGIN.repository, ORIGIN.commit))
    import_as(store, tmp_path, replace(ORIGIN, commit=commit))
    assert not pulled.names.has_given(reference)
    pulled.own()
    assert not list(store.folder("pulled").glob(".giving-*"))


def test_without_hard_links_a_note_says_what_a_fetch_has_given(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: object, **__: object) -> None:
        raise OSError

    monkeypatch.setattr(os, "link", link)
    pulled, reference = PulledModels(store), Reference.parse("org/model")
    pulled.names.giving(reference, (ORIGIN.repository, ORIGIN.commit))
    import_as(store, tmp_path, ORIGIN)
    pulled.names.give(reference, store.resolve(reference))
    pulled.own()
    assert pulled.names.has_given(reference)
    store.manifest_path(reference).unlink()  # now it is lost
    assert pulled.names.has_given(reference)


@pytest.mark.parametrize("is_noted", [False, True])
def test_a_change_that_fails_removes_no_note_of_another_fetch(
    is_noted: bool, store: LocalStore, tmp_path: Path
) -> None:
    reference, pulled = Reference.parse("org/model"), PulledModels(store)
    commit = (ORIGIN.repository, ORIGIN.commit)
    pulled.names.giving(reference, commit)
    import_as(store, tmp_path, ORIGIN)
    manifest = store.resolve(reference)
    pulled.names.give(reference, manifest)
    if is_noted:
        pulled.names.giving(reference, commit)
    with pytest.raises(NameTaken), pulled.names.changing(reference, commit, manifest):
        assert pulled.names.has_given(reference), "if this process is killed now"
        raise NameTaken
    assert bool(list(store.folder("pulled").glob(".giving-*"))) is is_noted
    with pulled.names.changing(reference, commit, manifest):
        pass
    assert pulled.names.has_given(reference)
    assert not list(store.folder("pulled").glob(".giving-*")), "there is a link now"


def test_the_notes_of_fetches_of_several_commits_are_kept_apart(
    store: LocalStore, tmp_path: Path
) -> None:
    pulled, reference = PulledModels(store), Reference.parse("org/model")
    old, new = (ORIGIN.repository, ORIGIN.commit), (ORIGIN.repository, "e" * 40)
    pulled.names.giving(reference, old)
    import_as(store, tmp_path / "old", ORIGIN)
    manifest = store.resolve(reference)
    pulled.names.give(reference, manifest)
    pulled.names.giving(reference, new)
    with pulled.names.changing(reference, old, manifest):  # adds a file
        import_as(store, tmp_path / "new", replace(ORIGIN, commit="e" * 40))
        assert pulled.names.has_given(reference)
    PulledModels(store).own()  # as if the server had been killed now
    assert pulled.names.has_given(reference)
    pulled.names.giving(reference, old)
    pulled.names.giving(reference, new)
    pulled.names.not_given(reference, old)
    assert pulled.names._noted(reference) == {new}
    pulled.names.not_given(reference, new)
    assert not list(store.folder("pulled").glob(".giving-*"))


def test_a_note_of_a_former_version_has_one_commit(store: LocalStore, tmp_path: Path) -> None:
    reference, pulled = Reference.parse("org/model"), PulledModels(store)
    import_as(store, tmp_path, ORIGIN)
    store.folder("pulled").mkdir(exist_ok=True)
    note = store.folder("pulled") / giving_name(reference)
    note.write_text(json.dumps([str(reference), ORIGIN.repository, ORIGIN.commit]))
    assert pulled.names.has_given(reference)
    for damaged in (b"", b"{", b"[]", b"[1, 2]", b'["x"]', b'["org/model:latest", [1]]'):
        note.write_bytes(damaged)
        assert not pulled.names.has_given(reference)
