from __future__ import annotations

import os
import random
from collections.abc import Iterable
from pathlib import Path

import pytest

import blobstore
from blobstore.cold_blobs.base_search import BaseFinder, choose_bases
from blobstore.cold_blobs.similarity import BlobSampler
from blobstore.core.digest import BlobId, Digest
from blobstore.manifests.reference import Reference
from blobstore.store.local import LocalStore
from tests.support.frozen import layer, layers, put, steps, tuned, weights
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


def finder(store: LocalStore, *deltas: Digest) -> BaseFinder:
    manifests = {reference: store.parse(reference)[1] for reference in store.references()}
    return BaseFinder(store, manifests, deltas)


def found(store: LocalStore, *deltas: Digest) -> str | None:
    base = finder(store, *deltas).find_bases([MINE]).get(MINE)
    return None if base is None else base.model


def test_finds_the_most_similar_model_by_its_bytes(store: LocalStore) -> None:
    assert found(store) == "base"


def test_does_not_find_a_model_of_deltas(store: LocalStore) -> None:
    assert found(store, layers(store, "base")["x"].digest) is None


def test_chooses_the_most_similar_of_several_models(store: LocalStore) -> None:
    add_blobs(store, "far", {"x": layer("x", tuned(11, 1)[:40_000] + weights(3)[40_000:])})
    assert found(store) == "base"


@pytest.mark.slow
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


@pytest.mark.parametrize("frozen", [("base", "a-chat"), ("base", "a-chat", "a-code")])
def test_the_first_model_of_a_family_is_the_base_even_if_another_one_stays_hot(
    tmp_path: Path, frozen: tuple[str, ...]
) -> None:
    store = LocalStore(tmp_path / "family")
    put(store, "base", {"x": 1})
    for age, child in enumerate(("a-code", "a-chat"), start=1):
        add_blobs(store, child, {"x": layer("x", tuned(10 + age, 1))})
        os.utime(store.manifest_path(child), (2e9 + age, 2e9 + age))
    bases = finder(store).find_bases([Reference.parse(name) for name in frozen])
    assert {one.model: base.model for one, base in bases.items()} == dict.fromkeys(
        [name for name in frozen if name != "base"], "base"
    )


def test_a_base_that_a_card_names_stays_the_base_of_an_older_model(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "family")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(layer("x", tuned(10, 1)))
    (folder / "config.json").write_text('{"_name_or_path": "org/base"}')
    blobstore.create(folder, "mine", store=store)
    put(store, "base", {"x": 1})
    base = Reference.parse("base")
    assert finder(store).find_bases([MINE, base]) == {MINE: base}


def test_of_models_that_stay_hot_the_first_one_is_the_base(tmp_path: Path) -> None:
    """Also if another one has more blobs that differ, and so would save more."""
    store = LocalStore(tmp_path / "family")
    put(store, "z-base", {"x": 1, "y": 2})
    add_blobs(store, "a-full", {"x": layer("x", tuned(11, 1)), "y": layer("y", tuned(12, 2))})
    add_blobs(store, "half", {"x": layer("x", tuned(13, 1)), "y": layer("y", weights(2))})
    for age, name in enumerate(("z-base", "a-full", "half")):
        os.utime(store.manifest_path(name), (1e9 + age, 1e9 + age))
    half, base = map(Reference.parse, ("half", "z-base"))
    assert finder(store).find_bases([half]) == {half: base}


def test_a_base_is_a_delta_if_nothing_else_would_be(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "family")
    put(store, "base", {"x": 1})
    add_blobs(store, "tune", {"x": layer("x", tuned(2, 1))})
    base, tune = map(Reference.parse, ("base", "tune"))
    assert finder(store).find_bases([base]) == {base: tune}


def test_a_model_that_deltas_need_already_stays_the_base(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "family")
    put(store, "base", {"x": 1})
    for child in (2, 3, 4):
        add_blobs(store, f"tune{child}", {"x": layer("x", tuned(child, 1))})
    blobstore.freeze("tune3", base="tune2", store=store)
    base, fourth = map(Reference.parse, ("base", "tune4"))
    deltas = store.cold_bases()
    assert finder(store, *deltas).find_bases([base, fourth])[base].model == "tune2"


