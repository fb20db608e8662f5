"""The commits of a repository: those of its names, and of versions that had a name before."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import blobstore
from blobstore.core.digest import Digest
from blobstore.manifests.reference import Reference
from blobstore.operations.create.create import import_source
from blobstore.operations.maintenance.names import copy_model, remove_models
from blobstore.planning.import_options import ImportOptions
from blobstore.serve import pulled
from blobstore.serve.commits import Version
from blobstore.serve.library import Library
from blobstore.serve.model_files import commit_of
from blobstore.serve.pulled import Origin
from blobstore.serve.unprepared import prepared
from blobstore.serve.visible import Visible
from blobstore.sources.open import open_source
from blobstore.store.fetched import mark_of
from blobstore.store.history import FormerManifest, read_former
from blobstore.store.local import LocalStore
from blobstore.store.names import replace_any
from tests.support.models import write_folder

NAME = Reference.parse("org/model")
ABSENT = "0" * 40


@pytest.fixture
def library(store: LocalStore) -> Library:
    save(store, 1)
    return Library(store)


def save(store: LocalStore, number: int, name: str = "org/model") -> str:
    """Give a name a version, and return its commit."""
    blobstore.save({"w": np.full(8, number, np.float32)}, name, store=store)
    return commit_of(Digest.of(store.read_manifest(Reference.parse(name))))


def at(library: Library, commit: str) -> Sequence[Version]:
    return prepared(lambda: library.at_commit(NAME, commit))


def names(found: Sequence[Version]) -> list[str]:
    return [str(one.reference) for one in found]


def test_any_absent_commit_is_absent_at_once_after_the_first(library: Library) -> None:
    assert at(library, ABSENT) == []
    for number in range(3):
        assert library.at_commit(NAME, f"{number:040}") == []


def test_an_absent_repository_needs_no_work(library: Library) -> None:
    assert library.at_commit(Reference.parse("nobody/nothing"), ABSENT) == []


def test_versions_of_a_name_are_found_while_they_can_be_read(library: Library) -> None:
    store = library.store
    blob = store.resolve(NAME).layers[0].digest
    first = commit_of(Digest.of(store.read_manifest(NAME)))
    second = save(store, 2)
    copy_model("org/model", "org/model:v2", store=store)
    assert names(at(library, first)) == ["org/model:latest"]
    assert names(at(library, second)) == ["org/model:latest", "org/model:v2"]
    for one, is_there in ((library, True), (Library(store), False)):
        found = prepared(partial(Visible.of(one).at_commit, NAME, first))
        assert (found is not None) == is_there
        Path(store.blob_path(blob)).unlink(missing_ok=True)


def test_names_of_fetched_models_are_looked_at_without_reading_a_file_each(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, commit = Library(store), ("org/model", ABSENT)
    library.pulled.keep(Origin(*commit), is_public=True)
    write_folder(tmp_path / "source", {"w": np.zeros(8, np.float32)})
    with contextlib.closing(open_source(tmp_path / "source")) as source:
        import_source(source, replace_any(NAME), store, ImportOptions(), mark=mark_of(commit))
    origins = prepared(partial(library.origins, [NAME]))
    monkeypatch.delattr(pulled, "read_regular")
    assert library.origins([NAME]) == origins == {NAME: Origin(*commit)}
    assert Visible.of(library).shows(origins[NAME])


def test_a_manifest_of_many_names_is_read_once(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        copy_model("org/model", f"org/model:v{number}", store=library.store)
    second = save(library.store, 2)
    keys = prepared(lambda: library.keys(NAME))
    read: list[Reference] = []
    read_manifest = library.store.read_manifest

    def noted(name: Reference) -> bytes:
        read.append(name)
        return read_manifest(name)

    monkeypatch.setattr(library.store, "read_manifest", noted)
    commits = prepared(lambda: Visible.of(library).commits(NAME))
    assert [commit == second for commit in commits.values()] == [True, *[False] * 5]
    assert len(commits) == len(keys) == 6
    assert len(read) == 2


def test_a_version_that_was_removed_is_absent(library: Library) -> None:
    store = library.store
    commit = save(store, 2, "org/model:v2")
    assert names(at(library, commit)) == ["org/model:v2"]
    remove_models(["org/model:v2"], store=store)
    for entry in store.folder("history").iterdir():
        entry.unlink()
    library.tags.list_again(NAME)
    assert at(library, commit) == []


def test_a_manifest_of_the_history_is_read_once(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []

    def counted(path: Path) -> Iterator[FormerManifest]:
        read.append(path)
        return read_former(path)

    monkeypatch.setattr("blobstore.serve.commits.read_former", counted)
    for number in range(2, 6):
        save(library.store, number)
        library.tags.list_again(NAME)
        assert at(library, ABSENT) == []
    assert len(read) == len(set(read)) == 4


def test_a_version_that_comes_while_commits_are_looked_for_is_there_at_once(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model arrives just after somebody has found that its commit is absent."""
    find = library._commits._find
    commits: list[str] = []

    def overtaken(repository: Reference) -> None:
        find(repository)
        if not commits:
            commits.append(save(library.store, 2, "org/model:v2"))
            library.tags.list_again(repository)

    monkeypatch.setattr(library._commits, "_find", overtaken)
    assert at(library, ABSENT) == []
    assert names(at(library, commits[0])) == ["org/model:v2"]
