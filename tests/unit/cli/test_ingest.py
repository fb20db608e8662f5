from __future__ import annotations

from pathlib import Path

import pytest

from blobstore.cli import output
from blobstore.store.local import LocalStore
from tests.unit.cli.running import run, run_json


def test_models_that_are_there_are_printed_together(
    stored: LocalStore, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        run("cp", "dense", name)
    names = tmp_path / "list"
    names.write_text("".join(f"'{dense}' {name}\n" for name in "axbyc"))
    monkeypatch.setattr(output, "_ROWS_WAIT", 3600)
    printed: list[list[str]] = []
    show = output.show

    def noted(text: str) -> None:
        printed.append([line.partition(": ")[0] for line in text.splitlines()])
        show(text)

    monkeypatch.setattr(output, "show", noted)
    run("ingest", names, "--executor", "threads:1")
    there = ["[1/5] a:latest", "[2/5] b:latest", "[3/5] c:latest", "[4/5] x:latest"]
    assert printed[:2] == [there, ["[5/5] y:latest"]]
    models = run_json("ingest", names, "--executor", "threads:1")["models"]
    assert [model["name"].partition(":")[0] for model in models] == [*"axbyc"]
