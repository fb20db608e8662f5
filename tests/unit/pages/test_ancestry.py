from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from blobstore.operations.create.create import create
from blobstore.operations.describe.disk_usage import read_disk
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.operations.maintenance.names import copy_model
from blobstore.pages.ancestry import Parent, find_delta_bases, find_parents
from blobstore.planning.plan import QuantizeOptions
from blobstore.store.local import LocalStore
from tests.support.frozen import layer, put, tuned, weights
from tests.support.models import add_blobs, quantizable_tensors, write_folder


def found_in(store: LocalStore) -> dict[str, Parent]:
    return {str(name): parent for name, parent in find_parents(read_disk(store)).items()}


def card(base: str) -> dict[str, bytes]:
    return {"README.md": f"---\nbase_model: {base}\n---\n".encode()}


def test_a_quantized_model_descends_from_the_model_of_the_same_files(
    store: LocalStore, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "plain", quantizable_tensors())
    create(folder, "plain", store=store)
    create(folder, "small", quantize=QuantizeOptions("int8"), store=store)

    (found,) = found_in(store).items()

    assert (found[0], found[1].name, found[1].relation) == (
        "small:latest",
        "plain:latest",
        "quantized from",
    )


def test_of_models_with_equal_headers_the_one_that_shares_most_is_the_parent(
    store: LocalStore, tmp_path: Path
) -> None:
    tensors = quantizable_tensors()
    changed = {name: tensor + tensor for name, tensor in tensors.items()}
    create(write_folder(tmp_path / "a", changed), "a-other", store=store)
    folder = write_folder(tmp_path / "b", tensors)
    create(folder, "b-origin", store=store)
    create(folder, "small", quantize=QuantizeOptions("int8"), store=store)

    assert found_in(store)["small:latest"].name == "b-origin:latest"


@pytest.mark.parametrize("base", ["someone/Plain", "someone/plain-v2", "plain"])
def test_a_model_card_names_the_parent(base: str, store: LocalStore, tmp_path: Path) -> None:
    tensors = quantizable_tensors()
    create(write_folder(tmp_path / "plain", tensors), "plain", store=store)
    made = {name: tensor + tensor for name, tensor in tensors.items()}
    create(write_folder(tmp_path / "tuned", made, files=card(base)), "tuned", store=store)

    found = found_in(store)["tuned:latest"]

    assert (found.name, found.relation) == ("plain:latest", "fine-tuned from")
    assert base in found.evidence


def test_a_parent_that_the_store_lacks_is_named(store: LocalStore, tmp_path: Path) -> None:
    files = card("someone/else")
    create(write_folder(tmp_path / "m", {"a": np.ones(3)}, files=files), "m", store=store)

    found = found_in(store)["m:latest"]

    assert (found.reference, found.name) == (None, "someone/else")


def put_kin(store: LocalStore, *names: str) -> None:
    """Import a base and its fine-tunes, each of which has half of the base's weights."""
    kin = {
        "base": (weights(0), weights(1)),
        "a-chat": (weights(0), tuned(8, 1)),
        "z-code": (tuned(9, 0), weights(1)),
    }
    for age, name in enumerate(names):
        add_blobs(store, name, {f"w{i}": layer(f"w{i}", data) for i, data in enumerate(kin[name])})
        os.utime(store.manifest_path(name), (1e9 + age, 1e9 + age))


def test_of_similar_models_the_earliest_is_the_parent(store: LocalStore) -> None:
    put_kin(store, "base", "z-code", "a-chat")

    found = found_in(store)

    assert {name: (parent.name, parent.relation) for name, parent in found.items()} == {
        "a-chat:latest": ("base:latest", "similar to"),
        "z-code:latest": ("base:latest", "similar to"),
    }


def test_the_direction_of_deltas_makes_no_descent(store: LocalStore) -> None:
    put_kin(store, "base", "a-chat", "z-code")
    freeze_models(["base", "a-chat"], base="z-code", store=store)

    disk = read_disk(store)
    against = find_delta_bases(disk, find_parents(disk))

    assert {str(name): str(base.reference) for name, base in against.items()} == {
        "base:latest": "z-code:latest"
    }
    assert {name: parent.name for name, parent in found_in(store).items()} == dict.fromkeys(
        ("a-chat:latest", "z-code:latest"), "base:latest"
    )


def test_equal_weights_say_more_than_deltas(store: LocalStore) -> None:
    put(store, "base", {"w": 1, "v": 2})
    add_blobs(store, "a-tune", {"w": layer("w", tuned(8, 1)), "v": layer("v", weights(2))})
    add_blobs(store, "b-tune", {"w": layer("w", tuned(9, 1)), "v": layer("v", weights(2))})
    for age, name in enumerate(("base", "a-tune", "b-tune")):
        os.utime(store.manifest_path(name), (1e9 + age, 1e9 + age))
    freeze_models(["a-tune"], base="b-tune", store=store)

    assert {name: parent.name for name, parent in found_in(store).items()} == dict.fromkeys(
        ("a-tune:latest", "b-tune:latest"), "base:latest"
    )


def test_a_second_name_of_a_model_is_no_child(store: LocalStore) -> None:
    put_kin(store, "base", "a-chat")
    copy_model("base", "copy", store=store)

    assert {name: parent.name for name, parent in found_in(store).items()} == {
        "a-chat:latest": "base:latest"
    }


def test_a_declared_base_comes_before_a_similar_model(store: LocalStore, tmp_path: Path) -> None:
    tensors = quantizable_tensors()
    create(write_folder(tmp_path / "near", tensors), "near", store=store)
    made = {name: tensor + tensor for name, tensor in tensors.items()}
    create(write_folder(tmp_path / "far", made), "far", store=store)
    create(write_folder(tmp_path / "ft", tensors, files=card("x/far")), "ft", store=store)

    found = found_in(store)["ft:latest"]

    assert (found.name, found.relation) == ("far:latest", "fine-tuned from")


def test_a_model_of_deltas_is_similar_to_the_model_of_its_bases(store: LocalStore) -> None:
    add_blobs(store, "base", {f"w{i}": layer(f"w{i}", weights(i)) for i in range(2)})
    add_blobs(store, "ft", {f"w{i}": layer(f"w{i}", tuned(9 + i, i)) for i in range(2)})
    freeze_models(["ft"], base="base", store=store)

    disk = read_disk(store)
    found = found_in(store)["ft:latest"]

    assert (found.name, found.relation) == ("base:latest", "similar to")
    assert found.delta == sum(disk.blobs.cold_sizes.values()) > 0
    assert found.shared > 0  # the config
    assert found.own == 0


def test_bytes_of_an_edge_add_up_to_the_model(store: LocalStore, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "plain", quantizable_tensors())
    create(folder, "plain", store=store)
    create(folder, "small", quantize=QuantizeOptions("int8"), store=store)

    disk = read_disk(store)
    ((name, parent),) = find_parents(disk).items()
    size = sum(disk.sizes[digest] for digest in disk.entries[name].blobs)
    assert parent.shared + parent.delta + parent.own == size


def test_two_models_that_name_each_other_make_no_circle(store: LocalStore, tmp_path: Path) -> None:
    for name, base in (("one", "x/two"), ("two", "x/one")):
        made = {"a": np.full(3, len(base) + ord(name[0]), np.float32)}
        create(write_folder(tmp_path / name, made, files=card(base)), name, store=store)

    found = found_in(store)

    parents = {name: (str(parent.reference), parent.name) for name, parent in found.items()}
    assert parents == {"one:latest": ("two:latest", "two:latest"), "two:latest": ("None", "x/one")}
