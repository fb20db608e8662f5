from __future__ import annotations

from pathlib import Path

import pytest

from blobstore.core.digest import Digest
from blobstore.manifests.reference import Reference
from blobstore.store.local import LocalStore
from tests.support.damage import blob_path, flip, truncate
from tests.support.models import dense_tensors, quantizable_tensors, write_folder
from tests.unit.cli.running import run, run_json

PLAIN = "model.embed_tokens.weight"


def test_rewrites_damaged_blobs(stored: LocalStore, dense: Path) -> None:
    path = blob_path(stored, PLAIN, "dense")
    size = path.stat().st_size
    truncate(path)
    blob_path(stored, "merges.txt", "dense").unlink()

    result = run("repair", "dense", "--from", dense)

    lines = sorted(result.stdout.splitlines())
    (aside,) = stored.folder("quarantine").iterdir()
    digest = path.name.replace("-", ":")
    assert lines[0].startswith("rewrote 2 blobs; ok: 1 model, ")
    assert lines[1].startswith("rewrote layer merges.txt, blob sha256:")
    assert lines[1].endswith("(4 B)")
    assert lines[2] == (
        f"rewrote layer {PLAIN}, blob {digest} ({size} B); the damaged file is now '{aside}'"
    )
    run("verify")
    assert run("repair", "--from", dense).stdout.startswith("ok: 1 model, ")


def test_prints_json(stored: LocalStore, dense: Path) -> None:
    path = blob_path(stored, PLAIN, "dense")
    flip(path)
    flip(blob_path(stored, "merges.txt", "dense"))
    (dense / "merges.txt").write_bytes(b"c d\n")

    repaired = run_json("repair", "--from", dense, exit_code=4)

    (aside,) = stored.folder("quarantine").iterdir()
    assert repaired["repaired"] == [
        {
            "blob": path.name.replace("-", ":"),
            "bytes": path.stat().st_size,
            "layer": PLAIN,
            "quarantined": str(aside),
        }
    ]
    (fault,) = repaired["faults"]
    assert (fault["reference"], fault["layer"]) == ("dense:latest", "merges.txt")
    assert (repaired["dry_run"], repaired["models"], repaired["blobs"]) == (False, 1, 14)


def test_lists_the_remaining_faults_and_exits_with_4(stored: LocalStore, dense: Path) -> None:
    flip(blob_path(stored, "merges.txt", "dense"))
    (dense / "merges.txt").write_bytes(b"c d\n")
    result = run("repair", "dense", "--from", dense, exit_code=4)
    fault, summary = result.stdout.splitlines()
    assert fault.startswith("model dense:latest, layer merges.txt: blob ")
    assert fault.endswith(f"; nothing in '{dense}' has its name and size")
    assert summary.startswith("1 fault left: 1 model, ")


def test_advises_on_a_source_if_none_is_given(stored: LocalStore) -> None:
    flip(blob_path(stored, PLAIN, "dense"))
    result = run("repair", exit_code=4)
    assert f"tensor {PLAIN}: blob " in result.stdout
    assert (
        "note: to rewrite damaged and missing blobs, give --from the source of the model"
        in result.stderr
    )


def test_an_intact_store_is_ok(stored: LocalStore) -> None:
    assert run("repair").stderr == ""


def test_a_dry_run_changes_nothing(stored: LocalStore, dense: Path) -> None:
    path = blob_path(stored, PLAIN, "dense")
    flip(path)
    wrong = path.read_bytes()
    result = run("repair", "--from", dense, "--dry-run")
    assert result.stdout.startswith(f"would rewrite layer {PLAIN}, blob ")
    assert "would rewrite 1 blob; all would be intact: 1 model" in result.stdout
    assert path.read_bytes() == wrong
    assert run_json("repair", "--from", dense, "--dry-run")["dry_run"] is True


