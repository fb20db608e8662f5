from __future__ import annotations

from pathlib import Path

from blobstore.store.local import LocalStore
from tests.unit.cli.running import run, run_json


def test_gives_a_model_another_tag_of_its_name(stored: LocalStore) -> None:
    run("mv", "dense", "host/team/dense:v1")
    result = run("tag", "host/team/dense:v1", "stable")
    assert result.stderr == ""
    assert result.stdout == "copied host/team/dense:v1 to host/team/dense:stable\n"
    assert list(map(str, stored.references())) == ["host/team/dense:stable", "host/team/dense:v1"]


def test_moves_a_tag_by_force_only(stored: LocalStore, moe: Path) -> None:
    run("create", moe, "dense:new")
    run("tag", "dense:new", "latest", exit_code=1)
    assert run_json("tag", "dense:new", "latest", "--force")["replaced"]
    models = run_json("list")["models"]
    assert models[0]["digest"] == models[1]["digest"]


def test_takes_a_name_with_its_tag_too(stored: LocalStore) -> None:
    run("tag", "dense", "dense:best")
    run("tag", "dense:best", "team/other:v1")
    assert list(map(str, stored.references()))[:3] == [
        "dense:best",
        "dense:latest",
        "team/other:v1",
    ]


def test_an_invalid_tag_is_wrong_usage(stored: LocalStore) -> None:
    for tag in ("../x", "a:b:c", "", "n/m", ".hidden"):
        assert "tag" in run("tag", "dense", tag, exit_code=2).stderr
    run("tag", "dens", "x", exit_code=3)


def test_an_address_is_no_tag(stored: LocalStore) -> None:
    for tag in ("team/dense", "s3://models/dense:v2"):
        error = run("tag", "dense", tag, exit_code=2).stderr
    assert "'s3://models/dense:v2' is not a tag; give the tag alone" in error
