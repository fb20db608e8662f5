"""What a client may see of a store: each question about a version is judged."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blobstore.core.digest import Digest
from blobstore.manifests.reference import Reference
from blobstore.operations.create.create import create, import_source
from blobstore.operations.maintenance.names import copy_model, remove_models
from blobstore.planning.import_options import ImportOptions
from blobstore.serve.library import Library, ServedModel
from blobstore.serve.messages import Content
from blobstore.serve.pulled import Origin
from blobstore.serve.unprepared import NotListed, prepared
from blobstore.serve.visible import Visible
from blobstore.sources.hub_listing import ListedFile
from blobstore.sources.open import open_source
from blobstore.store.local import LocalStore
from blobstore.store.names import replace_any
from tests.support.models import write_folder

NAME, COMMIT = "org/model", "a" * 40
READER = frozenset({(NAME, COMMIT)})
"""What a client may read."""
FETCHED, MINE = Reference.parse(NAME), Reference.parse(f"{NAME}:mine")


@pytest.fixture
def library(store: LocalStore, tmp_path: Path) -> Library:
    """A library with a fetched version, and one of the store's own of the same repository."""
    library = Library(store)
    library.pulled.keep(Origin(NAME, COMMIT), is_public=True)
    source: Any = open_source(made(tmp_path / "fetched", 1))
    source.repository, source.commit = NAME, COMMIT
    with contextlib.closing(source):
        import_source(source, replace_any(FETCHED), store, ImportOptions(), mark=f"{NAME}@{COMMIT}")
    create(made(tmp_path / "mine", 2), MINE, store=store)
    return library


def made(folder: Path, seed: int) -> Path:
    random = np.random.default_rng(seed)
    return write_folder(folder, {"weight": random.standard_normal((8, 8), dtype=np.float32)})


def seen(visible: Visible) -> dict[str, object]:
    """Return what each question finds of the fetched version."""
    digest = visible._library.store.resolve(FETCHED).layers[0].digest
    return {
        "model": prepared(lambda: visible.model(FETCHED)) is not None,
        "commit": prepared(lambda: visible.at_commit(FETCHED, COMMIT)) is not None,
        "artifact": prepared(lambda: visible.artifact(FETCHED)) is not None,
        "artifacts": FETCHED
        in [one.reference for one in prepared(lambda: list(visible.artifacts(FETCHED, digest)))],
        "image": prepared(lambda: visible.artifact(Reference.parse(f"{NAME}:latest.image")))
        is not None,
        "tags": FETCHED in prepared(lambda: visible.tags(FETCHED)),
        "models": FETCHED in prepared(visible.models),
        "page": str(FETCHED) in prepared(lambda: visible.page(str, "", 9)),
        "descriptions": FETCHED in prepared(lambda: visible.descriptions([FETCHED])),
        "modified": prepared(lambda: visible.modified(FETCHED)) is not None,
        "watch": prepared(lambda: visible.watch(FETCHED)) is not None,
    }


