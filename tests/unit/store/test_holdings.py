from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest

from blobstore.manifests.reference import Reference
from blobstore.operations.describe.disk_usage import measure_usage
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.operations.maintenance.gc import collect_garbage
from blobstore.operations.maintenance.names import copy_model, remove_models
from blobstore.pages.store_view import store_view
from blobstore.store.catalog import read_catalog
from blobstore.store.holdings import Holdings
from blobstore.store.local import LocalStore
from tests.support.disk import measured
from tests.support.frozen import layer, layers, put, tuned
from tests.support.models import add_blobs

NAMES = ("alone:latest", "base:latest", "copy:latest", "one:latest", "two:latest")


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> LocalStore:
    """Two tunes that are deltas against a base, one of them with two names, and a model by itself."""
    store = LocalStore(tmp_path_factory.mktemp("holdings") / "store")
    put(store, "base", {"x": 1, "own": 2})
    for seed, name in enumerate(("one", "two")):
        tune = {"x": layer("x", tuned(seed, 1)), name: layer(name, tuned(seed, 5 + seed))}
        add_blobs(store, name, tune)
    put(store, "alone", {"z": 9})
    freeze_models(["one", "two", "alone"], base="base", store=store)
    copy_model("two", "copy", store=store)
    return store


def copied(store: LocalStore, folder: Path) -> LocalStore:
    shutil.copytree(store.root, folder, symlinks=True)
    return LocalStore(folder)


def removed(store: LocalStore, names: tuple[str, ...]) -> tuple[int, int]:
    """Remove names, and return the number of blobs that gc then removes, and their bytes."""
    remove_models(names, store=store)
    blobs = collect_garbage(store=store, older_than=0, force=True).blobs
    return len(blobs), sum(item.size for item in blobs)


@pytest.mark.parametrize(
    "names", [some for many in range(1, 6) for some in itertools.combinations(NAMES, many)]
)
def test_du_and_rm_say_what_rm_and_gc_then_free(
    filled: LocalStore, tmp_path: Path, names: tuple[str, ...]
) -> None:
    usage = measure_usage(names, store=filled)
    told = remove_models(names, store=filled, dry_run=True)

    freed = removed(copied(filled, tmp_path / "copy"), names)

    assert usage.together_unique == (told.blobs, told.size) == freed
    if len(names) == 1:
        assert usage.models[0].unique == freed[1]


def test_areas_of_the_page_are_what_rm_and_gc_free(filled: LocalStore, tmp_path: Path) -> None:
    view = store_view(*measured(filled))

    for place, model in enumerate(view["models"]):
        own = sum(cell[2] for cell in view["freed"]["cells"] if cell[1] == place)
        _, freed = removed(copied(filled, tmp_path / model["name"]), (model["name"],))
        assert own == model["unique"] == freed
    for kind, _, size, _, _, members, _ in view["freed"]["cells"]:
        if kind == "shared":
            names = tuple(view["models"][place]["name"] for place in members)
            *most, last = names
            store = copied(filled, tmp_path / "-".join(names))
            removed(store, tuple(most))
            assert removed(store, (last,))[1] >= size


def test_a_base_goes_with_the_last_model_that_needs_it(filled: LocalStore, tmp_path: Path) -> None:
    store = copied(filled, tmp_path / "copy")
    base = layers(filled, "base")["x"].digest
    assert removed(store, ("base:latest", "one:latest"))[1] > 0
    assert store.has(base)

    told = remove_models(["two", "copy"], store=store, dry_run=True)

    assert (told.bases, told.coded) == (0, ())
    assert removed(store, ("two:latest", "copy:latest")) == (told.blobs, told.size)
    assert not store.has(base)


def test_blobs_of_cached_remote_models_are_freed_by_no_removal(
    filled: LocalStore, tmp_path: Path
) -> None:
    store = copied(filled, tmp_path / "copy")
    store.remote_cache.keep(store.read_manifest("alone"))
    holdings = Holdings(store, read_catalog(store))

    assert set(holdings.freed([Reference.parse("alone")])) == set()
    told = remove_models(["alone"], store=store, dry_run=True)
    view = store_view(*measured(store))
    (place,) = (at for at, one in enumerate(view["models"]) if one["name"] == "alone:latest")
    labels = [cell[4] for cell in view["freed"]["cells"] if list(cell[5]) == [place]]
    assert labels == ["shared with the cache of remote models"]
    assert (told.blobs, told.size) == removed(store, ("alone:latest",)) == (0, 0)
    assert measure_usage(store=store).unreferenced.files == 0


def test_a_name_that_another_process_removed_frees_nothing(filled: LocalStore) -> None:
    gone = Reference.parse("gone")

    assert set(Holdings(filled, read_catalog(filled)).freed([gone])) == set()
