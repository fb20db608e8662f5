from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blobstore.manifests.reference import Reference
from blobstore.operations.compare.compare import Comparison, TensorError, compare_models
from blobstore.operations.create.create import create
from blobstore.pages.comparison import comparison_data, comparison_page
from blobstore.planning.plan import QuantizeOptions
from blobstore.quantization.error_metrics import WorstGroup
from blobstore.store.local import LocalStore
from tests.support.browser import Browser
from tests.support.models import write_folder

NAME = "packed:latest"


def tensor(name: str, ratio: float = math.inf, *, nonfinite: int = 0, **facts: Any) -> TensorError:
    """Return a tensor with a signal-to-noise ratio in decibels; an equal one without."""
    differs = not math.isinf(ratio)
    default = {
        "type": "int4" if differs else "BF16",
        "group_size": 32 if differs else 0,
        "nbytes": 160 if differs else 512,
        "base_type": "BF16",
        "base_group_size": 0,
        "base_nbytes": 512,
        "shape": (4, 64),
        "squared_error": 1.0 if differs else 0.0,
        "squared_base": 10 ** (ratio / 10) if differs else 0.0,
        "max_abs_error": 0.25 if differs else 0.0,
        "worst": WorstGroup(0.5, 3, 32, 32) if differs else None,
    }
    return TensorError(name=name, nonfinite=nonfinite, **(default | facts))


def compared(*tensors: TensorError, mine: Any = (), yours: Any = ()) -> Comparison:
    return Comparison(
        reference=Reference.parse("packed"),
        base=Reference.parse("base"),
        tensors=tensors,
        only_in_model=tuple(mine),
        only_in_base=tuple(yours),
    )


def shown(browser: Browser, folder: Path, found: Comparison) -> str:
    """Open the page of a comparison, and return its text with the table of tensors."""
    page = folder / "page.html"
    page.write_text(comparison_page(found))
    browser.open(page.as_uri())
    browser.run("[...document.querySelectorAll('details')].forEach(one => one.open = true)")
    browser.settle()
    return str(browser.run("document.querySelector('main').innerText"))


def rows(browser: Browser) -> list[list[str]]:
    return list(
        browser.run(
            "[...document.querySelectorAll('tbody tr')].map(row => [...row.cells].map(cell => cell.textContent))"
        )
    )


def test_the_data_are_those_of_compare() -> None:
    found = compared(tensor("l.0.q", 20), tensor("norm"), mine=["<mine>"], yours=["yours"] * 101)

    data = comparison_data(found)

    view = data["model"][NAME]
    assert data["root"] == "packed:latest compared with base:latest"
    assert data["start"] == "model/packed%3Alatest/error"
    assert view["compared"] == {
        "differing": 1,
        "relative_error": pytest.approx(0.1),
        "snr_db": pytest.approx(20),
        "max_abs_error": 0.25,
        "nonfinite": 0,
        "bits_per_weight": 10.5,
        "base_bits_per_weight": 16,
        "only": [[NAME, 1, ["<mine>"]], ["base:latest", 101, ["yours"] * 100]],
    }
    places = {item[0]: place for place, item in enumerate(view["tensors"])}
    assert view["measured"][places["norm"]] == {"relative_error": 0.0}
    assert view["measured"][places["l.0.q"]] == {
        "relative_error": pytest.approx(0.1),
        "snr_db": pytest.approx(20),
        "max_abs_error": 0.25,
        "worst": [0.5, 3, 32],
        "base_type": "BF16",
    }


def test_infinite_numbers_are_json() -> None:
    whole = {"squared_error": 0.0, "squared_base": 0.0, "worst": None}
    found = comparison_data(
        compared(
            tensor("zero", 20, squared_base=0.0, worst=WorstGroup(math.inf, 0, 0, 32)),
            tensor("odd", 20, nonfinite=256, **whole),
            tensor("same"),
        )
    )

    json.dumps(found, allow_nan=False)
    measured = found["model"][NAME]["measured"]
    places = {item[0]: place for place, item in enumerate(found["model"][NAME]["tensors"])}
    assert measured[places["zero"]]["relative_error"] == "inf"
    assert measured[places["zero"]]["snr_db"] == "-inf"
    assert measured[places["zero"]]["worst"][0] == "inf"
    assert "relative_error" not in measured[places["odd"]]
    assert measured[places["odd"]]["nonfinite"] == 256


