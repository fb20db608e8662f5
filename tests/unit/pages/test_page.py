"""What the script of the page draws, in a real browser, at the widths of a desk, a tablet and a phone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from blobstore.operations.freeze.freeze import freeze_models
from blobstore.operations.maintenance.names import remove_models
from blobstore.operations.maintenance.verify import verify_models
from blobstore.pages.write import write_page
from blobstore.store.local import LocalStore
from tests.support.browser import Browser
from tests.support.frozen import layer, put, tuned, weights
from tests.support.models import add_blobs

WIDTHS = (1400, 800, 390)


def opened(browser: Browser, store: LocalStore, folder: Path, view: str) -> Browser:
    page = write_page(folder / "page.html", store=store)
    browser.open("about:blank")  # else a page that is written again is not read again
    browser.open(f"{page.path.as_uri()}#{view}")
    return browser


@pytest.fixture
def kin(store: LocalStore) -> LocalStore:
    """A base that is compressed against one of its many fine-tunes."""
    put(store, "base", {"w": 0, "v": 1})
    for number in range(12):
        data = tuned(10 + number, 0)
        add_blobs(store, f"tune{number}", {"w": layer("w", data), "v": layer("v", weights(1))})
    freeze_models(["base"], base="tune3", store=store)
    return store


@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_grows_with_the_family(
    width: int, browser: Browser, kin: LocalStore, tmp_path: Path
) -> None:
    browser.resize(width, 800)

    opened(browser, kin, tmp_path, "family")

    hidden = "(box => [box.scrollHeight - box.clientHeight, box.scrollWidth - box.clientWidth])"
    assert browser.run(f"{hidden}(document.querySelector('.wide'))") == [0, 0]
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.run("document.querySelectorAll('.tree g').length") == 13


@pytest.mark.parametrize("width", WIDTHS)
def test_what_a_model_is_compressed_against_is_a_dashed_line_and_no_descent(
    width: int, browser: Browser, kin: LocalStore, tmp_path: Path
) -> None:
    browser.resize(width, 800)

    opened(browser, kin, tmp_path, "family")
    browser.run("document.querySelector('.tree g').focus()")
    browser.press("Enter")

    side = "getComputedStyle(document.querySelector('.tree path.side')).strokeDasharray"
    assert browser.run("document.querySelector('.tree g').dataset.name") == "base:latest"
    assert browser.run("document.querySelectorAll('.tree path.side').length") == 1
    assert browser.run(side) != "none"
    assert "compressed against\ntune3:latest" in browser.run(
        "document.querySelector('.panel').innerText"
    )


def drawn_texts(browser: Browser, width: int) -> list[str]:
    """Return the texts that canvases draw at another width of the window."""
    browser.run(
        "(() => { window.texts = []; const real = CanvasRenderingContext2D.prototype.fillText;"
        " CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {"
        " window.texts.push(text); return real.call(this, text, ...rest); }; })()"
    )
    browser.resize(width, 800)
    browser.settle()
    found: list[str] = browser.run("window.texts")
    return found


@pytest.mark.parametrize(("width", "has_numbers"), [(1401, True), (801, False), (391, False)])
def test_the_matrix_has_numbers_only_where_they_fit(
    width: int, has_numbers: bool, browser: Browser, kin: LocalStore, tmp_path: Path
) -> None:
    opened(browser, kin, tmp_path, "sharing")
    browser.run("document.querySelectorAll('.plot')[1].remove()")

    texts = drawn_texts(browser, width)

    assert "tune3" in texts
    assert any(text.endswith(" kB") for text in texts) == has_numbers
    assert not [text for text in texts if text.endswith("\u2026") and text[0].isdigit()]


def test_labels_of_areas_are_never_parts_of_a_sentence(
    browser: Browser, kin: LocalStore, tmp_path: Path
) -> None:
    opened(browser, kin, tmp_path, "store")

    texts = drawn_texts(browser, 390)

    assert "shared" in texts
    assert not [text for text in texts if text.startswith("shared") and text.endswith("\u2026")]


def test_a_model_is_ok_without_a_further_word_once_it_is_verified(
    browser: Browser, store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "one", {"a": 1})
    put(store, "two", {"b": 2})
    states = "[...document.querySelectorAll('tbody tr')].map(row => row.cells[1].textContent)"

    opened(browser, store, tmp_path, "health")
    before = browser.run(states)
    # Files that changed in the last seconds get no entry in the cache otherwise.
    monkeypatch.setattr("blobstore.store.verified_cache._MARGIN_NS", -(10**10))
    verify_models(["one"], store=store)
    opened(browser, store, tmp_path, "health")

    assert before == ["ok, not verified", "ok, not verified"]
    assert browser.run(states) == ["ok", "ok, partly verified"]  # both have the config


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dark", [False, True])
def test_many_healthy_models_are_one_row_and_damaged_ones_a_row_each(
    width: int, dark: bool, browser: Browser, store: LocalStore, tmp_path: Path
) -> None:
    names = [f"team/a-model-with-a-longer-name:v{number}" for number in range(22)]
    for number, name in enumerate(names):
        put(store, name, {"a": number})
    for name in names[:2]:
        Path(store.blob_path(store.resolve(name).layers[0].digest)).unlink()
    browser.resize(width, 800, dark=dark)

    opened(browser, store, tmp_path, "health")

    rows = "[...document.querySelectorAll('.brief tbody tr')].map(row => row.cells[0].textContent)"
    assert browser.run(rows) == [*names[:2], "20 models"]
    inner = "(box => [box.scrollHeight - box.clientHeight, box.scrollWidth - box.clientWidth])"
    assert browser.run(f"{inner}(document.querySelector('.brief'))") == [0, 0]
    assert browser.run("document.documentElement.scrollWidth") <= width
    browser.run("document.querySelector('details').open = true")
    browser.wait("document.querySelectorAll('details tbody tr').length === 22")
    browser.run(
        "(box => { box.value = 'v7'; box.dispatchEvent(new Event('input')); })"
        "(document.querySelector('[type=search]'))"
    )
    browser.wait(f"String({rows}) === {names[7]!r}")
    assert browser.complaints == []


def test_why_gc_would_free_nothing_is_said(
    browser: Browser, store: LocalStore, tmp_path: Path
) -> None:
    put(store, "one", {"a": 1})
    put(store, "gone", {"b": 2})
    remove_models(["gone"], store=store)

    opened(browser, store, tmp_path, "health")
    young = browser.run("document.querySelector('.facts').innerText")
    for path in store.folder("blobs").iterdir():
        os.utime(path, (1e9, 1e9))
    opened(browser, store, tmp_path, "health")
    old = browser.run("document.querySelector('.facts').innerText")

    assert "of garbage stays: written in the last hour\n0 B" in young
    assert "gc would free\n80.1 kB" in old
