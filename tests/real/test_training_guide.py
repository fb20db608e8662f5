"""The programs and commands of the guide about training."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch

from blobstore.store.local import LocalStore
from tests.real.training_guide import GUIDE, STEPS
from tests.support.clients import run_python
from tests.support.once import made_once
from tests.unit.cli.running import run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which the programs of the guide have run."""

    def train(folder: Path) -> None:
        ran = run_python((sys.executable, "-m", "tests.real.training_guide", folder), os.environ)
        assert ran.code == 0, ran.stderr[-5000:]

    return made_once(tmp_path_factory, "guide", train)


def test_the_programs_save_steps_and_resume_on_another_number_of_ranks(folder: Path) -> None:
    found, expected = (torch.load(folder / f"trained-{world}") for world in (1, 2))
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name])
    store = LocalStore(folder / "store")
    last = store.read_manifest(f"run:step-{STEPS}")
    assert store.read_manifest("run:latest") == last


def test_the_commands_choose_remove_evaluate_and_export_steps(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = shutil.copytree(folder / "store", tmp_path / "shared", symlinks=True)
    monkeypatch.setenv("BLOBSTORE_HOME", str(store))
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```text\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    lines += re.findall(r"`(blobstore (?:export|freeze)[^`]+)`", GUIDE)
    commands = [shlex.split(line.replace("step-1000", "step-3")) for line in lines]
    assert [words[1] for words in commands if words[0] == "blobstore"] == [
        *("list", "cp", "rm", "rm"),
        *("--store", "export", "freeze"),
    ]
    (tmp_path / "evaluate.py").write_text("open('evaluated', 'w').close()")
    for words in commands:
        places = {"/local/store": str(tmp_path / "local"), "/shared/store": str(store)}
        once = ["--once"] if "follow" in words else []
        run(*(places.get(word, word) for word in words[1:]), *once)
    assert (tmp_path / "evaluated").exists()
    assert (tmp_path / "step-3" / ".metadata").exists()
    tags = {reference.tag for reference in LocalStore(store).references()}
    assert {"best", "latest", "step-3", "step-4", "step-4.state"} <= tags
    assert "step-1.state" not in tags
