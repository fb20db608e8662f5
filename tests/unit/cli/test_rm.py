from __future__ import annotations

from pathlib import Path

from blobstore.manifests.reference import Reference
from blobstore.store.local import LocalStore
from tests.unit.cli.running import run, run_json

DENSE = Reference.parse("dense")


def listed(store: LocalStore) -> list[str]:
    return list(map(str, store.references()))


def test_removes_names_and_reports_what_gc_frees(stored: LocalStore) -> None:
    run("cp", "dense", "copy")
    result = run("rm", "dense")
    assert result.stderr == ""
    assert result.stdout.splitlines() == [
        "removed dense:latest",
        '"blobstore gc" has nothing to free',
    ]
    assert listed(stored) == ["copy:latest"]
    blobs = [path.stat().st_size for path in stored.folder("blobs").iterdir()]
    result = run("rm", "copy")
    assert result.stdout.splitlines() == [
        "removed copy:latest",
        (
            f'"blobstore gc --force" frees 2.1 kB in 60 minutes: {len(blobs)} blobs that no other '
            "model needs; with --older-than 0s at once"
        ),
    ]
    assert listed(stored) == []
    assert len(list(stored.folder("blobs").iterdir())) == len(blobs)


def test_a_dry_run_removes_nothing(stored: LocalStore) -> None:
    blobs = [path.stat().st_size for path in stored.folder("blobs").iterdir()]
    result = run("rm", "dense", "--dry-run")
    assert result.stdout.startswith(
        'would remove dense:latest\n"blobstore gc --force" would then free'
    )
    found = run_json("rm", "dense", "--dry-run")
    digest = run_json("list")["models"][0]["digest"]
    assert found == {
        "dry_run": True,
        "removed": [{"name": "dense:latest", "digest": digest, "error": None}],
        "unreferenced": {"blobs": len(blobs), "bytes": sum(blobs)},
        "kept_as_bases": {"blobs": 0, "bytes": 0, "by": []},
        "unreadable": [],
        "notices": [],
    }
    assert listed(stored) == ["dense:latest"]
    run("cp", "dense", "copy")
    assert '"blobstore gc" would have nothing to free' in run("rm", "dense", "--dry-run").stdout


def test_all_or_none_and_near_names(stored: LocalStore) -> None:
    result = run("rm", "dense", "dens", exit_code=3)
    assert "no model 'dens:latest'" in result.stderr
    assert "did you mean 'dense'?" in result.stderr
    assert result.stdout == ""
    assert run_json("rm", "none", exit_code=3)["error"]["kind"] == "ModelNotFound"
    assert listed(stored) == ["dense:latest"]
    run("rm", exit_code=2)


def test_a_manifest_that_cannot_be_read_is_removed_with_a_note(stored: LocalStore) -> None:
    run("cp", "dense", "other")
    stored.manifest_path(DENSE).write_bytes(b"{\x1b[2J")
    found = run_json("rm", "other")
    assert found["unreadable"] == ["dense:latest"]
    result = run("rm", "dense")
    assert result.stdout.startswith("removed dense:latest\n")
    assert "note: the blobs of dense:latest are unknown: '/" in result.stderr
    assert "\x1b" not in result.stderr
    assert listed(stored) == []


def test_lists_names_that_will_stop_gc(stored: LocalStore) -> None:
    run("cp", "dense", "other")
    stored.manifest_path(DENSE).write_bytes(b"{")
    result = run("rm", "other")
    assert 'note: "blobstore gc" removes nothing until dense:latest is repaired' in result.stderr
    assert result.stderr.count("\n") == 1


def test_does_not_create_an_absent_store(store: LocalStore) -> None:
    run("rm", "a", exit_code=3)
    assert not Path(store.root).exists()


def test_an_id_with_several_names_removes_none(stored: LocalStore) -> None:
    run("cp", "dense", "copy")
    digest = run_json("list", "dense")["models"][0]["digest"].removeprefix("sha256:")

    error = run("rm", digest[:8], exit_code=2).stderr

    assert f"'{digest[:8]}' is the ID of several names: 'copy:latest', 'dense:latest'" in error
    assert len(run_json("list")["models"]) == 2


def test_retention_shows_in_a_dry_run_what_gc_would_free(stored: LocalStore, moe: Path) -> None:
    run("create", moe, "dense:new")
    shown = run("rm", "dense:*", "--keep-last", "1", "--dry-run").stdout
    assert shown.startswith("keeps 1 model\nwould remove dense:latest\n")
    assert '"blobstore gc" would then free' in shown
    assert (
        run("rm", "dense:*", "--older-than", "1h").stdout == "keeps 2 models\nnothing to remove\n"
    )
    run("rm", "dense:*", "--keep-last", "1")
    assert [str(name) for name in stored.references()] == ["dense:new"]
    run("rm", "s3://bucket/x", "--keep-last", "1", exit_code=2)


def test_retention_says_when_no_name_has_several_tags(stored: LocalStore, moe: Path) -> None:
    run("cp", "dense", "other")
    result = run("rm", "*", "--keep-last", "1")
    assert result.stdout == "keeps 2 models\nnothing to remove\n"
    assert (
        "--keep-last counts the tags of each name, and each of these 2 names has one"
        in result.stderr
    )
    run("create", moe, "dense:new")
    assert not run("rm", "*", "--keep-last", "2").stderr
    run("cp", "dense", "dense:best")
    assert run("rm", "*", "--keep-last", "1").stdout == "keeps 4 models\nnothing to remove\n"


def test_a_glob_removes_models_elsewhere(stored: LocalStore, tmp_path: Path) -> None:
    place = f"file://{tmp_path}/remote"
    for name in ("run:1", "run:2", "other:v1"):
        run("push", "dense", f"{place}/{name}")

    shown = run("rm", f"{place}/run*", "--dry-run").stdout
    assert shown == f"would remove {place}/run:1\nwould remove {place}/run:2\n"
    run("rm", f"{place}/run*")
    rows = run("list", place).stdout.splitlines()
    assert [row.split()[0] for row in rows] == ["NAME", f"{place}/other:v1"]
    assert "no model matches" in run("rm", f"{place}/run*", exit_code=3).stderr
