from __future__ import annotations

import os
from pathlib import Path

import pytest

from blobstore.manifests.reference import Reference
from blobstore.store.local import LocalStore
from tests.support.sandbox import NOBODY
from tests.unit.cli.running import run


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_warns_of_a_name_that_another_user_gave(stored: LocalStore) -> None:
    os.chown(stored.manifest_path(Reference.parse("dense")), NOBODY, NOBODY)
    assert "was put into the store by another user" in run("show", "dense").stderr
    assert run("list").stderr == ""


def test_a_glob_says_where_it_looked_for_a_shared_model(
    stored: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOBSTORE_SHARED", str(stored.root))
    monkeypatch.setenv("BLOBSTORE_HOME", str(tmp_path / "own"))
    missing = run("export", "den*", tmp_path / "out", exit_code=3).stderr
    assert f"the shared store '{stored.root}' has 'dense:latest'; a glob stands for" in missing
    assert (
        "no model matches 'x*' in the store '"
        in run("export", "x*", tmp_path / "out", exit_code=3).stderr
    )
    assert f"store         {stored.root}\n" in run("info", "dense").stdout
