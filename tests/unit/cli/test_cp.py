from __future__ import annotations

from pathlib import Path

import pytest

from blobstore.manifests.reference import Reference
from blobstore.store.local import LocalStore
from tests.support.frozen import put
from tests.unit.cli.running import run, run_json


def test_copies_a_name(stored: LocalStore) -> None:
    result = run("cp", "dense", "team/copy:v2")
    assert result.stderr == ""
    assert result.stdout == "copied dense:latest to team/copy:v2\n"
    manifests = [stored.read_manifest(name) for name in stored.references()]
    assert len(manifests) == 2
    assert len(set(manifests)) == 1


def test_prints_json(stored: LocalStore) -> None:
    (model,) = run_json("list")["models"]
    assert run_json("cp", "dense", "copy") == {
        "source": "dense:latest",
        "name": "copy:latest",
        "digest": model["digest"],
        "replaced": False,
    }


def test_replaces_another_model_by_force_only(stored: LocalStore, moe: Path) -> None:
    run("create", moe, "moe")
    result = run("cp", "dense", "moe", exit_code=1)
    assert "another model has the name 'moe:latest'; replace it with --force" in result.stderr
    result = run("cp", "dense", "moe", "--force")
    assert result.stdout == (
        "copied dense:latest to moe:latest, which was the name of another model\n"
    )
    names = [stored.read_manifest(Reference.parse(name)) for name in ("dense", "moe")]
    assert names[0] == names[1]


@pytest.mark.parametrize("arguments", [("cp", "dense", "x"), ("mv", "dense", "x"), ("rm", "dense")])
def test_waits_as_long_as_the_option_says(stored: LocalStore, arguments: tuple[str, ...]) -> None:
    with stored._locks.shared():
        found = run_json(*arguments, "--wait", "0", exit_code=1)
    assert found["error"]["kind"] == "StoreBusy"
    assert list(map(str, stored.references())) == ["dense:latest"]


@pytest.mark.parametrize("command", ["cp", "mv"])
def test_the_same_name_is_wrong_usage(stored: LocalStore, command: str) -> None:
    assert "has that name already" in run(command, "dense", "dense:latest", exit_code=2).stderr
    assert len(list(stored.references())) == 1


@pytest.mark.slow
def test_copies_a_model_to_another_store(stored: LocalStore, tmp_path: Path) -> None:
    other = tmp_path / "other"
    result = run("cp", "dense", "--to", other)
    assert result.stdout.startswith(f"copied dense:latest to dense:latest in {other}: 2.1 kB writ")
    run("verify", "--store", other)

    found = run_json("cp", "dens*", "team/copy", "--to", other)
    assert found.pop("seconds") >= 0
    assert found == {
        "source": "dense:latest",
        "name": "team/copy:latest",
        "store": str(other),
        "digest": run_json("list", "dense")["models"][0]["digest"],
        "replaced": False,
        "bytes_written": 0,
        "bytes_present": run_json("list", "dense")["models"][0]["bytes"],
    }


def test_copies_all_models_that_match_to_another_store(
    stored: LocalStore, moe: Path, tmp_path: Path
) -> None:
    run("create", moe, "team/moe")
    run("cp", "dense", "team/dense")
    other = LocalStore(tmp_path / "other")
    result = run("cp", "team/*", "--to", other.root)
    assert result.stdout.startswith(f"copied 2 models to {other.root}: ")
    assert [str(name) for name in other.references()] == ["team/dense:latest", "team/moe:latest"]
    run("verify", "--store", other.root)

    run("cp", "dense", "team/moe", "--force")
    failing = run("cp", "team/*", "--to", other.root, exit_code=1)
    assert "copied 1 model to" in failing.stdout
    assert "1 of 2 models failed" in failing.stdout
    assert "error: team/moe:latest: another model has the name" in failing.stderr
    assert run("cp", "team/*", "new", "--to", other.root, exit_code=2)
    run("cp", "team/*", "--to", other.root, "--force", "-v")
    assert other.read_manifest("team/moe") == stored.read_manifest("dense")


def test_a_new_name_is_needed_in_the_same_store(stored: LocalStore) -> None:
    assert "missing argument 'DST'" in run("cp", "dense", exit_code=2).stderr


@pytest.mark.parametrize("arguments", [("cp", "dense", "copy:v1"), ("tag", "dense", "latest2")])
def test_says_that_there_is_nothing_to_do(stored: LocalStore, arguments: tuple[str, ...]) -> None:
    assert run(*arguments).stdout.startswith("copied dense:latest to ")
    assert run(*arguments).stdout.startswith("nothing to do: ")
    assert run_json(*arguments)["replaced"] is False


def test_a_state_that_is_not_named_is_noted(store: LocalStore, tmp_path: Path) -> None:
    put(store, "run:1", {"x": 1})
    put(store, "run:1.state", {"x": 1, "moment": 1})
    place, archive = f"file://{tmp_path}/bucket", tmp_path / "run.bsar"
    note = "note: not included: 'run:1.state', the state of a training"
    for words in (
        ("cp", "--to", tmp_path / "other"),
        ("pack", archive),
        ("push", place),
        ("lock", "--out", tmp_path / "lock"),
        ("rm", "--dry-run"),
    ):
        command, *rest = words
        assert note in run(command, "run:1", *rest).stderr
        both = run(command, "run:*", *rest, *(["--force"] if command == "pack" else []))
        assert note not in both.stderr
    remove = ("cp", "run:1", "run:best")
    assert run(*remove).stderr == ""
    assert "nothing to do" in run(*remove).stdout
    run("rm", "run:best.state")
    assert "copied run:1 to run:best" in run(*remove).stdout
