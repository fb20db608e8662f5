from __future__ import annotations

from pathlib import Path

from blobstore.manifests.reference import Reference
from blobstore.store.local import LocalStore
from tests.unit.cli.running import run, run_json


def listed(store: LocalStore) -> list[str]:
    return list(map(str, store.references()))


def test_renames_a_model(stored: LocalStore) -> None:
    manifest = stored.read_manifest(Reference.parse("dense"))
    result = run("mv", "dense", "team/other:v2")
    assert result.stderr == ""
    assert result.stdout == "renamed dense:latest to team/other:v2\n"
    assert listed(stored) == ["team/other:v2"]
    assert stored.read_manifest(Reference.parse("team/other:v2")) == manifest
    assert run_json("mv", "team/other:v2", "dense")["name"] == "dense:latest"


def test_replaces_another_model_by_force_only(stored: LocalStore, moe: Path) -> None:
    run("create", moe, "moe")
    run("mv", "dense", "moe", exit_code=1)
    assert listed(stored) == ["dense:latest", "moe:latest"]
    assert run_json("mv", "dense", "moe", "--force")["replaced"]
    assert listed(stored) == ["moe:latest"]