def test_finds_a_base_among_many_models_of_the_same_layers(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "family")
    for child in range(12):
        add_blobs(store, f"child{child:02}", {"x": layer("x", tuned(10 + child, 1))})
    put(store, "z-base", {"x": 1})
    bases = finder(store).find_bases(list(store.references()))
    assert {base.model for base in bases.values()} == {"z-base"}
    assert len(bases) == 12


@pytest.mark.slow
def test_the_time_grows_with_the_number_of_models(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[object] = []
    saved = BlobSampler.saved

    def counted(self: BlobSampler, blob: BlobId, base: BlobId) -> float:
        compared.append((blob, base))
        return saved(self, blob, base)

    monkeypatch.setattr(BlobSampler, "saved", counted)
    for number in range(40):
        put(store, f"other-{number}", {"x": 100 + number})
    reported: list[str] = []
    manifests = {reference: store.parse(reference)[1] for reference in store.references()}
    names = list(manifests)
    BaseFinder(store, manifests, report=reported.append).find_bases(names)
    assert len(compared) <= 11 * len(names)
    assert reported[-1] == f"searching for bases: {len(names)} of {len(names)} models"


def test_the_base_of_the_steps_of_a_run_is_the_one_in_the_middle(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")
    for number, data in enumerate(steps(5, 1, 10)):
        add_blobs(store, f"run:step-{number}", {"x": layer("x", data)})
    bases = finder(store).find_bases(list(store.references()))
    assert len(bases) == 9
    assert {base.tag for base in bases.values()} <= {"step-4", "step-5"}


@pytest.mark.parametrize(
    ("known", "base"), [((0, 3, 9, 10), 9), (range(11), 9), ((0, 1, 3, 10, 11, 12), 11)]
)
def test_a_new_step_gets_the_nearest_step_as_its_base(
    tmp_path: Path, known: Iterable[int], base: int
) -> None:
    store = LocalStore(tmp_path / "run")
    run = steps(5, 1, 13)
    for number in known:
        add_blobs(store, f"run:step-{number}", {"x": layer("x", run[number])})
    newest = Reference.parse("run:step-10")
    assert finder(store).find_bases([newest])[newest].tag == f"step-{base}"


@pytest.mark.parametrize("name", ["run:step-{0}-{1}", "run:step-{0}-seed-{1}", "run-{1}:step-{0}"])
@pytest.mark.parametrize("run", [0, 1])
def test_a_step_of_several_runs_gets_the_nearest_step_of_its_own(
    tmp_path: Path, name: str, run: int
) -> None:
    """In whatever order they came; the names of the runs lie next to each other."""
    store = LocalStore(tmp_path / "runs")
    names = [0, 1] if "seed" in name else ["a", "b"]
    models = {
        name.format(number, names[seed]): data
        for seed in range(2)
        for number, data in enumerate(steps(5 + seed, 1, 10))
    }
    for one in random.Random(run).sample(sorted(models), len(models)):
        add_blobs(store, one, {"x": layer("x", models[one])})
    for number, base in ((0, {1}), (6, {5, 7}), (9, {8})):
        newest = Reference.parse(name.format(number, names[run]))
        nearest = {Reference.parse(name.format(other, names[run])) for other in base}
        assert finder(store).find_bases([newest])[newest] in nearest


def test_a_step_gets_the_one_before_it_if_names_say_nothing(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")
    names = [Digest.of(bytes([number])).hex[:7] for number in range(30)]
    for age, (name, data) in enumerate(zip(names, steps(5, 1, 30), strict=True)):
        add_blobs(store, f"run:{name}", {"x": layer("x", data)})
        os.utime(store.manifest_path(f"run:{name}"), (1e9 + age, 1e9 + age))
    for number in (9, 20, 29):
        newest = Reference.parse(f"run:{names[number]}")
        base = finder(store).find_bases([newest])[newest]
        assert abs(names.index(base.tag) - number) == 1


def test_each_step_of_a_chain_has_its_neighbour_as_its_base(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")
    for number, data in enumerate(steps(5, 1, 12)):
        add_blobs(store, f"run:step-{number}", {"x": layer("x", data)})
    bases = finder(store).find_bases(list(store.references()), chains=True)
    assert len(bases) == 11
    for one, base in bases.items():
        assert abs(int(one.tag[5:]) - int(base.tag[5:])) == 1


@pytest.mark.parametrize(("far", "base"), [(tuned(3, 1, step=1e-2), "near"), (None, "far")])
def test_a_card_is_ignored_where_another_step_is_much_nearer(
    store: LocalStore, tmp_path: Path, far: bytes | None, base: str
) -> None:
    first, near, mine = steps(5, 1, 3)
    add_blobs(store, "far", {"x": layer("x", far or first)})
    add_blobs(store, "near", {"x": layer("x", near)})
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(layer("x", mine))
    (folder / "config.json").write_text('{"_name_or_path": "org/far"}')
    blobstore.create(folder, "mine", store=store)
    assert found(store) == base


@pytest.mark.parametrize(
    "card", ["meta-llama/Llama-3.2-1B", "llama-3.2", "org/llama_3.2"], ids=["tag", "model", "other"]
)
def test_a_card_names_a_model_with_or_without_its_tag(
    store: LocalStore, tmp_path: Path, card: str
) -> None:
    put(store, "llama-3.2:1b", {"x": 9})
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(layer("x", tuned(10, 1)))
    (folder / "config.json").write_text("{}")
    (folder / "README.md").write_text(f"---\nbase_model: {card}\n---\n")
    blobstore.create(folder, "mine", store=store)
    assert found(store) == "llama-3.2"


@pytest.mark.parametrize(
    ("named", "gains", "bases"),
    [
        ({}, {"a": {}, "b": {}}, {}),
        ({}, {"a": {"b": 2}, "b": {"a": 1}}, {"a": "b"}),
        # One base for all, though some would save more with another one.
        (
            {},
            {"a": {"b": 9, "c": 8}, "b": {"a": 9, "c": 8}, "c": {"b": 5}, "d": {"a": 9, "c": 8}},
            {"a": "c", "b": "c", "d": "c"},
        ),
        # A second base is worth it if it saves others more than it saves itself.
        (
            {},
            {"a": {"c": 9}, "b": {"c": 9, "d": 1}, "d": {"c": 2}, "e": {"d": 8}, "f": {"d": 8}},
            {"a": "c", "b": "c", "e": "d", "f": "d"},
        ),
        # The base is another model, which is not frozen itself.
        ({}, {"a": {"x": 3}, "b": {"x": 3, "a": 4}}, {"a": "x", "b": "x"}),
        # What cards name comes first, even if it saves less.
        ({"a": "x"}, {"a": {"b": 9}, "b": {"a": 9, "x": 1}}, {"a": "x", "b": "x"}),
        ({"a": "b", "b": "x", "c": "x"}, {"a": {"c": 2, "x": 1}, "b": {}, "c": {}}, None),
    ],
)
def test_few_models_become_the_bases_of_all_others(
    named: dict[str, str], gains: dict[str, dict[str, float]], bases: dict[str, str] | None
) -> None:
    models = {name: Reference.parse(name) for name in "abcdefx"}
    names = {reference: name for name, reference in models.items()}
    chosen = choose_bases(
        {models[one]: models[other] for one, other in named.items()},
        {
            models[one]: {models[other]: gain for other, gain in others.items()}
            for one, others in gains.items()
        },
    )
    expected = {"b": "x", "c": "x", "a": "x"} if bases is None else bases
    assert {names[one]: names[other] for one, other in chosen.items()} == expected
    assert not set(chosen) & set(chosen.values())