def test_the_page_depends_on_the_comparison_alone() -> None:
    found = compared(tensor("model.layers.0.a.weight", 20))
    assert comparison_page(found) == comparison_page(found)
    assert "connect-src" not in comparison_page(found)


def test_the_page_opens_with_the_errors_and_the_table_has_the_worst_first(
    browser: Browser, tmp_path: Path
) -> None:
    found = compared(
        *(tensor(f"l.{layer}.q.weight", 20 + layer) for layer in range(8)),
        tensor("l.8.q.weight", 30, nonfinite=3),
        tensor("norm.weight"),
        mine=["extra"],
    )

    text = shown(browser, tmp_path, found)

    assert "Error or change" in browser.run(
        "document.querySelector('[aria-pressed=true]').textContent"
    )
    assert browser.run("document.querySelector('nav')") is None
    assert "3 elements that differ and are not finite" in text
    assert "1 tensor only in packed:latest" in text
    table = rows(browser)
    assert [row[0] for row in table] == [
        "l.8.q.weight", *(f"l.{layer}.q.weight" for layer in range(8)), "norm.weight",
    ]  # fmt: skip
    assert table[1] == [
        *("l.0.q.weight", "int4 g32 (BF16)", "[4, 64]", "160 B", "5"),
        *("0.1", "20.0 dB", "0.25", "", "0.5 at row 3, column 32"),
    ]
    assert browser.complaints == []


def test_a_cell_opens_its_worst_expert(browser: Browser, tmp_path: Path) -> None:
    prefix = "model.layers.4.mlp.experts"
    shown(
        browser,
        tmp_path,
        compared(
            tensor(f"{prefix}.0.up_proj.weight", 20),
            tensor(f"{prefix}.1.up_proj.weight", 15),
            tensor(f"{prefix}.2.up_proj.weight"),
        ),
    )

    browser.run("document.querySelector('canvas').focus()")
    browser.press("ArrowRight")
    browser.press("Enter")

    panel = browser.run("document.querySelector('.panel').innerText")
    assert browser.run("document.querySelector('.panel h3').innerText") == (
        f"{prefix}.1.up_proj.weight"
    )
    assert "SNR 15.0 dB" in panel
    assert "0.5 at row 3, column 32" in panel
    assert "int4 g32; BF16 in the base" in panel


def test_equal_models_say_so(browser: Browser, tmp_path: Path) -> None:
    text = shown(browser, tmp_path, compared(tensor("model.layers.0.q.weight"), tensor("x")))

    assert "equal to base:latest" in text
    assert browser.complaints == []


@pytest.mark.parametrize(
    "name",
    [
        "<script>alert(1)</script>",
        "</script><img src=x onerror=alert(1)>",
        "esc\x1b[2J\x00 lf\n cr\r \u202eoverride \ud800",
        "x" * 70_000,
    ],
)
def test_hostile_names_are_text(browser: Browser, tmp_path: Path, name: str) -> None:
    names = [f"{name}.layers.0.w", f"model.layers.0.{name}.weight", name]
    found = compared(*(tensor(item, 20) for item in names), mine=[name], yours=[name])
    assert len(comparison_page(found)) < len(comparison_page(compared())) + 10_000

    text = shown(browser, tmp_path, found)

    assert (name if name.isprintable() and len(name) < 80 else name[:3]) in text
    assert browser.run("document.querySelectorAll('img, main script').length") == 0
    assert browser.complaints == []


def test_experts_that_are_stored_together_have_a_cell(
    browser: Browser, store: LocalStore, tmp_path: Path
) -> None:
    values = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    tensors = {f"model.layers.0.experts.{one}.w.weight": values + one for one in range(3)}
    folder = write_folder(tmp_path / "moe", tensors)
    create(folder, "moe", store=store)
    create(folder, "moe:int8", store=store, quantize=QuantizeOptions("int8"), experts="stacked")

    found = compare_models("moe:int8", "moe", store=store)
    shown(browser, tmp_path, found)

    assert len(rows(browser)) == len(found.tensors) > 0
    assert {row[0] for row in rows(browser)} == {one.name for one in found.tensors}
