"""All benchmarks of cold storage: codecs without and with a base, a store with a family, and a plot.

They take a quarter of an hour, most of it for training; --folder keeps the trained models. The plot needs
matplotlib, which `pip install --group bench .` installs together with the peers.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
from pathlib import Path

from tests.benchmarks import cold, cold_family, frozen
from tests.benchmarks.common import arguments, workspace
from tests.benchmarks.plot import draw

_PLOT = Path("docs/internals/cold-storage.svg")
_PANELS = {
    "medium": "fine-tune, 200 steps",
    "chgnet": "fine-tune, published (chgnet)",
    "adapter": "LoRA of rank 16, merged",
}


def main() -> None:
    """Print all tables, and draw the plot."""
    options = arguments(__doc__)
    with contextlib.ExitStack() as made:
        if options.folder is None:  # one for all tables, or what they share would be trained twice
            options.folder = made.enter_context(workspace(None))
        _print_all(options)


def _print_all(options: argparse.Namespace) -> None:
    alone = cold.tables(options)["bf16"]
    panels = {"bf16, alone": [point for point in alone if "," not in point.codec]}
    pairs = cold_family.tables(options)
    panels |= {title: pairs[name] for name, title in _PANELS.items()}
    frozen.tables(options)
    if importlib.util.find_spec("matplotlib"):
        draw(panels, _PLOT)
        print(f"drawn: {_PLOT}")


if __name__ == "__main__":
    main()
