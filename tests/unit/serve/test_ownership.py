"""Whose the names of a repository are."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from blobstore.manifests.reference import Reference
from blobstore.operations.create.create import create
from blobstore.serve import ownership, tags
from blobstore.serve.library import Library
from blobstore.serve.ownership import Ownership
from blobstore.serve.pulled import Origin
from blobstore.serve.tags import MANY
from blobstore.serve.unprepared import NotListed, prepared
from blobstore.store.fetched import mark_of
from blobstore.store.local import LocalStore
from tests.support.models import dense_tensors, write_folder
from tests.unit.serve.test_pulled import ORIGIN, import_as

OWN, FETCHED = Reference.parse("org/own"), Reference.parse("org/model")


@pytest.fixture
def library(store: LocalStore, tmp_path: Path) -> Library:
    """A store with a model of the operator's, and one that a server has fetched."""
    create(write_folder(tmp_path / "own", dense_tensors()), OWN, store=store)
    library = Library(store)
    library.pulled.keep(ORIGIN, is_public=True)
    import_as(store, tmp_path, ORIGIN)
    return library


def of(library: Library, name: Reference, *, is_one: bool = False) -> Ownership:
    return prepared(lambda: library.ownership(name, is_one=is_one))


def test_says_which_names_fetches_have_given_and_what_others_are_copies_of(
    library: Library, store: LocalStore
) -> None:
    copy = Reference.parse("org/own:copy")
    store.names.publish(store.names.seen(copy), store.resolve(FETCHED))
    found = of(library, OWN)
    assert (list(found.tags), list(found.fetched), found.has_own) == ([copy, OWN], [], True)
    assert {name: mark_of((one.repository, one.commit)) for name, one in found.copies.items()} == {
        copy: mark_of((ORIGIN.repository, ORIGIN.commit))
    }
    found = of(library, FETCHED)
    assert (list(found.tags), list(found.fetched), found.has_own) == ([FETCHED], [FETCHED], False)
    assert not of(library, Reference.parse("org/absent")).tags
    found = of(library.only(("org/own:latest",)), OWN)
    assert (list(found.tags), dict(found.copies)) == ([OWN], {})


def test_a_name_is_the_operators_even_if_it_is_lost(library: Library, store: LocalStore) -> None:
    for name, is_own in ((OWN, True), (FETCHED, False)):
        store.manifest_path(name).unlink()
        found = of(library, name, is_one=True)
        assert (list(found.tags), found.has_own) == ([name], is_own)
    assert not of(library, Reference.parse("org/own:absent"), is_one=True).tags


def test_many_names_are_looked_at_on_a_thread_and_again_only_after_a_change(
    library: Library, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (ownership, tags):
        monkeypatch.setattr(module, "settled_until", lambda _: math.inf)
    for number in range(MANY):
        path = store.manifest_path(OWN).with_name(f"v{number}")
        path.write_bytes(store.read_manifest(OWN))
    assert of(library, OWN).has_own
    with monkeypatch.context() as patch:
        patch.setattr(library.pulled.names, "has_given", None)  # it is not called
        patch.setattr(library.store, "manifest_version", None)
        assert len(library.ownership(OWN).tags) == MANY + 1
    last = Reference.parse(f"org/own:v{MANY - 1}")
    library.pulled.names.giving(last)
    store.manifest_path(last).unlink()
    store.manifest_path(last).write_bytes(store.read_manifest(FETCHED))
    with pytest.raises(NotListed):
        library.ownership(OWN)
    found = of(library, OWN)
    assert (list(found.fetched), found.has_own) == ([last], True)
    library.pulled.keep(Origin("org/other", "b" * 40), is_public=True)
    with pytest.raises(NotListed):
        library.ownership(OWN)
