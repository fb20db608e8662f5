from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from blobstore.operations.describe.disk_usage import measure_usage
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.operations.maintenance.names import remove_models
from blobstore.pages.store_view import store_view
from blobstore.store.local import LocalStore
from tests.support.disk import measured
from tests.support.frozen import put
from tests.support.models import add_blobs


@pytest.fixture
def filled(store: LocalStore) -> LocalStore:
    """Two models that share a blob, a frozen one, and one that was removed."""
    put(store, "one", {"a": 1, "b": 2})
    put(store, "two", {"a": 1, "c": 3})
    put(store, "cold", {"d": 4})
    put(store, "gone", {"e": 5})
    freeze_models(["cold"], store=store)
    remove_models(["gone"], store=store)
    return store


def sums(cells: list[Any]) -> Counter[str]:
    found: Counter[str] = Counter()
    for kind, _, size, *_ in cells:
        found[kind] += size
    return found


def test_every_byte_of_the_store_is_in_one_cell(filled: LocalStore) -> None:
    usage = measure_usage(store=filled)
    found = sums(store_view(*measured(filled))["freed"]["cells"])

    unique = sum(model.unique for model in usage.models)
    assert found.total() == usage.size
    assert found["unique"] + found["cold"] == unique
    assert found["shared"] == usage.referenced.size - unique
    assert found["garbage"] == usage.unreferenced.size > 0
    assert found["cold"] == usage.cold.size > 0


def test_total_sizes_are_those_of_each_model(filled: LocalStore) -> None:
    view = store_view(*measured(filled))

    sizes: Counter[int] = Counter()
    for _, model, size, *_ in view["size"]["cells"]:
        sizes[model] += size
    assert [sizes[place] for place in range(3)] == [model["size"] for model in view["models"]]
    assert sizes.total() == view["totals"]["bytes_without_sharing"]


def test_shared_blobs_name_the_models_that_share_them(filled: LocalStore) -> None:
    view = store_view(*measured(filled))

    names = [model["name"] for model in view["models"]]
    members = {
        tuple(names[place] for place in cell[5])
        for cell in view["freed"]["cells"]
        if cell[0] == "shared"
    }
    assert ("one:latest", "two:latest") in members


@pytest.mark.parametrize(("shape", "width"), [("wide", 2000), ("tall", 800)])
def test_areas_of_both_shapes_are_in_proportion_to_bytes(
    filled: LocalStore, shape: str, width: int
) -> None:
    picture = store_view(*measured(filled))["freed"]

    numbers = picture[shape]
    total = sum(cell[2] for cell in picture["cells"])
    assert len(numbers) == 4 * len(picture["cells"])
    for place, cell in enumerate(picture["cells"]):
        _, _, w, h = numbers[4 * place : 4 * place + 4]
        assert w * h == pytest.approx(width * 1000 * cell[2] / total, rel=0.02, abs=400)


def test_an_empty_store_has_no_cells(tmp_path: Path) -> None:
    view = store_view(*measured(LocalStore(tmp_path / "nothing")))

    assert view["models"] == view["freed"]["cells"] == view["size"]["cells"] == []
    assert view["totals"]["bytes_in_all"] == 0


def test_a_damaged_manifest_is_listed_with_its_error(filled: LocalStore) -> None:
    filled.manifest_path("one").write_text("{")

    view = store_view(*measured(filled))

    (broken,) = [model for model in view["models"] if model["error"]]
    assert broken["name"] == "one:latest"
    assert sums(view["freed"]["cells"])["garbage"] == measure_usage(store=filled).unreferenced.size


def test_smaller_sets_of_models_have_one_cell_together(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blobstore.pages.store_view._MAX_SETS", 1)
    for left in range(3):
        add_blobs(store, f"m{left}", {"x": b"x" * 100, f"y{left % 2}": b"y" * (left % 2 + 1)})

    view = store_view(*measured(store))

    labels = [cell[4] for cell in view["freed"]["cells"] if cell[0] == "shared"]
    assert labels == ["shared by 3 models", "shared by 1 smaller sets of models"]


def test_times_are_in_seconds(filled: LocalStore) -> None:
    for model in store_view(*measured(filled))["models"]:
        assert time.time() - 600 < model["modified"] <= time.time() + 1
