from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from blobstore.store.local import LocalStore
from blobstore.store.scan import digest_of
from tests.support.damage import forget_manifests, write_manifest
from tests.unit.cli.running import command_line, environment, run, run_json


@pytest.fixture
def emptied(stored: LocalStore) -> LocalStore:
    """Give a store whose one model has lost its name."""
    forget_manifests(stored, "dense")
    return stored


def test_removes_and_lists_unreferenced_blobs(emptied: LocalStore) -> None:
    blobs = {path.name: path.stat().st_size for path in emptied.folder("blobs").iterdir()}
    result = run("gc", "--older-than", "0s", "--force", "-v")
    lines = result.stdout.splitlines()
    assert {line.split()[1] for line in lines if "blobs/" in line} == {
        f"blobs/{name}" for name in blobs
    }
    assert lines[-1].startswith(f"removed {len(blobs)} blobs and 1 other file, ")
    assert list(emptied.folder("blobs").iterdir()) == []


def test_young_blobs_are_kept_by_default(emptied: LocalStore) -> None:
    count = len(list(emptied.folder("blobs").iterdir()))
    first, second = run("gc").stdout.splitlines()
    assert first == "removed 3 empty folders"
    assert second.startswith(f"kept {count} blobs, ")
    assert second.endswith(": too young, removable in 60 minutes; with --older-than 0s at once")
    assert len(list(emptied.folder("blobs").iterdir())) == count


def test_a_dry_run_says_what_would_be_removed(emptied: LocalStore) -> None:
    found = run_json("gc", "--dry-run", "--older-than=0s")
    assert found["dry_run"] is True
    assert {Path(item["path"]).name for item in found["blobs"]} == {
        path.name for path in emptied.folder("blobs").iterdir()
    }
    assert found["bytes"] == sum(item["bytes"] for item in [*found["blobs"], *found["leftovers"]])
    assert "there are no manifests in" in found["refusal"]
    again = run_json("gc", "--older-than=0s", "--force")
    assert again == found | {"dry_run": False, "refusal": None, "seconds": again["seconds"]}
    assert list(emptied.folder("blobs").iterdir()) == []


def test_a_store_without_manifests_is_emptied_only_by_force(emptied: LocalStore) -> None:
    count = len(list(emptied.folder("blobs").iterdir()))
    error = run("gc", "--older-than=0s", exit_code=1).stderr
    assert f"but {count} blobs; if the models were removed on purpose, run gc with --force" in error
    assert (
        "gc refuses to do this without --force" in run("gc", "--older-than=0s", "--dry-run").stderr
    )
    assert len(list(emptied.folder("blobs").iterdir())) == count
    lines = run("gc", "--older-than=0s", "--force").stdout.splitlines()
    assert [line.partition(",")[0] for line in lines] == [f"removed {count} blobs and 1 other file"]


def test_names_the_processes_that_use_a_blob(emptied: LocalStore) -> None:
    digests = [digest_of(path.name) for path in emptied.folder("blobs").iterdir()]
    with emptied.lease() as lease:
        lease.hold(digest for digest in digests if digest is not None)
        *_, last = run("gc", "--older-than=0s").stdout.splitlines()
        (first, *_) = run_json("gc", "--older-than=0s")["kept_blobs"]
    assert last.startswith(f"kept {len(digests)} blobs, ")
    assert last.endswith(f": in use by PID {os.getpid()}")
    assert (first["reason"], first["processes"]) == ("in use", [os.getpid()])


def test_reports_that_there_is_nothing_to_remove(stored: LocalStore) -> None:
    assert run("gc", "--older-than=0s").stdout == "nothing to remove\n"


@pytest.mark.parametrize("time", ["1", "-1h", "h", "1e5s", "1h30m", "", "nan s"])
def test_rejects_invalid_times(stored: LocalStore, time: str) -> None:
    result = run("gc", "--older-than", time, exit_code=2)
    assert "is not a time such as 30m, 1h or 2d" in result.stderr


@pytest.mark.parametrize("time", ["0s", "90 m", "1.5h", "2d", "1w"])
def test_takes_times_in_all_units(stored: LocalStore, time: str) -> None:
    assert run("gc", "--older-than", time).stdout == "nothing to remove\n"


def test_a_torn_manifest_is_named_and_nothing_is_removed(emptied: LocalStore) -> None:
    write_manifest(emptied, "torn", b"{")
    count = len(list(emptied.folder("blobs").iterdir()))
    assert "torn/latest' needs" in run("gc", "--older-than=0s", exit_code=4).stderr
    assert len(list(emptied.folder("blobs").iterdir())) == count


@pytest.mark.parametrize("options", [("--wait", "0.1"), ("--wait=0",)])
def test_waits_no_longer_than_the_option_says(stored: LocalStore, options: tuple[str, ...]) -> None:
    with stored._locks.shared():
        for arguments in (("gc", *options), ("gc", *options, "--store", stored.root)):
            command = command_line(*arguments)
            done = subprocess.run(
                command, env=environment(), capture_output=True, text=True, check=False
            )
            assert done.returncode == 1
            assert "waiting for the lock of the store" in done.stderr


def test_an_absent_store_has_no_garbage(store: LocalStore) -> None:
    run("gc")
    assert not store.root.exists()


def test_notes_about_manifests_in_a_bucket_are_not_counted_as_blobs(
    stored: LocalStore, tmp_path: Path
) -> None:
    place = f"file://{tmp_path}/bucket"
    run("push", "dense", place, "--cold")
    blobs = len(list((tmp_path / "bucket/blobs").iterdir()))
    run("rm", f"{place}/dense")
    removed = run("gc", "--remote", place, "--older-than=0s", "--force").stdout
    assert removed.startswith(f"removed {blobs} blobs and 1 other file, ")
    assert not list((tmp_path / "bucket/blobs").iterdir())
