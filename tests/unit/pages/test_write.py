"""The page as a whole, in a real browser: what it shows, what it refuses to run, and how it is used."""

from __future__ import annotations

import itertools
import json
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blobstore.core.digest import Digest
from blobstore.errors import BlobstoreError, ModelNotFound
from blobstore.manifests.reference import Reference
from blobstore.operations.compare.compare import compare_models
from blobstore.operations.compare.diff import diff_models
from blobstore.operations.create.create import create
from blobstore.operations.describe.disk_usage import measure_usage
from blobstore.pages.model_view import GridTensor, grid
from blobstore.pages.shell import render_page
from blobstore.pages.write import page_data, write_page
from blobstore.planning.plan import QuantizeOptions
from blobstore.store.local import LocalStore
from tests.support.browser import Browser
from tests.support.frozen import put
from tests.support.many_models import write_models
from tests.support.models import add_blobs, write_folder


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
    said = browser.run("document.querySelector('.seen').textContent")
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
    search(browser, "two")
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


@pytest.mark.parametrize("view", ["store", "sharing", "health"])
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
            store.names.remove(name)

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


def family(store: LocalStore, folder: Path) -> LocalStore:
    """A model, its quantized version and a fine-tune."""
    tensors = {
        f"model.layers.{number}.{name}.weight": np.random.default_rng(number).standard_normal(
            (64, 64), np.float32
        )
        for number in range(3)
        for name in ("q_proj", "v_proj")
    }
    config = b'{"architectures": ["TinyForCausalLM"], "model_type": "tiny"}'
    origin = write_folder(folder / "tiny", tensors, files={"config.json": config})
    create(origin, "tiny", store=store)
    create(origin, "tiny:int8", quantize=QuantizeOptions("int8"), store=store)
    name = "model.layers.2.q_proj.weight"
    tuned = tensors | {name: tensors[name] + np.float32(1e-3)}
    card = b"---\nbase_model: someone/tiny\n---\n"
    made = write_folder(folder / "tuned", tuned, files={"config.json": config, "README.md": card})
    create(made, "tuned", store=store)
    return store


VIEWS = ("store", "sharing", "family", "model", "health")


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("window", [(1180, 900), (390, 844)])
@pytest.mark.parametrize("dark", [False, True])
def test_every_view_draws_and_fits_its_window(
    view: str,
    window: tuple[int, int],
    dark: bool,
    browser: Browser,
    store: LocalStore,
    tmp_path: Path,
) -> None:
    browser.resize(*window, dark=dark)

    opened(browser, family(store, tmp_path), tmp_path, view)

    assert browser.run("document.querySelector('nav [aria-current]').textContent").lower() == view
    assert browser.run("document.documentElement.scrollWidth") <= window[0]
    assert browser.run("document.querySelector('main').innerText.length") > 100
    tables = browser.run("document.querySelectorAll('details, table').length")
    assert tables >= 1, "no table behind the picture"
    assert browser.complaints == []


def picture(browser: Browser) -> str:
    """Return what the view shows, in a form that changes with it."""
    return str(
        browser.run(
            "[...document.querySelectorAll('canvas')].map(one => one.toDataURL()).join()"
            "+ document.querySelector('main').innerHTML"
        )
    )


def search(browser: Browser, text: str) -> None:
    browser.run(
        f"(box => {{ box.value = {text!r}; box.dispatchEvent(new Event('input')); }})"
        "(document.querySelector('[type=search]'))"
    )


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_can_be_zoomed_searched_and_resized(
    view: str, browser: Browser, store: LocalStore, tmp_path: Path
) -> None:
    opened(browser, family(store, tmp_path), tmp_path, view)

    if view != "health":  # a table
        before = picture(browser)
        browser.run("document.querySelector('[aria-label=\"Zoom in\"]').click()")
        browser.settle()
        assert picture(browser) != before
    before = picture(browser)
    search(browser, "tuned" if view != "model" else "v_proj")
    while picture(browser) == before:  # the whole suite has a time limit
        pass
    browser.resize(500, 700)

    assert browser.run("document.documentElement.scrollWidth") <= 500
    assert browser.complaints == []


