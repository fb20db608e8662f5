"""Writing the page of a store of 1,000 models with 300 layers each, compared with ``du``.

The models are in families of ten that share nine of ten layers. Tensors are small: no weights are read.
``du`` reads the same manifests and sizes, so the difference is what pictures cost.
"""

from __future__ import annotations

import time
from pathlib import Path

from blobstore.operations.maintenance.disk_usage import measure_usage
from blobstore.operations.page.write import write_page
from blobstore.store.local import LocalStore
from tests.benchmarks.common import arguments, workspace
from tests.support.many_models import write_models

_MODELS, _LAYERS, _RUNS = 1000, 300, 5


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
        print(f"\nthe page has {target.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