def test_a_page_looks_at_models_of_its_names_alone(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(9):
        copy_model(MINE, f"org/model:v{number}", store=library.store)
        copy_model(MINE, f"zoo/m{number}", store=library.store)
    monkeypatch.setattr("blobstore.serve.visible.MANY", 1)
    read: list[str] = []
    read_manifest = library.store.read_manifest

    def noted(reference: Reference) -> bytes:
        read.append(str(reference))
        return read_manifest(reference)

    monkeypatch.setattr(library.store, "read_manifest", noted)
    visible = Visible.of(library)
    tags = prepared(lambda: visible.tags(MINE, "mine", 2))
    assert [one.tag for one in tags] == ["v0", "v1"]
    assert prepared(lambda: visible.has(MINE))
    page = prepared(lambda: visible.page(lambda one: f"{one.namespace}/{one.model}", "", 2))
    assert list(page) == ["org/model", "zoo/m0"]
    assert set(read) == {"org/model:latest", "org/model:v0", "org/model:v1", "zoo/m0:latest"}


def test_models_behind_many_restricted_ones_are_on_a_page(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blobstore.serve.visible.MANY", 1)
    for number in range(9):
        copy_model(FETCHED, f"org/model:a{number}", store=library.store)
    library.pulled.note_public(NAME, is_public=False)
    visible = Visible.of(library)
    assert prepared(lambda: visible.tags(MINE, limit=1)) == [MINE]
    assert prepared(lambda: visible.page(lambda one: one.model, "", 1)) == {"model": MINE}
    assert prepared(lambda: visible.page(lambda one: one.model, "model", 1)) == {}
    remove_models([MINE], store=library.store)
    assert not prepared(lambda: visible.has(MINE))
    assert prepared(lambda: visible.page(lambda one: one.model, "", 1)) == {}


def test_no_question_finds_what_is_restricted_even_if_it_was_prepared(library: Library) -> None:
    assert all(seen(Visible.of(library)).values())
    library.pulled.note_public(NAME, is_public=False)
    assert not any(seen(Visible.of(library)).values())
    assert not any(
        seen(Visible.of(library, frozenset({("org/other", COMMIT), (NAME, "b" * 40)}))).values()
    )
    assert all(seen(Visible.of(library, READER)).values())
    assert not any(seen(Visible.of(library)).values()), "nor after a reader was there"
    assert prepared(lambda: Visible.of(library).model(MINE)) is not None
    assert prepared(lambda: Visible.of(library).tags(MINE)) == [MINE]


def test_no_question_finds_what_is_restricted_before_it_was_prepared(library: Library) -> None:
    library.pulled.note_public(NAME, is_public=False)
    assert not any(seen(Visible.of(library)).values())
    assert not library._artifacts.values()
    assert not library._models.values(), "nothing is prepared that is not seen"
    assert all(seen(Visible.of(library, READER)).values())


def test_a_repository_is_there_for_those_who_see_a_version(library: Library) -> None:
    assert prepared(lambda: Visible.of(library).has(FETCHED))
    library.pulled.note_public(NAME, is_public=False)
    assert prepared(lambda: Visible.of(library).has(FETCHED)), "the store's own version"
    remove_models([MINE], store=library.store)
    assert not prepared(lambda: Visible.of(library).has(FETCHED))
    assert prepared(lambda: Visible.of(library, READER).has(FETCHED))


def test_a_version_that_arrives_is_seen_as_one_of_the_store(library: Library) -> None:
    other, commit = Reference.parse("org/arriving:v1"), "b" * 40
    origin = Origin("org/arriving", commit)
    library.arriving[other] = arriving = ServedModel(Digest.of(b""), None, {}, None, origin)
    library.pulled.keep(origin, is_public=False)
    for opened, expected in ((READER, None), (frozenset({("org/arriving", commit)}), arriving)):
        visible = Visible.of(library, opened)
        assert prepared(lambda: visible.model(other)) is expected  # noqa: B023
        assert prepared(lambda: visible.at_commit(other, commit)) is expected  # noqa: B023
        assert prepared(lambda: visible.at_commit(other, COMMIT)) is None  # noqa: B023
        assert prepared(lambda: visible.has(other)) == (expected is not None)  # noqa: B023
        assert (other in prepared(lambda: visible.tags(other))) == (expected is not None)  # noqa: B023
        assert (other in prepared(lambda: visible.commits(other))) == (expected is not None)  # noqa: B023


def test_files_that_the_store_lacks_are_those_of_clients_that_can_get_them(
    library: Library,
) -> None:
    others = {
        "large.bin": ListedFile("large.bin", 5, "sha256", "c" * 64),
        "notes.txt": ListedFile("notes.txt", 3, "sha1", "d" * 40),
    }
    library.pulled.keep(Origin(NAME, COMMIT, others=others), is_public=True)
    content = Content.absent(5)
    fetching = replace(Visible.of(library), _fetch=lambda _, file: content)

    def model(visible: Visible, **options: bool) -> ServedModel:
        found = prepared(lambda: visible.model(FETCHED, **options))
        assert found is not None
        return found

    assert "large.bin" not in model(Visible.of(library)).files
    found = model(fetching)
    assert found.files["large.bin"].size == 5
    assert found.digests is None
    assert model(fetching) is found
    known = model(fetching, with_digests=True)
    assert known.digests is not None
    assert known.digests["large.bin"].hex == "c" * 64
    assert "notes.txt" not in known.digests
    assert model(fetching) is known
    assert fetching.content(known, "large.bin") is content
    assert fetching.content(known, "model.safetensors") is known.files["model.safetensors"]


def test_nothing_that_is_restricted_is_described_ahead(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    described: list[Reference] = []
    monkeypatch.setattr("blobstore.serve.visible.MANY", 1)

    def describe(tag: Reference) -> list[Digest]:
        described.append(tag)
        return []

    monkeypatch.setattr(library.tags, "_describe", describe)
    library.pulled.note_public(NAME, is_public=False)
    Visible.of(library).look_ahead()
    assert described == [MINE]
    library.pulled.note_public(NAME, is_public=True)
    Visible.of(library).look_ahead()
    assert described == [MINE, FETCHED]


def test_a_model_that_is_being_removed_is_not_the_stores_own(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.pulled.keep(Origin(NAME, COMMIT), is_public=False)
    everyone, listed = Visible.of(library), [*prepared(library.names)]
    keys = prepared(lambda: library.keys(FETCHED))
    remove_models([FETCHED], store=library.store)
    monkeypatch.setattr(library, "names", lambda: listed)
    monkeypatch.setattr(library, "keys", lambda _: keys)

    assert prepared(everyone.models) == [MINE]
    assert [*prepared(lambda: everyone.commits(FETCHED))] == [MINE]
    assert [*prepared(lambda: library.origins([FETCHED, MINE]))] == [MINE]


def test_the_origin_of_a_model_is_not_that_of_one_which_replaced_it(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy is replaced after the server has looked which model it has, and before it reads where that is from."""
    library.pulled.keep(Origin(NAME, COMMIT), is_public=False)
    copies = [Reference.parse(f"team/x:v{number}") for number in range(3)]
    for copy in copies:
        copy_model(FETCHED, copy, store=library.store)
    with monkeypatch.context() as patch:
        read = LocalStore.read_manifest

        def replaced(store: LocalStore, reference: Reference) -> bytes:
            patch.undo()
            copy_model(MINE, reference, store=store, force=True)
            return read(store, reference)

        prepared(lambda: library.keys(copies[0]))
        with pytest.raises(NotListed) as unknown:
            library.origins(copies)
        patch.setattr(LocalStore, "read_manifest", replaced)
        unknown.value.prepare()
    everyone = Visible.of(library)
    assert [*prepared(lambda: everyone.commits(copies[0]))] == copies[:1]
    assert prepared(lambda: everyone(copies)) == copies[:1]


def test_what_is_not_served_is_not_seen(library: Library) -> None:
    some = Library(library.store, [f"{NAME}:mine"])
    assert not any(seen(Visible.of(some)).values())
    assert prepared(lambda: Visible.of(some).models()) == [MINE]


@pytest.mark.parametrize("name", ["Org/Model", "org/model", "ORG/MODEL"])
def test_names_are_found_in_any_case(library: Library, name: str) -> None:
    visible, other = Visible.of(library), Reference.parse(f"{name}-2")
    assert prepared(lambda: visible.spelled(Reference.parse(name))) == FETCHED
    assert prepared(lambda: visible.spelled(other)) == other
