"""Containers that share a store: each has process IDs of its own, and the first process of each is number 1."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.known import command, write_models

ROOT = Path(__file__).parents[2]
CONTAINER = ("unshare", "--pid", "--mount-proc", "--fork", "--kill-child")
_ROLE = """
import os, sys
from pathlib import Path
import blobstore
from tests.faults.known import command, read_models

assert os.getpid() == 1
role, folder, rounds = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
models, store = read_models(folder / "sources"), folder / "store"

def run(*arguments, may_fail=()):
    code, output, errors = command(*arguments, "--store", store)
    if code and code not in may_fail:
        print(arguments, "exits with", code, output, errors)

def check(opened, model):
    for problem in model.differences(opened):
        print(role, problem)

for number in range(rounds):
    model = models[number % len(models)]
    if role == "collect":
        run("gc", "--older-than", "0s", "--force")
    elif role == "freeze":
        run(("freeze", "thaw")[number % 2], models[0].name)
    elif role == "push":
        run("push", models[0].name, f"file://{folder}/pushed")
    elif role == "pull":
        run("rm", "pulled", may_fail=[3])
        run("pull", f"file://{folder}/remote/{model.name}", "pulled")
        with blobstore.open("pulled", store=store) as opened:
            check(opened, model)
    elif role == "open":
        os.environ["BLOBSTORE_CACHE_LIMIT"] = "60000"
        with blobstore.open(f"file://{folder}/remote/{model.name}", store=store) as opened:
            check(opened, model)
    elif role == "create":
        run("create", model.folder, "made")
        run("rm", "made")
"""
ROLES = {"collect": 30, "freeze": 8, "push": 8, "pull": 6, "open": 12, "create": 6}


def _why_not() -> str:
    if shutil.which("unshare") is None or os.geteuid():
        return "a namespace of process IDs takes root and 'unshare' of util-linux"
    tried = subprocess.run([*CONTAINER, "true"], capture_output=True, text=True, check=False)
    return tried.stderr.strip() if tried.returncode else ""


pytestmark = pytest.mark.skipif(bool(_why_not()), reason=_why_not() or "-")


def test_containers_that_share_a_store_lose_nothing(tmp_path: Path) -> None:
    """Garbage is collected while others import, pull, push, freeze, and evict what they keep as a cache."""
    models = write_models(tmp_path / "sources", 3)
    (tmp_path / "remote").mkdir()
    (tmp_path / "pushed").mkdir()
    for model in models:
        for store in ("origin", "store") if model is models[0] else ("origin",):
            assert command("create", model.folder, model.name, "--store", tmp_path / store)[0] == 0
        address = f"file://{tmp_path}/remote"
        assert command("push", model.name, address, "--store", tmp_path / "origin")[0] == 0
    containers = [
        subprocess.Popen(
            [*CONTAINER, sys.executable, "-c", _ROLE, role, str(tmp_path), str(rounds)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
        )
        for role, rounds in ROLES.items()
    ]
    ended = {
        role: (child.communicate()[0], child.returncode)
        for role, child in zip(ROLES, containers, strict=True)
    }
    assert ended == dict.fromkeys(ROLES, ("", 0))
    root = tmp_path / "store"
    assert command("verify", "--store", root)[0] == 0
    assert command("gc", "--older-than", "0s", "--force", "--store", root)[0] == 0
    for folder in ("tmp", "leases"):
        assert list((root / ".blobstore" / folder).iterdir()) == []
