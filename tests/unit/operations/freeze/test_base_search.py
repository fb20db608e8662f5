from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

import blobstore
from blobstore.manifests.reference import Reference
from blobstore.operations.freeze.base_search import BaseFinder
from blobstore.operations.freeze.blob_encoder import SizeEstimator
from blobstore.store.local import LocalStore
from tests.support.frozen import layer, put, tuned, weights
from tests.support.models import add_blobs, replace_file

MINE = Reference.parse("mine")


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """A store with a fine-tune, its base and other models."""
    store = LocalStore(tmp_path / "store")
    add_blobs(store, "mine", {"x": layer("x", tuned(10, 1))})
    put(store, "unlike", {"x": 7})
    put(store, "base", {"x": 1})
    put(store, "elsewhere", {"y": 1})
    return store


def finder(store: LocalStore) -> BaseFinder:
    manifests = {reference: store.parse(reference)[1] for reference in store.references()}
    return BaseFinder(store, manifests, SizeEstimator(store, "fast"))


def found(store: LocalStore, *excluded: str) -> str | None:
    base = finder(store).find_base(MINE, [Reference.parse(name) for name in excluded])
    return None if base is None else base.model


def test_finds_the_most_similar_model_by_its_bytes(store: LocalStore) -> None:
    assert found(store) == "base"


def test_does_not_find_an_excluded_model(store: LocalStore) -> None:
    assert found(store, "base") is None


def test_chooses_the_most_similar_of_several_models(store: LocalStore) -> None:
    add_blobs(store, "far", {"x": layer("x", tuned(11, 1)[:40_000] + weights(3)[40_000:])})
    assert found(store) == "base"


@pytest.mark.parametrize(
    ("name", "text", "base"),
    [
        ("README.md", "---\nbase_model: org/Unlike\n---\n", "unlike"),
        (
            "README.md",
            "---\nlicense: mit\nbase_model:\n  - 'org/un-like'\ntags: []\n---\n# Text\n",
            "unlike",
        ),
        ("config.json", '{"_name_or_path": "models/unlike"}', "unlike"),
        ("config.json", '{"base_model": "unlike"}', "unlike"),
        # These name no base in the store.
        ("README.md", "base_model: org/unlike\n", "base"),
        ("README.md", "---\nbase_model: org/none\n---\n", "base"),
        ("README.md", "---\nbase_model:\n---\n", "base"),
        ("config.json", "not JSON", "base"),
        ("config.json", "[1]", "base"),
        ("config.json", '{"_name_or_path": ["unlike"], "base_model": ""}', "base"),
    ],
)
def test_prefers_the_base_that_the_card_or_config_names_to_the_most_similar_model(
    store: LocalStore, tmp_path: Path, name: str, text: str, base: str
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(layer("x", tuned(10, 1)))
    (folder / name).write_text("{}")
    blobstore.create(folder, "mine", store=store)
    replace_file(store, "mine", name, text.encode())  # earlier versions imported any text
    assert found(store) == base


def test_all_fine_tunes_get_the_same_base(tmp_path: Path) -> None:
    """Whatever their names are: pairs of fine-tunes would leave two bases."""
    store = LocalStore(tmp_path / "family")
    put(store, "a-base", {"x": 1})
    for child in (2, 3, 4):
        add_blobs(store, f"child{child}", {"x": layer("x", tuned(child, 1))})
    put(store, "other", {"x": 9})
    bases = finder(store).find_bases(list(store.references()))
    assert {key.model: base.model for key, base in bases.items()} == dict.fromkeys(
        ("child2", "child3", "child4"), "a-base"
    )


@pytest.mark.parametrize(
    ("best", "bases"),
    [
        ({"a": None, "b": None}, {}),
        ({"a": "b", "b": "a"}, {"a": "b"}),
        ({"a": "b", "b": "c", "c": "b", "d": "b"}, {"a": "b", "c": "b", "d": "b"}),
        # The best base of one model has a base itself: the next best is chosen, if there is one.
        (
            {"a": "b", "b": "c", "c": "d", "d": "c", "e": "c"},
            {"b": "c", "d": "c", "e": "c", "a": "c"},
        ),
        ({"a": "b", "b": "x", "c": "x", "d": "x"}, {"b": "x", "c": "x", "d": "x"}),
        # The best base is another model.
        ({"a": "x", "b": "x"}, {"a": "x", "b": "x"}),
    ],
)
def test_the_most_frequent_base_is_chosen_first(
    best: dict[str, str | None], bases: dict[str, str], tmp_path: Path
) -> None:
    models = {name: Reference.parse(name) for name in "abcdex"}
    names = {reference: name for name, reference in models.items()}
    store = LocalStore(tmp_path)

    class Known(BaseFinder):
        def find_base(
            self, reference: Reference, excluded: Sequence[Reference] = ()
        ) -> Reference | None:
            found = best[names[reference]]
            if found is None or models[found] not in excluded:
                return None if found is None else models[found]
            return None if models["c"] in excluded else models["c"]

    found = Known(store, {}, SizeEstimator(store, "fast")).find_bases(
        [models[name] for name in best]
    )
    assert {names[one]: names[other] for one, other in found.items()} == bases
    assert not set(found) & set(found.values())
