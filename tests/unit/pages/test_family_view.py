from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from blobstore.operations.create.create import create
from blobstore.operations.describe.disk_usage import read_disk
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.pages.ancestry import find_delta_bases, find_parents
from blobstore.pages.family_view import family_view
from blobstore.store.local import LocalStore
from tests.support.frozen import layer, put, tuned, weights
from tests.support.models import add_blobs, write_folder


def view_of(store: LocalStore) -> dict[str, Any]:
    disk = read_disk(store)
    parents = find_parents(disk)
    return family_view(disk, parents, find_delta_bases(disk, parents))


def card(base: str) -> dict[str, bytes]:
    return {"README.md": f"---\nbase_model: {base}\n---\n".encode()}


def test_a_base_outside_of_the_store_is_a_root(store: LocalStore, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", {"a": np.ones(3)}, files=card("someone/else"))
    create(folder, "m", store=store)

    nodes = view_of(store)["nodes"]

    assert [(node["name"], node["depth"], node.get("outside")) for node in nodes] == [
        ("someone/else", 0, True),
        ("m:latest", 1, None),
    ]


def test_the_tree_of_the_most_models_comes_first(store: LocalStore, tmp_path: Path) -> None:
    for number, (name, base) in enumerate(
        [("alone", "a/small"), ("one", "z/large"), ("two", "z/large")]
    ):
        folder = write_folder(tmp_path / name, {"a": np.full(3, number)}, files=card(base))
        create(folder, name, store=store)

    view = view_of(store)

    assert [(node["name"], node["row"]) for node in view["nodes"]] == [
        ("z/large", 0),
        ("one:latest", 1),
        ("two:latest", 2),
        ("a/small", 4),
        ("alone:latest", 5),
    ]
    assert view["rows"] == 6


def test_a_model_names_what_it_is_compressed_against_unless_that_is_its_parent(
    store: LocalStore,
) -> None:
    put(store, "base", {"w": 0, "v": 1})
    add_blobs(store, "near", {"w": layer("w", tuned(8, 0)), "v": layer("v", weights(1))})
    add_blobs(store, "tune", {"w": layer("w", weights(0)), "v": layer("v", tuned(9, 1))})
    freeze_models(["near"], base="base", store=store)
    freeze_models(["base"], base="tune", store=store)

    nodes = {node["name"]: node for node in view_of(store)["nodes"]}

    (name, size) = nodes["base:latest"]["against"]
    assert (name, size > 0) == ("tune:latest", True)
    assert nodes["base:latest"]["depth"] == 0
    assert "against" not in nodes["near:latest"]
    assert "against" not in nodes["tune:latest"]


def test_models_without_relatives_are_counted(store: LocalStore) -> None:
    add_blobs(store, "alone", {"x": b"1"})

    assert view_of(store) == {"nodes": [], "rows": 0, "alone": 1}
