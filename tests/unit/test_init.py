from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import blobstore

ROOT = Path(__file__).parents[2]


def run(code: str) -> str:
    """Return what a fresh interpreter prints, started at the root of the project."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, cwd=ROOT, text=True
    )
    return done.stdout


def test_importing_the_package_imports_none_of_its_modules() -> None:
    listing = "import sys, blobstore; print(*(name for name in sys.modules if name.startswith('blobstore')))"
    assert run(listing).split() == ["blobstore"]


def test_a_public_name_imports_only_its_own_home() -> None:
    code = "import sys, blobstore; blobstore.BlobstoreError; print('blobstore.operations.open' in sys.modules)"
    assert run(code) == "False\n"


def test_public_names_stay_what_they_are_after_every_module_was_imported() -> None:
    code = """
import importlib, pkgutil, types
import blobstore
found = [module.name for module in pkgutil.walk_packages(blobstore.__path__, "blobstore.")]
for name in found:
    # vLLM has an environment of its own.
    if not name.endswith(("__main__", ".vllm.loader", ".vllm.server")):
        importlib.import_module(name)
names = {name: getattr(blobstore, name) for name in blobstore.__all__}
assert "blobstore.operations.create.create" in found
assert not [name for name, value in names.items() if isinstance(value, types.ModuleType)]
print(names["create"].__module__, names["open"].__name__, names["LocalStore"].__module__)
"""
    assert run(code) == "blobstore.operations.create.create open_model blobstore.store.local\n"


@pytest.mark.parametrize("name", blobstore.__all__)
def test_a_public_name_is_looked_up_once(name: str) -> None:
    first = getattr(blobstore, name)
    assert vars(blobstore)[name] is first
