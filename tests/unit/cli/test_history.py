from __future__ import annotations

from pathlib import Path

import pytest

from blobstore.store.local import LocalStore
from tests.unit.cli.running import run, run_json


@pytest.fixture
def replaced(stored: LocalStore, moe: Path) -> LocalStore:
    """A store whose name ``name`` was ``dense`` and is ``moe`` now."""
    run("create", moe, "moe")
    run("cp", "dense", "name")
    run("cp", "moe", "name", "--force")
    return stored


def ident(name: str) -> str:
    digest: str = run_json("list", name)["models"][0]["digest"]
    return digest.removeprefix("sha256:")


def test_lists_what_a_name_was(replaced: LocalStore) -> None:
    heading, row = run("history", "name").stdout.splitlines()
    assert heading.split() == ["ID", "SIZE", "UNTIL", "RESTORABLE"]
    assert row.split() == [ident("dense")[:12], "2.1", "kB", "just", "now", "yes"]
    assert run("history", "dense").stderr.startswith("note: dense:latest has not been another")


def test_restores_it(replaced: LocalStore) -> None:
    assert run("restore", "name").stdout == f"restored name:latest to {ident('dense')[:12]}\n"
    assert ident("name") == ident("dense")
    found = run_json("restore", "name", ident("moe")[:8])
    assert found == {"name": "name:latest", "digest": f"sha256:{ident('moe')}", "replaced": True}


def test_says_that_the_blobs_are_gone(replaced: LocalStore) -> None:
    blob = replaced.resolve("dense").layers[0]
    (replaced.folder("blobs") / blob.digest.file_name).unlink()

    assert run("history", "name").stdout.endswith("no: blobs are gone\n")
    assert "gc has removed some of its blobs" in run("restore", "name", exit_code=3).stderr


@pytest.mark.parametrize("command", ["history", "restore"])
def test_a_name_that_does_not_exist_gets_suggestions(replaced: LocalStore, command: str) -> None:
    assert "did you mean 'dense'?" in run(command, "desne", exit_code=3).stderr