@pytest.mark.slow
def test_takes_blobs_from_another_store(stored: LocalStore, dense: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    run("create", dense, "any-name", "--store", other)
    for path in stored.folder("blobs").iterdir():
        flip(path)
    run("repair", "--from", other)
    run("verify")


@pytest.mark.slow
def test_restores_a_damaged_manifest_from_another_store(
    stored: LocalStore, dense: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    run("create", dense, "any-name", "--store", other)
    path = stored.manifest_path(Reference.parse("dense"))
    wrong = path.read_bytes().replace(b'"merges.txt"', b'"mergds.txt"')
    path.write_bytes(wrong)
    flip(Path(stored.blob_path(stored.parse(Reference.parse("dense"))[1].layers[0].digest)))
    told = run("repair", "--from", other, "--dry-run")
    assert "would rewrite 1 manifest and 1 blob; all would be intact: 1 model, " in told.stdout

    result = run("repair", "--from", dense, exit_code=4)  # which has no manifests
    assert "or create the model again, or take the file from a backup\n" in result.stdout

    result = run("repair", "--from", other)
    (aside,) = stored.folder("quarantine").glob(f"{Digest.of(wrong).file_name}.*")
    assert result.stdout.startswith(
        f"rewrote the manifest of model dense:latest; the damaged file is now '{aside}'\n"
        "rewrote 1 manifest; ok: 1 model, "
    )
    run("verify")


def test_json_lists_restored_manifests(stored: LocalStore, dense: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    run("create", dense, "dense", "--store", other)
    path = stored.manifest_path(Reference.parse("dense"))
    path.write_bytes(path.read_bytes().replace(b'"merges.txt"', b'"mergds.txt"'))
    told = run_json("repair", "--from", other, "--dry-run")
    assert told["manifests"] == [{"model": "dense:latest", "quarantined": None, "signatures": 0}]
    told = run_json("repair", "--from", other)
    (aside,) = stored.folder("quarantine").iterdir()
    restored = {"model": "dense:latest", "quarantined": str(aside), "signatures": 0}
    assert told["manifests"] == [restored]
    assert run_json("repair", "--from", other)["manifests"] == []


@pytest.mark.slow
def test_a_quantized_model_needs_only_its_overrides(store: LocalStore, tmp_path: Path) -> None:
    source = write_folder(tmp_path / "source", quantizable_tensors())
    override = ("--quantize-override", "*.experts.1.up_proj.weight=int8")
    run("create", source, "m", "--quantize", "int4", *override)
    for path in store.folder("blobs").iterdir():
        path.unlink()
    run("repair", "--from", source, "--dry-run", exit_code=4)
    run("repair", "--from", source, *override)
    run("verify")


def test_options_choose_the_part_of_a_source(store: LocalStore, tmp_path: Path) -> None:
    source = write_folder(tmp_path / "source", dense_tensors(), stem="model.fp16")
    write_folder(tmp_path / "source", {"x": dense_tensors()["mask"]}, stem="model.int8")
    choice = ("--weights", "*fp16*")
    run("create", source, "m", *choice)
    flip(blob_path(store, PLAIN))
    assert "rewrote layer" in run("repair", "--from", source, *choice).stdout
    run("verify")


def test_a_missing_model_cannot_be_repaired(stored: LocalStore, dense: Path) -> None:
    result = run("repair", "dens", "--from", dense, exit_code=3)
    assert "that has a model of this name can restore its manifest" in result.stderr
    assert "did you mean 'dense'?" in result.stderr


def test_a_missing_source_is_not_found(stored: LocalStore) -> None:
    assert "'nowhere'" in run("repair", "--from", "nowhere", exit_code=3).stderr


def test_the_store_itself_is_no_source(stored: LocalStore) -> None:
    assert "is the store itself" in run("repair", "--from", stored.root, exit_code=2).stderr


def test_waits_for_processes_that_hold_the_lock(stored: LocalStore, dense: Path) -> None:
    flip(blob_path(stored, PLAIN, "dense"))
    with stored._locks.shared():
        result = run("repair", "--from", dense, "--wait", "0.01", exit_code=1)
    assert "waiting for the lock of the store" in result.stderr


@pytest.mark.parametrize("name", ["x\x1b[2Jy", "a\nb"])
def test_names_are_escaped(name: str, store: LocalStore, tmp_path: Path) -> None:
    source = write_folder(tmp_path / "source", {name: dense_tensors()["mask"]})
    run("create", source, "m")
    flip(Path(store.blob_path(store.resolve(Reference.parse("m")).layers[0].digest)))
    result = run("repair", "--from", source)
    assert result.stdout.count("\n") == 2
    assert "\x1b" not in result.output
