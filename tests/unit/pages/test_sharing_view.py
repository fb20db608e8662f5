from __future__ import annotations

import itertools
from typing import Any

from blobstore.operations.describe.disk_usage import read_disk
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.pages.sharing_view import sharing_view
from blobstore.store.local import LocalStore
from tests.support.frozen import layer, put, tuned, weights
from tests.support.models import add_blobs


def matrix(view: dict[str, Any]) -> dict[tuple[str, str], int]:
    """Return the bytes that two models share, by their names."""
    found = {}
    for row, runs in enumerate(view["shared"]):
        values = itertools.chain.from_iterable(
            [value] * count for count, value in zip(runs[::2], runs[1::2], strict=True)
        )
        for column, value in enumerate(values, row):
            names = view["models"][row], view["models"][column]
            found[names] = found[names[::-1]] = value
    return found


def test_a_cell_is_the_bytes_that_two_models_share(store: LocalStore) -> None:
    put(store, "one", {"a": 1, "b": 2})
    put(store, "two", {"a": 1, "c": 3})
    put(store, "three", {"d": 4})

    found = matrix(sharing_view(read_disk(store)))

    blobs = {
        name: {b.digest: b.size for b in store.resolve(name).blobs}
        for name in ("one", "two", "three")
    }
    for a, b in itertools.product(blobs, blobs):
        common = sum(size for digest, size in blobs[a].items() if digest in blobs[b])
        assert found[f"{a}:latest", f"{b}:latest"] == common


def test_relatives_stand_together_and_a_config_makes_no_family(store: LocalStore) -> None:
    for name, seed in (("a", 1), ("b", 2), ("c", 1), ("d", 2)):
        put(store, name, {"w": seed, f"own-{name}": ord(name)})
    put(store, "alone", {"w": 3})

    view = sharing_view(read_disk(store))

    families = sorted(sorted(family["models"]) for family in view["families"])
    assert families == [["a:latest", "c:latest"], ["b:latest", "d:latest"]]
    assert view["models"] in (
        ["a:latest", "c:latest", "b:latest", "d:latest", "alone:latest"],
        ["b:latest", "d:latest", "a:latest", "c:latest", "alone:latest"],
    )


def test_layers_of_a_family_are_shared_differences_or_own(store: LocalStore) -> None:
    names = [*(f"model.layers.{number}.w" for number in range(3)), "head.w"]
    base = {name: layer(name, weights(seed)) for seed, name in enumerate(names)}
    changed = base | {
        names[1]: layer(names[1], tuned(7, 1)),
        names[2]: layer(names[2], weights(8)),
    }
    add_blobs(store, "base", base)
    add_blobs(store, "ft", changed)
    freeze_models(["ft"], base="base", store=store)

    disk = read_disk(store)
    (family,) = sharing_view(disk)["families"]

    assert family["columns"] == ["outside of layers", 0, 1, 2]
    assert family["stacks"] == ["", *["model.layers"] * 3]
    _, *row = family["cells"][family["models"].index("ft:latest")]
    kinds = [[bool(part) for part in cell] for cell in row]
    assert kinds == [[True, False, False], [False, True, False], [False, False, True]]
    assert row[1][1] < len(changed[names[1]]) / 2


def test_a_base_is_shared_with_what_is_a_delta_against_it(store: LocalStore) -> None:
    add_blobs(store, "base", {"w": layer("w", weights(1))})
    add_blobs(store, "ft", {"w": layer("w", tuned(7, 1))})
    freeze_models(["ft"], base="base", store=store)

    view = sharing_view(read_disk(store))

    size = store.resolve("base").layers[0].size
    assert matrix(view)["base:latest", "ft:latest"] >= size
    assert sorted(view["families"][0]["models"]) == ["base:latest", "ft:latest"]


def test_an_empty_store_shares_nothing(store: LocalStore) -> None:
    assert sharing_view(read_disk(store)) == {
        "models": [],
        "shared": [],
        "families": [],
    }
