from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from blobstore.operations.create.create import create
from blobstore.operations.open import open_model
from blobstore.pages.notebook import store_picture
from blobstore.planning.plan import QuantizeOptions
from blobstore.store.local import LocalStore
from tests.support.browser import Browser
from tests.support.frozen import put
from tests.support.models import moe_tensors, quantizable_tensors, write_folder

ATTACK = "</svg><script>document.title = 'hacked'</script><img src=x onerror=alert(1)>"


def boxes(markup: str) -> list[str]:
    """Return the titles of the rectangles of the picture, which is well-formed."""
    found = re.search("<svg.*</svg>", markup, re.DOTALL)
    assert found is not None
    return [group.findtext("title") or "" for group in ET.fromstring(found[0]).iter("g")]


def test_a_store_is_a_treemap_of_what_removals_free(store: LocalStore) -> None:
    put(store, "one", {"a": 1})
    put(store, "two", {"a": 1, "b": 2})

    titles = boxes(store._repr_html_())

    assert any(title.startswith("two: ") for title in titles)
    assert any(title.startswith("shared by 2 models: ") for title in titles)


def test_a_model_is_a_grid_with_a_box_for_each_tensor(store: LocalStore, tmp_path: Path) -> None:
    create(
        write_folder(tmp_path / "q", quantizable_tensors()),
        "q",
        quantize=QuantizeOptions("int8"),
        store=store,
    )

    with open_model("q", store=store) as model:
        titles = boxes(model._repr_html_())

    named = {re.split(": | and ", title)[0] for title in titles}
    assert named <= quantizable_tensors().keys()  # neither scales nor offsets
    assert len(named) == len(titles) > 1
    assert any(": int8 g64, " in title for title in titles)


def test_experts_of_a_layer_have_one_box(store: LocalStore, tmp_path: Path) -> None:
    create(write_folder(tmp_path / "moe", moe_tensors()), "moe", store=store)

    with open_model("moe", store=store) as model:
        titles = boxes(model._repr_html_())

    assert sum(" and 11 more: " in title for title in titles) == 3


def texts(markup: str) -> list[str]:
    """Return the texts next to and above the boxes."""
    found = re.search("<svg.*</svg>", markup, re.DOTALL)
    assert found is not None
    return [text.text or "" for text in ET.fromstring(found[0]).findall("text")]


def test_columns_have_headings_and_layers_that_are_alike_one_row(
    store: LocalStore, tmp_path: Path
) -> None:
    shapes = {0: (2, 2), 1: (2, 2), 2: (4, 2), 3: (2, 2)}
    tensors: dict[str, Any] = {
        f"model.layers.{layer}.{name}.weight": np.full(shape, layer, np.float32)
        for layer, shape in shapes.items()
        for name in ("q_proj", "v_proj")
    }
    tensors |= {f"norm{number}.weight": np.ones(2, np.float32) for number in range(2)}
    create(write_folder(tmp_path / "m", tensors), "m", store=store)

    with open_model("m", store=store) as model:
        markup = model._repr_html_()

    assert texts(markup) == [
        *("q_proj", "v_proj"),
        *("norm0.weight", "norm1.weight"),
        *("model.layers 0 to 1, 3", "model.layers 2"),
    ]
    titles = boxes(markup)
    assert len(titles) == 6
    assert sum(title.endswith(", alike in 3 layers") for title in titles) == 2


def test_the_name_of_a_row_of_many_layers_is_short(store: LocalStore, tmp_path: Path) -> None:
    tensors = {
        f"model.layers.{layer}.proj.weight": np.ones(2 + layer % 2, np.float32)
        for layer in range(12)
    }
    create(write_folder(tmp_path / "m", tensors), "m", store=store)

    with open_model("m", store=store) as model:
        markup = model._repr_html_()

    assert texts(markup) == ["proj", "model.layers 0 and 5 more", "model.layers 1 and 5 more"]


def test_hostile_names_are_text(store: LocalStore, tmp_path: Path, browser: Browser) -> None:
    tensors: dict[str, Any] = {f"layers.0.{ATTACK}": np.ones(4, np.float32), ATTACK: np.ones(3)}
    create(write_folder(tmp_path / "bad", tensors), "bad", store=store)
    with open_model("bad", store=store) as model:
        markup = model._repr_html_() + store._repr_html_()
    page = tmp_path / "page.html"
    page.write_text(f"<title>safe</title>{markup}")

    browser.open(page.as_uri())

    assert browser.run("document.title") == "safe"
    assert browser.run("document.querySelectorAll('script, img').length") == 0
    assert browser.complaints == []


def test_an_empty_store_and_a_file_are_shown(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    assert "0 models" in store_picture(LocalStore(tmp_path / "nothing"))
    assert store_picture(LocalStore(tmp_path / "file")).startswith("<p>")


def test_a_model_of_too_many_layers_has_no_picture(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blobstore.pages.notebook._MAX_ROWS", 1)
    create(write_folder(tmp_path / "moe", moe_tensors()), "moe", store=store)
    create(write_folder(tmp_path / "q", quantizable_tensors()), "q", store=store)

    with open_model("q", store=store) as model:
        assert "<svg" not in model._repr_html_()
