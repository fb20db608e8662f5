from __future__ import annotations

from pathlib import Path

from blobstore.manifests.reference import Reference
from blobstore.store.local import LocalStore
from tests.unit.cli.running import run, run_json


def test_an_absent_store_uses_no_space(store: LocalStore) -> None:
    result = run("du")
    assert result.stdout == ""
    assert result.stderr.startswith("note: there is no store at ")
    found = run_json("du")
    assert found["models"] == []
    assert found["store"] == {
        "models": 0,
        "blobs": 0,
        "bytes": 0,
        "bytes_without_sharing": 0,
        "dedup_ratio": None,
        "bytes_in_all": 0,
    }
    run("du", "a", exit_code=3)


def test_prints_rows_and_totals(stored: LocalStore, moe: Path) -> None:
    run("create", moe, "moe")
    run("cp", "dense", "copy")
    run("cp", "moe", "garbage")
    run("rm", "garbage", "moe")
    (stored.folder("temporary") / "1-a-0").write_bytes(b"12")
    result = run("du")

    assert result.stderr == ""
    heading, *rows = result.stdout.splitlines()
    assert heading.split() == ["NAME", "ON", "DISK", "UNIQUE", "SHARED", "BLOBS"]
    blobs = str(len(stored.resolve(Reference.parse("dense")).blobs))
    cells = ["2.1", "kB", "0", "B", "2.1", "kB", blobs]
    assert rows[0].split() == ["copy:latest", *cells]
    assert rows[1].split() == ["dense:latest", *cells]
    assert rows[2] == (
        f"store: 2 models, 2.1 kB in {blobs} blobs; without sharing 4.2 kB (2.00 times as much)"
    )
    assert 'blobs that no model needs; "blobstore gc" frees them' in rows[3]
    assert "  2 B in 1 file: temporary files" in rows
    assert rows[-1].endswith(" in all")


def test_json_has_exact_numbers(stored: LocalStore, moe: Path) -> None:
    (moe / "tokenizer.json").write_bytes(b"{}")
    run("create", moe, "moe")
    (stored.folder("blobs") / "sha256-partial").write_bytes(b"123")
    manifests = [stored.resolve(Reference.parse(name)) for name in ("dense", "moe")]
    sizes = [sum(item.size for item in manifest.blobs) for manifest in manifests]
    shared = len(b"{}")
    found = run_json("du")

    assert found["models"][0] == {
        "name": "dense:latest",
        "blobs": len(manifests[0].blobs),
        "bytes": sizes[0],
        "unique_bytes": sizes[0] - shared,
        "shared_bytes": shared,
        "faults": [],
        "error": None,
    }
    files = [path.stat() for path in stored.root.rglob("*") if path.is_file()]
    in_all = {status.st_ino: status.st_size for status in files}  # a manifest has two links
    assert found["store"] == {
        "models": 2,
        "blobs": len(manifests[0].blobs) + len(manifests[1].blobs) - 1,
        "bytes": sum(sizes) - shared,
        "bytes_without_sharing": sum(sizes),
        "dedup_ratio": sum(sizes) / (sum(sizes) - shared),
        "bytes_in_all": sum(in_all.values()),
    }
    assert found["foreign"] == {"files": 1, "bytes": 3}
    assert found["partial"] == {"files": 0, "bytes": 0}
    assert found["unreferenced"] == found["quarantine"] == {"files": 0, "bytes": 0}
    assert found["errors"] == []


def test_shows_only_the_models_that_were_named(stored: LocalStore, dense: Path, moe: Path) -> None:
    (moe / "merges.txt").write_bytes((dense / "merges.txt").read_bytes().ljust(300))
    (dense / "merges.txt").write_bytes((moe / "merges.txt").read_bytes())
    run("create", dense, "dense")
    run("create", moe, "moe")
    result = run("du", "dense")
    lines = result.stdout.splitlines()
    assert lines[1].startswith("dense:latest")
    assert lines[2].startswith("together 2.4 kB, of which no other model needs 2.1 kB")
    assert len(lines) == 3
    assert set(run_json("du", "dense")) == {"models", "together", "errors", "seconds"}
    assert "did you mean 'dense'?" in run("du", "dens", exit_code=3).stderr


def test_sorts(stored: LocalStore, moe: Path) -> None:
    run("create", moe, "moe")
    run("cp", "moe", "zoe")

    def names(*options: str) -> list[str]:
        return [model["name"].partition(":")[0] for model in run_json("du", *options)["models"]]

    assert names() == names("--sort", "name") == ["dense", "moe", "zoe"]
    assert names("--sort", "size") == ["moe", "zoe", "dense"]
    assert names("--sort", "unique") == ["dense", "moe", "zoe"]


def test_missing_and_damaged_blobs_are_reported(stored: LocalStore) -> None:
    layers = stored.resolve(Reference.parse("dense")).layers
    Path(stored.blob_path(layers[0].digest)).unlink()
    result = run("du", exit_code=4)
    assert result.stderr == (
        f"blobstore: error: model dense:latest: blob '{stored.blob_path(layers[0].digest)}' "
        "is missing\n"
    )
    (stored.root / "blobs" / layers[1].digest.file_name).unlink()
    assert run("du", exit_code=4).stderr.endswith("is missing; and 1 more of its blobs\n")
    assert len(run_json("du", exit_code=4)["models"][0]["faults"]) == 2


def test_an_unreadable_manifest_is_reported(stored: LocalStore) -> None:
    stored.manifest_path(Reference.parse("dense")).write_bytes(b"{\x1b[2J")
    result = run("du", exit_code=4)
    assert result.stdout.splitlines()[1].split() == ["dense:latest", "UNREADABLE", "-", "-", "-"]
    assert "its blobs count as needed by no model" in result.stderr
    assert "blobs that no manifest needs that can be read; 'blobstore repair'" in result.stdout
    assert '"blobstore gc" frees them' not in result.stdout
    assert "\x1b" not in result.output
    found = run_json("du", exit_code=4)
    assert found["models"][0]["bytes"] is None
    assert found["errors"] == [found["models"][0]["error"]]
