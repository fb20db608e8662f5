"""The notebook of the documentation runs from top to bottom, and holds what it printed."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.transcripts import ROOT

if TYPE_CHECKING:
    import nbformat

pytestmark = pytest.mark.skipif(
    find_spec("nbclient") is None or find_spec("ipykernel") is None,
    reason="they are in the test group",
)
NOTEBOOK = ROOT / "docs" / "getting-started" / "tutorial.ipynb"


def outputs(notebook: nbformat.NotebookNode) -> list[list[dict[str, Any]]]:
    return [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]


def kinds(notebook: nbformat.NotebookNode) -> list[list[str]]:
    """Return what kinds of outputs the cells have: texts and pictures."""
    return [
        sorted(kind for output in cell for kind in output.get("data", {"stream": ""}))
        for cell in outputs(notebook)
    ]


def test_the_tutorial_runs_and_its_last_answers_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Here, since nbformat takes a second to import, which every worker would wait for.
    import nbformat

    from tests.support.notebooks import executed

    monkeypatch.setenv("JUPYTER_PATH", str(Path(sys.prefix) / "share" / "jupyter"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    (tmp_path / "work").mkdir()
    stored = nbformat.read(NOTEBOOK, as_version=4)

    run = executed(NOTEBOOK, tmp_path / "work")

    assert kinds(run) == kinds(stored)
    printed = [output.get("text", "") for cell in outputs(run) for output in cell]
    assert any("1 blob repaired, 0 faults left" in text for text in printed)
    answers = [output["data"] for cell in outputs(run) for output in cell if "data" in output]
    assert answers[-1]["text/plain"] == "True"
    assert sum("<svg" in answer.get("text/html", "") for answer in answers) == 2


def test_the_tutorial_names_no_folder_of_one_machine() -> None:
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert "/tmp" not in text
    assert "/home" not in text
