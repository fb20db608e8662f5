from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from blobstore.store.local import LocalStore
from tests.support.models import quantizable_tensors, write_folder
from tests.unit.cli.running import run, run_json


def data_of(page: Path) -> Any:
    """Return the values that a page draws."""
    found = re.search('<script type="application/json" id="data">(.*)</script>', page.read_text())
    assert found is not None
    return json.loads(found[1])


@pytest.fixture
def page(tmp_path: Path) -> Path:
    return tmp_path / "page.html"


@pytest.fixture
def quantized(store: LocalStore, tmp_path: Path) -> LocalStore:
    """A store with the models ``plain`` and ``small``, which is quantized."""
    tensors = {
        name: tensor for name, tensor in quantizable_tensors().items() if "experts" not in name
    }
    folder = write_folder(tmp_path / "plain", tensors)
    run("create", folder, "plain")
    run("create", folder, "small", "--quantize", "int8")
    return store


def test_says_what_it_wrote(stored: LocalStore, page: Path) -> None:
    result = run("page", page)

    assert re.fullmatch(rf"wrote {re.escape(str(page))}: 1 model, [\d.]+ kB\n", result.stdout)
    assert run_json("page", page)["bytes"] == page.stat().st_size


def test_the_totals_are_those_of_du(stored: LocalStore, page: Path) -> None:
    run("page", page)

    usage = run_json("du")
    store = data_of(page)["store"]
    for key in ("bytes_in_all", "bytes", "blobs", "bytes_without_sharing", "dedup_ratio", "models"):
        assert store["totals"][key] == usage["store"][key]
    for model, used in zip(store["models"], usage["models"], strict=True):
        assert (model["size"], model["unique"]) == (used["bytes"], used["unique_bytes"])
        assert (model["shared"], model["blobs"]) == (used["shared_bytes"], used["blobs"])


def test_tensors_in_other_models_are_those_that_diff_finds(
    quantized: LocalStore, page: Path
) -> None:
    run("page", "small", page)

    data = data_of(page)
    model = data["model"]["small:latest"]
    shared = {item[0] for item in model["tensors"] if len(model["owners"][item[6]]) > 1}
    found = run_json("diff", "small", "plain", exit_code=1)["tensors"]
    assert shared == {item["name"] for item in found if item["same_blob"]}
    assert 0 < len(shared) < len(found)


@pytest.mark.slow
def test_errors_are_those_of_compare(quantized: LocalStore, page: Path) -> None:
    run("page", "small", page, "--measure")

    model = data_of(page)["model"]["small:latest"]
    found = run_json("compare", "small", "plain", "--all")["tensors"]
    errors = {
        model["tensors"][int(place)][0]: item.get("relative_error")
        for place, item in model["measured"].items()
    }
    assert errors == {item["name"]: item["relative_error"] for item in found}
    assert any(errors.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "missing argument 'OUT.html'"),
        (("--serve", "--measure"), "--serve measures on request"),
        (("--serve", "--json"), "--serve measures on request"),
    ],
)
def test_words_that_do_not_fit_are_wrong_usage(
    arguments: tuple[str, ...], message: str, stored: LocalStore
) -> None:
    assert message in run("page", *arguments, exit_code=2).stderr


def test_a_file_of_another_kind_is_not_replaced(stored: LocalStore, tmp_path: Path) -> None:
    assert "not a regular file" in run("page", tmp_path, exit_code=1).stderr


def test_a_model_in_the_place_of_the_file_is_wrong_usage(
    stored: LocalStore,
) -> None:
    assert "the last word is the file to write" in run("page", "dense", exit_code=2).stderr
