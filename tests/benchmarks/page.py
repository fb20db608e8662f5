"""Writing the page of a store of 1,000 models with 300 layers each, compared with ``du``.

The models are in families of ten that share nine of ten layers. Tensors are small: no weights are read.
``du`` reads the same manifests and sizes, so the difference is what pictures cost. Then a browser scrolls
through pictures, and the time from frame to frame is measured; 60 frames per second are 16.7 ms.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from pathlib import Path

from blobstore.operations.describe.disk_usage import measure_usage
from blobstore.pages.model_view import GridTensor, grid
from blobstore.pages.shell import render_page
from blobstore.pages.write import page_data, write_page
from blobstore.store.local import LocalStore
from tests.benchmarks.common import arguments, workspace
from tests.support.browser import running_browser
from tests.support.many_models import write_models

_MODELS, _LAYERS, _RUNS = 1000, 300, 5
_SCROLL = """new Promise(done => {
  const box = document.querySelector('.plot'), times = [];
  const step = now => {
    times.push(now);
    box.scrollTop += 23;
    box.scrollLeft += 11;
    if (times.length <= 200) requestAnimationFrame(step); else done(times);
  };
  requestAnimationFrame(step);
})"""


def main() -> None:
    """Print the table."""
    options = arguments(__doc__)
    with workspace(options.folder) as folder:
        store = LocalStore(Path(folder) / "store")
        write_models(store, _MODELS, _LAYERS)
        target = Path(folder) / "page.html"
        ways = {
            "du": lambda: measure_usage(store=store),
            "page": lambda: write_page(target, store=store),
        }
        print(f"{_MODELS:,} models with {_LAYERS} layers each; best of {_RUNS}\n")
        for name, run in ways.items():
            times = []
            for _ in range(_RUNS):
                begin = time.perf_counter()
                run()
                times.append(time.perf_counter() - begin)
            print(f"{name:6} {min(times):6.2f} s")
        print(f"\nthe page has {target.stat().st_size / 1e6:.2f} MB\n")
        large = Path(folder) / "large.html"
        write_large_model(store, large)
        pages = {
            "1,000 models": f"{target.as_uri()}#sharing",
            "20,000 tensors": f"{large.as_uri()}#model",
        }
        with (
            # Processes of the browser may still write while the folder is removed.
            tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
            running_browser(Path(profile)) as browser,
        ):
            browser.resize(1180, 900)
            for name, address in pages.items():
                browser.open(address)
                times = browser.run(_SCROLL)
                frames = sorted(after - before for before, after in itertools.pairwise(times))
                middle, late = frames[len(frames) // 2], frames[int(len(frames) * 0.95)]
                print(f"scrolling {name}: {middle:.1f} ms per frame, 95% within {late:.1f} ms")


def write_large_model(store: LocalStore, target: Path) -> None:
    """Write a page with a model of 200 layers of 100 tensors."""
    tensors = [
        GridTensor(f"model.layers.{layer}.part{part}.weight", "BF16", (4, 4), 32, 16.0)
        for layer in range(200)
        for part in range(100)
    ]
    data = page_data(store)
    name, model = next(iter(data["model"].items()))
    target.write_text(render_page("large", data | {"model": {name: model | grid(tensors, {})}}))


if __name__ == "__main__":
    main()
