from __future__ import annotations

import pytest

from blobstore.manifests.reference import Reference
from blobstore.operations.describe.disk_usage import measure_usage
from blobstore.pages import largest_models
from blobstore.pages.largest_models import read_largest
from blobstore.pages.sharing_view import sharing_view
from blobstore.pages.store_view import store_view
from blobstore.pages.write import page_data
from blobstore.store.local import LocalStore
from tests.support.models import add_blobs


@pytest.fixture
def filled(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> LocalStore:
    """Five models, more than a page describes, of which the larger ones share a blob."""
    monkeypatch.setattr(largest_models, "MAX_MODELS", 2)
    for number, name in enumerate(("run:1", "run:2", "large", "larger", "other"), 1):
        blobs = {"x": b"x" * 1000 * number, "y": bytes([number])}
        add_blobs(store, name, blobs | ({"z": b"z" * 9000} if "run:1" != name != "other" else {}))
    return store


def names(store: LocalStore, *asked: str) -> set[str]:
    disk, usage, rest = read_largest(store, [*map(Reference.parse, asked)])
    assert set(disk.entries) == {model.reference for model in usage.models}
    assert rest["models"] == 5 - len(usage.models) == sum(row[1] for row in rest["repositories"])
    return set(map(str, disk.entries))


def test_the_largest_models_are_described(filled: LocalStore) -> None:
    assert names(filled) == {"large:latest", "larger:latest"}


def test_models_that_were_asked_for_and_damaged_ones_come_first(filled: LocalStore) -> None:
    assert names(filled, "run:1") == {"run:1", "larger:latest"}
    assert names(filled, "run:1", "run:2", "other") == {"run:1", "run:2", "other:latest"}
    filled.manifest_path("run:2").write_text("{")
    assert names(filled) == {"run:2", "larger:latest"}


def test_the_other_models_are_a_table_of_repositories(
    filled: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = {str(model.reference): model for model in measure_usage(store=filled).models}
    run = [usage[name] for name in ("run:1", "run:2")]
    assert page_data(filled)["rest"]["repositories"] == [
        ["run", 2, sum(one.size for one in run), sum(one.unique for one in run)],
        ["other", 1, usage["other:latest"].size, usage["other:latest"].unique],
    ]
    monkeypatch.setattr(largest_models, "_MAX_REPOSITORIES", 1)
    first, last = page_data(filled)["rest"]["repositories"]
    assert (first[0], last[:2]) == ("run", ["and 1 more", 1])


def test_every_byte_is_in_one_cell_though_few_models_are_described(filled: LocalStore) -> None:
    disk, usage, _ = read_largest(filled)
    view = store_view(disk, usage)
    cells = view["freed"]["cells"]

    assert sum(cell[2] for cell in cells) == usage.size
    for place, model in enumerate(view["models"]):
        assert sum(cell[2] for cell in cells if cell[1] == place) == model["unique"]
    (shared,) = (cell for cell in cells if cell[4] == "shared by 3 models")
    assert (shared[5], shared[6]) == ((0, 1), 3)
    assert "only in 3 smaller models" in {cell[4] for cell in cells}
    assert sum(cell[2] for cell in view["size"]["cells"]) == usage.without_sharing
    everything = measure_usage(store=filled)
    assert sum(cell[3] for cell in view["size"]["cells"]) == sum(
        model.blobs for model in everything.models
    )
    assert len(sharing_view(disk)["shared"]) == 2