@pytest.mark.parametrize("view", ["store", "sharing", "model"])
def test_a_click_in_a_canvas_opens_what_is_there(
    view: str, browser: Browser, store: LocalStore, tmp_path: Path
) -> None:
    opened(browser, family(store, tmp_path), tmp_path, view)

    box = browser.run(
        "(({x, y, width, height}) => [x, y, width, height])"
        "(document.querySelector('canvas').getBoundingClientRect())"
    )
    for across, down in itertools.product((0.15, 0.2, 0.3, 0.5, 0.7), (0.5, 0.7, 0.9)):
        browser.click(box[0] + across * box[2], box[1] + down * box[3])
        if browser.run("document.querySelector('.panel h3') !== null"):
            break

    assert browser.run("document.querySelector('.panel h3').textContent") != ""
    assert browser.complaints == []


def test_tensors_that_diff_calls_the_same_are_those_that_the_page_says_both_have(
    store: LocalStore, tmp_path: Path
) -> None:
    data = page_data(family(store, tmp_path))

    same = {item.name for item in diff_models("tuned", "tiny", store=store).tensors if item.is_same}
    places = {model["name"]: place for place, model in enumerate(data["store"]["models"])}
    view = data["model"]["tuned:latest"]
    shared = {
        tensor[0]
        for tensor in view["tensors"]
        if places["tiny:latest"] in view["owners"][tensor[6]]
    }
    assert shared == same
    assert 0 < len(same) < len(view["tensors"])


def test_the_matrix_has_the_bytes_that_models_share(
    browser: Browser, store: LocalStore, tmp_path: Path
) -> None:
    opened(browser, family(store, tmp_path), tmp_path, "sharing")

    browser.run("document.querySelector('details').open = true")
    browser.settle()
    rows = browser.run(
        "[...document.querySelectorAll('tbody tr')].map(row => [...row.cells].map(cell => cell.textContent))"
    )

    blobs = {
        name: {blob.digest: blob.size for blob in store.resolve(name).blobs}
        for name in ("tiny:latest", "tuned:latest", "tiny:int8")
    }
    for one, other, size, *_ in rows:
        common = sum(size for digest, size in blobs[one].items() if digest in blobs[other])
        assert size in (f"{float(f'{common / 1e3:.3g}'):g} kB", f"{common} B")
    assert len(rows) == 3


def test_a_family_is_a_tree_that_a_keyboard_opens(
    browser: Browser, store: LocalStore, tmp_path: Path
) -> None:
    opened(browser, family(store, tmp_path), tmp_path, "family")

    names = browser.run("[...document.querySelectorAll('.tree g')].map(g => g.dataset.name)")
    browser.run("document.querySelectorAll('.tree g')[1].focus()")
    browser.press("Enter")

    assert names == ["tiny:latest", "tiny:int8", "tuned:latest"]
    assert "quantized from tiny:latest" in browser.run("document.querySelector('.panel').innerText")


def test_a_click_shows_a_tensor_with_its_error_and_histograms(
    browser: Browser, store: LocalStore, tmp_path: Path
) -> None:
    family(store, tmp_path)
    page = write_page(tmp_path / "page.html", store=store, measure=True).path
    expected = {
        tensor.name: tensor for tensor in compare_models("tiny:int8", "tiny", store=store).tensors
    }

    browser.open(f"{page.as_uri()}#model/tiny%3Aint8/error")
    assert "Error or change" in browser.run(
        "[...document.querySelectorAll('[aria-pressed=true]')].map(b => b.textContent).join()"
    )
    browser.run("document.querySelector('canvas').focus()")
    browser.press("ArrowRight")
    browser.press("Enter")

    panel = browser.run("document.querySelector('.panel').innerText")
    name = "model.layers.0.q_proj.weight"
    assert name in panel
    assert f"{expected[name].relative_error:.3g}" in panel
    assert "int8 g64" in panel
    assert browser.run("document.querySelectorAll('.panel svg').length") == 2
    assert browser.complaints == []


def test_a_model_that_cannot_be_read_says_why(
    browser: Browser, store: LocalStore, tmp_path: Path
) -> None:
    family(store, tmp_path)
    layer = store.resolve("tuned").layers[0]
    Path(store.blob_path(layer.digest)).unlink()

    opened(browser, store, tmp_path, "model/tuned%3Alatest")
    assert "missing" in browser.run("document.querySelector('main').innerText")
    browser.run("location.hash = 'health'")
    browser.wait("document.querySelector('#view-health') !== null")

    # Both models that have the file need it.
    assert "damaged models\n2\n" in browser.run("document.querySelector('.facts').innerText")
    assert "fault" in browser.run("document.querySelector('table').innerText")


