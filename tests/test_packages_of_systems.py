"""The formula of Homebrew and the recipe of conda are valid, and say what pyproject.toml says."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import rattler_build
import yaml

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
RECIPE = (ROOT / ".ci" / "release" / "recipe.yaml").read_text(encoding="utf-8")
FORMULA = (ROOT / ".ci" / "release" / "blobstore.rb").read_text(encoding="utf-8")
CONDA_NAMES = {"ml-dtypes": "ml_dtypes", "zlib-ng": "python-zlib-ng"}
"""What conda-forge calls what has another name on PyPI."""


def conda(requirement: str) -> str:
    name, _, version = requirement.partition(">=")
    return f"{CONDA_NAMES.get(name, name)} >={version}"


def test_rattler_build_renders_the_recipe() -> None:
    (variant,) = rattler_build.Stage0Recipe.from_yaml(RECIPE).render()

    package = variant.recipe.to_dict()["package"]
    assert package["name"] == "tensor-blobstore"
    assert package["version"] == PROJECT["project"]["version"]


def test_the_recipe_needs_what_the_project_needs() -> None:
    recipe = yaml.safe_load(RECIPE)
    python = f"python {PROJECT['project']['requires-python']}"
    built = PROJECT["build-system"]["requires"]
    built += PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"][
        "dependencies"
    ]

    needed = recipe["requirements"]
    assert needed["run"] == [python, *map(conda, PROJECT["project"]["dependencies"])]
    assert needed["host"] == [python, "pip", *map(conda, built)]
    (script,) = PROJECT["project"]["scripts"].items()
    assert recipe["build"]["python"]["entry_points"] == [" = ".join(script)]
    assert recipe["about"]["license"] == PROJECT["project"]["license"]
    assert recipe["about"]["license_file"] == PROJECT["project"]["license-files"]


@pytest.mark.skipif(shutil.which("ruby") is None, reason="ruby is not installed")
def test_the_formula_is_ruby() -> None:
    command = ["ruby", "-wc", str(ROOT / ".ci" / "release" / "blobstore.rb")]
    done = subprocess.run(command, capture_output=True, check=False, text=True)

    assert (done.stdout.strip(), done.stderr) == ("Syntax OK", "")


def test_the_formula_installs_this_version_and_extras_that_there_are() -> None:
    version = re.search(r"tensor_blobstore-(.+?)\.tar\.gz", FORMULA)
    extras = re.search(r"buildpath\}\[(.+?)\]", FORMULA)
    container = re.search(
        r"wheel\}\[(.+?)\]", (ROOT / ".ci" / "release" / "Containerfile").read_text("utf-8")
    )

    assert version is not None
    assert version[1] == PROJECT["project"]["version"]
    assert extras is not None
    assert container is not None
    assert extras[1] == container[1]
    assert set(extras[1].split(",")) <= set(PROJECT["project"]["optional-dependencies"])
