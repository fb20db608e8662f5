"""The site of the documentation is built without a warning, and its reference has every public name."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import blobstore
from blobstore import safetensors
from tests.support.transcripts import ROOT

pytestmark = pytest.mark.skipif(
    find_spec("material") is None or find_spec("mkdocstrings") is None,
    reason="the group docs has what builds the site",
)


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(
        command,
        capture_output=True,
        check=False,
        cwd=ROOT,
        env={"PATH": "", "NO_MKDOCS_2_WARNING": "1"},
        text=True,
    )

    assert done.returncode == 0, done.stderr
    help_page = (tmp_path / "reference" / "help" / "index.html").read_text(encoding="utf-8")
    assert "Usage: blobstore create [OPTIONS]" in help_page
    assert "On the site" not in help_page
    pictures = (tmp_path / "guides" / "page" / "index.html").read_text(encoding="utf-8")
    for name in re.findall(r'src="(\w+)\.png#only-light"', pictures):
        assert f'src="{name}-dark.png#only-dark"' in pictures
    assert pictures.count("#only-light") == 5
    tutorial = (tmp_path / "getting-started" / "tutorial" / "index.html").read_text("utf-8")
    assert tutorial.count("<rect ") > 10  # the pictures
    formats = (tmp_path / "reference" / "format" / "index.html").read_text(encoding="utf-8")
    assert "../tests/" not in formats  # the site has no tests
    for page, module in (("api", blobstore), ("safetensors-api", safetensors)):
        text = (tmp_path / "reference" / page / "index.html").read_text(encoding="utf-8")
        described = re.findall(rf'<h3 id="{module.__name__}\.(\w+)"', text)
        assert sorted(described) == sorted(module.__all__)
        for name in ("LocalStore.resolve", "Model.state_dict"):
            assert (f'id="blobstore.{name}"' in text) == (module is blobstore)
        for name in ("LocalStore.manifest_path", "Model.map_hot"):  # dir() does not list them
            assert f'id="blobstore.{name}"' not in text
