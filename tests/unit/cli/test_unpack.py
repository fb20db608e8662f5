from __future__ import annotations

from pathlib import Path

import pytest

from blobstore.store.local import LocalStore
from tests.support.archives import packed_family
from tests.support.frozen import put
from tests.unit.cli.running import run, run_json


@pytest.fixture
def path(tmp_path: Path, store: LocalStore) -> Path:
    from blobstore.store.local import LocalStore

    path = tmp_path / "family.bsar"
    packed_family(LocalStore(tmp_path / "origin"), path)
    return path


def test_reports_what_was_unpacked(store: LocalStore, path: Path) -> None:
    result = run("unpack", path)
    assert result.stderr == ""
    first, *rest = result.stdout.splitlines()
    assert first.startswith("unpacked 2 models: 8 blobs, 141 kB written, 1 signature; ")
    assert rest == ["  base:latest", "  tuned:latest"]
    run("verify")
    again = run("unpack", path, "base")
    assert again.stdout.startswith(
        "unpacked 1 model: 5 blobs, 0 B written, 80.5 kB already present, 1 signature; "
    )


def test_prints_json_with_exact_numbers(store: LocalStore, path: Path) -> None:
    found = run_json("unpack", path, "tuned")
    assert found.pop("seconds") >= 0
    written = sum(file.stat().st_size for file in store.folder("blobs").iterdir())
    assert found == {
        "file": str(path),
        "names": ["tuned:latest"],
        "blobs": 5,
        "bytes_written": written,
        "bytes_present": 0,
        "signatures": 0,
        "stored_bytes": run_json("unpack", path, "tuned", "--verify-only")["stored_bytes"],
    }


@pytest.mark.parametrize("command", [("unpack", "--list"), ("show",)])
def test_lists_who_signed_the_models(
    store: LocalStore, path: Path, command: tuple[str, ...]
) -> None:
    heading, base, tuned, _ = run(*command, path).stdout.splitlines()
    assert heading.split()[-2:] == ["SIGNED", "BY"]
    assert base.endswith("a key that is not named (cosign, not checked)")
    assert tuned.split()[-1] == "-"
    first, second = run_json(*command, path)["models"]
    assert [one["state"] for one in first["signatures"]] == ["not checked"]
    assert second["signatures"] == []


def test_as_gives_the_models_another_namespace(store: LocalStore, path: Path) -> None:
    assert run("unpack", path, "--as", "lab").stdout.splitlines()[1:] == [
        "  lab/base:latest",
        "  lab/tuned:latest",
    ]
    run("unpack", path, "tuned", "--as", "h.x:5000")
    assert run("list", "-q").stdout.split() == [
        *("h.x:5000/tuned:latest", "lab/base:latest", "lab/tuned:latest")
    ]
    run("cp", "lab/base", "x/tuned")
    run("pack", "x/tuned", "lab/tuned", path, "--force")
    error = run("unpack", path, "--as", "y", exit_code=1).stderr
    assert "'lab/tuned:latest' and 'x/tuned:latest' would both become 'y/tuned:latest'" in error
    assert "contradict each other" in run("unpack", path, "--list", "--as", "y", exit_code=2).stderr


def test_verify_only_writes_nothing(store: LocalStore, path: Path) -> None:
    result = run("unpack", path, "--verify-only")
    assert result.stderr == ""
    assert result.stdout.startswith(f"{path} is intact: 8 blobs of 141 kB in ")
    assert result.stdout.splitlines()[1:] == ["  base:latest", "  tuned:latest"]
    found = run_json("unpack", path, "--verify-only")
    assert found.pop("seconds") >= 0
    assert found["names"] == ["base:latest", "tuned:latest"]
    assert 0 < found["stored_bytes"] < found["bytes"]
    assert set(found) == {"file", "names", "blobs", "bytes", "stored_bytes"}
    assert not store.root.exists()


def test_lists_the_models_and_unpacks_none(store: LocalStore, path: Path) -> None:
    no_suffix = path.rename(path.with_name("family"))
    heading, *rows, total = run("unpack", "--list", no_suffix, "tun*").stdout.splitlines()
    assert heading.split() == ["NAME", "ID", "SIZE", "STORED"]
    assert [row.split()[0] for row in rows] == ["tuned:latest"]
    assert total.startswith(f"{no_suffix}: 1 model, 8 blobs (3 as deltas) in ")
    found = run_json("unpack", "--list", no_suffix)
    run("unpack", no_suffix)
    listed = {model["name"]: model["digest"] for model in run_json("list")["models"]}
    assert {model["name"]: model["digest"] for model in found["models"]} == listed


@pytest.mark.parametrize(
    "options", [("--list", "absent"), ("--list", "--force"), ("--list", "--verify-only")]
)
def test_a_list_takes_names_of_the_archive_and_no_other_options(
    store: LocalStore, path: Path, options: tuple[str, ...]
) -> None:
    is_name = not options[1].startswith("--")
    result = run("unpack", path, *options, exit_code=3 if is_name else 2)
    assert ("contradict each other" in result.stderr) != is_name
    assert not store.root.exists()


@pytest.mark.parametrize("options", [(), ("--verify-only",)])
def test_exits_with_4_if_the_archive_is_damaged(
    store: LocalStore, path: Path, options: tuple[str, ...]
) -> None:
    path.write_bytes(path.read_bytes()[:-1])
    result = run("unpack", path, *options, exit_code=4)
    assert f"blobstore: error: archive '{path}': " in result.stderr
    error = run_json("unpack", path, *options, exit_code=4)["error"]
    assert error["kind"] == "ArchiveDamaged"
    assert list(store.references()) == []


def test_force_replaces_another_model_of_the_name(store: LocalStore, path: Path) -> None:
    put(store, "base", {"x": 50})
    result = run("unpack", path, exit_code=1)
    assert "another model has the name 'base:latest'; replace it with --force" in result.stderr
    run("unpack", path, "--force")
    run("verify")


def test_exits_with_3_if_the_file_or_model_is_missing(store: LocalStore, path: Path) -> None:
    assert "none.bsar'" in run("unpack", path.with_name("none.bsar"), exit_code=3).stderr
    assert "'other:latest'" in run("unpack", path, "other", exit_code=3).stderr


def test_verify_only_and_force_contradict_each_other(store: LocalStore, path: Path) -> None:
    result = run("unpack", path, "--verify-only", "--force", exit_code=2)
    assert "contradict each other" in result.stderr


def test_unpacks_what_a_glob_matches(store: LocalStore, path: Path) -> None:
    assert run_json("unpack", path, "tun*")["names"] == ["tuned:latest"]
    assert run_json("list")["models"][0]["name"] == "tuned:latest"
