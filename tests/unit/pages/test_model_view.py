from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blobstore.manifests.reference import Reference
from blobstore.operations.create.create import create
from blobstore.operations.describe.disk_usage import read_disk
from blobstore.operations.describe.show import describe_model
from blobstore.pages.model_view import chosen_models, model_views
from blobstore.store.local import LocalStore
from tests.support.models import add_blobs, moe_tensors, write_folder


def views(store: LocalStore, references: list[Reference]) -> dict[str, Any]:
    disk = read_disk(store)
    return model_views(disk, references, {}, {})


MOE = Reference.parse("moe")


def test_every_tensor_is_in_one_cell_with_what_show_says(store: LocalStore, tmp_path: Path) -> None:
    create(write_folder(tmp_path / "moe", moe_tensors(), shards=2), "moe", store=store)

    view = views(store, [MOE])["moe:latest"]

    described = {tensor.name: tensor for tensor in describe_model("moe", store=store).tensors}
    covered = sorted(
        place for _, _, first, count in view["cells"] for place in range(first, first + count)
    )
    assert covered == list(range(len(described)))
    for name, kind, shape, size, bits, digest, _ in view["tensors"]:
        tensor = described[name]
        assert (view["types"][kind], tuple(shape), size) == (tensor.type, tensor.shape, tensor.size)
        assert (bits, digest) == (tensor.bits_per_weight, tensor.digest.short)


def test_layers_are_rows_in_order_and_tensors_outside_come_first(
    store: LocalStore, tmp_path: Path
) -> None:
    names = ["m.10.a", "head", "m.2.b", "m.2.a"]
    tensors = {name: np.full(2, place, np.float32) for place, name in enumerate(names)}
    create(write_folder(tmp_path / "model", tensors), "model", store=store)

    view = views(store, [Reference.parse("model")])["model:latest"]

    assert view["rows"] == ["head", 2, 10]
    assert view["stacks"] == ["", "m", "m"]
    assert sorted(view["columns"]) == ["", "a", "b"]
    assert view["columns"][0] == ""  # of the tensor outside
    assert view["cells"][0][:2] == [0, 0]


def test_a_tensor_lists_the_other_models_that_have_it(store: LocalStore, tmp_path: Path) -> None:
    shared, own = np.ones(5, np.float32), np.zeros(5, np.float32)
    create(write_folder(tmp_path / "one", {"s": shared, "o": own}), "one", store=store)
    create(write_folder(tmp_path / "two", {"s": shared}), "two", store=store)

    view = views(store, [Reference.parse("one")])["one:latest"]

    owners = {tensor[0]: view["owners"][tensor[6]] for tensor in view["tensors"]}
    assert owners == {"s": (0, 1), "o": (0,)}
    assert view["place"] == 0


def test_a_page_without_names_describes_as_many_models_as_fit(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blobstore.pages.model_view.MAX_TENSORS", 5)
    for name in ("a", "b", "c"):
        add_blobs(store, name, {"x": b"1", "y": b"2"})
    disk = read_disk(store)

    assert [str(name) for name in chosen_models(disk, [])] == ["a:latest", "b:latest"]
    named = [Reference.parse("c")]
    assert chosen_models(disk, named) == named


def test_a_damaged_manifest_is_an_error_of_its_model(store: LocalStore) -> None:
    add_blobs(store, "one", {"x": b"1"})
    disk = read_disk(store)
    store.manifest_path("one").write_text("{")

    assert "error" in model_views(disk, [Reference.parse("one")], {}, {})["one:latest"]
