"""The page as a whole, in a real browser: what it shows, what it refuses to run, and how it is used."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from blobstore.errors import BlobstoreError, ModelNotFound
from blobstore.operations.maintenance.disk_usage import measure_usage
from blobstore.operations.page.write import write_page
from blobstore.store.local import LocalStore
from tests.support.browser import Browser
from tests.support.frozen import put
from tests.support.models import add_blobs


def opened(browser: Browser, store: LocalStore, folder: Path, view: str = "store") -> Browser:
    page = write_page(folder / "page.html", store=store)
    browser.open(f"{page.path.as_uri()}#{view}")
    return browser


def two_models(store: LocalStore) -> LocalStore:
    put(store, "one", {"model.layers.0.a": 1, "model.layers.1.b": 2})
    put(store, "two", {"model.layers.0.a": 1, "model.layers.1.b": 3})
    return store


def centre(browser: Browser, selector: str = "canvas") -> dict[str, Any]:
    found: dict[str, Any] = browser.run(
        f"(({{x,y,width,height}}) => ({{x: x + width / 4, y: y + height / 2}}))"
        f"(document.querySelector({selector!r}).getBoundingClientRect())"
    )
    return found


def test_the_totals_are_those_of_du(browser: Browser, store: LocalStore, tmp_path: Path) -> None:
    usage = measure_usage(store=two_models(store))

    opened(browser, store, tmp_path)

    facts = browser.run("document.querySelector('.facts').innerText")
    assert f"{usage.size / 1e3:.3g} kB".replace(".0 ", " ") in facts
    assert "models\n2\n" in facts
    assert browser.complaints == []


def test_a_click_opens_a_cell_and_the_table_has_every_model(
    browser: Browser, store: LocalStore, tmp_path: Path
) -> None:
    opened(browser, two_models(store), tmp_path)

    browser.click(**centre(browser))
    panel = browser.run("document.querySelector('.panel').innerText")
    browser.run("document.querySelector('details').open = true")
    browser.settle()
    rows = browser.run("[...document.querySelectorAll('tbody th')].map(cell => cell.textContent)")

    assert "on disk" in panel or "a removal frees" in panel
    assert rows == ["one:latest", "two:latest"]


def test_a_keyboard_alone_moves_opens_and_zooms(
    browser: Browser, store: LocalStore, tmp_path: Path
) -> None:
    opened(browser, two_models(store), tmp_path)

    browser.run("document.querySelector('canvas').focus()")
    browser.press("ArrowRight")
    said = browser.run("document.querySelector('[role=status]').textContent")
    browser.press("Enter")
    browser.press("+")

    assert said.startswith("one:latest\n")
    assert browser.run("document.querySelector('.panel h3').textContent") == "one:latest"
    assert browser.run("document.querySelector('.plot').scrollWidth") > 1200


def test_zoom_resize_and_search_draw_again(
    browser: Browser, store: LocalStore, tmp_path: Path
) -> None:
    opened(browser, two_models(store), tmp_path)
    drawn = "document.querySelector('canvas').toDataURL()"
    before = browser.run(drawn)

    browser.run("document.querySelector('[aria-label=\"Zoom in\"]').click()")
    browser.settle()
    zoomed = browser.run(drawn)
    browser.run(
        "(box => { box.value = 'two'; box.dispatchEvent(new Event('input')); })"
        "(document.querySelector('[type=search]'))"
    )
    browser.wait(f"{drawn} !== {zoomed!r}")
    browser.resize(390, 844)

    assert zoomed != before
    assert browser.run("document.documentElement.scrollWidth") <= 390
    assert browser.complaints == []


def test_dark_mode_changes_the_picture(browser: Browser, store: LocalStore, tmp_path: Path) -> None:
    opened(browser, two_models(store), tmp_path)
    light = browser.run("document.querySelector('canvas').toDataURL()")

    browser.resize(1180, 900, dark=True)

    assert browser.run("document.querySelector('canvas').toDataURL()") != light
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"


@pytest.mark.parametrize("view", ["store"])
def test_an_empty_store_says_so(
    view: str, browser: Browser, store: LocalStore, tmp_path: Path
) -> None:
    opened(browser, store, tmp_path, view)

    assert "empty" in browser.run("document.querySelector('main').innerText")
    assert browser.complaints == []


def test_names_are_text_whatever_they_hold(
    browser: Browser, store: LocalStore, tmp_path: Path
) -> None:
    attack = "<img src=x onerror=alert(1)></script><script>alert(2)</script>\u202e\u2028"
    add_blobs(store, "hostile", {attack: b"1" * 5000, "'\"><svg onload=alert(3)>": b"2" * 5000})
    store.manifest_path("hostile").with_name("broken").write_text(f'{{"{attack}": ')

    opened(browser, store, tmp_path)
    browser.click(**centre(browser))
    browser.run("document.querySelector('details').open = true")
    browser.settle()

    assert browser.complaints == []
    assert browser.run("document.querySelectorAll('img, main script, [onload]').length") == 0
    assert browser.run("document.querySelectorAll('script').length") == 2


def test_the_policy_stops_a_script_that_gets_into_the_page(
    browser: Browser, store: LocalStore, tmp_path: Path
) -> None:
    page = write_page(tmp_path / "page.html", store=two_models(store)).path
    text = page.read_text().replace("</body>", "<script>window.hacked = 1</script></body>")
    page.write_text(text.replace("<body>", "<body><img src=http://127.0.0.1:9/x onerror=hacked=2>"))

    browser.open(page.as_uri())

    assert browser.run("window.hacked") is None
    refused = [
        event["params"]["entry"]["text"]
        for event in browser.complaints
        if "entry" in event["params"]
    ]
    assert sum("Content Security Policy" in text for text in refused) >= 2


def test_a_store_that_changes_while_it_is_read_gives_a_page(
    store: LocalStore, tmp_path: Path
) -> None:
    stop = threading.Event()
    two_models(store)

    def change() -> None:
        number = 0
        while not stop.is_set():
            name, number = f"n{number % 3}", number + 1
            add_blobs(store, name, {"x": b"%d" % number * 999})
            store.remove(name)

    changing = threading.Thread(target=change)
    changing.start()
    try:
        for _ in range(5):
            assert write_page(tmp_path / "page.html", store=store).models >= 2
    finally:
        stop.set()
        changing.join()


def test_an_unknown_model_is_not_found_and_nothing_is_written(
    store: LocalStore, tmp_path: Path
) -> None:
    two_models(store)

    with pytest.raises(ModelNotFound):
        write_page(tmp_path / "page.html", ["three"], store=store)
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize("target", [".", "missing/page.html", ""])
def test_what_cannot_be_written_is_an_error(
    target: str, store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(BlobstoreError, match="regular file|no folder"):
        write_page(target, store=store)