@pytest.mark.parametrize("view", VIEWS)
def test_hostile_names_are_text_in_every_view(
    view: str, browser: Browser, store: LocalStore, tmp_path: Path
) -> None:
    attack = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"
    tensors: dict[str, Any] = {
        f"model.layers.0.{attack}": np.ones((4, 4), np.float32),
        attack: np.ones(3),
    }
    card = f'---\nbase_model: "<svg/onload=alert(3)>"\n---\n{attack}'.encode()
    config = json.dumps({"architectures": [attack], "model_type": attack, "_name_or_path": attack})
    files = {"README.md": card, "config.json": config.encode()}
    create(write_folder(tmp_path / "bad", tensors, files=files), "bad", store=store)

    opened(browser, store, tmp_path, view)
    browser.run("document.querySelectorAll('details').forEach(table => { table.open = true; })")
    browser.run("document.querySelectorAll('.tree g, canvas').forEach(item => item.focus())")
    for key in ("ArrowRight", "Enter"):
        browser.press(key)

    assert browser.complaints == []
    assert browser.run("document.querySelectorAll('img, main script, svg[onload]').length") == 0


def test_a_hash_that_someone_made_up_shows_a_view(
    browser: Browser, store: LocalStore, tmp_path: Path
) -> None:
    opened(
        browser, family(store, tmp_path), tmp_path, "model/%3Cimg%20src=x%20onerror=alert(1)%3E%"
    )

    assert browser.run("document.querySelector('select').value") == "tiny:int8"
    browser.run("location.hash = '__proto__/x'")
    browser.settle()
    assert browser.complaints == []


def test_only_named_models_are_described(store: LocalStore, tmp_path: Path) -> None:
    family(store, tmp_path)

    data = page_data(store, [Reference.parse("tuned")])

    assert list(data["model"]) == ["tuned:latest"]
    assert len(data["store"]["models"]) == 3


def test_a_page_of_a_thousand_models_draws_only_what_is_in_sight(
    browser: Browser, store: LocalStore, tmp_path: Path
) -> None:
    write_models(store, 1000, 10)

    page = write_page(tmp_path / "page.html", store=store)

    text = page.path.read_text()
    data = re.search('<script type="application/json" id="data">(.*)</script>\n<script>', text)
    assert data is not None
    assert page.models == 1000
    assert len(text) - len(data[1]) < 100_000
    for view in VIEWS:
        browser.open("about:blank")
        browser.open(f"{page.path.as_uri()}#{view}")
        drawn = browser.run(
            "+(document.querySelector('canvas') || {dataset: {drawn: 0}}).dataset.drawn"
        )
        assert drawn < 10_000
        assert browser.complaints == []
    browser.open(f"{page.path.as_uri()}#sharing")
    browser.run("document.querySelector('.plot').scrollTo(1e6, 1e6)")
    browser.settle()
    assert browser.run("+document.querySelector('canvas').dataset.drawn") > 100


