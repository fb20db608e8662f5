"""Compile the code and its tests once, although all workers begin at the same time."""

from __future__ import annotations

import compileall
import contextlib
import importlib
import os
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_FEW = 50


def compile_in_turn(config: pytest.Config) -> None:
    """Begin in each worker with other modules, so that it finds most of the others compiled.

    All workers collect the same tests in the same order. In a fresh clone, each would compile all modules at
    the same time as the others.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if not worker.isdecimal() or workers == 1:
        return
    tests = list(_modules(config.invocation_params.dir / arg for arg in config.args))
    if len(tests) < _FEW:
        return
    folders = (ROOT / name for name in ("manifests", "cli", "blobstore", "tests"))
    others = [path for folder in folders for path in _modules([folder], "*.py")]
    share = slice(int(worker), None, workers)
    for path in sorted(set(others) - set(tests))[share]:
        compileall.compile_file(path, quiet=2)
    # pytest compiles tests when they are imported. It will see again, and report, what cannot be.
    for path in tests[share]:
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))


def _modules(places: Iterable[Path], pattern: str = "test_*.py") -> Iterable[Path]:
    for place in places:
        yield from sorted(place.rglob(pattern))