def test_each_picture_says_that_smaller_models_are_not_described(
    browser: Browser, store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blobstore.pages.largest_models.MAX_MODELS", 1)
    page = write_page(tmp_path / "page.html", store=two_models(store))

    for view in VIEWS:
        browser.open("about:blank")
        browser.open(f"{page.path.as_uri()}#{view}")
        hints = browser.run(
            "[...document.querySelectorAll('.hint')].map(hint => hint.textContent).join()"
        )
        assert "The page describes the largest models, and not 1 smaller one." in hints
        assert browser.complaints == []
    browser.run("[...document.querySelectorAll('details')].at(-1).open = true")
    browser.settle()
    assert browser.run("document.querySelector('tbody:last-of-type th').textContent")


def test_a_model_of_20000_tensors_scrolls_through_what_is_in_sight(
    browser: Browser, store: LocalStore, tmp_path: Path
) -> None:
    tensors = [
        GridTensor(
            f"model.layers.{layer}.part{part}.weight", "BF16", (4, 4), 32, 16.0, Digest.of(b"")
        )
        for layer in range(200)
        for part in range(100)
    ]
    data = page_data(two_models(store))
    model = data["model"]["one:latest"] | grid(tensors, {})
    page = tmp_path / "page.html"
    page.write_text(render_page("large", data | {"model": {"one:latest": model}}))

    browser.open(f"{page.as_uri()}#model")
    first = browser.run("document.querySelector('canvas').toDataURL()")
    browser.run("document.querySelector('.plot').scrollTo(900, 3000)")
    browser.settle()

    assert browser.run("document.querySelector('canvas').toDataURL()") != first
    assert 100 < browser.run("+document.querySelector('canvas').dataset.drawn") < 3000
    assert browser.run("document.querySelector('canvas').width") < 1200
    browser.run("document.querySelector('details').open = true")
    browser.wait("document.querySelectorAll('tbody tr').length === 500")
    assert browser.complaints == []


def test_a_picture_is_printed_whole(browser: Browser, store: LocalStore, tmp_path: Path) -> None:
    tensors = [GridTensor(f"h.{layer}.w", "BF16", (4,), 8, 16.0) for layer in range(200)]
    data = page_data(two_models(store))
    model = data["model"]["one:latest"] | grid(tensors, {})
    page = tmp_path / "page.html"
    page.write_text(render_page("long", data | {"model": {"one:latest": model}}))
    browser.open(f"{page.as_uri()}#model")
    height = "document.querySelector('canvas').clientHeight"
    on_screen = browser.run(height)

    browser.run("dispatchEvent(new Event('beforeprint'))")
    assert browser.run(height) > 200 * 24 > on_screen
    browser.run("dispatchEvent(new Event('afterprint'))")
    assert browser.run(height) == on_screen


def test_arrow_keys_move_by_rows_and_columns_of_a_grid(
    browser: Browser, store: LocalStore, tmp_path: Path
) -> None:
    opened(browser, family(store, tmp_path), tmp_path, "model/tiny%3Alatest")
    browser.run("document.querySelector('canvas').focus()")

    said = []
    for key in ("Home", "ArrowRight", "ArrowDown", "ArrowLeft", "ArrowUp", "End", "ArrowDown"):
        browser.press(key)
        said.append(browser.run("document.querySelector('.seen').textContent").split("\n")[0])

    names = [(0, "q"), (0, "v"), (1, "v"), (1, "q"), (0, "q"), (2, "v"), (2, "v")]
    assert said == [f"model.layers.{layer}.{part}_proj.weight" for layer, part in names]


def test_a_printed_page_is_light_and_has_no_controls(
    browser: Browser, store: LocalStore, tmp_path: Path
) -> None:
    opened(browser, family(store, tmp_path), tmp_path)

    browser.resize(1180, 900, dark=True, media="print")

    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.run("getComputedStyle(document.querySelector('nav')).display") == "none"
    assert browser.run("document.querySelector('canvas').getBoundingClientRect().width") > 500


def test_a_phone_and_a_printed_page_lack_only_the_hints_about_keys(
    browser: Browser, store: LocalStore, tmp_path: Path
) -> None:
    put(store, "alone", {"x": 1})
    page = family(store, tmp_path)
    shown = "[...document.querySelectorAll('.hint')].filter(one => one.offsetHeight).map(one => one.textContent)"
    keys = "Arrow keys move"

    opened(browser, page, tmp_path, "family")
    notes = browser.run(shown)
    opened(browser, page, tmp_path)
    hints = browser.run(shown)
    browser.resize(390, 844)
    hidden = browser.run(shown)
    opened(browser, page, tmp_path, "family")
    browser.resize(390, 844)
    on_phone = browser.run(shown)
    browser.resize(1180, 900, media="print")

    assert notes == on_phone == browser.run(shown) == ["1 model without relatives: not shown."]
    assert hints[0].startswith(keys)
    assert hidden == []


def test_on_a_phone_a_family_is_a_list_that_fits(
    browser: Browser, store: LocalStore, tmp_path: Path
) -> None:
    opened(browser, family(store, tmp_path), tmp_path, "family")
    width = "document.querySelector('.tree').getBoundingClientRect().width"
    wide = browser.run(width)

    browser.resize(390, 844)
    browser.wait(f"{width} < 380")

    assert wide > 600
    assert browser.run("document.querySelectorAll('.tree g').length") == 3
    assert browser.complaints == []
